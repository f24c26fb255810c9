/* stress.c - the same tokens through sessions in every way there is, again and again: the results
 * must not change, and memory must not grow. */
#include <malloc.h>
#include <string.h>

#include "base/clock.h"
#include "base/crc.h"
#include "base/sanitized.h"
#include "infer/session.h"

#define CONTEXT 64
#define PROMPT  24
#define HALF    (PROMPT / 2)
#define ANSWER  8
#define TYPES   NBI_KV_TYPES
#define SLACK   ((int64_t)256 << 10)

/* Greedy tokens behind a prompt, and the checksum of the logits the last was chosen from. */
struct outcome {
    int32_t ids[ANSWER];
    uint32_t crc;
};

struct stress {
    const struct nb_engine *engine;
    struct nb_stress_report *report;
    int32_t prompt[2][PROMPT]; /* the second differs from the first everywhere */
    float *logits[2];          /* [V] */
    struct outcome wanted[TYPES][2][NB_STRESS_CASES][2]; /* by type, exact, way, prompt */
    struct nbi_session_opts opts;                        /* of the session at work */
    const char *way;                                     /* the one at work */
    int64_t iteration;
    int type;
    int wanted_way; /* that the one at work is compared with */
};

/* Keeps the first difference. */
NBI_PRINTF(2, 3) static void differ(struct stress *t, const char *fmt, ...)
{
    char what[128];
    va_list args;
    if (!t->report->outputs_identical)
        return;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    t->report->outputs_identical = false;
    snprintf(t->report->difference, sizeof t->report->difference,
             "iteration %lld, cache in %s, %s products, '%s': %s", (long long)t->iteration + 1,
             nbi_kv_types[t->type].name, t->opts.exact ? "exact" : "integer", t->way, what);
}

/* ---- ways for a session to come to hold the first prompt, with its logits ---- */

static enum nb_status append(struct stress *t, struct nb_session *s, int64_t from, int64_t to)
{
    return nbi_session_append(s, t->prompt[0] + from, to - from, to == PROMPT ? t->logits[0] : NULL,
                              1);
}

static enum nb_status fill_whole(struct stress *t, struct nb_session *s)
{
    nb_session_truncate(s, 0);
    return append(t, s, 0, PROMPT);
}

static enum nb_status fill_half_then_single(struct stress *t, struct nb_session *s)
{
    nb_session_truncate(s, 0);
    NBI_TRY(append(t, s, 0, HALF));
    for (int i = HALF; i < PROMPT; i++)
        NBI_TRY(append(t, s, i, i + 1));
    return NB_OK;
}

static enum nb_status fill_truncated(struct stress *t, struct nb_session *s)
{
    NBI_TRY(fill_whole(t, s));
    NBI_TRY(nbi_session_append(s, t->prompt[1], PROMPT, NULL, 0));
    nb_session_truncate(s, HALF);
    return append(t, s, HALF, PROMPT);
}

static enum nb_status fill_reused(struct stress *t, struct nb_session *s)
{
    int32_t other[PROMPT];
    int64_t reused;
    memcpy(other, t->prompt[0], HALF * sizeof *other);
    memcpy(other + HALF, t->prompt[1] + HALF, (PROMPT - HALF) * sizeof *other);
    struct nbi_logits_spec next = {.logits = t->logits[0]};
    NBI_TRY(nbi_session_set_prompt(s, other, PROMPT, &next, &reused));
    NBI_TRY(nbi_session_set_prompt(s, t->prompt[0], PROMPT, &next, &reused));
    if (reused != HALF)
        differ(t, "%lld tokens were kept, not %d", (long long)reused, HALF);
    return NB_OK;
}

/* Into s, from what another session, or itself, has after half of the prompt. */
static enum nb_status move(struct stress *t, struct nb_session *from, struct nb_session *s)
{
    struct nbi_snapshot *snapshot = NULL;
    nb_session_truncate(from, 0);
    NBI_TRY(append(t, from, 0, HALF));
    NBI_TRY(nbi_session_save(from, &snapshot));
    nb_session_truncate(s, 0);
    enum nb_status rc = nbi_session_append(s, t->prompt[1], PROMPT, NULL, 0);
    if (rc == NB_OK)
        rc = nbi_session_restore(s, snapshot);
    nbi_snapshot_free(snapshot);
    return rc == NB_OK ? append(t, s, HALF, PROMPT) : rc;
}

static enum nb_status fill_restored(struct stress *t, struct nb_session *s)
{
    return move(t, s, s);
}

static enum nb_status fill_moved(struct stress *t, struct nb_session *s)
{
    struct nbi_session_opts opts = t->opts;
    struct nb_session *from = NULL;
    opts.context = HALF; /* rows lie elsewhere there */
    NBI_TRY(nbi_session_new(&from, t->engine, &opts));
    enum nb_status rc = move(t, from, s);
    nb_session_close(from);
    return rc;
}

