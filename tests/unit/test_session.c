/* test_session.c - logits do not depend on how tokens are divided into calls; limits, snapshots and
 * threads of a session. */
#include "unit/allocations.h"

#include <math.h>
#include <pthread.h>

#include "infer/session.h"
#include "unit/support.h"

#define TOKENS 21
#define VOCAB  2048
#define ROW    (VOCAB * sizeof(float))

/* ---- fixture ---- */

static struct nb_engine *engine; /* one thread, the best instruction set of the CPU */
static int32_t ids[64];

static int open_engine(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 1};
    (void)state;
    for (int i = 0; i < 64; i++)
        ids[i] = (i * i * 37 + i * 101 + 5) % VOCAB;
    return nb_engine_open(&engine, &opts) == NB_OK ? 0 : -1;
}

static int close_engine(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

static const struct nbi_session_opts exact = {
    .context = 64, .logits = TOKENS, .kv = NBI_F32, .exact = true};

static struct nb_session *open_session(const struct nbi_session_opts *opts)
{
    struct nb_session *s;
    assert_ok(nbi_session_new(&s, engine, opts));
    return s;
}

/* All logits of the first n ids, from one pass of a new session. */
static float *in_one_pass(const struct nb_engine *e, const struct nbi_session_opts *opts, int n)
{
    struct nbi_session_opts o = *opts;
    struct nb_session *s;
    float *logits = malloc((size_t)n * ROW);
    o.chunk = o.logits = n;
    o.mode = NB_KV_PROMPT;
    assert_non_null(logits);
    assert_ok(nbi_session_new(&s, e, &o));
    assert_ok(nbi_session_append(s, ids, n, logits, n));
    nb_session_close(s);
    return logits;
}

/* Rows must be bit-identical; reports the first that is not. */
static void expect_rows(const float *wanted, const float *got, int rows, const char *what, int i)
{
    for (int r = 0; r < rows; r++)
        if (memcmp(wanted + r * VOCAB, got + r * VOCAB, ROW) != 0)
            fail_msg("%s %d: row %d of %d differs", what, i, r, rows);
}

static double distance(const float *a, const float *b, int n)
{
    double square = 0, dd = 0;
    for (int i = 0; i < n; i++) {
        square += (double)a[i] * a[i];
        dd += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    }
    assert_true(isfinite(dd) && square > 0);
    return sqrt(dd / square);
}

/* ---- chunks ---- */

/* Every size of chunk, and passes with fewer rows of logits than are wanted. */
static void chunks_agree(const struct nb_engine *e, const struct nbi_session_opts *opts,
                         const float *wanted)
{
    static float got[TOKENS * VOCAB];
    for (int chunk = 1; chunk <= TOKENS; chunk++) {
        struct nbi_session_opts o = *opts;
        struct nb_session *s;
        o.chunk = chunk;
        o.logits = 1 + chunk % 7;
        memset(got, 0, sizeof got);
        assert_ok(nbi_session_new(&s, e, &o));
        assert_ok(nbi_session_append(s, ids, TOKENS, got, TOKENS));
        expect_rows(wanted, got, TOKENS, "chunks of", chunk);
        nb_session_truncate(s, 0);
        assert_ok(nbi_session_append(s, ids, TOKENS, got, 3));
        expect_rows(wanted + (TOKENS - 3) * VOCAB, got, 3, "three rows of chunks of", chunk);
        nb_session_close(s);
    }
}

/* Several tokens appended after others at once: each must attend only to earlier ones. */
static void appending_is_causal(const struct nb_engine *e, const struct nbi_session_opts *opts,
                                const float *wanted)
{
    static float got[TOKENS * VOCAB];
    struct nb_session *s;
    assert_ok(nbi_session_new(&s, e, opts));
    for (int k = 1; k < TOKENS; k++) {
        nb_session_truncate(s, 0);
        assert_ok(nbi_session_append(s, ids, k, NULL, 0));
        assert_ok(nbi_session_append(s, ids + k, TOKENS - k, got, TOKENS - k));
        expect_rows(wanted + k * VOCAB, got, TOKENS - k, "appended after", k);
    }
    nb_session_close(s);
}

static void one_by_one_agrees(const struct nb_engine *e, const struct nbi_session_opts *opts,
                              const float *wanted)
{
    static float got[VOCAB];
    for (int mode = NB_KV_PROMPT; mode <= NB_KV_NONE; mode++) {
        struct nbi_session_opts o = *opts;
        struct nb_session *s;
        o.mode = (enum nb_kv_mode)mode;
        assert_ok(nbi_session_new(&s, e, &o));
        for (int i = 0; i < TOKENS; i++) {
            assert_ok(nbi_session_append(s, ids + i, 1, got, 1));
            if (memcmp(wanted + i * VOCAB, got, ROW) != 0)
                fail_msg("mode %d: token %d differs", mode, i);
        }
        nb_session_truncate(s, 2);
        assert_ok(nbi_session_append(s, ids + 2, TOKENS - 2, got, 1));
        assert_memory_equal(wanted + (TOKENS - 1) * VOCAB, got, ROW);
        nb_session_close(s);
    }
}

static void all_chunkings_agree(const struct nb_engine *e, const struct nbi_session_opts *opts)
{
    float *wanted = in_one_pass(e, opts, TOKENS);
    chunks_agree(e, opts, wanted);
    appending_is_causal(e, opts, wanted);
    one_by_one_agrees(e, opts, wanted);
    free(wanted);
}

static void test_chunks__same_bits_exact(void **state)
{
    (void)state;
    all_chunkings_agree(engine, &exact);
}

static void test_chunks__same_bits_integers(void **state)
{
    struct nbi_session_opts o = exact;
    (void)state;
    o.exact = false;
    float *a = in_one_pass(engine, &exact, TOKENS), *b = in_one_pass(engine, &o, TOKENS);
    double d = distance(a, b, TOKENS * VOCAB);
    assert_true(d > 0 && d < 1e-2); /* 0: the path was the same */
    free(a);
    free(b);
    all_chunkings_agree(engine, &o);
}

static void test_chunks__same_bits_with_small_kv_types(void **state)
{
    static const enum nbi_dtype types[] = {NBI_F16, NBI_BF16, NBI_E4M3};
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct nbi_session_opts o = exact;
        o.kv = types[i];
        all_chunkings_agree(engine, &o);
    }
}

