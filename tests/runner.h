/* runner.h - skipping a test case, and what the cases of a program ask about its run. */
#pragma once

#include <stdbool.h>

/* Whether only the cases that need no GPU were asked for. */
bool without_gpu_cases(void);

/* Ends a test case that cannot run here; prints the reason, one line. Does not return. */
void skip_because(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Takes the reason, as printf does; replaces cmocka's skip(), which has none. */
#undef skip
#define skip(...) skip_because(__FILE__, __LINE__, __VA_ARGS__)
