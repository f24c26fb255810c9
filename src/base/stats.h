/* stats.h - the median of measurements. */
#pragma once

#include <stdlib.h>

static inline int nbi_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values in place. */
static inline double nbi_median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, nbi_by_value);
    return values[count / 2];
}
