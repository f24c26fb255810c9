/* clock.h - seconds on the monotonic clock. */
#pragma once

#include <time.h>

static inline double nbi_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
