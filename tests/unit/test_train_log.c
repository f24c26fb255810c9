/* test_train_log.c - a resumed run's log equals that of an uninterrupted run; a log reads back as
 * written; files that are no log are refused and left alone. */
#include "train/train_log.h"

#include <math.h>

#include "unit/support.h"

static struct nbi_log_step step_at(int64_t step)
{
    return (struct nbi_log_step){.step = step,
                                 .loss = 4.0 / (double)(step + 1),
                                 .lr = 1e-5,
                                 .grad_norm = step == 3 ? NAN : 1.25,
                                 .tokens = 1000 * step,
                                 .tokens_per_s = 812.5,
                                 .seconds = 0.1 * (double)step,
                                 .resident_bytes = 1ull << 33,
                                 .device_bytes = 3};
}

static void log_steps(struct nbi_train_log *log, int64_t first, int64_t last)
{
    for (int64_t i = first; i <= last; i++) {
        const struct nbi_log_step s = step_at(i);
        assert_ok(nbi_train_log_step(log, &s, NULL, 0));
        if (i % 2 == 0)
            assert_ok(nbi_train_log_eval(log, &(struct nbi_log_eval){i, 2.5, 12.25, 64}));
    }
}

static void run(const char *name, int64_t resumed, int64_t last)
{
    struct nbi_train_log *log;
    assert_ok(nbi_train_log_open(&log, test_path(name), resumed));
    log_steps(log, resumed < 0 ? 1 : resumed + 1, last);
    nbi_train_log_close(log);
}

static void test_train_log__lines_are_json(void **state)
{
    (void)state;
    struct nbi_train_log *log;
    const struct nbi_log_step s = {.step = 7, .loss = INFINITY, .lr = 0.1, .grad_norm = -0.5};
    const struct nbi_log_extra extra[] = {{"kl", 1.0 / 3}, {"a\"b", NAN}};
    assert_ok(nbi_train_log_open(&log, test_path("l"), -1));
    assert_ok(nbi_train_log_step(log, &s, extra, 2));
    assert_ok(nbi_train_log_eval(log, &(struct nbi_log_eval){7, 0.5, 1.5, 9}));
    assert_content("l", /* before it is closed: each line is written at once */
                   "{\"step\":7,\"loss\":null,\"lr\":0.1,\"grad_norm\":-0.5,\"tokens\":0,"
                   "\"tokens_per_s\":0,\"seconds\":0,\"resident_bytes\":0,"
                   "\"kl\":0.3333333333333333,\"a\\\"b\":null}\n"
                   "{\"step\":7,\"eval\":{\"tokens\":9,\"loss\":0.5,\"ppl\":1.5}}\n");
    nbi_train_log_close(log);
}

static void assert_same(const char *a, const char *b)
{
    char *x, *y;
    size_t n, m;
    assert_ok(nbi_file_read(test_path(a), 1 << 20, &x, &n));
    assert_ok(nbi_file_read(test_path(b), 1 << 20, &y, &m));
    assert_string_equal(x, y);
    free(x);
    free(y);
}

static void test_train_log__resumed_equals_uninterrupted(void **state)
{
    (void)state;
    run("straight", -1, 20);
    for (int64_t at = 0; at <= 13; at++) {
        run("resumed", -1, 13);
        run("resumed", at, 20);
        assert_same("resumed", "straight");
    }
    run("absent", 0, 20); /* a resumed run without an old log starts a new one */
    assert_same("absent", "straight");
    run("straight", -1, 3); /* a new run empties the file */
    run("short", -1, 3);
    assert_same("straight", "short");
}

static void test_train_log__incomplete_last_line_is_dropped(void **state)
{
    (void)state;
    struct nbi_history h;
    char *text;
    size_t len;
    run("straight", -1, 6);
    run("cut", -1, 5);
    assert_ok(nbi_file_read(test_path("straight"), 1 << 20, &text, &len));
    char *line = strstr(text, "{\"step\":6");
    for (const char *p = line; *p != '\n'; p++) { /* killed after each byte of step 6 */
        assert_ok(nbi_file_write(test_path("cut"), text, (size_t)(p - text)));
        assert_ok(nbi_history_read(&h, test_path("cut")));
        assert_int_equal(h.step_count, 5);
        nbi_history_release(&h);
        run("cut", 5, 6);
        assert_same("cut", "straight");
    }
    free(text);
}

