/* test_batch_inputs.c - a bad input of a step fails alone: its sequence is as it was, and the
 * others get the logits that they get without it. */
#include <math.h>

#include "unit/batch_lab.h"

/* ---- refused inputs ---- */

enum { GOOD = 2, BEFORE = 10, AFTER = 3, FULL = 64 };

/* What the sequences of the tests below get alone. */
struct alone {
    int32_t ids[GOOD + 1][CONTEXT];
    float logits[GOOD + 1][VOCAB]; /* of good ones after BEFORE + AFTER tokens, of the other FULL */
};

static void make_alone(struct alone *a)
{
    for (int i = 0; i <= GOOD; i++) {
        struct nb_session *s;
        ids_of(a->ids[i], 20 + i);
        assert_ok(nb_session_open(&s, engine,
                                  &(struct nb_session_opts){.context = CONTEXT, .kv = usual.kv}));
        assert_ok(nb_session_append(s, a->ids[i], i < GOOD ? BEFORE + AFTER : FULL, a->logits[i]));
        nb_session_close(s);
    }
}

/* Sequences 0 and 1 with room on their pages, sequence 2 with a full one; no page is left. */
static struct nb_batch *open_full(const struct alone *a, bool deterministic)
{
    struct nb_batch_opts o = usual;
    o.tokens = 3 * 64;
    o.deterministic = deterministic;
    struct nb_batch *b = open_batch(&o);
    for (int i = 0; i <= GOOD; i++) {
        struct nb_batch_input input = {
            .sequence = added(b), .ids = a->ids[i], .count = i < GOOD ? BEFORE : FULL};
        run_step(b, &input, 1);
    }
    assert_int_equal(free_pages(b), 0);
    return b;
}

/* A step of two good inputs and, at place `at`, a bad one. */
static void check_refused(const struct alone *a, const struct nb_batch_input *bad, int at,
                          bool deterministic, enum nb_status status, const char *words)
{
    static float logits[GOOD + 1][VOCAB];
    struct nb_batch *b = open_full(a, deterministic);
    struct nb_batch_input inputs[GOOD + 1];
    for (int i = 0, sequence = 0; i <= GOOD; i++)
        if (i == at) {
            inputs[i] = *bad;
        } else {
            inputs[i] = (struct nb_batch_input){.sequence = sequence,
                                                .ids = a->ids[sequence] + BEFORE,
                                                .count = AFTER,
                                                .logits = logits[sequence]};
            sequence++;
        }
    assert_ok(nb_batch_step(b, inputs, GOOD + 1));
    assert_fails(inputs[at].status, status, words);
    for (int i = 0; i <= GOOD; i++)
        assert_true(i == at || inputs[i].status == NB_OK);
    for (int i = 0; i < GOOD; i++) {
        assert_memory_equal(logits[i], a->logits[i], ROW);
        assert_int_equal(nb_batch_length(b, i), BEFORE + AFTER);
    }
    /* The sequence of the bad input is as it was: its keys still give the same logits. */
    assert_int_equal(free_pages(b), 0);
    assert_int_equal(nb_batch_length(b, GOOD), FULL);
    assert_ok(nb_batch_truncate(b, GOOD, FULL - 1));
    struct nb_batch_input last = {GOOD, a->ids[GOOD] + FULL - 1, .count = 1,
                                  .logits = logits[GOOD]};
    run_step(b, &last, 1);
    assert_memory_equal(logits[GOOD], a->logits[GOOD], ROW);
    nb_batch_close(b);
}

