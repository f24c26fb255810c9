/* conversation.c - messages, and the tokens they became.
 *
 * The tokens that a model generates need not be those that its text would be tokenized to. So the
 * conversation keeps them, with the text they stand for. As long as the template renders the same
 * text again, only what follows it is tokenized, and the session computes nothing twice. Where the
 * template changes earlier text (Qwen3's leaves out old thoughts), the whole prompt is tokenized
 * again, and the session keeps the prefix that is still the same. */
#include <string.h>

#include "base/array.h"
#include "base/file.h"
#include "infer/session.h"
#include "tokenizer/chat_template.h"

struct nb_conversation {
    struct nb_session *session;
    bool think;
    struct nb_message *messages; /* a system message is the first; each owns its text */
    size_t count, capacity;
    struct nbi_str known; /* the text that ids stand for */
    int32_t *ids;
    size_t id_count, id_capacity;
    int64_t tokens;              /* of prompt and answer, after the last answer */
    size_t sent_known, sent_ids; /* lengths of known and ids before the last question */
};

/* ---- open and close ---- */

enum nb_status nb_conversation_open(struct nb_conversation **out, struct nb_session *session,
                                    bool think)
{
    const struct nb_engine *e = nbi_session_engine(session);
    *out = NULL;
    if (!e->tokenizer || !e->chat)
        return nbi_fail(NB_ENOTFOUND, "the model has no tokenizer, so it cannot talk");
    struct nb_conversation *c = calloc(1, sizeof *c);
    if (!c)
        return nbi_fail_memory("a conversation", sizeof *c);
    c->session = session;
    c->think = think;
    *out = c;
    return NB_OK;
}

/* Makes the next prompt be tokenized from its beginning. */
static void forget_tokens(struct nb_conversation *c)
{
    nbi_str_release(&c->known);
    c->id_count = 0;
}

static void free_message(struct nb_message *m)
{
    free((char *)m->text);
}

static void cut(struct nb_conversation *c, size_t count)
{
    while (c->count > count)
        free_message(&c->messages[--c->count]);
    forget_tokens(c);
    c->tokens = 0;
}

void nb_conversation_close(struct nb_conversation *c)
{
    if (!c)
        return;
    cut(c, 0);
    nbi_str_release(&c->known);
    free(c->ids);
    free(c->messages);
    free(c);
}

static bool has_system(const struct nb_conversation *c)
{
    return c->count > 0 && c->messages[0].role == NB_ROLE_SYSTEM;
}

void nb_conversation_reset(struct nb_conversation *c)
{
    cut(c, has_system(c));
}

void nb_conversation_info(const struct nb_conversation *c, struct nb_conversation_info *info)
{
    *info = (struct nb_conversation_info){.messages = (int64_t)c->count,
                                          .tokens = c->tokens,
                                          .context = nbi_session_context(c->session)};
}

void nb_conversation_message(const struct nb_conversation *c, int64_t index,
                             struct nb_message *message)
{
    *message = c->messages[index];
}

/* ---- messages ---- */

static enum nb_status insert(struct nb_conversation *c, size_t at, const struct nb_message *message)
{
    NBI_TRY(NBI_ARRAY_RESERVE(c->messages, c->capacity, c->count + 1, "messages"));
    char *text = malloc(message->len + 1);
    if (!text)
        return nbi_fail_memory("a message", message->len);
    memcpy(text, message->text, message->len);
    text[message->len] = 0;
    memmove(c->messages + at + 1, c->messages + at, (c->count - at) * sizeof *c->messages);
    c->messages[at] = (struct nb_message){message->role, text, message->len};
    c->count++;
    return NB_OK;
}

/* Replaces the system message. An empty one removes it. */
static enum nb_status set_system(struct nb_conversation *c, const struct nb_message *message)
{
    bool had = has_system(c);
    if (message->len > 0)
        NBI_TRY(insert(c, 0, message));
    if (had) {
        size_t old = message->len > 0;
        free_message(&c->messages[old]);
        c->count--;
        memmove(c->messages + old, c->messages + old + 1, (c->count - old) * sizeof *c->messages);
    }
    return NB_OK;
}

enum nb_status nb_conversation_add(struct nb_conversation *c, const struct nb_message *message)
{
    forget_tokens(c);
    return message->role == NB_ROLE_SYSTEM ? set_system(c, message) : insert(c, c->count, message);
}

/* ---- answers ---- */

/* Appends tokens and the text that they stand for. */
static enum nb_status add_known(struct nb_conversation *c, const int32_t *ids, size_t count,
                                const char *text, size_t len)
{
    NBI_TRY(NBI_ARRAY_RESERVE(c->ids, c->id_capacity, c->id_count + count + 1, "tokens"));
    memcpy(c->ids + c->id_count, ids, count * sizeof *ids);
    c->id_count += count;
    nbi_str_append(&c->known, text, len);
    return nbi_str_status(&c->known);
}