/* Chunks agree on each of scalar, AVX2 and AVX-512, and these are close to each other. */
static void test_chunks__same_bits_on_each_instruction_set(void **state)
{
    (void)state;
    float *wanted = in_one_pass(engine, &exact, TOKENS);
    for (int level = NBI_SIMD_SCALAR; level < (int)nbi_simd_level(); level++) {
        const struct nb_engine_opts opts = {
            .synthetic = "tiny", .threads = 1, .simd = nbi_simd_name((enum nbi_simd)level)};
        struct nb_engine *e;
        struct nbi_session_opts o = exact;
        assert_ok(nb_engine_open(&e, &opts));
        float *got = in_one_pass(e, &o, TOKENS);
        assert_true(distance(wanted, got, TOKENS * VOCAB) < 1e-5);
        free(got);
        for (int i = 0; i < (SANITIZED ? 1 : 2); i++) {
            o.exact = (i + level) % 2;
            got = in_one_pass(e, &o, TOKENS);
            appending_is_causal(e, &o, got);
            one_by_one_agrees(e, &o, got);
            free(got);
        }
        nb_engine_close(e);
    }
    free(wanted);
}

static void test_chunks__same_bits_on_any_number_of_threads(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 2};
    struct nb_engine *e;
    (void)state;
    assert_ok(nb_engine_open(&e, &opts));
    float *one = in_one_pass(engine, &exact, TOKENS), *two = in_one_pass(e, &exact, TOKENS);
    expect_rows(one, two, TOKENS, "threads", 2);
    free(one);
    free(two);
    nb_engine_close(e);
}

