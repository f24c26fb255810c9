/* test_report.c - charts keep extremes, and pages are well-formed whatever the texts hold. */
#include "train/report.h"

#include <math.h>

#include "train/chart.h"
#include "unit/support.h"

/* Markup, quotes, a malformed byte, a control character, a line end, Chinese. */
#define HOSTILE "</td><script>alert(1)</script>&amp;\"'\xFF\x01\n\xE4\xBD\xA0"

/* Runs check_report.py on the page. */
static void check_page(const struct nbi_report *r, const char *kind)
{
    char command[1200];
    if (system("python3 -c 0 2> /dev/null") != 0)
        skip("there is no python3");
    assert_ok(nbi_report_write(test_path("report.html"), r));
    snprintf(command, sizeof command, "python3 -B '%s/unit/check_report.py' '%s' %s",
             NB_TEST_SOURCE, test_path("report.html"), kind);
    assert_int_equal(system(command), 0);
}

static void test_report__full_page_is_well_formed(void **state)
{
    (void)state;
    enum { N = 5000 };
    struct nbi_log_step *steps = calloc(N, sizeof *steps);
    assert_non_null(steps);
    for (int i = 0; i < N; i++)
        steps[i] = (struct nbi_log_step){.step = i + 1,
                                         .loss = i % 100 == 50 ? (i % 200 == 50 ? NAN : INFINITY)
                                                 : i == 1233   ? 9
                                                               : 4.0 / (1 + i / 1000.0),
                                         .lr = 1e-5 * (1 - i / (double)N),
                                         .grad_norm = 1 + sin(i),
                                         .tokens = 1000 * (i + 1),
                                         .tokens_per_s = 1e5,
                                         .seconds = i,
                                         .resident_bytes = 3ull << 30};
    const struct nbi_log_eval evals[] = {
        {1000, 1.5, 4.48, 10}, {2000, NAN, NAN, 10}, {3000, 1.25, 3.49, 10}};
    const struct nbi_report_pair settings[] = {{"lr", "1e-05"}, {HOSTILE, HOSTILE}};
    const struct nbi_report_sample samples[] = {{HOSTILE, "I am nobody", HOSTILE},
                                                {"hi", NULL, "yes"}};
    const char *const notes[] = {HOSTILE};
    const struct nbi_report r = {.title = HOSTILE,
                                 .steps = steps,
                                 .step_count = N,
                                 .evals = evals,
                                 .eval_count = 3,
                                 .settings = settings,
                                 .setting_count = 2,
                                 .samples = samples,
                                 .sample_count = 2,
                                 .notes = notes,
                                 .note_count = 1};
    check_page(&r, "full");
    free(steps);
}

static void test_report__empty_page_is_well_formed(void **state)
{
    (void)state;
    const struct nbi_report none = {.title = "empty"};
    const struct nbi_log_step bad = {
        .loss = NAN, .lr = INFINITY, .grad_norm = -INFINITY, .tokens_per_s = NAN};
    const struct nbi_report one = {.title = "one", .steps = &bad, .step_count = 1};
    check_page(&none, "empty");
    struct nbi_str page = {0};
    assert_ok(nbi_report_html(&page, &one)); /* one point of memory, 0, and nothing else */
    assert_non_null(strstr(page.p, "not finite"));
    assert_null(strstr(page.p, "nan"));
    assert_non_null(strstr(page.p, ">each step</b>, <b class=\"line\">smoothed</b></p>"));
    assert_null(strstr(page.p, ">held-out<"));
    nbi_str_release(&page);
}

static void test_chart__decimation_keeps_extremes(void **state)
{
    (void)state;
    enum { N = 100000, MAX = 64 };
    double *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    size_t keep[MAX];
    assert_true(x && y);
    for (int i = 0; i < N; i++)
        x[i] = i, y[i] = i % 7 == 0 ? NAN : sin(i * 0.01);
    y[777] = 50, y[55555] = -50, y[N - 1] = INFINITY;
    const struct nbi_chart_series s = {"line", "y", x, y, N, false};
    size_t n = nbi_chart_decimate(&s, false, keep, MAX);
    assert_true(n <= MAX && n > MAX / 2);
    bool high = false, low = false;
    for (size_t k = 0; k < n; k++) {
        assert_true(isfinite(y[keep[k]]) && (k == 0 || keep[k] > keep[k - 1]));
        high = high || keep[k] == 777;
        low = low || keep[k] == 55555;
    }
    assert_true(high && low && keep[0] == 1 && keep[n - 1] == N - 2);
    n = nbi_chart_decimate(&s, true, keep, MAX);
    for (size_t k = 0; k < n; k++)
        assert_true(y[keep[k]] > 0);
    const struct nbi_chart_series few = {"line", "y", x, y, 20, false};
    assert_int_equal(nbi_chart_decimate(&few, false, keep, MAX), 17);
    free(x);
    free(y);
}

/* No value makes a chart fail, hang or contain non-finite coordinates. */
static void test_chart__accepts_any_values(void **state)
{
    (void)state;
    static const double values[] = {0,     -0.0,  1,    1 + 1e-16, 1e-320, 1e99,
                                    -1e99, 1e300, 5e-9, 3,         NAN};
    enum { N = sizeof values / sizeof *values };
    for (size_t a = 0; a < N; a++)
        for (size_t b = 0; b < N; b++)
            for (int log_scale = 0; log_scale < 2; log_scale++) {
                const double x[] = {1e6, 1e6 + (double)b}, y[] = {values[a], values[b]};
                const struct nbi_chart_series s = {"line", "y", x, y, 2, false};
                const struct nbi_chart c = {"t", "x", log_scale, b % 2, &s, 1};
                struct nbi_str out = {0};
                nbi_chart_svg(&out, &c);
                assert_ok(nbi_str_status(&out));
                assert_null(strstr(out.p, "nan"));
                assert_null(strstr(out.p, "inf"));
                assert_true(out.len < 6000);
                nbi_str_release(&out);
            }
}

int main(void)
{
#define T(fn) cmocka_unit_test_setup_teardown(fn, make_test_dir, remove_test_dir)
    const struct CMUnitTest tests[] = {
        T(test_report__full_page_is_well_formed),
        T(test_report__empty_page_is_well_formed),
        T(test_chart__decimation_keeps_extremes),
        T(test_chart__accepts_any_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