/* ---- what they lead to ---- */

static enum nb_status step(struct stress *t, struct nb_session *s, int which, int i,
                           struct outcome *out)
{
    int64_t V = t->engine->config.vocab_size;
    const float *x = t->logits[which];
    int32_t best = nbi_argmax(x, V);
    out->ids[i] = best;
    out->crc = nbi_crc32c(0, x, (size_t)V * sizeof *x);
    return i + 1 < ANSWER ? nbi_session_append(s, &best, 1, t->logits[which], 1) : NB_OK;
}

/* Against what the first way gave. */
static void compare(struct stress *t, int which, const struct outcome *got)
{
    const struct outcome *wanted = &t->wanted[t->type][t->opts.exact][t->wanted_way][which];
    for (int i = 0; i < ANSWER; i++)
        if (got->ids[i] != wanted->ids[i]) {
            differ(t, "token %d of the answer is %d, not %d", i + 1, got->ids[i], wanted->ids[i]);
            return;
        }
    if (got->crc != wanted->crc)
        differ(t, "the last logits have crc32c %08x, not %08x", got->crc, wanted->crc);
}

/* The answer of s and, token by token in turn, of another session to the second prompt. */
static enum nb_status answer(struct stress *t, struct nb_session *s, struct nb_session *beside,
                             struct outcome out[2])
{
    if (beside) {
        nb_session_truncate(beside, 0);
        NBI_TRY(nbi_session_append(beside, t->prompt[1], PROMPT, t->logits[1], 1));
    }
    for (int i = 0; i < ANSWER; i++) {
        NBI_TRY(step(t, s, 0, i, &out[0]));
        if (beside)
            NBI_TRY(step(t, beside, 1, i, &out[1]));
    }
    return NB_OK;
}

/* ---- all of them ---- */

typedef enum nb_status (*fill_fn)(struct stress *t, struct nb_session *s);

struct way {
    const char *name;
    fill_fn fill;
    enum nb_kv_mode mode;
    bool chunks; /* of another size in each iteration */
    bool life;   /* all of these in one session, one behind the other */
    bool beside; /* with another session in turn */
};

/* The first gives what the others are compared with; where it matters how many rows go together,
 * each is compared with itself. */
static const struct way ways[] = {
    {.name = "prompt", .fill = fill_whole, .beside = true},
    {.name = "token", .fill = fill_whole, .mode = NB_KV_TOKEN},
    {.name = "none", .fill = fill_whole, .mode = NB_KV_NONE},
    {.name = "chunks", .fill = fill_whole, .chunks = true},
    {.name = "half, then single tokens", .fill = fill_half_then_single, .life = true},
    {.name = "truncated", .fill = fill_truncated, .life = true},
    {.name = "prefix reused", .fill = fill_reused, .life = true},
    {.name = "snapshot restored", .fill = fill_restored, .life = true},
    {.name = "snapshot of another session", .fill = fill_moved, .life = true},
    {.name = "whole again", .fill = fill_whole, .life = true},
    {.name = "two sessions in turn", .fill = fill_half_then_single, .beside = true},
};

#define WAYS ((int)(sizeof ways / sizeof *ways))
_Static_assert(WAYS <= NB_STRESS_CASES, "the report holds every case");

static enum nb_status run_way(struct stress *t, int which, struct nb_session *life)
{
    const struct way *w = &ways[which];
    struct nb_stress_case *row = &t->report->cases[which];
    struct nbi_session_opts opts = t->opts;
    struct nb_session *own = NULL, *beside = NULL;
    struct outcome out[2] = {0};
    double start = nbi_now();
    t->way = w->name;
    opts.mode = w->mode;
    opts.chunk = w->chunks ? 1 + t->iteration * 5 % PROMPT : 0;
    enum nb_status rc = w->life ? NB_OK : nbi_session_new(&own, t->engine, &opts);
    if (rc == NB_OK && w->beside)
        rc = nbi_session_new(&beside, t->engine, &opts);
    if (rc == NB_OK)
        rc = w->fill(t, own ? own : life);
    if (rc == NB_OK)
        rc = answer(t, own ? own : life, beside, out);
    nb_session_close(own);
    nb_session_close(beside);
    bool apart = t->engine->be->batch_variant && !t->opts.exact;
    t->wanted_way = apart ? which : 0;
    if (rc == NB_OK && which == t->wanted_way && t->iteration < 2) /* exact and not take turns */
        memcpy(t->wanted[t->type][t->opts.exact][which], out, sizeof out);
    bool same = !apart || !w->chunks;
    if (rc == NB_OK && same)
        compare(t, 0, &out[0]);
    if (rc == NB_OK && same && w->beside)
        compare(t, 1, &out[1]);
    row->runs++;
    row->seconds += nbi_now() - start;
    return rc;
}