static void test_refused__inputs_leave_the_others_alone(void **state)
{
    static struct alone a;
    static float untouched[VOCAB];
    struct nb_candidate candidates[NBI_TOPK_MAX + 1];
    static const int32_t low = -1, high = VOCAB;
    const struct {
        struct nb_batch_input input;
        enum nb_status status;
        const char *words;
    } cases[] = {
        {{-1, a.ids[0], 1, .logits = untouched}, NB_EINVAL, "no sequence -1"},
        {{3, a.ids[0], 1, .logits = untouched}, NB_EINVAL, "no sequence 3"},
        {{INT64_MAX, a.ids[0], 1, .logits = untouched}, NB_EINVAL, "no sequence"},
        {{GOOD, a.ids[0], 0, .logits = untouched}, NB_EINVAL, "0 tokens for sequence 2"},
        {{GOOD, a.ids[0], -7, .logits = untouched}, NB_EINVAL, "-7 tokens"},
        {{GOOD, NULL, 1, .logits = untouched}, NB_EINVAL, "1 tokens"},
        {{GOOD, a.ids[0], CONTEXT - FULL + 1, .logits = untouched},
         NB_EVALUE,
         "do not fit the context"},
        {{GOOD, a.ids[0], INT64_MAX, .logits = untouched}, NB_EVALUE, "do not fit the context"},
        {{GOOD, &low, 1, .logits = untouched}, NB_EVALUE, "sequence 2: token id -1"},
        {{GOOD, &high, 1, .logits = untouched}, NB_EVALUE, "sequence 2: token id 2048"},
        {{GOOD, a.ids[0], 1, .candidates = candidates, .topk = -1}, NB_EINVAL, "the -1 best"},
        {{GOOD, a.ids[0], 1, .candidates = candidates, .topk = NBI_TOPK_MAX + 1},
         NB_EINVAL,
         "the 65 best"},
        {{GOOD, a.ids[0], 1, .topk = 1}, NB_EINVAL, "the 1 best"},
        {{GOOD, a.ids[0], 1, .logits = untouched}, NB_ENOMEM, "of 3 there are 0 left"},
        {{GOOD, a.ids[0], 65, .logits = untouched}, NB_ENOMEM, "needs 2 more pages"},
    };
    const uint8_t *bytes = (const uint8_t *)untouched, *of_candidates = (const uint8_t *)candidates;
    (void)state;
    make_alone(&a);
    memset(untouched, 0xAB, sizeof untouched);
    memset(candidates, 0xAB, sizeof candidates);
    for (int64_t i = 0; i < COUNT(cases); i++)
        for (int at = 0; at <= GOOD; at++)
            for (int deterministic = 0; deterministic < 2; deterministic++)
                check_refused(&a, &cases[i].input, at, deterministic, cases[i].status,
                              cases[i].words);
    /* A second input for a sequence is refused, not the first. */
    const struct nb_batch_input twice = {0, a.ids[0], 1, .logits = untouched};
    for (int at = 1; at <= GOOD; at++)
        check_refused(&a, &twice, at, false, NB_EINVAL, "sequence 0 has two inputs");
    for (size_t i = 0; i < sizeof untouched; i++)
        assert_int_equal(bytes[i], 0xAB);
    for (size_t i = 0; i < sizeof candidates; i++)
        assert_int_equal(of_candidates[i], 0xAB);
}

/* Tokens of a step are counted in the order of its inputs, without those that are refused. */
static void test_refused__more_tokens_than_a_step_holds(void **state)
{
    static const int64_t counts[] = {100, 29, 20, 9, 8, 1};
    static const enum nb_status statuses[] = {NB_OK, NB_EVALUE, NB_OK, NB_EVALUE, NB_OK, NB_EVALUE};
    struct nb_batch *b = open_batch(&usual);
    struct nb_batch_input inputs[SEQUENCES];
    int32_t ids[CONTEXT];
    (void)state;
    ids_of(ids, 30);
    for (int i = 0; i < SEQUENCES; i++)
        inputs[i] = (struct nb_batch_input){.sequence = added(b), .ids = ids, .count = counts[i]};
    assert_ok(nb_batch_step(b, inputs, SEQUENCES));
    assert_non_null(strstr(nb_last_error(), "1 tokens for sequence 5 in a step of 128, which has "
                                            "room for 0")); /* the last one */
    for (int i = 0; i < SEQUENCES; i++) {
        assert_int_equal(inputs[i].status, statuses[i]);
        assert_int_equal(nb_batch_length(b, i), statuses[i] == NB_OK ? counts[i] : 0);
    }
    struct nb_batch_input large = {.sequence = 1, .ids = ids, .count = 129};
    assert_ok(nb_batch_step(b, &large, 1));
    assert_fails(large.status, NB_EVALUE, "129 tokens for sequence 1");
    nb_batch_close(b);
}

/* Every later input for a sequence is refused, even if the first was: its tokens would be appended
 * in the wrong place. */
static void test_refused__a_later_input_of_the_same_sequence(void **state)
{
    struct nb_batch *b = open_batch(&usual);
    const int32_t low = -1, ids[] = {1, 2, 3};
    int64_t x = added(b), y = added(b);
    struct nb_batch_input inputs[] = {{.sequence = x, .ids = &low, .count = 1},
                                      {.sequence = x, .ids = ids, .count = 1},
                                      {.sequence = y, .ids = ids, .count = 2},
                                      {.sequence = x, .ids = ids, .count = 3}};
    (void)state;
    assert_ok(nb_batch_step(b, inputs, 4));
    assert_int_equal(inputs[0].status, NB_EVALUE);
    assert_int_equal(inputs[1].status, NB_EINVAL);
    assert_int_equal(inputs[2].status, NB_OK);
    assert_int_equal(inputs[3].status, NB_EINVAL);
    assert_int_equal(nb_batch_length(b, x), 0);
    assert_int_equal(nb_batch_length(b, y), 2);
    run_step(b, inputs + 3, 1);
    assert_int_equal(nb_batch_length(b, x), 3);
    nb_batch_close(b);
}