/* ---- precision ---- */

/* The rounding of the cache adds up over the four layers. */
static void test_kv__error_is_that_of_its_type(void **state)
{
    static const struct {
        enum nbi_dtype type;
        double rounding;
    } types[] = {{NBI_F16, 0x1p-11}, {NBI_BF16, 0x1p-8}, {NBI_E4M3, 0x1p-4}};
    (void)state;
    float *wanted = in_one_pass(engine, &exact, TOKENS);
    for (int i = 0; i < 3; i++) {
        struct nbi_session_opts o = exact;
        o.kv = types[i].type;
        float *got = in_one_pass(engine, &o, TOKENS);
        double d = distance(wanted, got, TOKENS * VOCAB);
        if (!(d > types[i].rounding / 64 && d < 4 * types[i].rounding))
            fail_msg("%s: off by %g", nbi_dtypes[types[i].type].name, d);
        free(got);
    }
    free(wanted);
}

/* ---- truncate and continue ---- */

static void test_truncate__then_other_tokens(void **state)
{
    struct nb_session *s = open_session(&exact), *fresh = open_session(&exact);
    static float a[VOCAB], b[VOCAB];
    int32_t other[TOKENS];
    (void)state;
    memcpy(other, ids, sizeof other);
    for (int i = 9; i < TOKENS; i++)
        other[i] = ids[i] ^ 1;
    assert_ok(nbi_session_append(s, ids, TOKENS, a, 1));
    nb_session_truncate(s, TOKENS + 5);
    assert_int_equal(nbi_session_length(s), TOKENS);
    nb_session_truncate(s, 9);
    assert_int_equal(nbi_session_length(s), 9);
    assert_ok(nbi_session_append(s, other + 9, TOKENS - 9, b, 1));
    assert_memory_not_equal(a, b, ROW);
    assert_memory_equal(nb_session_tokens(s, NULL), other, sizeof other);
    assert_ok(nbi_session_append(fresh, other, TOKENS, a, 1));
    assert_memory_equal(a, b, ROW);
    nb_session_truncate(s, -3);
    assert_int_equal(nbi_session_length(s), 0);
    assert_ok(nbi_session_append(s, other, TOKENS, b, 1));
    assert_memory_equal(a, b, ROW);
    nb_session_close(s);
    nb_session_close(fresh);
}

static void test_reuse__keeps_the_common_prefix(void **state)
{
    static const struct {
        int before, now, change, reused; /* change: the first id that differs; -1: none */
    } cases[] = {{0, 5, -1, 0},  {5, 12, -1, 5}, {12, 12, -1, 11}, {12, 5, -1, 4},
                 {12, 20, 7, 7}, {12, 20, 0, 0}, {12, 12, 11, 11}, {1, 1, -1, 0}};
    static float got[VOCAB], wanted[VOCAB];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nb_session *s = open_session(&exact), *fresh = open_session(&exact);
        int32_t now[64];
        memcpy(now, ids, sizeof now);
        if (cases[i].change >= 0)
            now[cases[i].change] ^= 1;
        if (cases[i].before)
            assert_ok(nbi_session_append(s, ids, cases[i].before, NULL, 0));
        int64_t reused = nbi_session_reuse(s, now, cases[i].now);
        assert_int_equal(reused, cases[i].reused);
        assert_int_equal(nbi_session_length(s), reused);
        assert_ok(nbi_session_append(s, now + reused, cases[i].now - reused, got, 1));
        assert_int_equal(nbi_session_length(s), cases[i].now);
        assert_memory_equal(nb_session_tokens(s, NULL), now, (size_t)cases[i].now * sizeof *now);
        assert_ok(nbi_session_append(fresh, now, cases[i].now, wanted, 1));
        assert_memory_equal(got, wanted, ROW);
        nb_session_close(s);
        nb_session_close(fresh);
    }
}

