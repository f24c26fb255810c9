/* gradients.h - shared by tests of training operations: a backend under test, comparison with
 * arithmetic in double, and comparison of gradients with finite differences. The CPU is tested with
 * guarded memory, on every instruction set and with one to four threads.
 *
 * Error bounds as in test_cpu_kernels.c: U is half a unit in the last place, and a sum of n
 * products is off by at most (n + 1) U times the sum of their magnitudes. Roundings of single
 * operations are counted generously, since sums dominate.
 *
 * With activations in bf16 the inputs are values that bf16 represents, and results may be off by
 * their rounding to bf16 in addition: each element on the CPU, which computes in f32. A GPU may
 * round in between, so there the error as a whole may be twice that of rounding the reference. */
#pragma once

#include "rig.h"

#define U      0x1p-24
#define U_BF16 0x1p-8
/* Bound of underflow in intermediate results, times any factor used here. */
#define TINY 0x1p-120

/* ---- comparison ---- */

/* Runs one operation and appends its results to `out`. */
typedef void (*run_fn)(struct rig *r, const void *c, float *out);

struct expected {
    int64_t n;
    double *want, *bound;
};

static inline struct expected expect(int64_t n)
{
    return (struct expected){n, zeros(n, sizeof(double)), zeros(n, sizeof(double))};
}

static inline void expected_free(struct expected *e)
{
    free(e->want);
    free(e->bound);
}

/* What rounding to bf16 adds to the bound of result i. */
static inline double rounding_of(const struct expected *e, int64_t i, const double *rms)
{
    for (int k = 0; k < rounded_count; k++)
        if (i >= rounded[k].first && i < rounded[k].first + rounded[k].n)
            return (gpu ? 16 * rms[k] : 0) + U_BF16 * (fabs(e->want[i]) + e->bound[i]);
    return 0;
}

/* The root mean squares of the error of each part in bf16, and of what it would be if the reference
 * were rounded. */
static inline void check_rounded(const char *what, const float *is, const struct expected *e,
                                 double *rms)
{
    for (int k = 0; k < rounded_count; k++) {
        double error = 0, rounding = 0, other = 0, n = (double)rounded[k].n;
        for (int64_t i = rounded[k].first; i < rounded[k].first + rounded[k].n; i++) {
            error += pow((double)is[i] - e->want[i], 2);
            rounding += pow(to_bf16(e->want[i]) - e->want[i], 2);
            other += pow(e->bound[i], 2);
        }
        rms[k] = sqrt(rounding / n);
        if (!(sqrt(error / n) <= 2 * rms[k] + sqrt(other / n) + TINY))
            fail_msg("%s: bf16 result %d is off by %.3g, and the rounded reference by %.3g", what,
                     k, sqrt(error / n), rms[k]);
    }
}

/* Compares the operation with what is expected, and its bits with those of other numbers of
 * threads, or of a second run on a GPU. */
static inline void check(const char *what, run_fn run, const void *c,
                         const struct nbi_stream_limits *limits, const struct expected *e)
{
    float *one = zeros(e->n, sizeof *one), *more = zeros(e->n, sizeof *more);
    int levels = gpu ? 1 : (int)nbi_simd_level() + 1, runs = gpu ? 2 : 4;
    for (int level = 0; level < levels; level++)
        for (int threads = 1; threads <= runs; threads++) {
            struct rig r;
            double rms[MAX_BLOCKS];
            rounded_count = 0;
            results = threads == 1 ? one : more;
            rig_begin(&r, (enum nbi_simd)level, threads, limits);
            run(&r, c, threads == 1 ? one : more);
            rig_end(&r);
            if (threads > 1 && memcmp(one, more, (size_t)e->n * sizeof *one) != 0)
                fail_msg("%s: run with %d threads differs from the first at level %d", what,
                         threads, level);
            check_rounded(what, results, e, rms);
            for (int64_t i = 0; threads == 1 && i < e->n; i++)
                if (!(fabs((double)one[i] - e->want[i]) <=
                      e->bound[i] + rounding_of(e, i, rms) + TINY))
                    fail_msg("%s, level %d, result %d of %d: %.9g, %.9g expected, off by %.3g, "
                             "%.3g allowed in f32",
                             what, level, (int)i, (int)e->n, (double)one[i], e->want[i],
                             fabs((double)one[i] - e->want[i]), e->bound[i]);
        }
    free(one);
    free(more);
}

/* ---- finite differences ---- */

/* Compares the slope of f at x along a random direction with the gradient. */
typedef double (*objective_fn)(const void *c, const double *x);

static inline void check_gradient(const char *what, objective_fn f, const void *c, const double *x,
                                  const double *gradient, int64_t n)
{
    const double h = 1e-5;
    double *at = zeros(n, sizeof *at), *v = zeros(n, sizeof *v), want = 0, all = 0, side[2];
    for (int64_t i = 0; i < n; i++) {
        v[i] = uniform();
        want += gradient[i] * v[i];
        all += fabs(gradient[i] * v[i]);
    }
    for (int s = 0; s < 2; s++) {
        for (int64_t i = 0; i < n; i++)
            at[i] = x[i] + (s ? h : -h) * v[i];
        side[s] = f(c, at);
    }
    double is = (side[1] - side[0]) / (2 * h);
    if (!(fabs(is - want) <= 1e-6 * (all + fabs(is)) + 1e-9 * (fabs(side[0]) + 1e-3)))
        fail_msg("%s: slope %.12g, gradient %.12g", what, is, want);
    free(at);
    free(v);
}
