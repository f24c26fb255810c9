/* test_lr_schedule.c - the learning rate in runs of one and two steps, and with a warm-up that ends
 * at, just before or after the end of the run. */
#include "train/lr_schedule.h"

#include "unit/support.h"

static void test_lr_schedule__borders(void **state)
{
    /* Steps, warm-up, step, then the rate of each schedule relative to lr; final_frac is 0.1. */
    static const struct {
        int64_t steps, warmup, step;
        double constant, linear, cosine, wsd;
    } rows[] = {
        {1, 0, 0, 1, 1, 1, 1},       /* one step: lr */
        {1, 0, 5, 1, 1, 1, 1},       /* past the end: as at the end */
        {2, 0, 0, 1, 1, 1, 1},       /* the first step has lr, */
        {2, 0, 1, 1, 0.1, 0.1, 0.1}, /* the last one lr * final_frac */
        {2, 0, 9, 1, 0.1, 0.1, 0.1},
        {11, 0, 5, 1, 0.55, 0.55, 1},           /* halfway */
        {11, 0, 8, 1, 0.28, 0.185942353, 1},    /* wsd: the last constant step */
        {11, 0, 9, 1, 0.19, 0.122024567, 0.55}, /* wsd: halfway down */
        {11, 0, 10, 1, 0.1, 0.1, 0.1},
        {10, 4, 0, 0.25, 0.25, 0.25, 0.25}, /* warm-up rises from lr / 4 */
        {10, 4, 3, 1, 1, 1, 1},             /* to lr, */
        {10, 4, 4, 1, 1, 1, 1},             /* then falls */
        {10, 4, 9, 1, 0.1, 0.1, 0.1},       /* until the end */
        {10, 8, 8, 1, 1, 1, 1},             /* two steps after the warm-up */
        {10, 8, 9, 1, 0.1, 0.1, 0.1},
        {10, 9, 8, 1, 1, 1, 1}, /* one step after it: does not fall */
        {10, 9, 9, 1, 1, 1, 1},
        {10, 10, 9, 1, 1, 1, 1},         /* none after it */
        {10, 20, 9, 0.5, 0.5, 0.5, 0.5}, /* the warm-up is longer than the run, */
        {10, 20, 20, 1, 1, 1, 1},        /* and the rate does not fall after it */
        {1, 1, 0, 1, 1, 1, 1},
        {2, 1, 1, 1, 1, 1, 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const double want[] = {rows[i].constant, rows[i].linear, rows[i].cosine, rows[i].wsd};
        for (int kind = NB_SCHEDULE_CONSTANT; kind <= NB_SCHEDULE_WSD; kind++) {
            const struct nbi_lr_schedule_opts o = {.kind = (enum nb_lr_schedule)kind,
                                                   .lr = 3e-4,
                                                   .final_frac = 0.1,
                                                   .warmup = rows[i].warmup,
                                                   .steps = rows[i].steps};
            double got = nbi_learning_rate(&o, rows[i].step) / o.lr;
            if (!(got > want[kind] - 1e-8 && got < want[kind] + 1e-8))
                fail_msg("row %zu, schedule %d: %.9f, not %.9f", i, kind, got, want[kind]);
        }
    }
}

static void test_lr_schedule__default_warmup(void **state)
{
    static const struct {
        int64_t steps, warmup;
    } rows[] = {{0, 0},     {1, 0},      {2, 0},
                {19, 0},    {20, 1},     {150, 7},
                {1999, 99}, {2000, 100}, {1000000000000, 100}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int kind = NB_SCHEDULE_LINEAR; kind <= NB_SCHEDULE_WSD; kind++)
            assert_int_equal(nbi_default_warmup((enum nb_lr_schedule)kind, rows[i].steps),
                             rows[i].warmup);
        assert_int_equal(nbi_default_warmup(NB_SCHEDULE_CONSTANT, rows[i].steps), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lr_schedule__borders),
                                       cmocka_unit_test(test_lr_schedule__default_warmup)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
