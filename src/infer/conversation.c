/* conversation.c - messages in turn, and the tokens they became.
 *
 * The tokens of an answer are not always those that its text would be cut into. Those that the
 * session holds are therefore kept, together with the text they stand for: as long as the template
 * writes the same text again, only what follows it is tokenized, and the session has all of the
 * rest. Where it does not (it leaves out old thoughts), the whole is tokenized, and the session
 * keeps what is the same. */
#include <string.h>

#include "base/file.h"
#include "base/jscan.h"
#include "infer/session.h"

struct message {
    enum nb_role role;
    char *text;
    size_t len;
};

struct nb_conversation {
    struct nb_session *session;
    bool think;
    struct message *messages; /* the system's is the first, if there is one */
    size_t count, capacity;
    struct nbi_str known; /* what ids stand for */
    int32_t *ids;
    size_t id_count;
    int64_t tokens;              /* behind the last answer */
    size_t sent_known, sent_ids; /* what of both is from before the last question */
};

const char *nb_role_name(enum nb_role role)
{
    static const char *const names[] = {"system", "user", "assistant"};
    return names[role];
}

/* ---- life ---- */

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

/* The next prompt is tokenized as a whole. */
static void forget_tokens(struct nb_conversation *c)
{
    nbi_str_release(&c->known);
    c->id_count = 0;
}

static void cut(struct nb_conversation *c, size_t count)
{
    while (c->count > count)
        free(c->messages[--c->count].text);
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
    const struct message *m = &c->messages[index];
    *message = (struct nb_message){.role = m->role, .text = m->text, .len = m->len};
}

/* ---- messages ---- */

static enum nb_status insert(struct nb_conversation *c, size_t at, const struct nb_message *message)
{
    if (c->count == c->capacity) {
        size_t more = c->capacity ? 2 * c->capacity : 16;
        struct message *grown = reallocarray(c->messages, more, sizeof *grown);
        if (!grown)
            return nbi_fail_memory("messages", more * sizeof *grown);
        c->messages = grown;
        c->capacity = more;
    }
    char *text = malloc(message->len + 1);
    if (!text)
        return nbi_fail_memory("a message", message->len);
    memcpy(text, message->text, message->len);
    text[message->len] = 0;
    memmove(c->messages + at + 1, c->messages + at, (c->count - at) * sizeof *c->messages);
    c->messages[at] = (struct message){.role = message->role, .text = text, .len = message->len};
    c->count++;
    return NB_OK;
}

