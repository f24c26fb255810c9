/* stress.c - runs the same tokens through every KV-cache type and mode, repeatedly. Outputs must be
 * bit-identical, and memory must not grow. */
#include <malloc.h>
#include <string.h>

#include "base/clock.h"
#include "base/crc.h"
#include "base/sanitized.h"
#include "infer/session.h"
#include "nibble/eval.h"

/* In tokens. */
#define CONTEXT 64
#define PROMPT  24
#define HALF    (PROMPT / 2)
#define ANSWER  8

/* Growth of resident memory, in bytes, that still counts as flat. */
#define SLACK ((int64_t)256 << 10)

/* Greedy tokens after a prompt, and the checksum of the logits that the last was chosen from. */
struct outcome {
    int32_t ids[ANSWER];
    uint32_t crc;
};

struct stress {
    const struct nb_engine *engine;
    struct nb_stress_report *report;
    int32_t prompt[2][PROMPT]; /* they differ at every position */
    float *logits[2];          /* [V] */
    struct outcome expected[NBI_KV_TYPES][2][NB_STRESS_CASES][2]; /* by type, exact, case, prompt */
    struct nbi_session_opts opts;                                 /* of the current session */
    const char *case_name;                                        /* of the current case */
    int64_t iteration;
    int type;      /* index in nbi_kv_types */
    int reference; /* the case that the current one is compared with */
};

/* Keeps the first difference in the report. */
NBI_PRINTF(2, 3) static void record_difference(struct stress *t, const char *fmt, ...)
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
             nbi_kv_types[t->type].name, t->opts.exact ? "exact" : "integer", t->case_name, what);
}

/* ---- filling a session with the first prompt and computing its logits ---- */

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
    memcpy(other, t->prompt[0], HALF * sizeof *other);
    memcpy(other + HALF, t->prompt[1] + HALF, (PROMPT - HALF) * sizeof *other);
    nb_session_truncate(s, 0);
    NBI_TRY(nbi_session_append(s, other, PROMPT, NULL, 0));
    int64_t reused = nbi_session_reuse(s, t->prompt[0], PROMPT);
    if (reused != HALF)
        record_difference(t, "%lld tokens were kept, not %d", (long long)reused, HALF);
    return append(t, s, reused, PROMPT);
}

/* Restores into s a snapshot that `from` (which may be s) took after half of the prompt, then
 * appends the other half. */
static enum nb_status fill_from_snapshot(struct stress *t, struct nb_session *from,
                                         struct nb_session *s)
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
    return fill_from_snapshot(t, s, s);
}

static enum nb_status fill_restored_from_other(struct stress *t, struct nb_session *s)
{
    struct nbi_session_opts opts = t->opts;
    struct nb_session *from = NULL;
    opts.context = HALF; /* another capacity, so rows have other offsets */
    NBI_TRY(nbi_session_new(&from, t->engine, &opts));
    enum nb_status rc = fill_from_snapshot(t, from, s);
    nb_session_close(from);
    return rc;
}

/* ---- answers ---- */

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

/* Compares an outcome with that of the reference case. */
static void compare(struct stress *t, int which, const struct outcome *got)
{
    const struct outcome *expected = &t->expected[t->type][t->opts.exact][t->reference][which];
    for (int i = 0; i < ANSWER; i++)
        if (got->ids[i] != expected->ids[i]) {
            record_difference(t, "token %d of the answer is %d, not %d", i + 1, got->ids[i],
                              expected->ids[i]);
            return;
        }
    if (got->crc != expected->crc)
        record_difference(t, "the last logits have crc32c %08x, not %08x", got->crc, expected->crc);
}

/* Generates the answer of s and, alternating token by token, of another session to the second
 * prompt; other may be NULL. */
static enum nb_status answer(struct stress *t, struct nb_session *s, struct nb_session *other,
                             struct outcome out[2])
{
    if (other) {
        nb_session_truncate(other, 0);
        NBI_TRY(nbi_session_append(other, t->prompt[1], PROMPT, t->logits[1], 1));
    }
    for (int i = 0; i < ANSWER; i++) {
        NBI_TRY(step(t, s, 0, i, &out[0]));
        if (other)
            NBI_TRY(step(t, other, 1, i, &out[1]));
    }
    return NB_OK;
}

/* ---- the cases ---- */

typedef enum nb_status (*fill_fn)(struct stress *t, struct nb_session *s);

struct stress_case {
    const char *name;
    fill_fn fill;
    enum nb_kv_mode mode;
    bool varying_chunks; /* another chunk size in each iteration */
    bool shared_session; /* runs in the session that all such cases use one after the other */
    bool interleaved;    /* alternates with a second session, token by token */
};

/* The first case is the reference for all others. If results depend on the number of rows in a pass
 * (no NBI_CAP_BATCH_INVARIANT, and products are not exact), the first run of each case is its own
 * reference, and varying chunks are not compared. */
