/* transcript.c - reads saved conversations and chat logs, a JSON object in each line.
 *
 * A line is a conversation ("messages"), a message of a log ("role") or an event of a log ("event":
 * start, reset, load). */
#include "infer/transcript.h"

#include <string.h>

#include "base/file.h"
#include "base/jscan.h"

#define TRANSCRIPT_MAX ((size_t)256 << 20)
#define TOKENS_MAX     ((int64_t)1 << 30)

struct reader {
    nb_transcript_fn fn;
    void *ctx;
    bool any;            /* a message was read, or an empty conversation */
    struct nbi_str text; /* of the current message */
};

static enum nb_status emit(struct reader *r, enum nb_item_kind kind)
{
    const struct nb_transcript_item item = {.kind = kind};
    return r->fn(r->ctx, &item);
}

static enum nb_status read_role(struct nbi_jspan v, enum nb_role *role)
{
    for (int i = NB_ROLE_SYSTEM; i <= NB_ROLE_ASSISTANT; i++)
        if (nbi_jtype(v) == NBI_JSTRING && nbi_jequals(v, nb_role_name((enum nb_role)i))) {
            *role = (enum nb_role)i;
            return NB_OK;
        }
    if (nbi_jtype(v) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'role' is %s, not a string", nbi_jtype_text(v));
    return nbi_fail(NB_EUNSUPPORTED, "the role %.*s is none of system, user and assistant",
                    v.len < 64 ? (int)v.len : 64, v.p);
}

static enum nb_status read_message(struct reader *r, struct nbi_jspan v, enum nb_item_kind kind)
{
    struct nb_transcript_item item = {.kind = kind};
    struct nbi_jspan content = nbi_jget(v, "content"), tokens = nbi_jget(v, "completion_tokens");
    if (nbi_jtype(v) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "a message is %s, not an object", nbi_jtype_text(v));
    NBI_TRY(read_role(nbi_jget(v, "role"), &item.message.role));
    if (nbi_jtype(content) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'content' is %s, not a string", nbi_jtype_text(content));
    if (nbi_jtype(nbi_jget(v, "tool_calls")) > NBI_JNULL)
        return nbi_fail(NB_EUNSUPPORTED, "a message with tool calls");
    if (nbi_jtype(nbi_jget(v, "interrupted")) == NBI_JTRUE &&
        !nbi_jint(tokens, 1, TOKENS_MAX, &item.cut))
        return nbi_fail(NB_EFORMAT, "an interrupted answer without 'completion_tokens'");
    r->text.len = 0;
    nbi_jstring(content, &r->text);
    NBI_TRY(nbi_str_status(&r->text));
    item.message.text = nbi_str_text(&r->text);
    item.message.len = r->text.len;
    r->any = true;
    return r->fn(r->ctx, &item);
}

static enum nb_status read_messages(struct reader *r, struct nbi_jspan v, enum nb_item_kind kind)
{
    struct nbi_jiter it;
    struct nbi_jspan key, message;
    if (nbi_jtype(v) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "'messages' is %s, not an array", nbi_jtype_text(v));
    r->any = true;
    nbi_jiter_init(&it, v);
    while (nbi_jiter_next(&it, &key, &message))
        NBI_TRY(read_message(r, message, kind));
    return NB_OK;
}

static enum nb_status read_event(struct reader *r, struct nbi_jspan line, struct nbi_jspan event)
{
    static const struct nb_transcript_item no_system = {.kind = NB_ITEM_LOADED,
                                                        .message = {NB_ROLE_SYSTEM, "", 0}};
    if (nbi_jtype(event) == NBI_JSTRING && nbi_jequals(event, "start"))
        return emit(r, NB_ITEM_START);
    if (nbi_jtype(event) == NBI_JSTRING && nbi_jequals(event, "reset"))
        return emit(r, NB_ITEM_RESET);
    if (nbi_jtype(event) != NBI_JSTRING || !nbi_jequals(event, "load"))
        return nbi_fail(NB_EFORMAT, "'event' is none of start, reset and load");
    NBI_TRY(emit(r, NB_ITEM_RESET));
    NBI_TRY(r->fn(r->ctx, &no_system));
    return read_messages(r, nbi_jget(line, "messages"), NB_ITEM_LOADED);
}

static enum nb_status read_line(struct reader *r, const char *text, size_t len)
{
    struct nbi_jspan line, event, messages;
    NBI_TRY(nbi_jscan(&line, text, len));
    if (nbi_jtype(line) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "it is %s, not an object", nbi_jtype_text(line));
    event = nbi_jget(line, "event");
    messages = nbi_jget(line, "messages");
    if (nbi_jtype(event) != NBI_JNONE)
        return read_event(r, line, event);
    if (nbi_jtype(messages) == NBI_JNONE) {
        if (nbi_jtype(nbi_jget(line, "role")) == NBI_JNONE)
            return nbi_fail(NB_EFORMAT, "it has none of 'messages', 'role' and 'event'");
        return read_message(r, line, NB_ITEM_MESSAGE);
    }
    NBI_TRY(emit(r, NB_ITEM_START));
    return read_messages(r, messages, NB_ITEM_MESSAGE);
}

static bool is_blank(const char *line, size_t len)
{
    while (len > 0 && (line[len - 1] == ' ' || line[len - 1] == '\t' || line[len - 1] == '\r'))
        len--;
    return len == 0;
}

enum nb_status nbi_transcript_parse(const char *bytes, size_t len, const char *name,
                                    nb_transcript_fn fn, void *ctx)
{
    struct reader r = {.fn = fn, .ctx = ctx};
    const char *end = bytes + len;
    size_t number = 1;
    enum nb_status rc = NB_OK;
    for (const char *p = bytes; rc == NB_OK && p < end; number++) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        size_t n = (size_t)((stop ? stop : end) - p);
        if (!is_blank(p, n))
            rc = nbi_context(read_line(&r, p, n), "'%s', line %zu", name, number);
        p = stop ? stop + 1 : end;
    }
    if (rc == NB_OK && !r.any)
        rc = nbi_fail(NB_EFORMAT, "'%s' holds no messages", name);
    nbi_str_release(&r.text);
    return rc;
}

enum nb_status nb_transcript_read(const char *path, nb_transcript_fn fn, void *ctx)
{
    char *bytes;
    size_t len;
    NBI_TRY(nbi_file_read(path, TRANSCRIPT_MAX, &bytes, &len));
    enum nb_status rc = nbi_transcript_parse(bytes, len, path, fn, ctx);
    free(bytes);
    return rc;
}
