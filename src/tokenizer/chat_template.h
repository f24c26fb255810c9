/* chat_template.h - renders a conversation as the text that the model was trained on.
 *
 * in : JSON {"messages": [...], "tools": ..., "add_generation_prompt": ..., "enable_thinking": ...}
 * out: the text, byte for byte what Jinja makes of the model's template, and the ranges of it that
 *      the assistant wrote
 *
 * A template is a Jinja program, and programs from a model file are never run. Known templates are
 * recognised and rendered by C code; for any other, plain ChatML is used. Where Jinja raises an
 * error, rendering fails; where Jinja is lenient (a missing name, a tool message without text), so
 * is this code. */
#pragma once

#include "base/jscan.h"
#include "nibble/text.h"

/* Special tokens that other files search for in text or look up in a vocabulary. The tags around
 * reasoning are public: NB_THINK_START and NB_THINK_END. */
#define NBI_END_OF_TEXT "<|endoftext|>" /* between documents */
#define NBI_IM_START    "<|im_start|>"  /* starts a message */
#define NBI_IM_END      "<|im_end|>"    /* ends a message, and so an answer */

/* The tokens that Qwen adds to its vocabulary, in the order of their ids. */
struct nbi_chat_token {
    const char *text;
    bool special; /* as in tokenizer.json */
};

#define NBI_CHAT_TOKENS 26
extern const struct nbi_chat_token nbi_chat_tokens[NBI_CHAT_TOKENS];

enum nbi_chat_kind {
    NBI_CHAT_CHATML,     /* role and content only; tools and tool calls are errors */
    NBI_CHAT_QWEN3_2507, /* tools, no thinking */
    NBI_CHAT_QWEN3       /* tools, thinking can be switched off */
};

/* Plain ChatML in Jinja, written into models that nibble makes. Hugging Face renders and rejects
 * the same conversations with it as NBI_CHAT_CHATML does. */
extern const char nbi_chatml_template[];

/* Identifies a template; trailing white space is ignored. Returns false for an unknown one; *kind
 * is then NBI_CHAT_CHATML. */
bool nbi_chat_recognise(enum nbi_chat_kind *kind, const char *template);

/* Bytes [start, end) of a text. */
struct nbi_range {
    size_t start, end;
};

/* ranges has one entry per message of the assistant: from after "<|im_start|>assistant\n" through
 * "<|im_end|>". A leading empty think block is left out: with thinking off it is part of the
 * prompt, so the model never writes it. */
struct nbi_rendered {
    struct nbi_str text;
    struct nbi_range *ranges; /* in order */
    size_t range_count;
};

/* messages_json is a checked span (nbi_jscan). After a failure *out is empty. */
enum nb_status nbi_chat_render(enum nbi_chat_kind kind, struct nbi_jspan messages_json,
                               struct nbi_rendered *out);
void nbi_rendered_release(struct nbi_rendered *r);

enum nbi_chat_kind nbi_chat_kind(const struct nb_chat *chat);

/* ---- prompts ---- */

/* Appends a message as a JSON object, or several as a JSON array. */
void nbi_chat_put_message(struct nbi_str *json, enum nb_role role, const char *text, size_t len);
void nbi_chat_put_messages(struct nbi_str *json, const struct nb_message *messages, size_t count);

/* As nb_chat_prompt(), with messages and tools (NULL: none) as JSON arrays. */
enum nb_status nbi_chat_prompt(const struct nb_chat *chat, const char *messages, const char *tools,
                               bool think, char **text, size_t *text_len);
