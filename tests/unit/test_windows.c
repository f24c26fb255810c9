/* test_windows.c - windows predict every token but the first of the text once, with a stride
 * shorter than a window from as much context as there is. */
#include "data/windows.h"
#include "unit/support.h"

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void check(int64_t count, int64_t context, int64_t stride)
{
    struct nbi_windows windows = {.count = count, .context = context, .stride = stride};
    struct nbi_window w;
    int64_t next = 1, at = 0; /* the token to be predicted, and the start of the last window */
    while (nbi_windows_next(&windows, &w)) {
        assert_true(w.begin >= at && w.begin % stride == 0);
        assert_int_equal(w.end, smaller(w.begin + context, count));
        assert_true(w.predicted > w.begin && w.predicted < w.end);
        if (stride == context && w.begin > 0 && w.begin == next)
            next++; /* the first of a window that overlaps no other */
        assert_int_equal(w.predicted, next);
        next = w.end;
        at = w.begin;
    }
    assert_true(stride == context ? next + 1 >= count : next == count);
}

static void test_windows__each_token_is_predicted_once(void **state)
{
    (void)state;
    for (int64_t count = 2; count < 40; count++)
        for (int64_t context = 2; context < 12; context++)
            for (int64_t stride = 1; stride <= context; stride++)
                check(count, context, stride);
}

static void test_windows__one_token_predicts_nothing(void **state)
{
    (void)state;
    struct nbi_windows windows = {.count = 1, .context = 8, .stride = 8};
    struct nbi_window w;
    assert_false(nbi_windows_next(&windows, &w));
    assert_false(nbi_windows_next(&windows, &w));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows__each_token_is_predicted_once),
        cmocka_unit_test(test_windows__one_token_predicts_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
