/* tests.c - the unit tests that need a GPU as one program, so that they can be carried together.
 * usage: gpu_tests [--test=NAME [--cpu | --gpu] [PATTERN]]
 * Without --test: the names, a line each. */
#include "gpu/tests.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(void);
} tests[] = {
#define X(name) {#name, name},
    GPU_TESTS
#undef X
};

int main(int argc, char **argv)
{
    const char *wanted = argc > 1 && strncmp(argv[1], "--test=", 7) == 0 ? argv[1] + 7 : NULL;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (!wanted)
            puts(tests[i].name);
        else if (strcmp(wanted, tests[i].name) == 0)
            return tests[i].run();
    if (wanted)
        fprintf(stderr, "gpu_tests: there is no '%s'\n", wanted);
    return wanted != NULL;
}
