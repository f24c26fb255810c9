/* test_progress.c - what a progress line says. */
#include "cli/progress.h"

#include <string.h>

#include "base/clock.h"
#include "unit/support.h"

static void test_progress__line_has_share_rate_and_time_left(void **state)
{
    (void)state;
    struct cli_progress p = {.label = "load", .unit = CLI_UNIT_BYTES, .start = 100};
    char line[256];
    cli_progress_format(line, sizeof line, &p, 110, 1u << 30, 4u << 28);
    assert_string_equal(line, "load: 100%, 1.00 GiB, 102.40 MiB/s, 0s left");
    cli_progress_format(line, sizeof line, &p, 110, 1u << 28, 1u << 30);
    assert_string_equal(line, "load: 25%, 256.00 MiB, 25.60 MiB/s, 30s left");
    p.unit = CLI_UNIT_ITEMS;
    cli_progress_format(line, sizeof line, &p, 200, 50, 200);
    assert_string_equal(line, "load: 25%, 50/200, 0.5/s, 5:00 left");
    cli_progress_format(line, sizeof line, &p, 100 + 7200, 1, 3);
    assert_string_equal(line, "load: 33%, 1/3, 0.0001389/s, 4:00:00 left");
    cli_progress_format(line, sizeof line, &p, 100, 0, 0); /* nothing known: no division by zero */
    assert_non_null(strstr(line, "100%"));
}

/* Bytes that an update prints when the last line is so many seconds old. */
static size_t printed_after(double seconds)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);
    assert_non_null(stream);
    struct cli_progress p = {.out = stream, .label = "load", .unit = CLI_UNIT_ITEMS};
    p.last = nbi_now() - seconds;
    cli_progress_update(&p, 1, 4);
    cli_progress_update(&p, 2, 4); /* at once: nothing */
    assert_int_equal(fclose(stream), 0);
    assert_true(size == 0 || strncmp(text, "load: 25%, 1/4, ", 16) == 0);
    assert_true(size == 0 || strchr(text, '\n') == text + size - 1);
    free(text);
    return size;
}

static void test_progress__has_a_plain_line_every_half_minute(void **state)
{
    (void)state;
    assert_int_equal(printed_after(29), 0);
    assert_true(printed_after(31) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_progress__line_has_share_rate_and_time_left),
        cmocka_unit_test(test_progress__has_a_plain_line_every_half_minute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
