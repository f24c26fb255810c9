/* example.c - makes examples and prompts from records of TSV, JSONL and text.
 *
 * Chat templates are lenient; training is not. What a template would silently drop is an error
 * here. */
#include "data/example.h"

#include <string.h>
#include <strings.h>

#include "base/array.h"
#include "base/utf8.h"
#include "data/sharegpt.h"

void nbi_example_release(struct nbi_example *x)
{
    nbi_ids_release(&x->ids);
    free(x->trained);
    *x = (struct nbi_example){0};
}

void nbi_example_encoder_release(struct nbi_example_encoder *e)
{
    nbi_str_release(&e->a);
    nbi_str_release(&e->b);
    nbi_str_release(&e->messages_json);
}

/* ---- tokens ---- */

/* Sets the loss mask of ids[from..]. */
static enum nb_status set_mask(struct nbi_example *out, size_t from, bool trained)
{
    NBI_TRY(NBI_ARRAY_RESERVE(out->trained, out->capacity, out->ids.count, "sample"));
    if (out->ids.count > from)
        memset(out->trained + from, trained, out->ids.count - from);
    return NB_OK;
}

static enum nb_status put_text(struct nbi_example_encoder *e, const char *text, size_t len,
                               bool trained, struct nbi_example *out)
{
    size_t from = out->ids.count;
    if (!e->tokenizer)
        return NB_OK;
    NBI_TRY(nbi_tokenizer_encode(e->tokenizer, text, len, true, &out->ids));
    return set_mask(out, from, trained);
}

/* The token after a document; -1: the vocabulary has none. */
static int64_t end_of_text(const struct nb_tokenizer *t)
{
    const struct nbi_bpe *bpe = nbi_tokenizer_bpe(t);
    int64_t id = nbi_bpe_added(bpe, NBI_END_OF_TEXT);
    return id >= 0 ? id : nbi_bpe_added(bpe, NBI_IM_END);
}

static enum nb_status make_document(struct nbi_example_encoder *e, const char *text, size_t len,
                                    bool ends, struct nbi_example *out)
{
    out->document = true;
    if (memchr(text, 0, len))
        return nbi_fail(NB_EFORMAT, "a NUL character: this is not text");
    NBI_TRY(put_text(e, text, len, true, out));
    if (!ends || !e->tokenizer)
        return NB_OK;
    int64_t id = end_of_text(e->tokenizer);
    if (id < 0)
        return NB_OK;
    size_t from = out->ids.count;
    NBI_TRY(nbi_ids_reserve(&out->ids, 1));
    out->ids.p[out->ids.count++] = (int32_t)id;
    return set_mask(out, from, true);
}

static enum nb_status check_message(struct nbi_jspan message, size_t number)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    struct nbi_jspan role = nbi_jget(message, "role"), content = nbi_jget(message, "content");
    size_t r = 0;
    while (r < 4 && !nbi_jequals(role, roles[r]))
        r++;
    if (r == 4)
        return nbi_fail(NB_EFORMAT,
                        "the role of message %zu is none of system, user, assistant "
                        "and tool",
                        number);
    bool calls = nbi_jcount(nbi_jget(message, "tool_calls")) > 0;
    if (calls && r == 2 && nbi_jtype(content) <= NBI_JNULL)
        return NB_OK;
    if (nbi_jtype(content) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "the content of message %zu must be text, it is %s", number,
                        nbi_jtype_text(content));
    if (r == 2 && !calls && content.len == 2)
        return nbi_fail(NB_EFORMAT, "message %zu, the assistant's, is empty", number);
    return NB_OK;
}

static enum nb_status check_messages(struct nbi_jspan messages)
{
    struct nbi_jiter it;
    struct nbi_jspan key, message;
    if (nbi_jtype(messages) != NBI_JARRAY)
        return nbi_fail(NB_EFORMAT, "'messages' must be an array, it is %s",
                        nbi_jtype_text(messages));
    nbi_jiter_init(&it, messages);
    for (size_t n = 1; nbi_jiter_next(&it, &key, &message); n++)
        NBI_TRY(check_message(message, n));
    return NB_OK;
}

