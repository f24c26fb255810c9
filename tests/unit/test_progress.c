/* test_progress.c - what a progress line says. */
#include "cli/progress.h"

#include <string.h>

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
    p.terminal = true;
    p.unit = CLI_UNIT_ITEMS;
    cli_progress_format(line, sizeof line, &p, 200, 50, 200);
    assert_string_equal(line, "load [######..................]  25%  50/200  0.5/s  5:00 left");
    cli_progress_format(line, sizeof line, &p, 100, 0, 0); /* nothing known: no division by zero */
    assert_non_null(strstr(line, "100%"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_progress__line_has_share_rate_and_time_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
