/* test_perplexity.c - compares perplexity with a loop over windows that computes it in long double,
 * and with Hugging Face's logits. */
#include <math.h>

#include "eval/perplexity.h"
#include "formats/store.h"
#include "infer/session.h"
#include "unit/support.h"

#define TOKENS 700
#define VOCAB  2048

static struct nb_engine *engine;
static int32_t ids[TOKENS];

static int open_engine(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 1};
    (void)state;
    for (int i = 0; i < TOKENS; i++)
        ids[i] = (i * i * 37 + i * 101 + 5) % VOCAB;
    return nb_engine_open(&engine, &opts) == NB_OK ? 0 : -1;
}

static int close_engine(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

/* -log softmax in long double. */
static long double by_formula(const float *x, int64_t V, int32_t target)
{
    long double all = 0;
    for (int64_t v = 0; v < V; v++)
        all += expl((long double)x[v] - x[target]);
    return logl(all);
}

/* The loop from Hugging Face's documentation of perplexity; each window is one forward pass. */
static long double by_windows(int64_t count, int64_t context, int64_t stride, enum nbi_dtype kv,
                              int64_t *tokens)
{
    const struct nbi_session_opts o = {
        .context = context, .chunk = context, .logits = context, .kv = kv, .exact = true};
    float *logits = malloc((size_t)(context * VOCAB) * sizeof *logits);
    long double sum = 0;
    int64_t seen = 0;
    *tokens = 0;
    for (int64_t begin = 0; begin < count; begin += stride) {
        int64_t end = begin + context < count ? begin + context : count, fresh = end - seen;
        struct nb_session *s;
        assert_ok(nbi_session_new(&s, engine, &o));
        assert_ok(nbi_session_append(s, ids + begin, end - begin, logits, end - begin));
        nb_session_close(s);
        for (int64_t i = begin + 1; i < end; i++)
            if (i >= end - fresh) {
                sum += by_formula(logits + (i - 1 - begin) * VOCAB, VOCAB, ids[i]);
                ++*tokens;
            }
        seen = end;
        if (end == count)
            break;
    }
    free(logits);
    return sum / (long double)*tokens;
}

static void expect(int64_t count, int64_t context, int64_t stride, enum nb_kv_dtype kv)
{
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    const struct nb_ppl_opts o = {.context = context, .stride = stride, .kv = kv};
    struct nb_ppl_result r;
    int64_t tokens;
    long double nll = by_windows(count, context, stride ? stride : context, types[kv], &tokens);
    assert_ok(nb_eval_ppl(engine, ids, count, &o, &r));
    if (r.tokens != tokens || fabsl(r.nll - nll) > 1e-12L * nll ||
        fabs(r.ppl - exp((double)nll)) > 1e-11 * r.ppl)
        fail_msg("%d tokens, windows of %d, stride %d: %.17g over %d; %.17Lg over %d expected",
                 (int)count, (int)context, (int)stride, r.nll, (int)r.tokens, nll, (int)tokens);
    assert_int_equal(r.context, context);
}

static void test_windows__match_one_session_per_window(void **state)
{
    static const int64_t cases[][3] = {{2, 2, 0},   {2, 64, 0},   {40, 40, 0}, {40, 64, 0},
                                       {40, 16, 0}, {41, 20, 0},  {40, 2, 0},  {40, 16, 8},
                                       {40, 16, 1}, {40, 16, 15}, {33, 8, 3},  {17, 16, 16}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect(cases[i][0], cases[i][1], cases[i][2], NB_KV_F32);
    for (int kv = NB_KV_F16; kv <= NB_KV_F8; kv++)
        expect(40, 16, 8, (enum nb_kv_dtype)kv);
}

/* Windows of more tokens than one scoring pass takes. */
static void test_windows__may_take_several_passes(void **state)
{
    (void)state;
    expect(TOKENS, TOKENS, 0, NB_KV_F32);
    expect(TOKENS, 600, 300, NB_KV_F32);
}

static void test_threads__do_not_change_the_bits(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 3};
    const struct nb_ppl_opts o = {.context = 32, .stride = 8};
    struct nb_ppl_result a, b;
    struct nb_engine *e;
    (void)state;
    assert_ok(nb_engine_open(&e, &opts));
    assert_ok(nb_eval_ppl(engine, ids, 100, &o, &a));
    assert_ok(nb_eval_ppl(e, ids, 100, &o, &b));
    assert_memory_equal(&a.nll, &b.nll, sizeof a.nll);
    nb_engine_close(e);
}

static void test_fast__is_close_but_not_equal(void **state)
{
    struct nb_ppl_opts o = {.context = 64};
    struct nb_ppl_result a, b;
    (void)state;
    assert_ok(nb_eval_ppl(engine, ids, 64, &o, &a));
    o.fast = true;
    assert_ok(nb_eval_ppl(engine, ids, 64, &o, &b));
    assert_true(a.nll != b.nll && fabs(a.nll - b.nll) < 1e-3 * a.nll);
}

static void count_progress(void *ctx, uint64_t done, uint64_t total)
{
    uint64_t *last = ctx;
    assert_true(done > *last && done <= total && total == 39);
    *last = done;
}

static void test_opts__have_defaults_and_progress_is_reported(void **state)
{
    uint64_t last = 0;
    const struct nb_ppl_opts o = {.progress = count_progress, .progress_ctx = &last};
    struct nb_ppl_result r;
    (void)state;
    assert_ok(nb_eval_ppl(engine, ids, 40, &o, &r));
    assert_int_equal(r.context, 2048);
    assert_int_equal(r.stride, 2048);
    assert_int_equal(r.windows, 1);
    assert_int_equal(r.tokens, 39);
    assert_int_equal(last, 39);
}

static void test_nll__is_accurate_for_extreme_logits(void **state)
{
    static const float far[] = {-1e4F, 0, 1e4F}, equal[] = {7, 7, 7, 7}, wrong[] = {0, NAN, 1};
    (void)state;
    assert_true(nbi_token_nll(far, 3, 2) == 0);
    assert_true(nbi_token_nll(far, 3, 0) == 2e4);
    assert_true(fabs(nbi_token_nll(equal, 4, 3) - log(4)) < 1e-15);
    assert_false(isfinite(nbi_token_nll(wrong, 3, 0)));
}

static void test_errors__name_the_cause(void **state)
{
    static const int32_t outside[] = {1, 2, VOCAB};
    struct nb_ppl_opts o = {.context = 16};
    struct nb_ppl_result r;
    (void)state;
    assert_fails(nb_eval_ppl(engine, ids, 0, &o, &r), NB_EVALUE, "0 tokens");
    assert_fails(nb_eval_ppl(engine, ids, 1, &o, &r), NB_EVALUE, "takes two");
    assert_fails(nb_eval_ppl(engine, outside, 3, &o, &r), NB_EVALUE, "outside the vocabulary");
    o.stride = 17;
    assert_fails(nb_eval_ppl(engine, ids, 40, &o, &r), NB_EINVAL, "leaves some out");
    o = (struct nb_ppl_opts){.context = 1};
    assert_fails(nb_eval_ppl(engine, ids, 40, &o, &r), NB_EVALUE, "windows of 1 ");
    o.context = 40961;
    assert_fails(nb_eval_ppl(engine, ids, 40, &o, &r), NB_EVALUE, "2 to 40960");
    o = (struct nb_ppl_opts){.kv = (enum nb_kv_dtype)9};
    assert_fails(nb_eval_ppl(engine, ids, 40, &o, &r), NB_EINVAL, "unknown kind");
}

/* ---- Hugging Face ---- */

static void *read_tensor(const struct nbi_store *s, const char *name, int64_t shape[3])
{
    const struct nbi_entry *e = nbi_store_find(s, name);
    assert_non_null(e);
    memcpy(shape, e->shape, (size_t)e->ndim * sizeof *shape);
    void *values = malloc((size_t)e->count * 4);
    assert_non_null(values);
    assert_ok(nbi_store_read(s, e, 0, e->count, values));
    return values;
}

/* The rows of the golden file form one text; with windows of a row's length, the windows are the
 * rows. The golden logits were computed in float64 and rounded to f32. */
static void test_loss__matches_hugging_face(void **state)
{
    static const char *const models[] = {"tied", "untied"};
    char dir[1024], golden[1100];
    (void)state;
    for (int m = 0; m < 2; m++) {
        snprintf(dir, sizeof dir, "%s/golden/hf/%s", NB_TEST_SOURCE, models[m]);
        snprintf(golden, sizeof golden, "%s.golden.safetensors", dir);
        const struct nb_engine_opts opts = {.model = dir, .threads = 1};
        struct nb_engine *e;
        struct nbi_store *store;
        struct nb_ppl_result r;
        int64_t rows[3], shape[3];
        long double sum = 0;
        assert_ok(nbi_store_open(&store, golden));
        int32_t *tokens = read_tensor(store, "input_ids", rows);
        float *logits = read_tensor(store, "logits", shape);
        nbi_store_close(store);
        int64_t B = shape[0], T = shape[1], V = shape[2];
        for (int64_t i = 0; i < B * T; i++)
            if ((i + 1) % T)
                sum += by_formula(logits + i * V, V, tokens[i + 1]);
        sum /= (long double)(B * (T - 1));
        const struct nb_ppl_opts o = {.context = T};
        assert_ok(nb_engine_open(&e, &opts));
        assert_ok(nb_eval_ppl(e, tokens, B * T, &o, &r));
        nb_engine_close(e);
        assert_int_equal(r.tokens, B * (T - 1));
        if (fabsl(r.nll - sum) > 1e-6L * sum)
            fail_msg("%s: %.9g; %.9Lg expected", models[m], r.nll, sum);
        free(tokens);
        free(logits);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows__match_one_session_per_window),
        cmocka_unit_test(test_windows__may_take_several_passes),
        cmocka_unit_test(test_threads__do_not_change_the_bits),
        cmocka_unit_test(test_fast__is_close_but_not_equal),
        cmocka_unit_test(test_opts__have_defaults_and_progress_is_reported),
        cmocka_unit_test(test_nll__is_accurate_for_extreme_logits),
        cmocka_unit_test(test_errors__name_the_cause),
        cmocka_unit_test(test_loss__matches_hugging_face),
    };
    return cmocka_run_group_tests_name("perplexity", tests, open_engine, close_engine);
}