static void test_train_log__reads_back(void **state)
{
    (void)state;
    struct nbi_history h;
    run("l", -1, 9);
    assert_ok(nbi_history_read(&h, test_path("l")));
    assert_int_equal(h.step_count, 9);
    assert_int_equal(h.eval_count, 4);
    for (int i = 0; i < 9; i++) {
        struct nbi_log_step want = step_at(i + 1), *got = &h.steps[i];
        assert_true(got->step == want.step && got->loss == want.loss && got->lr == want.lr);
        assert_true(got->tokens == want.tokens && got->seconds == want.seconds);
        assert_true(got->tokens_per_s == want.tokens_per_s);
        assert_true(got->resident_bytes == want.resident_bytes && got->device_bytes == 3);
        assert_true(i == 2 ? isnan(got->grad_norm) : got->grad_norm == 1.25);
    }
    assert_true(h.evals[3].step == 8 && h.evals[3].loss == 2.5 && h.evals[3].ppl == 12.25);
    assert_int_equal(h.evals[3].tokens, 64);
    nbi_history_release(&h);
}

static void test_train_log__other_files_are_refused_and_kept(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "hello\n",          "{\"step\":1}\n[1]\n",       "{\"loss\":1}\n",
        "{\"step\":-1}\n",  "{\"step\":1,\"eval\":3}\n", "\n",
        "{\"step\":1e99}\n"};
    struct nbi_train_log *log;
    struct nbi_history h;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        put("l", texts[i]);
        assert_fails(nbi_train_log_open(&log, test_path("l"), 5), NB_EFORMAT, "training log");
        assert_fails(nbi_history_read(&h, test_path("l")), NB_EFORMAT, ", line ");
        assert_content("l", texts[i]);
    }
    assert_fails(nbi_train_log_open(&log, test_path("no/l"), -1), NB_EIO, "cannot write");
    assert_fails(nbi_history_read(&h, test_path("none")), NB_ENOTFOUND, "cannot open");
}

#define STEP                                                                                       \
    "{\"step\":9,\"loss\":1,\"lr\":1,\"grad_norm\":1,\"tokens\":1,\"tokens_per_s\":1,\"seconds\":" \
    "1}\n"

/* Before anything is cut, every line is checked, including one without a line end. */
static void test_train_log__only_logs_are_cut(void **state)
{
    (void)state;
    static const char *const texts[] = {"a letter without the end of a line",
                                        "{\"step",
                                        "{\"step\":12,\"loss\":1.5,\"l",
                                        "{\"step\":1} and so on",
                                        "{\"step\":1,\"reward\":0.5}",
                                        "{\"step\":x",
                                        STEP "Dear diary\n" STEP,
                                        STEP STEP "{\"step\":1,\"reward\":0.5}\n",
                                        "{\"step\":12,\"reward\":0.5}\n",
                                        STEP "[1]\n"};
    struct nbi_train_log *log;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int64_t resumed = -1; resumed < 20; resumed += 5) {
            bool begins = i == 1 || i == 2; /* killed while writing the first line */
            put("l", texts[i]);
            if (begins) {
                assert_ok(nbi_train_log_open(&log, test_path("l"), resumed));
                nbi_train_log_close(log);
                assert_content("l", "");
                continue;
            }
            assert_fails(nbi_train_log_open(&log, test_path("l"), resumed), NB_EFORMAT,
                         "training log");
            assert_content("l", texts[i]);
        }
    put("l", STEP "#");
    assert_ok(nbi_train_log_open(&log, test_path("l"), 9));
    nbi_train_log_close(log);
    assert_content("l", STEP);
}

static void test_train_log__second_writer_is_refused(void **state)
{
    (void)state;
    struct nbi_train_log *log, *other;
    run("l", -1, 3);
    assert_ok(nbi_train_log_open(&log, test_path("l"), 3));
    assert_fails(nbi_train_log_open(&other, test_path("l"), -1), NB_EIO, "another run is writing");
    run("straight", -1, 3);
    assert_same("l", "straight");
    nbi_train_log_close(log);
    assert_ok(nbi_train_log_open(&other, test_path("l"), -1));
    nbi_train_log_close(other);
    assert_content("l", "");
}

int main(void)
{
#define T(fn) cmocka_unit_test_setup_teardown(fn, make_test_dir, remove_test_dir)
    const struct CMUnitTest tests[] = {
        T(test_train_log__lines_are_json),
        T(test_train_log__resumed_equals_uninterrupted),
        T(test_train_log__incomplete_last_line_is_dropped),
        T(test_train_log__reads_back),
        T(test_train_log__other_files_are_refused_and_kept),
        T(test_train_log__only_logs_are_cut),
        T(test_train_log__second_writer_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