/* Candidates must be the first of all logits sorted. */
static void test_append_next__gives_the_largest_logits(void **state)
{
    static float logits[VOCAB];
    struct nb_session *a = open_session(&exact), *b = open_session(&exact);
    struct nbi_logits_spec next = {.k = 5};
    (void)state;
    for (int i = 0; i < 12; i++) {
        assert_ok(nbi_session_append(a, ids + i, 1, logits, 1));
        assert_ok(nbi_session_append_next(b, ids + i, 1, &next));
        for (int j = 0; j < 5; j++) {
            int best = 0;
            for (int v = 1; v < VOCAB; v++)
                best = logits[v] > logits[best] ? v : best;
            assert_int_equal(next.candidates[j].id, best);
            assert_memory_equal(&next.candidates[j].logit, &logits[best], sizeof *logits);
            logits[best] = -INFINITY;
        }
    }
    nb_session_close(a);
    nb_session_close(b);
}

/* ---- snapshots ---- */

static void test_snapshot__restored_session_continues_alike(void **state)
{
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    static float wanted[VOCAB], got[VOCAB];
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct nbi_session_opts o = exact;
        struct nbi_snapshot *snapshot;
        o.kv = types[i];
        struct nb_session *s = open_session(&o);
        o.context = TOKENS; /* the other session has its rows at other addresses */
        struct nb_session *other = open_session(&o);
        assert_ok(nbi_session_append(s, ids, 9, NULL, 0));
        assert_ok(nbi_session_save(s, &snapshot));
        assert_ok(nbi_session_append(s, ids + 9, TOKENS - 9, wanted, 1));
        nb_session_truncate(s, 0);
        assert_ok(nbi_session_append(s, ids + 20, 30, NULL, 0));
        assert_ok(nbi_session_restore(s, snapshot));
        assert_int_equal(nbi_session_length(s), 9);
        assert_memory_equal(nb_session_tokens(s, NULL), ids, 9 * sizeof *ids);
        assert_ok(nbi_session_append(s, ids + 9, TOKENS - 9, got, 1));
        assert_memory_equal(wanted, got, ROW);
        assert_ok(nbi_session_restore(other, snapshot));
        assert_ok(nbi_session_append(other, ids + 9, TOKENS - 9, got, 1));
        assert_memory_equal(wanted, got, ROW);
        nbi_snapshot_free(snapshot);
        nb_session_close(other);
        nb_session_close(s);
    }
}

static void test_snapshot__of_an_empty_session(void **state)
{
    struct nb_session *s = open_session(&exact);
    struct nbi_snapshot *snapshot;
    (void)state;
    assert_ok(nbi_session_save(s, &snapshot));
    assert_ok(nbi_session_append(s, ids, 4, NULL, 0));
    assert_ok(nbi_session_restore(s, snapshot));
    assert_int_equal(nbi_session_length(s), 0);
    nbi_snapshot_free(snapshot);
    nbi_snapshot_free(NULL);
    nb_session_close(s);
}

static void test_snapshot__of_another_type_is_refused(void **state)
{
    static float wanted[VOCAB], got[VOCAB];
    struct nbi_session_opts half = exact, small = exact;
    struct nbi_snapshot *snapshot;
    (void)state;
    half.kv = NBI_F16;
    small.context = 8;
    struct nb_session *s = open_session(&exact), *a = open_session(&half),
                      *b = open_session(&small);
    assert_ok(nbi_session_append(s, ids, 9, NULL, 0));
    assert_ok(nbi_session_save(s, &snapshot));
    assert_ok(nbi_session_append(b, ids + 1, 5, wanted, 1));
    assert_ok(nbi_session_append(a, ids + 1, 4, NULL, 0));
    assert_fails(nbi_session_restore(a, snapshot), NB_EINVAL, "another kind");
    assert_fails(nbi_session_restore(b, snapshot), NB_EVALUE, "9 tokens");
    assert_int_equal(nbi_session_length(a), 4);
    assert_int_equal(nbi_session_length(b), 5);
    nb_session_truncate(b, 4);
    assert_ok(nbi_session_append(b, ids + 5, 1, got, 1));
    assert_memory_equal(wanted, got, ROW);
    nbi_snapshot_free(snapshot);
    nb_session_close(s);
    nb_session_close(a);
    nb_session_close(b);
}