/* The tokens of the conversation up to where the answer begins. */
static enum nb_status make_prompt(struct nb_conversation *c)
{
    const struct nb_engine *e = nbi_session_engine(c->session);
    char *text;
    size_t len, count = 0;
    int32_t *ids = NULL;
    NBI_TRY(nb_chat_prompt(e->chat, c->messages, c->count, c->think, &text, &len));
    if (len < c->known.len || memcmp(text, nbi_str_text(&c->known), c->known.len) != 0)
        forget_tokens(c);
    c->sent_known = c->known.len;
    c->sent_ids = c->id_count;
    const char *rest = text + c->known.len;
    len -= c->known.len;
    enum nb_status rc = nb_tokenizer_encode(e->tokenizer, rest, len, true, &ids, &count);
    if (rc == NB_OK)
        rc = add_known(c, ids, count, rest, len);
    free(ids);
    free(text);
    return rc;
}

static enum nb_status generate(struct nb_conversation *c, const struct nb_generate_opts *opts,
                               struct nb_generate_result *result)
{
    int64_t context = nbi_session_context(c->session);
    NBI_TRY(make_prompt(c));
    if ((int64_t)c->id_count > context) {
        result->prompt_tokens = (int64_t)c->id_count;
        return nbi_fail(NB_EVALUE, "the conversation has %zu tokens, the context only %lld",
                        c->id_count, (long long)context);
    }
    return nb_generate(c->session, c->ids, c->id_count, opts, result);
}

/* Adds the answer as a message. Its tokens are kept, except for the one that ended it, which the
 * template writes itself. If a stop text was cut off, tokens and text differ, and all are
 * forgotten. Releases the answer if there is no memory for the message. */
static enum nb_status keep_answer(struct nb_conversation *c, const struct nb_generate_opts *opts,
                                  struct nb_generate_result *r, enum nb_status how)
{
    const struct nb_engine *e = nbi_session_engine(c->session);
    const struct nb_message answer = {NB_ROLE_ASSISTANT, r->text, r->len};
    enum nb_status rc = insert(c, c->count, &answer);
    if (rc != NB_OK) {
        nb_generate_result_release(r);
        return rc;
    }
    c->tokens = r->prompt_tokens + (int64_t)r->count;
    bool ended = !opts->ignore_eos && nbi_engine_is_eos(e, r->ids[r->count - 1]);
    bool cut_off = how == NB_OK && r->finish == NB_FINISH_STOP && !ended;
    if (cut_off || add_known(c, r->ids, r->count - ended, r->text, r->len) != NB_OK)
        forget_tokens(c);
    return how;
}

static void remove_question(struct nb_conversation *c)
{
    free_message(&c->messages[--c->count]);
    nbi_str_cut(&c->known, c->sent_known);
    c->id_count = c->sent_ids;
}

enum nb_status nb_conversation_answer(struct nb_conversation *c, const char *text, size_t len,
                                      const struct nb_generate_opts *opts,
                                      struct nb_generate_result *result)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    const struct nb_message question = {NB_ROLE_USER, text, len};
    memset(result, 0, sizeof *result);
    c->sent_known = c->known.len;
    c->sent_ids = c->id_count;
    NBI_TRY(insert(c, c->count, &question));
    enum nb_status rc = generate(c, opts, result);
    if (rc == NB_OK || (rc == NB_EINTERRUPTED && result->count > 0))
        rc = keep_answer(c, opts, result, rc);
    if (c->messages[c->count - 1].role == NB_ROLE_USER)
        remove_question(c);
    return rc;
}

/* ---- files ---- */

enum nb_status nb_conversation_save(const struct nb_conversation *c, const char *path)
{
    struct nbi_str line = {0};
    nbi_str_puts(&line, "{\"messages\":");
    nbi_chat_put_messages(&line, c->messages, c->count);
    nbi_str_puts(&line, "}\n");
    enum nb_status rc = nbi_str_status(&line);
    if (rc == NB_OK)
        rc = nbi_file_write(path, line.p, line.len);
    nbi_str_release(&line);
    return rc;
}

static enum nb_status add_item(void *ctx, const struct nb_transcript_item *item)
{
    struct nb_conversation *c = ctx;
    switch (item->kind) {
    case NB_ITEM_START:
        cut(c, 0);
        return NB_OK;
    case NB_ITEM_RESET:
        nb_conversation_reset(c);
        return NB_OK;
    case NB_ITEM_MESSAGE:
    case NB_ITEM_LOADED:
        break;
    }
    return nb_conversation_add(c, &item->message);
}

enum nb_status nb_conversation_load(struct nb_conversation *c, const char *path)
{
    struct nb_conversation loaded = {.session = c->session, .think = c->think};
    enum nb_status rc = nb_transcript_read(path, add_item, &loaded);
    if (rc == NB_OK) { /* swap the messages, so that the old ones are freed below */
        struct nb_conversation old = *c;
        c->messages = loaded.messages;
        c->count = loaded.count;
        c->capacity = loaded.capacity;
        c->tokens = 0;
        forget_tokens(c);
        loaded.messages = old.messages;
        loaded.count = old.count;
    }
    cut(&loaded, 0);
    free(loaded.messages);
    return rc;
}