/* Without these tokens the template would be tokenized as plain text, and no answer would end. */
static enum nb_status check_chat_tokens(const struct nb_tokenizer *t)
{
    const struct nbi_bpe *bpe = nbi_tokenizer_bpe(t);
    if (nbi_bpe_added(bpe, NBI_IM_START) >= 0 && nbi_bpe_added(bpe, NBI_IM_END) >= 0)
        return NB_OK;
    return nbi_fail(NB_EINVAL, "the tokenizer has no tokens <|im_start|> and <|im_end|>, which a "
                               "conversation needs");
}

/* Makes an example from the object that a chat template renders. Text after the last answer is
 * dropped: nothing there is trained on. */
static enum nb_status make_chat(struct nbi_example_encoder *e, struct nbi_jspan messages_json,
                                struct nbi_example *out)
{
    struct nbi_rendered r = {0};
    size_t at = 0;
    if (e->tokenizer && !e->checked)
        NBI_TRY(check_chat_tokens(e->tokenizer));
    e->checked = true;
    NBI_TRY(check_messages(nbi_jget(messages_json, "messages")));
    NBI_TRY(nbi_chat_render(e->chat, messages_json, &r));
    enum nb_status rc = NB_OK;
    if (r.range_count == 0)
        rc = nbi_fail(NB_EFORMAT, "there is no assistant message to learn from");
    for (size_t i = 0; i < r.range_count && rc == NB_OK; i++) {
        rc = put_text(e, r.text.p + at, r.ranges[i].start - at, false, out);
        if (rc == NB_OK)
            rc = put_text(e, r.text.p + r.ranges[i].start, r.ranges[i].end - r.ranges[i].start,
                          true, out);
        at = r.ranges[i].end;
    }
    nbi_rendered_release(&r);
    return rc;
}

static enum nb_status make_pair(struct nbi_example_encoder *e, const struct nbi_str *system,
                                const char *prompt, size_t prompt_len, const char *answer,
                                size_t answer_len, struct nbi_example *out)
{
    struct nb_message m[3];
    size_t count = 0;
    struct nbi_str *q = &e->messages_json;
    struct nbi_jspan messages_json;
    if (system && system->len > 0)
        m[count++] = (struct nb_message){NB_ROLE_SYSTEM, system->p, system->len};
    m[count++] = (struct nb_message){NB_ROLE_USER, prompt, prompt_len};
    m[count++] = (struct nb_message){NB_ROLE_ASSISTANT, answer, answer_len};
    q->len = 0;
    nbi_str_puts(q, "{\"messages\":");
    nbi_chat_put_messages(q, m, count);
    nbi_str_puts(q, "}");
    NBI_TRY(nbi_str_status(q));
    NBI_TRY(nbi_jscan(&messages_json, q->p, q->len));
    return make_chat(e, messages_json, out);
}

/* ---- TSV ---- */

struct field {
    const char *p;
    size_t len;
};

static struct field trim(const char *p, size_t len)
{
    while (len > 0 && (*p == ' ' || *p == '\t' || *p == '\r')) {
        p++;
        len--;
    }
    while (len > 0 && (p[len - 1] == ' ' || p[len - 1] == '\t' || p[len - 1] == '\r'))
        len--;
    return (struct field){p, len};
}

/* Splits a line at its first TAB; further TABs belong to the answer. */
static enum nb_status split_tsv(const char *line, size_t len, struct field *prompt,
                                struct field *answer)
{
    const char *tab = memchr(line, '\t', len);
    if (!tab)
        return nbi_fail(NB_EFORMAT, "no TAB between prompt and answer");
    *prompt = trim(line, (size_t)(tab - line));
    *answer = trim(tab + 1, (size_t)(line + len - tab - 1));
    if (prompt->len == 0 || answer->len == 0)
        return nbi_fail(NB_EFORMAT, "the %s is empty", prompt->len ? "answer" : "prompt");
    if (!nbi_utf8_valid(line, len))
        return nbi_fail(NB_EFORMAT, "the line is not well-formed UTF-8");
    return NB_OK;
}