/* ---- limits ---- */

static void test_context__cannot_be_exceeded(void **state)
{
    static float before[VOCAB], after[VOCAB];
    (void)state;
    for (int mode = NB_KV_PROMPT; mode <= NB_KV_NONE; mode++) {
        struct nbi_session_opts o = exact;
        o.context = TOKENS;
        o.chunk = 4;
        o.mode = (enum nb_kv_mode)mode;
        struct nb_session *s = open_session(&o);
        assert_fails(nbi_session_append(s, ids, TOKENS + 1, after, 1), NB_EVALUE, "context of 21");
        assert_int_equal(nbi_session_length(s), 0);
        assert_ok(nbi_session_append(s, ids, TOKENS, before, 1));
        assert_int_equal(nbi_session_length(s), TOKENS);
        assert_fails(nbi_session_append(s, ids, 1, after, 1), NB_EVALUE, "context of 21");
        assert_int_equal(nbi_session_length(s), TOKENS);
        assert_memory_equal(nb_session_tokens(s, NULL), ids, TOKENS * sizeof *ids);
        nb_session_truncate(s, TOKENS - 2);
        assert_fails(nbi_session_append(s, ids + 40, 3, after, 1), NB_EVALUE, "context of 21");
        assert_ok(nbi_session_append(s, ids + TOKENS - 2, 2, after, 1));
        assert_memory_equal(before, after, ROW);
        nb_session_close(s);
    }
}

static void test_context__of_one_token(void **state)
{
    struct nbi_session_opts o = exact;
    static float got[VOCAB];
    (void)state;
    o.context = 1;
    struct nb_session *s = open_session(&o);
    float *wanted = in_one_pass(engine, &exact, 1);
    assert_ok(nbi_session_append(s, ids, 1, got, 1));
    assert_memory_equal(wanted, got, ROW);
    assert_fails(nbi_session_append(s, ids, 1, got, 1), NB_EVALUE, "context of 1");
    nb_session_close(s);
    free(wanted);
}

static void test_open__refuses_impossible_contexts(void **state)
{
    struct nbi_session_opts o = exact;
    struct nb_session *s = (void *)1;
    const struct nb_session_opts defaults = {.kv = NB_KV_F8};
    (void)state;
    o.context = 40961;
    assert_fails(nbi_session_new(&s, engine, &o), NB_EVALUE, "the model was made for 40960");
    assert_null(s);
    o.context = 0;
    assert_fails(nbi_session_new(&s, engine, &o), NB_EINVAL, "a context of 0");
    o.context = -1;
    assert_fails(nbi_session_new(&s, engine, &o), NB_EINVAL, "a context of -1");
    o.context = INT64_MAX;
    assert_fails(nbi_session_new(&s, engine, &o), NB_EINVAL, "a context of");
    nb_session_close(NULL);
    assert_ok(nb_session_open(&s, engine, &defaults));
    assert_int_equal(nbi_session_context(s), 4096);
    nb_session_close(s);
}

