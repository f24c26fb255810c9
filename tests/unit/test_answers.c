/* test_answers.c - the answers to a list of prompts: those that each gets by hand, which one
 * failed, and how much memory they take at most. */
#include "infer/answers.h"

#include "base/rng.h"
#include "unit/by_hand.h"

#define PROMPTS 40
#define LONGEST 60
#define KIB     1024

static struct nb_engine *engine;

static int setup(void **state)
{
    (void)state;
    return nb_engine_open(
        &engine, &(struct nb_engine_opts){.synthetic = "tiny", .device = "cpu", .threads = 2});
}

static int teardown(void **state)
{
    (void)state;
    nb_engine_close(engine);
    return 0;
}

/* ---- a list of prompts ---- */

static int32_t prompts[PROMPTS][LONGEST];
static struct nbi_answer list[PROMPTS];

static struct nb_cancel stop;
static int64_t answered, stop_at;

static void count_answer(void *ctx)
{
    assert_ptr_equal(ctx, list);
    if (++answered == stop_at)
        nb_cancel_set(&stop);
}

static struct nbi_answers make(int64_t count, int64_t max_tokens)
{
    answered = stop_at = 0;
    nb_cancel_clear(&stop);
    for (int64_t i = 0; i < count; i++) {
        list[i] = (struct nbi_answer){.ids = prompts[i], .count = (size_t)(1 + 7 * i % LONGEST)};
        for (size_t k = 0; k < list[i].count; k++)
            prompts[i][k] = (int32_t)(nbi_philox(3, (uint64_t)i * LONGEST + k, 0).v[0] % 500);
        list[i].opts = (struct nb_generate_opts){.sampling = {.temperature = (double)(i % 3),
                                                              .top_p = 0.9,
                                                              .repeat_penalty = 1.1,
                                                              .seed = (uint64_t)i},
                                                 .max_tokens = max_tokens};
    }
    return (struct nbi_answers){
        .list = list, .count = count, .answered = count_answer, .ctx = list, .failed = 77};
}

static void release(int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        nb_generate_result_release(&list[i].result);
}

/* ---- tests ---- */

static void test_answers__are_those_by_hand(void **state)
{
    static const int64_t counts[] = {1, 2, 16, 17, PROMPTS};
    static struct by_hand wanted;
    (void)state;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        struct nbi_answers all = make(counts[c], 25);
        all.independent = c % 2;
        assert_ok(nbi_answer_all(engine, &all));
        assert_int_equal(all.failed, -1);
        assert_int_equal(answered, counts[c]);
        for (int64_t i = 0; i < counts[c]; i++) {
            const struct nb_generate_result *r = &list[i].result;
            answer_by_hand(engine, 512, list[i].ids, list[i].count, &list[i].opts, &wanted);
            assert_int_equal(r->count, wanted.count);
            assert_int_equal(r->finish, NB_FINISH_LENGTH);
            assert_memory_equal(r->ids, wanted.ids, r->count * sizeof *r->ids);
            assert_string_equal(r->text, "");
        }
        release(counts[c]);
    }
    struct nbi_answers none = make(0, 25);
    assert_ok(nbi_answer_all(engine, &none));
    assert_int_equal(none.failed, -1);
}

static void test_answers__say_which_failed(void **state)
{
    struct nbi_answers all = make(PROMPTS, 25);
    (void)state;
    prompts[31][0] = 1 << 20; /* when others have been answered */
    assert_fails(nbi_answer_all(engine, &all), NB_EVALUE, "token id 1048576 is outside");
    assert_int_equal(all.failed, 31);
    assert_in_range(answered, 1, 30);
    release(PROMPTS);

    all = make(PROMPTS, 25);
    list[3].opts.sampling.top_p = 7;
    assert_fails(nbi_answer_all(engine, &all), NB_EINVAL, "top-p");
    assert_int_equal(all.failed, 3);
    assert_int_equal(answered, 0);
    release(PROMPTS);

    const struct nbi_weight *embed = &engine->weights.embed;
    uint16_t *row = (uint16_t *)embed->data.at + 505 * embed->cols, kept = *row;
    const struct nb_bias never = {505, -1e6F};
    assert_int_equal(embed->dtype, NBI_BF16);
    all = make(PROMPTS, 25);
    prompts[20][list[20].count - 1] = 505;
    for (int i = 0; i < PROMPTS; i++) {
        list[i].opts.sampling.bias = &never;
        list[i].opts.sampling.bias_count = 1;
    }
    *row = 0x7FC0; /* NaN */
    enum nb_status rc = nbi_answer_all(engine, &all);
    *row = kept;
    assert_fails(rc, NB_EVALUE, "the model gave a logit that is not finite");
    assert_int_equal(all.failed, 20);
    release(PROMPTS);
}