static bool is_one_of(struct field f, const char *const *names)
{
    for (; *names; names++)
        if (strlen(*names) == f.len && strncasecmp(f.p, *names, f.len) == 0)
            return true;
    return false;
}

static const char *const prompt_names[] = {"prompt", "instruction", "question", NULL};
static const char *const context_names[] = {"input", "context", NULL};
static const char *const answer_names[] = {"response", "completion", "output",
                                           "answer",   "target",     NULL};

bool nbi_example_is_header(const char *line, size_t len)
{
    const char *tab = memchr(line, '\t', len);
    if (!tab)
        return false;
    const char *rest = tab + 1;
    size_t left = (size_t)(line + len - rest);
    const char *next = memchr(rest, '\t', left);
    return is_one_of(trim(line, (size_t)(tab - line)), prompt_names) &&
           is_one_of(trim(rest, next ? (size_t)(next - rest) : left), answer_names);
}

/* ---- JSONL ---- */

/* null counts as absent: exported tables have every column in every line. */
static bool is_present(struct nbi_jspan v)
{
    return nbi_jtype(v) > NBI_JNULL;
}

static struct nbi_jspan get_any(struct nbi_jspan object, const char *const *names,
                                const char **found)
{
    struct nbi_jspan v = {0};
    for (; !is_present(v) && *names; names++) {
        v = nbi_jget(object, *names);
        *found = *names;
    }
    return v;
}

/* Replaces *s. An absent field is empty if it is optional. */
static enum nb_status get_string(struct nbi_jspan v, const char *name, bool optional,
                                 struct nbi_str *s)
{
    s->len = 0;
    nbi_str_append(s, "", 0);
    if (optional && !is_present(v))
        return nbi_str_status(s);
    if (nbi_jtype(v) != NBI_JSTRING)
        return nbi_fail(NB_EFORMAT, "'%s' must be a string, it is %s", name, nbi_jtype_text(v));
    nbi_jstring(v, s);
    NBI_TRY(nbi_str_status(s));
    if (!optional && s->len == 0)
        return nbi_fail(NB_EFORMAT, "'%s' is empty", name);
    return NB_OK;
}

/* Sets *a to the prompt, followed by its context, and *b to the answer. An answer that need not be
 * there may be empty. */
static enum nb_status get_pair(struct nbi_jspan json, bool answered, struct nbi_str *a,
                               struct nbi_str *b)
{
    const char *prompt_name = "", *context_name = "", *answer_name = "";
    struct nbi_jspan prompt = get_any(json, prompt_names, &prompt_name);
    struct nbi_jspan context = get_any(json, context_names, &context_name);
    struct nbi_jspan answer = get_any(json, answer_names, &answer_name);
    if (!is_present(prompt) && !answered)
        return nbi_fail(NB_EFORMAT, "there is neither 'messages' nor 'prompt' in it");
    if (!is_present(prompt) || (answered && !is_present(answer)))
        return nbi_fail(NB_EFORMAT, "there is neither 'messages', nor 'prompt' and 'response', nor "
                                    "'text' in it");
    NBI_TRY(get_string(context, context_name, true, b));
    NBI_TRY(get_string(prompt, prompt_name, false, a));
    if (b->len > 0) {
        nbi_str_puts(a, "\n\n");
        nbi_str_append(a, b->p, b->len);
    }
    NBI_TRY(nbi_str_status(a));
    return get_string(answer, answer_name, !answered, b);
}