static void test_ids__outside_the_vocabulary_are_refused(void **state)
{
    static const int32_t wrong[] = {-1, VOCAB, INT32_MAX, INT32_MIN};
    static float before[VOCAB], after[VOCAB];
    struct nb_session *s = open_session(&exact);
    (void)state;
    float *wanted = in_one_pass(engine, &exact, 6);
    assert_ok(nbi_session_append(s, ids, 5, before, 1));
    for (int i = 0; i < 4; i++) {
        int32_t bad[3] = {7, 8, wrong[i]};
        assert_fails(nb_session_append(s, bad, 3, after), NB_EVALUE, "outside the vocabulary");
        assert_int_equal(nbi_session_length(s), 5);
        assert_memory_equal(nb_session_tokens(s, NULL), ids, 5 * sizeof *ids);
    }
    assert_ok(nb_session_append(s, ids + 5, 1, after));
    assert_memory_equal(wanted + 5 * VOCAB, after, ROW);
    free(wanted);
    nb_session_close(s);
}

static void test_append__of_no_tokens(void **state)
{
    struct nb_session *s = open_session(&exact);
    (void)state;
    assert_ok(nb_session_append(s, ids, 3, NULL));
    assert_ok(nb_session_append(s, ids, 0, NULL));
    assert_int_equal(nbi_session_length(s), 3);
    nb_session_close(s);
}

/* ---- memory ---- */

static enum nb_status (*real_alloc)(struct nbi_backend *, const char *, int64_t, struct nbi_ptr *);
static int64_t cache_bytes, other_bytes;

static enum nb_status spy(struct nbi_backend *be, const char *what, int64_t bytes,
                          struct nbi_ptr *out)
{
    *(strcmp(what, "key/value cache") == 0 ? &cache_bytes : &other_bytes) += bytes;
    return real_alloc(be, what, bytes, out);
}

/* The model "tiny" has 4 layers and 2 key heads of 64. */
static void test_plan__equals_what_is_allocated(void **state)
{
    static const struct {
        enum nbi_dtype type;
        int64_t context, kv;
    } cases[] = {{NBI_F32, 64, 2 * 4 * 64 * 128 * 4},
                 {NBI_F16, 100, 2 * 4 * 100 * 128 * 2},
                 {NBI_BF16, 1, 2 * 4 * 128 * 2},
                 {NBI_E4M3, 4096, 2 * 4 * 4096 * 128}};
    (void)state;
    real_alloc = engine->be->alloc;
    engine->be->alloc = spy;
    for (int i = 0; i < 4; i++)
        for (int64_t chunk = 0; chunk <= 48; chunk += 24) {
            const struct nbi_session_opts o = {
                .context = cases[i].context, .chunk = chunk, .kv = cases[i].type, .logits = 3};
            struct nbi_memory_plan plan;
            struct nb_session *s = NULL;
            nbi_session_plan(engine, &o, &plan);
            cache_bytes = other_bytes = 0;
            enum nb_status rc = nbi_session_new(&s, engine, &o);
            nb_session_close(s);
            if (rc != NB_OK || plan.kv != cases[i].kv || cache_bytes != plan.kv ||
                other_bytes != plan.activations) {
                engine->be->alloc = real_alloc;
                fail_msg("case %d: kv %lld planned, %lld taken; activations %lld, %lld", i,
                         (long long)plan.kv, (long long)cache_bytes, (long long)plan.activations,
                         (long long)other_bytes);
            }
        }
    engine->be->alloc = real_alloc;
}

static void test_decoding__allocates_nothing(void **state)
{
    static float logits[VOCAB];
    (void)state;
    if (SANITIZED)
        skip("sanitizers allocate memory of their own");
    for (int mode = NB_KV_PROMPT; mode <= NB_KV_NONE; mode++)
        for (int integers = 0; integers < 2; integers++) {
            const struct nb_session_opts o = {
                .context = 64, .kv = NB_KV_F16, .mode = (enum nb_kv_mode)mode, .exact = !integers};
            struct nb_session *s;
            enum nb_status rc = NB_OK;
            assert_ok(nb_session_open(&s, engine, &o));
            assert_ok(nb_session_append(s, ids, 4, logits)); /* threads may start here */
            long before = allocations;
            assert_true(before > 0); /* counting works */
            for (int i = 0; i < 50 && rc == NB_OK; i++)
                rc = nb_session_append(s, ids + i, 1, logits);
            long made = allocations - before;
            assert_ok(rc);
            assert_int_equal(made, 0);
            nb_session_close(s);
        }
}

