/* test_stress.c - the stress run passes on a correct backend and finds injected faults. */
#include "backend/ops.h"
#include "infer/engine.h"
#include "unit/support.h"

static struct nb_engine *engine;
static struct nbi_backend real;

static int open_engine(void **state)
{
    const struct nb_engine_opts opts = {.synthetic = "tiny", .threads = 1};
    (void)state;
    if (nb_engine_open(&engine, &opts) != NB_OK)
        return -1;
    real = *engine->be;
    return 0;
}

static int close_engine(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

static struct nb_stress_report run(int64_t iterations)
{
    const struct nb_stress_opts opts = {.iterations = iterations};
    struct nb_stress_report r;
    enum nb_status rc = nb_eval_stress(engine, &opts, &r);
    engine->be->qkv_rope = real.qkv_rope;
    engine->be->upload = real.upload;
    engine->be->stream_new = real.stream_new;
    assert_ok(rc);
    return r;
}

static void test_stress__passes(void **state)
{
    const int64_t iterations = SANITIZED ? 3 : 8;
    struct nb_stress_report r = run(iterations);
    (void)state;
    assert_string_equal(r.difference, "");
    assert_true(r.outputs_identical && r.memory_flat);
    assert_int_equal(r.iterations, iterations);
    assert_true(r.case_count >= 10 && r.rss_first > 0 && r.rss_last > 0);
    for (int i = 0; i < r.case_count; i++)
        assert_int_equal(r.cases[i].runs, 4 * iterations);
}

/* Slightly changes one key of a token that is appended on its own. */
static enum nb_status change_key_of_single_token(struct nbi_stream *s,
                                                 const struct nbi_op_qkv_rope *a)
{
    const int32_t *kv_rows = (const void *)a->kv_rows.at; // NOLINT(performance-no-int-to-ptr)
    if (a->N == 1 && kv_rows[0] == 13)
        ((float *)a->k.at)[0] += 1e-2F; // NOLINT(performance-no-int-to-ptr)
    return real.qkv_rope(s, a);
}

static void test_stress__finds_a_token_that_depends_on_other_rows(void **state)
{
    (void)state;
    engine->be->qkv_rope = change_key_of_single_token;
    struct nb_stress_report r = run(3);
    assert_false(r.outputs_identical);
    assert_int_equal(r.iterations, 0);
    assert_non_null(strstr(r.difference, "iteration 1, cache in f32, integer products, 'token': "));
}

/* Flips a bit of a restored snapshot, which is recognised by its size. */
static enum nb_status flip_bit_of_snapshot(struct nbi_stream *s, struct nbi_ptr dst,
                                           const void *src, int64_t bytes)
{
    NBI_TRY(real.upload(s, dst, src, bytes));
    if (bytes < 12 * 2 * 64)
        return NB_OK;
    ((uint8_t *)dst.at)[bytes - 1] ^= 1; // NOLINT(performance-no-int-to-ptr)
    return NB_OK;
}

static void test_stress__finds_a_damaged_snapshot(void **state)
{
    (void)state;
    engine->be->upload = flip_bit_of_snapshot;
    struct nb_stress_report r = run(3);
    assert_false(r.outputs_identical);
    assert_non_null(strstr(r.difference, "'snapshot restored'"));
}

/* Changes the logits of a later iteration. */
static int calls;

static enum nb_status change_late_logits(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    if (++calls > (SANITIZED ? 10000 : 40000))
        ((float *)a->q.at)[0] += 1; // NOLINT(performance-no-int-to-ptr)
    return real.qkv_rope(s, a);
}

static void test_stress__finds_outputs_that_change_over_time(void **state)
{
    (void)state;
    engine->be->qkv_rope = change_late_logits;
    struct nb_stress_report r = run(1000);
    assert_false(r.outputs_identical);
    assert_true(r.iterations > 2 && r.iterations < 1000);
}

/* Leaks 400 bytes per session. */
static void *kept[10000];
static int kept_count;

static enum nb_status leak(struct nbi_backend *be, const struct nbi_stream_limits *limits,
                           struct nbi_stream **out)
{
    if (kept_count < 10000)
        kept[kept_count++] = malloc(400);
    return real.stream_new(be, limits, out);
}

static void test_stress__finds_a_leak(void **state)
{
    (void)state;
    if (SANITIZED)
        skip("sanitizers keep freed memory for a while");
    engine->be->stream_new = leak;
    struct nb_stress_report r = run(8);
    while (kept_count > 0)
        free(kept[--kept_count]);
    assert_true(r.outputs_identical);
    assert_true(r.memory_judged);
    assert_false(r.memory_flat);
    assert_true(r.heap_growth > 5 * 4 * 8 * 400);
}

static void test_stress__needs_iterations_to_judge_memory(void **state)
{
    struct nb_stress_report r = run(SANITIZED ? 2 : 5);
    const struct nb_stress_opts none = {.iterations = 0};
    (void)state;
    assert_true(!r.memory_judged && r.memory_flat && r.rss_first > 0);
    r = run(1);
    assert_true(r.rss_last > 0 && r.iterations == 1);
    assert_fails(nb_eval_stress(engine, &none, &r), NB_EINVAL, "0 iterations");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stress__passes),
        cmocka_unit_test(test_stress__finds_a_token_that_depends_on_other_rows),
        cmocka_unit_test(test_stress__finds_a_damaged_snapshot),
        cmocka_unit_test(test_stress__finds_outputs_that_change_over_time),
        cmocka_unit_test(test_stress__finds_a_leak),
        cmocka_unit_test(test_stress__needs_iterations_to_judge_memory),
    };
    return cmocka_run_group_tests_name("stress", tests, open_engine, close_engine);
}