static enum nb_status set_system(struct nb_conversation *c, const struct nb_message *message)
{
    bool had = has_system(c);
    if (message->len > 0)
        NBI_TRY(insert(c, 0, message));
    if (had) {
        size_t old = message->len > 0;
        free(c->messages[old].text);
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

static void put_messages(const struct nb_conversation *c, struct nbi_str *out)
{
    nbi_str_puts(out, "{\"messages\":[");
    for (size_t i = 0; i < c->count; i++) {
        const struct message *m = &c->messages[i];
        nbi_str_printf(out, "%s{\"role\":\"%s\",\"content\":", i ? "," : "", nb_role_name(m->role));
        nbi_jquote(out, m->text, m->len);
        nbi_str_puts(out, "}");
    }
    nbi_str_puts(out, "]");
}

static enum nb_status render(const struct nb_conversation *c, const struct nb_engine *e,
                             char **text, size_t *len)
{
    struct nbi_str q = {0};
    put_messages(c, &q);
    nbi_str_puts(&q, ",\"add_generation_prompt\":true");
    nbi_str_puts(&q, c->think ? "}" : ",\"enable_thinking\":false}");
    enum nb_status rc = nbi_str_status(&q);
    if (rc == NB_OK)
        rc = nb_chat_render(e->chat, q.p, q.len, text, len);
    nbi_str_release(&q);
    return rc;
}

enum nb_status nbi_question_ids(const struct nb_engine *e, const char *question, int32_t **ids,
                                size_t *count)
{
    struct message only = {NB_ROLE_USER, (char *)question, strlen(question)};
    const struct nb_conversation c = {.messages = &only, .count = 1};
    char *text;
    size_t len;
    *ids = NULL;
    if (!e->tokenizer || !e->chat)
        return nbi_fail(NB_ENOTFOUND, "the model has no tokenizer, so it cannot talk");
    NBI_TRY(render(&c, e, &text, &len));
    enum nb_status rc = nb_tokenizer_encode(e->tokenizer, text, len, true, ids, count);
    free(text);
    return rc;
}

/* Appends to the tokens what becomes of a text, and keeps the text with them. */
static enum nb_status know(struct nb_conversation *c, const int32_t *ids, size_t count,
                           const char *text, size_t len)
{
    int32_t *grown = reallocarray(c->ids, c->id_count + count + 1, sizeof *grown);
    if (!grown)
        return nbi_fail_memory("tokens", (c->id_count + count) * sizeof *grown);
    c->ids = grown;
    memcpy(c->ids + c->id_count, ids, count * sizeof *ids);
    c->id_count += count;
    nbi_str_append(&c->known, text, len);
    return nbi_str_status(&c->known);
}

/* The tokens of the conversation up to where the answer begins. */
static enum nb_status make_prompt(struct nb_conversation *c)
{
    char *text;
    size_t len, count = 0;
    int32_t *ids = NULL;
    NBI_TRY(render(c, nbi_session_engine(c->session), &text, &len));
    if (len < c->known.len || memcmp(text, nbi_str_text(&c->known), c->known.len) != 0)
        forget_tokens(c);
    c->sent_known = c->known.len;
    c->sent_ids = c->id_count;
    const char *rest = text + c->known.len;
    len -= c->known.len;
    enum nb_status rc = nb_tokenizer_encode(nbi_session_engine(c->session)->tokenizer, rest, len,
                                            true, &ids, &count);
    if (rc == NB_OK)
        rc = know(c, ids, count, rest, len);
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
        return nbi_fail(NB_EVALUE,
                        "the conversation has %zu tokens now, and the context is of %lld",
                        c->id_count, (long long)context);
    }
    return nb_generate(c->session, c->ids, c->id_count, opts, result);
}

/* The answer becomes a message. Its tokens are known but for the one that ended it, which the
 * template writes itself, and unless a stop text was cut off. */
static enum nb_status keep_answer(struct nb_conversation *c, const struct nb_generate_opts *opts,
                                  const struct nb_generate_result *r, enum nb_status how)
{
    const struct nb_engine *e = nbi_session_engine(c->session);
    const struct nb_message answer = {NB_ROLE_ASSISTANT, r->text, r->len};
    NBI_TRY(insert(c, c->count, &answer));
    c->tokens = r->prompt_tokens + (int64_t)r->count;
    bool ended = !opts->ignore_eos && nbi_engine_is_eos(e, r->ids[r->count - 1]);
    bool cut_off = how == NB_OK && r->finish == NB_FINISH_STOP && !ended;
    if (cut_off || know(c, r->ids, r->count - ended, r->text, r->len) != NB_OK)
        forget_tokens(c);
    return how;
}

/* The last question was not answered. */
static void take_back(struct nb_conversation *c)
{
    free(c->messages[--c->count].text);
    nbi_str_cut(&c->known, c->sent_known);
    c->id_count = c->sent_ids;
}

enum nb_status nb_conversation_answer(struct nb_conversation *c, const char *text, size_t len,
                                      const struct nb_generate_opts *opts,
                                      struct nb_generate_result *result)
{
    const struct nb_message question = {NB_ROLE_USER, text, len};
    memset(result, 0, sizeof *result);
    c->sent_known = c->known.len;
    c->sent_ids = c->id_count;
    NBI_TRY(insert(c, c->count, &question));
    enum nb_status rc = generate(c, opts, result);
    if (rc == NB_OK || (rc == NB_EINTERRUPTED && result->count > 0))
        rc = keep_answer(c, opts, result, rc);
    if (c->messages[c->count - 1].role == NB_ROLE_USER)
        take_back(c);
    return rc;
}

/* ---- files ---- */

enum nb_status nb_conversation_save(const struct nb_conversation *c, const char *path)
{
    struct nbi_str line = {0};
    put_messages(c, &line);
    nbi_str_puts(&line, "}\n");
    enum nb_status rc = nbi_str_status(&line);
    if (rc == NB_OK)
        rc = nbi_file_write(path, line.p, line.len);
    nbi_str_release(&line);
    return rc;
}

static enum nb_status take_item(void *ctx, const struct nb_transcript_item *item)
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
    enum nb_status rc = nb_transcript_read(path, take_item, &loaded);
    if (rc == NB_OK) { /* the messages change places, and the old ones go */
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
