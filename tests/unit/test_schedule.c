/* test_schedule.c - the learning rate at the borders: one step, two, warm-up up to the end and past
 * it. */
#include "train/lr_schedule.h"

#include "unit/support.h"

static void test_schedule__borders(void **state)
{
    /* Of steps, warm-up and the step: the rates as shares of the highest, final_frac 0.1. */
    static const struct {
        int64_t steps, warmup, step;
        double constant, linear, cosine, wsd;
    } rows[] = {
        {1, 0, 0, 1, 1, 1, 1},       /* one step: all of it */
        {1, 0, 5, 1, 1, 1, 1},       /* past the end: that of the end */
        {2, 0, 0, 1, 1, 1, 1},       /* the first is the highest, */
        {2, 0, 1, 1, 0.1, 0.1, 0.1}, /* the last the lowest */
        {2, 0, 9, 1, 0.1, 0.1, 0.1},
        {11, 0, 5, 1, 0.55, 0.55, 1},           /* half way */
        {11, 0, 8, 1, 0.28, 0.185942353, 1},    /* wsd: the last that is constant */
        {11, 0, 9, 1, 0.19, 0.122024567, 0.55}, /* and half way down */
        {11, 0, 10, 1, 0.1, 0.1, 0.1},
        {10, 4, 0, 0.25, 0.25, 0.25, 0.25}, /* warm-up rises from lr / 4 */
        {10, 4, 3, 1, 1, 1, 1},             /* to all of it, */
        {10, 4, 4, 1, 1, 1, 1},             /* from where it falls */
        {10, 4, 9, 1, 0.1, 0.1, 0.1},       /* to the end */
        {10, 8, 8, 1, 1, 1, 1},             /* two steps behind the warm-up */
        {10, 8, 9, 1, 0.1, 0.1, 0.1},
        {10, 9, 8, 1, 1, 1, 1}, /* one step behind it: not the lowest */
        {10, 9, 9, 1, 1, 1, 1},
        {10, 10, 9, 1, 1, 1, 1},         /* none */
        {10, 20, 9, 0.5, 0.5, 0.5, 0.5}, /* it is not over at the end, */
        {10, 20, 20, 1, 1, 1, 1},        /* and nothing falls behind it */
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_schedule__borders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