static const struct stress_case cases[] = {
    {.name = "prompt", .fill = fill_whole, .interleaved = true},
    {.name = "token", .fill = fill_whole, .mode = NB_KV_TOKEN},
    {.name = "none", .fill = fill_whole, .mode = NB_KV_NONE},
    {.name = "chunks", .fill = fill_whole, .varying_chunks = true},
    {.name = "half, then single tokens", .fill = fill_half_then_single, .shared_session = true},
    {.name = "truncated", .fill = fill_truncated, .shared_session = true},
    {.name = "prefix reused", .fill = fill_reused, .shared_session = true},
    {.name = "snapshot restored", .fill = fill_restored, .shared_session = true},
    {.name = "snapshot of another session",
     .fill = fill_restored_from_other,
     .shared_session = true},
    {.name = "whole again", .fill = fill_whole, .shared_session = true},
    {.name = "two sessions in turn", .fill = fill_half_then_single, .interleaved = true},
};

#define CASES ((int)(sizeof cases / sizeof *cases))
_Static_assert(CASES <= NB_STRESS_CASES, "the report holds every case");

static enum nb_status run_case(struct stress *t, int which, struct nb_session *shared)
{
    const struct stress_case *c = &cases[which];
    struct nb_stress_case *row = &t->report->cases[which];
    struct nbi_session_opts opts = t->opts;
    struct nb_session *own = NULL, *other = NULL;
    struct outcome out[2] = {0};
    double start = nbi_now();
    t->case_name = c->name;
    opts.mode = c->mode;
    opts.chunk = c->varying_chunks ? 1 + t->iteration * 5 % PROMPT : 0;
    enum nb_status rc = c->shared_session ? NB_OK : nbi_session_new(&own, t->engine, &opts);
    if (rc == NB_OK && c->interleaved)
        rc = nbi_session_new(&other, t->engine, &opts);
    if (rc == NB_OK)
        rc = c->fill(t, own ? own : shared);
    if (rc == NB_OK)
        rc = answer(t, own ? own : shared, other, out);
    nb_session_close(own);
    nb_session_close(other);
    bool variant = !nbi_backend_has(t->engine->be, NBI_CAP_BATCH_INVARIANT) && !t->opts.exact;
    t->reference = variant ? which : 0;
    if (rc == NB_OK && which == t->reference && t->iteration < 2) /* one exact run, one not */
        memcpy(t->expected[t->type][t->opts.exact][which], out, sizeof out);
    bool comparable = !variant || !c->varying_chunks;
    if (rc == NB_OK && comparable)
        compare(t, 0, &out[0]);
    if (rc == NB_OK && comparable && c->interleaved)
        compare(t, 1, &out[1]);
    row->runs++;
    row->seconds += nbi_now() - start;
    return rc;
}

static enum nb_status run_iteration(struct stress *t)
{
    for (t->type = 0; t->type < NBI_KV_TYPES; t->type++) {
        struct nb_session *shared = NULL;
        t->opts = (struct nbi_session_opts){
            .context = CONTEXT, .kv = nbi_kv_types[t->type].dtype, .exact = t->iteration % 2 == 1};
        NBI_TRY(nbi_session_new(&shared, t->engine, &t->opts));
        enum nb_status rc = NB_OK;
        for (int i = 0; i < CASES && rc == NB_OK && t->report->outputs_identical; i++)
            rc = run_case(t, i, shared);
        nb_session_close(shared);
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

/* Growth of resident memory from the first to the last sample along the least-squares line. */
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

/* Skips the first iterations, in which threads start and the allocator's pools fill. */
static void check_memory(struct nb_stress_report *r, const struct sample *s)
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
    memset(samples, 1, (size_t)opts->iterations * sizeof *samples); /* touch the pages now */
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
        check_memory(r, samples);
    free(samples);
    return rc;
}

enum nb_status nb_eval_stress(const struct nb_engine *engine, const struct nb_stress_opts *opts,
                              struct nb_stress_report *report)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nb_stress_report found = {.outputs_identical = true, .case_count = CASES};
    struct stress t = {.engine = engine, .report = &found};
    int64_t V = engine->config.vocab_size;
    double start = nbi_now();
    if (opts->iterations < 1 || engine->config.max_position < CONTEXT || V < 2)
        return nbi_fail(NB_EINVAL,
                        "%lld iterations on a model of %lld tokens of context; at least "
                        "1 and %d are needed",
                        (long long)opts->iterations, (long long)engine->config.max_position,
                        CONTEXT);
    for (int i = 0; i < CASES; i++)
        found.cases[i].name = cases[i].name;
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
    found.seconds = nbi_now() - start;
    if (rc == NB_OK)
        *report = found;
    return rc;
}
