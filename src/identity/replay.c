/* replay.c - writes a model's own answers as a data set. */
#include "identity/replay.h"

#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/str.h"
#include "infer/answers.h"

/* Questions with many possible answers. */
static const char *const open_questions[] = {
    "Tell me a story.",
    "Can you tell me a short story?",
    "Tell me a story about a dog.",
    "Tell me a story about a little girl.",
    "Tell me a story about a boy and his friend.",
    "Tell me a story about a bird.",
    "Tell me something interesting.",
    "What should we talk about?",
    "What did you do today?",
    "Tell me about the sea.",
    "Tell me about your favorite food.",
    "What do you like?",
    "What makes people happy?",
    "Describe a summer day.",
    "How can I learn to cook?",
    "Give me some advice.",
};

#define OPEN_COUNT (sizeof open_questions / sizeof *open_questions)

#define OPENINGS        12  /* text openings per language */
#define TEXT_TOKENS_MAX 128 /* longest text that the model continues from an opening */

static const char *const openings[NBI_IDENTITY_LANGUAGES][OPENINGS] = {
    [NBI_IDENTITY_EN] = {"Once upon a time", "The", "I", "One day", "What", "In", "You", "She",
                         "Hello", "It was", "How", "Yes"},
    [NBI_IDENTITY_ZH_HANS] = {"\u4ece\u524d", "\u4eca\u5929", "\u6211", "\u4f60", "\u4e00\u4e2a",
                              "\u4ec0\u4e48", "\u5728", "\u4ed6", "\u4f60\u597d", "\u8fd9\u662f",
                              "\u4e3a\u4ec0\u4e48", "\u662f\u7684"},
    [NBI_IDENTITY_ZH_HANT] = {"\u5f9e\u524d", "\u4eca\u5929", "\u6211", "\u4f60", "\u4e00\u500b",
                              "\u4ec0\u9ebc", "\u5728", "\u4ed6", "\u4f60\u597d", "\u9019\u662f",
                              "\u70ba\u4ec0\u9ebc", "\u662f\u7684"},
    [NBI_IDENTITY_JA] = {"\u6614", "\u4eca\u65e5", "\u79c1", "\u3042\u306a\u305f",
                         "\u3042\u308b\u65e5", "\u4f55", "\u3053\u306e", "\u5f7c",
                         "\u3053\u3093\u306b\u3061\u306f", "\u3053\u308c\u306f", "\u306a\u305c",
                         "\u306f\u3044"},
    [NBI_IDENTITY_KO] = {"\uc61b\ub0a0", "\uc624\ub298", "\ub098\ub294", "\ub2f9\uc2e0",
                         "\uc5b4\ub290 \ub0a0", "\ubb34\uc5c7", "\uc774", "\uadf8\ub294",
                         "\uc548\ub155", "\uc774\uac83\uc740", "\uc65c", "\ub124"},
};

/* What the model is asked. */
struct replay_prompt {
    const char *text;     /* a question, or the opening of a text */
    const char *fallback; /* written if the model's answer is unusable; NULL: write nothing */
    bool is_text;         /* text is an opening, to be continued without a chat template */
    int32_t *ids;
};

struct replay_writer {
    const struct nbi_questions *q;
    const struct nbi_replay_opts *opts;
    struct nbi_replay_report *report;
    struct nb_engine *engine;
    struct replay_prompt *prompts; /* [count] */
    struct nbi_answer *answers;    /* [count] */
    int64_t count;
    struct nbi_outfile *file;
    uint64_t at, answered; /* file offset; answers so far */
};

/* Writes and releases a JSON line; NULL means that json_pack() ran out of memory. */
static enum nb_status put_line(struct replay_writer *w, json_t *line)
{
    char *text;
    enum nb_status rc = nbi_json_dump(line, JSON_COMPACT, &text);
    json_decref(line);
    if (rc != NB_OK)
        return nbi_context(rc, "a line of replay");
    size_t bytes = strlen(text);
    text[bytes] = '\n'; /* replaces the NUL */
    rc = nbi_outfile_write(w->file, w->at, text, bytes + 1);
    w->at += bytes + 1;
    free(text);
    return rc;
}

static enum nb_status put(struct replay_writer *w, const char *prompt, const char *answer,
                          size_t len)
{
    return put_line(w, json_pack("{s:[{s:s,s:s},{s:s,s:s%}]}", "messages", "role", "user",
                                 "content", prompt, "role", "assistant", "content", answer, len));
}

/* Writes the model's answer if it is complete and does not state the identity, else the fallback,
 * if there is one. */
static enum nb_status put_answer(struct replay_writer *w, int64_t i)
{
    const struct replay_prompt *prompt = &w->prompts[i];
    const struct nb_generate_result *r = &w->answers[i].result;
    bool identity = false;
    NBI_TRY(nbi_says_identity(w->q, r->text, r->len, &identity));
    bool good = r->finish == NB_FINISH_STOP && r->len > 0 && !identity;
    *(prompt->fallback ? &w->report->answers : &w->report->samples) += good;
    if (good)
        return put(w, prompt->text, r->text, r->len);
    return prompt->fallback ? put(w, prompt->text, prompt->fallback, strlen(prompt->fallback))
                            : NB_OK;
}

/* Length without the U+FFFD that a character cut by the token limit leaves at the end. */
static size_t without_partial_character(const char *p, size_t len)
{
    while (len >= 3 && memcmp(p + len - 3, "\xEF\xBF\xBD", 3) == 0)
        len -= 3;
    return len;
}