static enum nb_status make_json(struct nbi_example_encoder *e, const char *line, size_t len,
                                struct nbi_example *out)
{
    struct nbi_jspan json, chat, text, ends;
    NBI_TRY(nbi_jscan(&json, line, len));
    if (nbi_jtype(json) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "the line is %s and not an object", nbi_jtype_text(json));
    NBI_TRY(nbi_sharegpt_messages(json, &e->messages_json, &chat));
    if (is_present(chat))
        return make_chat(e, chat, out);
    text = nbi_jget(json, "text");
    ends = nbi_jget(json, "ends");
    if (is_present(text)) {
        if (is_present(ends) && nbi_jtype(ends) != NBI_JTRUE && nbi_jtype(ends) != NBI_JFALSE)
            return nbi_fail(NB_EFORMAT, "'ends' is %s and not true or false", nbi_jtype_text(ends));
        NBI_TRY(get_string(text, "text", false, &e->a));
        return make_document(e, e->a.p, e->a.len, nbi_jtype(ends) != NBI_JFALSE, out);
    }
    struct nbi_str system = {0};
    enum nb_status rc = get_pair(json, true, &e->a, &e->b);
    if (rc == NB_OK)
        rc = get_string(nbi_jget(json, "system"), "system", true, &system);
    if (rc == NB_OK)
        rc = make_pair(e, &system, e->a.p, e->a.len, e->b.p, e->b.len, out);
    nbi_str_release(&system);
    return rc;
}

enum nb_status nbi_example_make(struct nbi_example_encoder *e, enum nbi_data_kind kind,
                                const char *text, size_t len, bool ends, struct nbi_example *out)
{
    out->ids.count = 0;
    out->document = false;
    if (kind == NBI_DATA_TEXT)
        return make_document(e, text, len, ends, out);
    if (kind == NBI_DATA_JSONL)
        return make_json(e, text, len, out);
    struct field prompt, answer;
    NBI_TRY(split_tsv(text, len, &prompt, &answer));
    return make_pair(e, NULL, prompt.p, prompt.len, answer.p, answer.len, out);
}

/* ---- a question and its answer ---- */

static enum nb_status message_pair(struct nbi_jspan messages, struct nbi_str *prompt,
                                   struct nbi_str *answer)
{
    struct nbi_jiter it;
    struct nbi_jspan key, message[3] = {0};
    int n = 0;
    nbi_jiter_init(&it, messages);
    while (n < 3 && nbi_jiter_next(&it, &key, &message[n]))
        n++;
    if (n != 2 || !nbi_jequals(nbi_jget(message[0], "role"), "user") ||
        !nbi_jequals(nbi_jget(message[1], "role"), "assistant"))
        return nbi_fail(NB_EFORMAT, "'messages' is not one question and one answer");
    NBI_TRY(get_string(nbi_jget(message[0], "content"), "content", false, prompt));
    return get_string(nbi_jget(message[1], "content"), "content", false, answer);
}

enum nb_status nbi_example_pair(enum nbi_data_kind kind, const char *text, size_t len,
                                struct nbi_str *prompt, struct nbi_str *answer)
{
    struct nbi_jspan json, chat;
    if (kind == NBI_DATA_TSV) {
        struct field a, b;
        NBI_TRY(split_tsv(text, len, &a, &b));
        prompt->len = answer->len = 0;
        nbi_str_append(prompt, a.p, a.len);
        nbi_str_append(answer, b.p, b.len);
        NBI_TRY(nbi_str_status(prompt));
        return nbi_str_status(answer);
    }
    if (kind == NBI_DATA_TEXT)
        return nbi_fail(NB_EFORMAT, "a plain text has no questions and answers");
    struct nbi_str scratch = {0};
    NBI_TRY(nbi_jscan(&json, text, len));
    enum nb_status rc = nbi_sharegpt_messages(json, &scratch, &chat);
    if (rc == NB_OK)
        rc = is_present(chat) ? message_pair(nbi_jget(chat, "messages"), prompt, answer)
                              : get_pair(json, true, prompt, answer);
    nbi_str_release(&scratch);
    return rc;
}