/* ---- threads ---- */

struct worker {
    pthread_t thread;
    const int32_t *ids;
    enum nb_status rc;
    float logits[VOCAB];
};

static void *work(void *ctx)
{
    struct worker *w = ctx;
    const struct nb_session_opts o = {.context = 64, .chunk = 5, .kv = NB_KV_F16};
    struct nb_session *s;
    w->rc = nb_session_open(&s, engine, &o);
    for (int round = 0; round < 10 && w->rc == NB_OK; round++) {
        nb_session_truncate(s, round);
        w->rc = nb_session_append(s, w->ids + round, 12, NULL);
        for (int i = round + 12; i < 30 && w->rc == NB_OK; i++)
            w->rc = nb_session_append(s, w->ids + i, 1, w->logits);
    }
    nb_session_close(s);
    return NULL;
}

static void test_engine__sessions_on_threads_give_the_same_bits(void **state)
{
    static struct worker serial[3], parallel[3];
    (void)state;
    for (int i = 0; i < 3; i++) {
        serial[i].ids = parallel[i].ids = ids + 7 * i;
        work(&serial[i]);
        assert_ok(serial[i].rc);
    }
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&parallel[i].thread, NULL, work, &parallel[i]), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(parallel[i].thread, NULL);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(parallel[i].rc, NB_OK);
        assert_memory_equal(serial[i].logits, parallel[i].logits, ROW);
    }
}

/* ---- engines ---- */

static void test_engine__refuses_what_cannot_be_opened(void **state)
{
    struct nb_engine *e = (void *)1;
    struct nb_engine_opts opts = {.synthetic = "huge"};
    (void)state;
    assert_fails(nb_engine_open(&e, &opts), NB_EINVAL, "there is no size 'huge'");
    assert_null(e);
    opts.synthetic = "tiny";
    opts.simd = "sse9";
    assert_fails(nb_engine_open(&e, &opts), NB_EINVAL, "'sse9'");
    const struct nb_engine_opts none = {.model = "/nonexistent/model"};
    assert_fails(nb_engine_open(&e, &none), NB_ENOTFOUND, "'/nonexistent/model'");
    nb_engine_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks__same_bits_exact),
        cmocka_unit_test(test_chunks__same_bits_integers),
        cmocka_unit_test(test_chunks__same_bits_with_small_kv_types),
        cmocka_unit_test(test_chunks__same_bits_on_each_instruction_set),
        cmocka_unit_test(test_chunks__same_bits_on_any_number_of_threads),
        cmocka_unit_test(test_kv__error_is_that_of_its_type),
        cmocka_unit_test(test_truncate__then_other_tokens),
        cmocka_unit_test(test_reuse__keeps_the_common_prefix),
        cmocka_unit_test(test_append_next__gives_the_largest_logits),
        cmocka_unit_test(test_snapshot__restored_session_continues_alike),
        cmocka_unit_test(test_snapshot__of_an_empty_session),
        cmocka_unit_test(test_snapshot__of_another_type_is_refused),
        cmocka_unit_test(test_context__cannot_be_exceeded),
        cmocka_unit_test(test_context__of_one_token),
        cmocka_unit_test(test_open__refuses_impossible_contexts),
        cmocka_unit_test(test_ids__outside_the_vocabulary_are_refused),
        cmocka_unit_test(test_append__of_no_tokens),
        cmocka_unit_test(test_plan__equals_what_is_allocated),
        cmocka_unit_test(test_decoding__allocates_nothing),
        cmocka_unit_test(test_engine__sessions_on_threads_give_the_same_bits),
        cmocka_unit_test(test_engine__refuses_what_cannot_be_opened),
    };
    return cmocka_run_group_tests_name("session", tests, open_engine, close_engine);
}