static enum nb_status run_iteration(struct stress *t)
{
    for (t->type = 0; t->type < TYPES; t->type++) {
        struct nb_session *life = NULL;
        t->opts = (struct nbi_session_opts){
            .context = CONTEXT, .kv = nbi_kv_types[t->type].dtype, .exact = t->iteration % 2 == 1};
        NBI_TRY(nbi_session_new(&life, t->engine, &t->opts));
        enum nb_status rc = NB_OK;
        for (int i = 0; i < WAYS && rc == NB_OK && t->report->outputs_identical; i++)
            rc = run_way(t, i, life);
        nb_session_close(life);
        NBI_TRY(rc);
    }
    return NB_OK;
}

/* ---- memory ---- */

struct sample {
    int64_t resident, heap;
};

static struct sample measure(void)
{
    struct mallinfo2 info = mallinfo2();
    return (struct sample){(int64_t)nbi_current_rss(), (int64_t)(info.uordblks + info.hblkhd)};
}

/* What a straight line through the values (least squares) gains from the first to the last. */
static int64_t line_growth(const struct sample *s, int64_t n)
{
    double mean_x = (double)(n - 1) / 2, mean_y = 0, xx = 0, xy = 0;
    for (int64_t i = 0; i < n; i++)
        mean_y += (double)s[i].resident / (double)n;
    for (int64_t i = 0; i < n; i++) {
        xx += ((double)i - mean_x) * ((double)i - mean_x);
        xy += ((double)i - mean_x) * ((double)s[i].resident - mean_y);
    }
    return n > 1 ? (int64_t)(xy / xx * (double)(n - 1)) : 0;
}

/* The first iterations warm up: threads start, the allocator takes its share. */
static void judge_memory(struct nb_stress_report *r, const struct sample *s)
{
    int64_t first = r->iterations / 4 < 2 ? 2 : r->iterations / 4, n = r->iterations - first;
    r->memory_judged = !SANITIZED && n >= 4;
    if (n < 1) {
        first = r->iterations - 1;
        n = 1;
    }
    s += first;
    r->rss_first = s[0].resident;
    r->rss_last = s[n - 1].resident;
    r->rss_growth = line_growth(s, n);
    r->heap_growth = s[n - 1].heap - s[0].heap;
    r->rss_slack = SLACK;
    r->memory_flat = !r->memory_judged || (r->rss_growth <= SLACK && r->heap_growth <= SLACK / 16);
}

static enum nb_status run_all(struct stress *t, const struct nb_stress_opts *opts)
{
    struct nb_stress_report *r = t->report;
    struct sample *samples = calloc((size_t)opts->iterations, sizeof *samples);
    if (!samples)
        return nbi_fail_memory("measurements", (size_t)opts->iterations * sizeof *samples);
    memset(samples, 1, (size_t)opts->iterations * sizeof *samples); /* there before it counts */
    enum nb_status rc = NB_OK;
    for (t->iteration = 0; t->iteration < opts->iterations && rc == NB_OK; t->iteration++) {
        rc = run_iteration(t);
        if (!r->outputs_identical)
            break;
        samples[t->iteration] = measure();
        r->iterations++;
        if (rc == NB_OK && opts->progress)
            opts->progress(opts->progress_ctx, (uint64_t)r->iterations, (uint64_t)opts->iterations);
    }
    if (rc == NB_OK && r->iterations > 0)
        judge_memory(r, samples);
    free(samples);
    return rc;
}

enum nb_status nb_stress_kv(const struct nb_engine *engine, const struct nb_stress_opts *opts,
                            struct nb_stress_report *report)
{
    struct stress t = {.engine = engine, .report = report};
    int64_t V = engine->config.vocab_size;
    double start = nbi_now();
    *report = (struct nb_stress_report){.outputs_identical = true, .case_count = WAYS};
    if (opts->iterations < 1 || engine->config.max_position < CONTEXT || V < 2)
        return nbi_fail(NB_EINVAL,
                        "%lld iterations on a model of %lld tokens of context; at least "
                        "1 and %d are needed",
                        (long long)opts->iterations, (long long)engine->config.max_position,
                        CONTEXT);
    for (int i = 0; i < WAYS; i++)
        report->cases[i].name = ways[i].name;
    for (int i = 0; i < PROMPT; i++) {
        t.prompt[0][i] = (int32_t)((i * i * 37 + i * 101 + 5) % V);
        t.prompt[1][i] = (int32_t)((t.prompt[0][i] + 1) % V);
    }
    t.logits[0] = malloc((size_t)(2 * V) * sizeof **t.logits);
    if (!t.logits[0])
        return nbi_fail_memory("logits", (size_t)(2 * V) * sizeof **t.logits);
    t.logits[1] = t.logits[0] + V;
    enum nb_status rc = run_all(&t, opts);
    free(t.logits[0]);
    report->seconds = nbi_now() - start;
    return rc;
}