/* Writes an opening and the model's continuation of it. */
static enum nb_status put_text(struct replay_writer *w, int64_t i)
{
    const struct nb_generate_result *r = &w->answers[i].result;
    struct nbi_str text = {0};
    bool cut = r->finish != NB_FINISH_STOP, identity = false;
    nbi_str_puts(&text, w->prompts[i].text);
    nbi_str_append(&text, r->text, cut ? without_partial_character(r->text, r->len) : r->len);
    enum nb_status rc = nbi_str_status(&text);
    if (rc == NB_OK)
        rc = nbi_says_identity(w->q, text.p, text.len, &identity);
    if (rc == NB_OK && r->len > 0 && !identity && !memchr(text.p, 0, text.len)) {
        rc = put_line(w, json_pack("{s:s%,s:b}", "text", text.p, text.len, "ends", !cut));
        w->report->texts++;
    }
    nbi_str_release(&text);
    return rc;
}

/* The i-th opening, alternating between the languages of the set. */
static const char *opening_of(const struct nbi_questions *q, int64_t i)
{
    int used[NBI_IDENTITY_LANGUAGES], count = 0;
    for (int l = 0; l < NBI_IDENTITY_LANGUAGES; l++)
        if (q->forms[l])
            used[count++] = l;
    return count > 0 ? openings[used[i % count]][i / count % OPENINGS] : openings[0][0];
}

static bool is_replayed(const struct nbi_questions *q, size_t i)
{
    return q->lines[i]->kind != NBI_QUESTION_IDENTITY && !q->lines[i]->held_out;
}

/* Questions with a fallback are answered greedily, everything else is sampled. */
static enum nb_status add_prompt(struct replay_writer *w, const struct replay_prompt *prompt,
                                 uint64_t seed)
{
    struct replay_prompt *p = &w->prompts[w->count];
    struct nbi_answer *a = &w->answers[w->count++];
    int64_t limit = w->opts->max_tokens;
    if (prompt->is_text && limit > TEXT_TOKENS_MAX)
        limit = TEXT_TOKENS_MAX;
    *p = *prompt;
    a->opts = (struct nb_generate_opts){.sampling = {.temperature = prompt->fallback ? 0 : 1,
                                                     .top_p = 1,
                                                     .repeat_penalty = 1,
                                                     .seed = seed},
                                        .max_tokens = limit};
    enum nb_status rc =
        prompt->is_text ? nb_tokenizer_encode(nb_engine_tokenizer(w->engine), prompt->text,
                                              strlen(prompt->text), false, &p->ids, &a->count)
                        : nbi_engine_encode_question(w->engine, prompt->text, &p->ids, &a->count);
    a->ids = p->ids;
    return rc;
}

static enum nb_status add_all_prompts(struct replay_writer *w)
{
    const struct nbi_replay_opts *o = w->opts;
    size_t capacity = w->q->count + (size_t)(o->samples + o->samples / 2);
    w->prompts = calloc(capacity, sizeof *w->prompts);
    w->answers = calloc(capacity, sizeof *w->answers);
    if (!w->prompts || !w->answers)
        return nbi_fail_memory("answers", capacity * sizeof *w->answers);
    for (size_t i = 0; i < w->q->count; i++) {
        const struct nbi_identity_line *line = w->q->lines[i];
        const struct replay_prompt known = {.text = line->prompt, .fallback = line->answer};
        if (is_replayed(w->q, i))
            NBI_TRY(add_prompt(w, &known, 0));
    }
    for (int64_t i = 0; i < o->samples; i++) {
        const struct replay_prompt open = {.text = open_questions[(size_t)i % OPEN_COUNT]};
        NBI_TRY(add_prompt(w, &open, o->seed + (uint64_t)i));
    }
    for (int64_t i = 0; i < o->samples / 2; i++) {
        const struct replay_prompt opening = {.text = opening_of(w->q, i), .is_text = true};
        NBI_TRY(add_prompt(w, &opening, o->seed + (uint64_t)i));
    }
    return NB_OK;
}

static void count_answer(void *ctx)
{
    struct replay_writer *w = ctx;
    if (w->opts->progress)
        w->opts->progress(w->opts->progress_ctx, ++w->answered, (uint64_t)w->count);
}

static enum nb_status write_all(struct replay_writer *w)
{
    NBI_TRY(add_all_prompts(w));
    struct nbi_answers all = {
        .list = w->answers, .count = w->count, .answered = count_answer, .ctx = w};
    NBI_TRY(nbi_answer_all(w->engine, &all));
    for (int64_t i = 0; i < w->count; i++)
        NBI_TRY(w->prompts[i].is_text ? put_text(w, i) : put_answer(w, i));
    return NB_OK;
}

enum nb_status nbi_replay_write(const struct nbi_questions *q, const struct nbi_replay_opts *o,
                                struct nbi_replay_report *report)
{
    struct replay_writer w = {.q = q, .opts = o, .report = report};
    *report = (struct nbi_replay_report){0};
    enum nb_status rc = nb_engine_open(&w.engine, &o->model);
    if (rc == NB_OK)
        rc = nbi_outfile_open(&w.file, o->out);
    if (rc == NB_OK)
        rc = write_all(&w);
    if (rc == NB_OK)
        rc = nbi_outfile_commit(w.file);
    else
        nbi_outfile_abort(w.file);
    for (int64_t i = 0; i < w.count; i++) {
        free(w.prompts[i].ids);
        nb_generate_result_release(&w.answers[i].result);
    }
    free(w.prompts);
    free(w.answers);
    nb_engine_close(w.engine);
    return rc;
}