static void test_answers__end_when_interrupted(void **state)
{
    struct nbi_answers all = make(PROMPTS, 25);
    (void)state;
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(&stop);
    stop_at = 20;
    assert_fails(nbi_answer_all(engine, &all), NB_EINTERRUPTED, "interrupted");
    assert_int_equal(all.failed, -1);
    assert_in_range(answered, 20, 32); /* others may have ended in the same step */
    release(PROMPTS);
}

/* ---- a device that counts bytes, and fails ---- */

static struct nbi_backend real; /* the engine's, before it was changed */
static int64_t cache_bytes;

static enum nb_status spy(struct nbi_backend *be, const char *what, int64_t bytes,
                          struct nbi_ptr *out)
{
    cache_bytes += strcmp(what, "key/value cache") == 0 ? bytes : 0;
    return real.alloc(be, what, bytes, out);
}

static enum nb_status lose_device(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    (void)s;
    (void)a;
    return nbi_fail(NB_EDEVICE, "the device is gone");
}

/* The model "tiny" has 4 layers and 2 key heads of 64: a page of f16 takes 128 KiB. Its context of
 * 40960 tokens is 640 pages. */
static void test_answers__bound_the_memory_of_keys_and_values(void **state)
{
    static const struct {
        int64_t count, max_tokens, bytes;
    } cases[] = {{3, 20, (int64_t)3 * 1 * 128 * KIB}, /* up to 15 tokens and 20 */
                 {3, 50, (int64_t)3 * 2 * 128 * KIB},
                 {6, 0, (int64_t)6 * 640 * 128 * KIB}, /* until the context is full */
                 {7, 0, (int64_t)512 * KIB * KIB},
                 {PROMPTS, 0, (int64_t)512 * KIB * KIB}};
    (void)state;
    real = *engine->be;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct nbi_answers all = make(cases[i].count, cases[i].max_tokens);
        cache_bytes = 0;
        engine->be->alloc = spy;
        engine->be->linear = lose_device;
        enum nb_status rc = nbi_answer_all(engine, &all);
        *engine->be = real;
        assert_fails(rc, NB_EDEVICE, "the device is gone");
        assert_int_equal(all.failed, -1);
        assert_int_equal(answered, 0);
        assert_int_equal(cache_bytes, cases[i].bytes);
        release(cases[i].count);
    }
}

/* On a GPU whose products do not share passes without changing bits, prompts that are to be
 * independent are answered in turn, over a session: keys and values of one context, not of pages.
 */
static void test_answers__independent_ones_may_be_answered_in_turn(void **state)
{
    static const int64_t pages = (int64_t)3 * 2 * 128 * KIB, session = (int64_t)65 * 2 * KIB;
    struct nbi_weight *up = &engine->weights.layers[1].up;
    enum nbi_dtype kept = up->dtype;
    (void)state;
    real = *engine->be;
    for (int independent = 0; independent < 2; independent++)
        for (int all_nvfp4 = 0; all_nvfp4 < 2; all_nvfp4++) {
            struct nbi_answers all = make(3, 50); /* up to 15 tokens and 50 */
            all.independent = independent;
            cache_bytes = 0;
            engine->be->alloc = spy;
            engine->be->linear = lose_device;
            engine->be->caps &= ~(unsigned)NBI_CAP_BATCH_INVARIANT;
            engine->be->batch_invariant_rows = 8;
            up->dtype = all_nvfp4 ? NBI_NVFP4 : NBI_BF16;
            enum nb_status rc = nbi_answer_all(engine, &all);
            up->dtype = kept;
            *engine->be = real;
            assert_int_equal(rc, NB_EDEVICE);
            assert_int_equal(cache_bytes, independent && !all_nvfp4 ? session : pages);
            release(3);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers__are_those_by_hand),
        cmocka_unit_test(test_answers__say_which_failed),
        cmocka_unit_test(test_answers__end_when_interrupted),
        cmocka_unit_test(test_answers__bound_the_memory_of_keys_and_values),
        cmocka_unit_test(test_answers__independent_ones_may_be_answered_in_turn),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