/* A step of refused inputs alone computes nothing, and succeeds. */
static void test_refused__all_inputs(void **state)
{
    struct nb_batch *b = open_batch(&usual);
    struct nb_batch_input inputs[SEQUENCES + 2];
    const int32_t id = 1;
    int64_t x = added(b), pages = free_pages(b);
    (void)state;
    for (int i = 0; i < SEQUENCES + 2; i++) /* more than there are sequences */
        inputs[i] = (struct nb_batch_input){.sequence = x + (i > 0), .ids = &id, .count = i > 0};
    real = *engine->be;
    engine->be->rope_table = count_pass;
    pass_count = 0;
    enum nb_status rc = nb_batch_step(b, inputs, SEQUENCES + 2);
    *engine->be = real;
    assert_ok(rc);
    assert_int_equal(pass_count, 0);
    for (int i = 0; i < SEQUENCES + 2; i++)
        assert_int_equal(inputs[i].status, NB_EINVAL);
    assert_int_equal(free_pages(b), pages);
    assert_fails(nb_batch_step(b, inputs, 0), NB_EINVAL, "a step of 0 inputs");
    assert_fails(nb_batch_step(b, inputs, -1), NB_EINVAL, "a step of -1 inputs");
    assert_fails(nb_batch_step(b, NULL, 1), NB_EINVAL, "a step of 1 inputs");
    nb_batch_close(b);
}

/* ---- logits that are not finite ---- */

static enum nb_status spoil_first_row(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    NBI_TRY(real.linear(s, a));
    if (a->w[0].rows == VOCAB)
        ((float *)a->y[0].at)[17] = NAN; // NOLINT(performance-no-int-to-ptr)
    return NB_OK;
}

/* Whether an input asks for logits, for candidates or for both: a NaN fails it alone, its page goes
 * back to the pool, and it can be repeated. */
static void test_nonfinite__fails_its_own_input(void **state)
{
    static float wanted[2][VOCAB], logits[2][VOCAB];
    static int32_t ids[2][CONTEXT];
    (void)state;
    for (int wants = 1; wants <= 3; wants++) { /* bit 0: logits; bit 1: candidates */
        struct nb_candidate candidates[2];
        struct nb_batch *b = open_batch(&usual);
        struct nb_batch_input inputs[2];
        for (int i = 0; i < 2; i++) {
            ids_of(ids[i], i);
            inputs[i] = (struct nb_batch_input){.sequence = added(b), .ids = ids[i], .count = FULL};
            run_step(b, &inputs[i], 1);
            inputs[i] = (struct nb_batch_input){
                .sequence = i, .ids = ids[i] + FULL, .count = 1, .logits = wanted[i]};
            run_step(b, &inputs[i], 1);
            assert_ok(nb_batch_truncate(b, i, FULL));
            inputs[i].logits = wants & 1 ? logits[i] : NULL;
            inputs[i].candidates = wants & 2 ? &candidates[i] : NULL;
            inputs[i].topk = wants & 2 ? 1 : 0;
        }
        int64_t pages = free_pages(b);
        real = *engine->be;
        engine->be->linear = spoil_first_row;
        enum nb_status rc = nb_batch_step(b, inputs, 2);
        *engine->be = real;
        assert_ok(rc);
        assert_fails(inputs[0].status, NB_EVALUE, "sequence 0: the model gave a logit that is not");
        assert_int_equal(inputs[1].status, NB_OK);
        assert_int_equal(nb_batch_length(b, 0), FULL);
        assert_int_equal(nb_batch_length(b, 1), FULL + 1);
        assert_int_equal(free_pages(b), pages - 1);
        if (wants & 1) {
            assert_true(isnan(logits[0][17]));
            assert_memory_equal(logits[0], wanted[0], 17 * sizeof(float));
            assert_memory_equal(logits[1], wanted[1], ROW);
        }
        if (wants & 2) {
            assert_true(candidates[0].id == -1 && isnan(candidates[0].logit));
            assert_int_equal(candidates[1].id, best_of(wanted[1]));
        }
        run_step(b, inputs, 1); /* once more */
        assert_int_equal(nb_batch_length(b, 0), FULL + 1);
        if (wants & 1)
            assert_memory_equal(logits[0], wanted[0], ROW);
        if (wants & 2)
            assert_int_equal(candidates[0].id, best_of(wanted[0]));
        nb_batch_close(b);
    }
}

/* An input that wants nothing of its logits does not fail by them. */
static void test_nonfinite__logits_that_nobody_wants(void **state)
{
    struct nb_batch *b = open_batch(&usual);
    const int32_t id = 5;
    struct nb_batch_input input = {.sequence = added(b), .ids = &id, .count = 1};
    (void)state;
    real = *engine->be;
    engine->be->linear = spoil_first_row;
    enum nb_status rc = nb_batch_step(b, &input, 1);
    *engine->be = real;
    assert_ok(rc);
    assert_ok(input.status);
    assert_int_equal(nb_batch_length(b, 0), 1);
    nb_batch_close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused__inputs_leave_the_others_alone),
        cmocka_unit_test(test_refused__more_tokens_than_a_step_holds),
        cmocka_unit_test(test_refused__a_later_input_of_the_same_sequence),
        cmocka_unit_test(test_refused__all_inputs),
        cmocka_unit_test(test_nonfinite__fails_its_own_input),
        cmocka_unit_test(test_nonfinite__logits_that_nobody_wants),
    };
    return cmocka_run_group_tests(tests, open_engine, close_engine);
}