/* ---- prompts ---- */

void nbi_prompt_release(struct nbi_prompt *p)
{
    nbi_str_release(&p->text);
    nbi_str_release(&p->messages);
    nbi_str_release(&p->tools);
    nbi_str_release(&p->expected);
    *p = (struct nbi_prompt){0};
}

static enum nb_status put_question(struct nbi_prompt *out, const struct nbi_str *system)
{
    struct nb_message m[2];
    size_t count = 0;
    out->system = system && system->len > 0;
    if (out->system)
        m[count++] = (struct nb_message){NB_ROLE_SYSTEM, system->p, system->len};
    m[count++] = (struct nb_message){NB_ROLE_USER, out->text.p, out->text.len};
    nbi_chat_put_messages(&out->messages, m, count);
    out->count = (int64_t)count;
    return NB_OK;
}

static enum nb_status take_messages(struct nbi_prompt *out, struct nbi_jspan messages)
{
    struct nbi_jiter it;
    struct nbi_jspan key, message, role = {0};
    int64_t all = (int64_t)nbi_jcount(messages);
    NBI_TRY(check_messages(messages));
    nbi_str_puts(&out->messages, "[");
    nbi_jiter_init(&it, messages);
    for (int64_t n = 0; nbi_jiter_next(&it, &key, &message); n++) {
        role = nbi_jget(message, "role");
        struct nbi_jspan content = nbi_jget(message, "content");
        if (n == all - 1 && nbi_jequals(role, "assistant")) {
            NBI_TRY(get_string(content, "content", false, &out->expected));
            break;
        }
        if (nbi_jequals(role, "user"))
            NBI_TRY(get_string(content, "content", true, &out->text));
        out->system = out->system || (n == 0 && nbi_jequals(role, "system"));
        nbi_str_puts(&out->messages, n ? "," : "");
        nbi_str_append(&out->messages, message.p, message.len);
        out->count++;
    }
    nbi_str_puts(&out->messages, "]");
    if (out->text.len == 0)
        return nbi_fail(NB_EFORMAT, "there is no message of the user to answer");
    return NB_OK;
}

static enum nb_status take_json(struct nbi_prompt *out, const char *text, size_t len)
{
    struct nbi_jspan json, chat, tools;
    struct nbi_str system = {0}; /* scratch for the conversation, too */
    NBI_TRY(nbi_jscan(&json, text, len));
    if (nbi_jtype(json) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "the line is %s and not an object", nbi_jtype_text(json));
    tools = nbi_jget(json, "tools");
    if (is_present(tools))
        nbi_str_append(&out->tools, tools.p, tools.len);
    enum nb_status rc = nbi_sharegpt_messages(json, &system, &chat);
    if (rc == NB_OK && is_present(chat)) {
        rc = take_messages(out, nbi_jget(chat, "messages"));
    } else if (rc == NB_OK) {
        rc = get_pair(json, false, &out->text, &out->expected);
        if (rc == NB_OK)
            rc = get_string(nbi_jget(json, "system"), "system", true, &system);
        if (rc == NB_OK)
            rc = put_question(out, &system);
    }
    nbi_str_release(&system);
    return rc;
}

static enum nb_status take_line(struct nbi_prompt *out, enum nbi_data_kind kind, const char *text,
                                size_t len)
{
    struct field prompt = trim(text, len), answer = {"", 0};
    if (kind == NBI_DATA_TSV && memchr(text, '\t', len))
        NBI_TRY(split_tsv(text, len, &prompt, &answer));
    if (!nbi_utf8_valid(text, len))
        return nbi_fail(NB_EFORMAT, "the line is not well-formed UTF-8");
    nbi_str_append(&out->text, prompt.p, prompt.len);
    nbi_str_append(&out->expected, answer.p, answer.len);
    return put_question(out, NULL);
}

