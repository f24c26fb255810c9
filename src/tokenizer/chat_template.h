/* chat_template.h - chat templates: a conversation as the text that the model was trained on.
 *
 * in : a request {"messages": [...], "tools": ..., "add_generation_prompt": ...,
 *      "enable_thinking": ...}
 * out: the text, byte for byte what Jinja makes of the model's template, and which parts of it the
 *      assistant has written
 *
 * Templates are programs, and those of a file are not run: a known one is recognised and rendered
 * by code of ours, any other counts as plain ChatML. Where Jinja raises an error, rendering fails;
 * where it is lenient (a missing name, a tool message without text), so are we. */
#pragma once

#include "base/jscan.h"

/* Special tokens that the code looks for in text, or looks up in a vocabulary; nibble.h has those
 * around reasoning. */
#define NBI_END_OF_TEXT "<|endoftext|>" /* between documents */
#define NBI_IM_START    "<|im_start|>"  /* starts a message */
#define NBI_IM_END      "<|im_end|>"    /* ends one, and with it an answer */

/* All of Qwen's, in the order of their ids. */
struct nbi_chat_token {
    const char *text;
    bool special; /* as tokenizer.json says: not part of decoded text */
};

#define NBI_CHAT_TOKENS 26
extern const struct nbi_chat_token nbi_chat_tokens[NBI_CHAT_TOKENS];

enum nbi_chat_kind {
    NBI_CHAT_CHATML,     /* role and content, nothing else; tools and tool calls are refused */
    NBI_CHAT_QWEN3_2507, /* tools, no thinking */
    NBI_CHAT_QWEN3       /* tools, thinking on or off */
};

/* Plain ChatML in Jinja, for models of our own: Hugging Face renders, and refuses, the same as
 * NBI_CHAT_CHATML. */
extern const char nbi_chatml_template[];

/* false: a template that is not known; *kind is ChatML. White space at the end does not matter. */
bool nbi_chat_recognise(enum nbi_chat_kind *kind, const char *template);

/* Bytes [start, end) of a text. */
struct nbi_range {
    size_t start, end;
};

/* A range for each message of the assistant: what follows "<|im_start|>assistant\n", up to and
 * including "<|im_end|>". An empty think block at its front belongs to the prompt, which holds it
 * already when thinking is off, and is not in the range. */
struct nbi_rendered {
    struct nbi_str text;
    struct nbi_range *ranges; /* in order */
    size_t range_count;
};

/* request comes from nbi_jscan. On failure *out is empty. */
enum nb_status nbi_chat_render(enum nbi_chat_kind kind, struct nbi_jspan request,
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
