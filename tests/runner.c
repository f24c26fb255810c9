/* runner.c - selects the cases of a unit test program, and reports those that were skipped.
 * usage: test_NAME [--cpu | --gpu] [PATTERN]
 *
 * A case needs a GPU if and only if its name has "gpu" or "cuda" in it. --cpu leaves these out,
 * --gpu runs no others, PATTERN (with * and ?) selects by name. The exit status is 77 if every case
 * that was selected skipped itself. The linker sends cmocka's group runner and its _skip() here
 * (--wrap). */
#include "runner.h"

#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SKIPPED 77

static enum { ALL, CPU, GPU } selected = ALL;
static const char *pattern = "*";
static int skipped;

int __real__cmocka_run_group_tests(const char *name, const struct CMUnitTest *tests, size_t count,
                                   CMFixtureFunction setup, CMFixtureFunction teardown);
int __wrap__cmocka_run_group_tests(const char *name, const struct CMUnitTest *tests, size_t count,
                                   CMFixtureFunction setup, CMFixtureFunction teardown);
void __real__skip(const char *file, int line);
void __wrap__skip(const char *file, int line);

/* glibc passes main's arguments to constructors, so that no main() has to hand them on. */
__attribute__((constructor)) static void read_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--cpu") == 0)
            selected = CPU;
        else if (strcmp(argv[i], "--gpu") == 0)
            selected = GPU;
        else if (strncmp(argv[i], "--test=", 7) != 0) /* of gpu/tests.c */
            pattern = argv[i];
}

bool without_gpu_cases(void)
{
    return selected == CPU;
}

void skip_because(const char *file, int line, const char *format, ...)
{
    char reason[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    print_message("SKIP: %s\n", reason);
    skipped++;
    __real__skip(file, line);
}

void __wrap__skip(const char *file, int line)
{
    print_error("%s:%d: include runner.h, and give skip() a reason\n", file, line);
    exit(1);
}

static bool is_selected(const char *name)
{
    bool gpu = strstr(name, "gpu") || strstr(name, "cuda");
    return (selected == ALL || gpu == (selected == GPU)) && fnmatch(pattern, name, 0) == 0;
}

int __wrap__cmocka_run_group_tests(const char *name, const struct CMUnitTest *tests, size_t count,
                                   CMFixtureFunction setup, CMFixtureFunction teardown)
{
    int n = 0;
    struct CMUnitTest *some = calloc(count, sizeof *some);
    for (size_t i = 0; some && i < count; i++)
        if (is_selected(tests[i].name))
            some[n++] = tests[i];
    if (n == 0) {
        print_error("none of the %zu cases was selected\n", count);
        free(some);
        return 1;
    }
    int failed = __real__cmocka_run_group_tests(name, some, (size_t)n, setup, teardown);
    free(some);
    return failed == 0 && skipped == n ? SKIPPED : failed;
}