enum nb_status nbi_example_prompt(enum nbi_data_kind kind, const char *text, size_t len,
                                  struct nbi_prompt *out)
{
    struct nbi_str *parts[] = {&out->text, &out->messages, &out->tools, &out->expected};
    for (size_t i = 0; i < 4; i++)
        parts[i]->len = 0;
    out->count = 0;
    out->system = false;
    NBI_TRY(kind == NBI_DATA_JSONL ? take_json(out, text, len) : take_line(out, kind, text, len));
    for (size_t i = 0; i < 4; i++) {
        NBI_TRY(nbi_str_status(parts[i]));
        if (memchr(nbi_str_text(parts[i]), 0, parts[i]->len))
            return nbi_fail(NB_EFORMAT, "a NUL character: this is not text");
    }
    return NB_OK;
}

/* ---- all texts of a record ---- */

static enum nb_status json_texts(struct nbi_jspan json, struct nbi_str *s, nbi_text_fn fn,
                                 void *ctx)
{
    struct nbi_jiter it;
    struct nbi_jspan key, message;
    nbi_jiter_init(&it, nbi_jget(json, "messages"));
    while (nbi_jiter_next(&it, &key, &message)) {
        NBI_TRY(get_string(nbi_jget(message, "content"), "content", true, s));
        NBI_TRY(fn(ctx, s->p, s->len));
    }
    nbi_jiter_init(&it, nbi_jget(json, "conversations"));
    while (nbi_jiter_next(&it, &key, &message)) {
        NBI_TRY(get_string(nbi_jget(message, "value"), "value", true, s));
        NBI_TRY(fn(ctx, s->p, s->len));
    }
    static const char *const *const groups[] = {prompt_names, context_names, answer_names};
    for (int g = 0; g < 3; g++)
        for (const char *const *name = groups[g]; *name; name++) {
            struct nbi_jspan v = nbi_jget(json, *name);
            s->len = 0;
            nbi_jstring(v, s);
            NBI_TRY(nbi_str_status(s));
            NBI_TRY(fn(ctx, nbi_str_text(s), s->len));
        }
    NBI_TRY(get_string(nbi_jget(json, "text"), "text", true, s));
    return fn(ctx, s->p, s->len);
}

enum nb_status nbi_example_texts(enum nbi_data_kind kind, const char *text, size_t len,
                                 nbi_text_fn fn, void *ctx)
{
    if (kind == NBI_DATA_TEXT)
        return fn(ctx, text, len);
    if (kind == NBI_DATA_TSV) {
        struct field prompt, answer;
        NBI_TRY(split_tsv(text, len, &prompt, &answer));
        NBI_TRY(fn(ctx, prompt.p, prompt.len));
        return fn(ctx, answer.p, answer.len);
    }
    struct nbi_jspan json;
    struct nbi_str s = {0};
    enum nb_status rc = nbi_jscan(&json, text, len);
    if (rc == NB_OK)
        rc = json_texts(json, &s, fn, ctx);
    nbi_str_release(&s);
    return rc;
}

/* ---- truncation ---- */

bool nbi_example_truncate(struct nbi_example *x, size_t max)
{
    size_t n = x->ids.count, end = n, start;
    if (n <= max)
        return false;
    if (x->document) {
        x->ids.count = max;
        return true;
    }
    size_t answer = n; /* start of the last trained range */
    while (answer > 0 && !x->trained[answer - 1])
        answer--;
    while (answer > 0 && x->trained[answer - 1])
        answer--;
    size_t reserve = max / 8 > 0 ? max / 8 : 1, prompt = answer < reserve ? answer : reserve;
    if (n - answer + prompt > max) /* the answer is too long: cut its end */
        end = answer - prompt + max;
    start = end - max;
    memmove(x->ids.p, x->ids.p + start, max * sizeof *x->ids.p);
    memmove(x->trained, x->trained + start, max);
    x->ids.count = max;
    return true;
}
