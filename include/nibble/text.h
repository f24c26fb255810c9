/* text.h - tokenizers, chat templates, conversations and transcripts.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- tokenizers ------------------------------------------------------------------------------ */

/* Texts to token ids, and back. Any number of threads may use a tokenizer at once. */
struct nb_tokenizer;

/* From a model directory, a tokenizer.json, a `.gguf` file, or a weights file with model_dir (may
 * be NULL). NB_ENOTFOUND: there is none. */
NB_MUST_CHECK enum nb_status nb_tokenizer_open(struct nb_tokenizer **out, const char *model,
                                               const char *model_dir);
void nb_tokenizer_close(struct nb_tokenizer *t);

int64_t nb_tokenizer_size(const struct nb_tokenizer *t); /* all ids are smaller */

/* The ids of a text; malformed UTF-8 counts as U+FFFD. special: special tokens in the text are
 * recognised. The caller frees *ids, which is not NULL for an empty text either. */
NB_MUST_CHECK enum nb_status nb_tokenizer_encode(struct nb_tokenizer *t, const char *text,
                                                 size_t len, bool special, int32_t **ids,
                                                 size_t *count);

/* The bytes that ids stand for, followed by a NUL; ids without a token give none and are counted in
 * *unknown (may be NULL). The caller frees *text. */
NB_MUST_CHECK enum nb_status nb_tokenizer_decode(const struct nb_tokenizer *t, const int32_t *ids,
                                                 size_t count, char **text, size_t *len,
                                                 size_t *unknown);

/* Decodes token by token, in whole characters. A zeroed struct is a valid start; what it allocates
 * is its own, until it is released. */
struct nb_decoder {
    char held[4];
    int count;
    char *buffer;
    size_t capacity;
};

/* The text that a token adds: the bytes of an incomplete character are held back, and malformed
 * bytes become U+FFFD. id -1 ends the text and returns what is held. *text, not NUL-terminated, is
 * valid until the next call with d. After a failure, which is NB_ENOMEM, *text is empty. */
NB_MUST_CHECK enum nb_status nb_decoder_next(struct nb_decoder *d, const struct nb_tokenizer *t,
                                             int32_t id, const char **text, size_t *len);
void nb_decoder_release(struct nb_decoder *d);

/* ---- chat templates -------------------------------------------------------------------------- */

/* How a model writes a conversation as one text. Any number of threads may use it at once. */
struct nb_chat;

/* Takes what nb_tokenizer_open takes, but needs only tokenizer_config.json (or GGUF metadata);
 * without a template there it is ChatML. */
NB_MUST_CHECK enum nb_status nb_chat_open(struct nb_chat **out, const char *model,
                                          const char *model_dir);
void nb_chat_close(struct nb_chat *chat);
const char *nb_chat_name(const struct nb_chat *chat); /* "qwen3", "qwen3-2507", "chatml" */

/* The reasoning of a Qwen3 model, at the start of an answer, stands between these. */
#define NB_THINK_START "<think>"
#define NB_THINK_END   "</think>"

enum nb_role { NB_ROLE_SYSTEM, NB_ROLE_USER, NB_ROLE_ASSISTANT };

const char *nb_role_name(enum nb_role role); /* "system", "user", "assistant" */

/* text need not be NUL-terminated, and is its owner's. */
struct nb_message {
    enum nb_role role;
    const char *text;
    size_t len;
};

/* Renders messages and the opening of the assistant's answer. think false: turns thinking off if
 * the template can. The caller frees *text. */
NB_MUST_CHECK enum nb_status nb_chat_prompt(const struct nb_chat *chat,
                                            const struct nb_message *messages, size_t count,
                                            bool think, char **text, size_t *text_len);

/* messages_json: {"messages": [...], "tools": [...], "add_generation_prompt": ...,
 * "enable_thinking": ...}; all but messages are optional. The caller frees *text. NB_EFORMAT: it is
 * no such JSON. */
NB_MUST_CHECK enum nb_status nb_chat_render(const struct nb_chat *chat, const char *messages_json,
                                            size_t len, char **text, size_t *text_len);

/* ---- conversations --------------------------------------------------------------------------- */

/* A conversation over a session of its own, whose KV cache holds what was said before, token for
 * token. */
struct nb_conversation;

/* think: the chat template's enable_thinking. The session must outlive the conversation, which
 * alone uses it. NB_ENOTFOUND: the model has no tokenizer. */
NB_MUST_CHECK enum nb_status nb_conversation_open(struct nb_conversation **out,
                                                  struct nb_session *session, bool think);
void nb_conversation_close(struct nb_conversation *c);

struct nb_conversation_info {
    int64_t messages;
    int64_t tokens;  /* of the session after the last answer; 0: none yet */
    int64_t context; /* of the session */
};

void nb_conversation_info(const struct nb_conversation *c, struct nb_conversation_info *info);

/* index is below nb_conversation_info.messages; the system message comes first, if there is one.
 * The text is valid until the conversation changes. */
void nb_conversation_message(const struct nb_conversation *c, int64_t index,
                             struct nb_message *message);

/* Adds a copy of a message without answering it. A system message replaces the one before; an empty
 * one removes it. */
NB_MUST_CHECK enum nb_status nb_conversation_add(struct nb_conversation *c,
                                                 const struct nb_message *message);

/* Adds a message of the user and the answer to it. A failure leaves the conversation as it was. So
 * does NB_EINTERRUPTED before the first token; after it (result->count > 0) the partial answer is
 * kept, and result has it. More than the context holds: NB_EVALUE, with result->prompt_tokens set
 * and the rest zero. */
NB_MUST_CHECK enum nb_status nb_conversation_answer(struct nb_conversation *c, const char *text,
                                                    size_t len, const struct nb_generate_opts *opts,
                                                    struct nb_generate_result *result);

/* Forgets all messages but the system's. */
void nb_conversation_reset(struct nb_conversation *c);

/* A file of one line {"messages": [...]}, which is also a data set and a request to the chat
 * template; it is replaced in one step. Loading takes the last conversation of any transcript. */
NB_MUST_CHECK enum nb_status nb_conversation_save(const struct nb_conversation *c,
                                                  const char *path);
NB_MUST_CHECK enum nb_status nb_conversation_load(struct nb_conversation *c, const char *path);

/* ---- transcripts ----------------------------------------------------------------------------- */

/* A transcript is JSON Lines: a whole conversation {"messages": [...]}; or one message {"role",
 * "content"}; or {"event": "start"}, {"event": "reset"} and {"event": "load", "messages": [...]},
 * as `nibble chat --log` writes them. */
enum nb_item_kind {
    NB_ITEM_START,   /* a conversation begins */
    NB_ITEM_RESET,   /* all messages but the system's are dropped */
    NB_ITEM_MESSAGE, /* one was said */
    NB_ITEM_LOADED   /* came from a file */
};

struct nb_transcript_item {
    enum nb_item_kind kind;
    struct nb_message message;
    int64_t cut; /* an interrupted answer: its tokens; otherwise 0 */
};

/* What item points to is valid during the call. */
typedef enum nb_status (*nb_transcript_fn)(void *ctx, const struct nb_transcript_item *item);

/* Calls fn for each item in order, up to the first that is damaged or unknown: NB_EFORMAT or
 * NB_EUNSUPPORTED, and the message names file and line. A file with neither a message nor a
 * conversation (which may be empty) is damaged. */
NB_MUST_CHECK enum nb_status nb_transcript_read(const char *path, nb_transcript_fn fn, void *ctx);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
