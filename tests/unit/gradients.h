/* gradients.h - shared by tests of training operations: a backend under test, comparison with
 * arithmetic in double, and comparison of gradients with finite differences. The CPU is tested with
 * guarded memory, on every instruction set and with one to four threads.
 *
 * Error bounds as in test_cpu_kernels.c: U is half a unit in the last place, and a sum of n
 * products is off by at most (n + 1) U times the sum of their magnitudes. Roundings of single
 * operations are counted generously, since sums dominate. */
#pragma once

#include <math.h>

#include "backend/backend.h"
#include "backend/ops_train.h"
#include "base/rng.h"
#include "support.h"

#include "guarded_backend.h"
#include "on_devices.h"

#define U 0x1p-24
/* Bound of underflow in intermediate results, times any factor used here. */
#define TINY     0x1p-120
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* ---- random input ---- */

static uint64_t drawn;

static inline uint32_t bits32(void)
{
    return nbi_philox(50, drawn++, 0).v[0];
}

static inline double uniform(void)
{
    return 2 * (double)nbi_uniform(bits32()) - 1;
}

static inline void *zeros(int64_t n, size_t size)
{
    void *p = calloc((size_t)(n > 0 ? n : 1), size);
    assert_non_null(p);
    return p;
}

/* Random values that f32 represents, as doubles. */
static inline double *random_floats(int64_t n, double scale)
{
    double *x = zeros(n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (double)(float)(scale * uniform());
    return x;
}

/* ---- a backend under test ---- */

static struct nbi_backend *gpu; /* the device under test; NULL: the CPU, opened for each rig */

static inline void begin_on(const char *device)
{
    drawn = 0;
    if (strcmp(device, "cpu") == 0)
        return;
    need_gpu();
    assert_ok(nbi_backend_open(&gpu, &(struct nbi_backend_opts){.device = device}));
}

static inline void end_on(void)
{
    if (gpu)
        gpu->close(gpu);
    gpu = NULL;
}

#define MAX_BLOCKS 32
#define GUARD      16 /* floats after each result that must keep their value */

struct rig {
    struct nbi_backend *be;
    struct nbi_stream *s;
    struct nbi_ptr blocks[MAX_BLOCKS];
    int count;
};

static inline void rig_begin(struct rig *r, enum nbi_simd level, int threads,
                             const struct nbi_stream_limits *limits)
{
    struct nbi_backend *be;
    *r = (struct rig){.be = gpu};
    if (!gpu) {
        assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){"cpu", threads, level}));
        r->be = guarded_open(be);
    }
    assert_ok(r->be->stream_new(r->be, limits, &r->s));
}

static inline void rig_end(struct rig *r)
{
    for (int i = 0; i < r->count; i++)
        r->be->free(r->be, r->blocks[i]);
    r->be->stream_free(r->s);
    if (!gpu)
        r->be->close(r->be);
}

static inline struct nbi_ptr put_bytes(struct rig *r, const void *p, int64_t bytes)
{
    assert_true(r->count < MAX_BLOCKS);
    struct nbi_ptr *at = &r->blocks[r->count++];
    assert_ok(r->be->alloc(r->be, "test", bytes, at));
    assert_ok(r->be->upload(r->s, *at, p, bytes));
    return *at;
}

/* Uploads n values as f32, with a guard after them. */
static inline struct nbi_ptr put_in(struct rig *r, const double *x, int64_t n)
{
    float *f = zeros(n + GUARD, sizeof *f);
    for (int64_t i = 0; i < n + GUARD; i++)
        f[i] = i < n ? (float)x[i] : -77;
    struct nbi_ptr p = put_bytes(r, f, (n + GUARD) * 4);
    free(f);
    return p;
}

/* Allocates n floats for an operation to write, filled with NaN. */
static inline struct nbi_ptr alloc_nan(struct rig *r, int64_t n)
{
    double *x = zeros(n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    struct nbi_ptr p = put_in(r, x, n);
    free(x);
    return p;
}

static inline float *get(struct rig *r, float *out, struct nbi_ptr p, int64_t n)
{
    float guard[GUARD];
    assert_ok(r->be->download(r->s, out, p, n * 4));
    assert_ok(r->be->download(r->s, guard, nbi_ptr_add(p, n * 4), sizeof guard));
    assert_ok(r->be->sync(r->s));
    for (int i = 0; i < GUARD; i++)
        assert_true(guard[i] == -77);
    return out + n;
}

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
            rig_begin(&r, (enum nbi_simd)level, threads, limits);
            run(&r, c, threads == 1 ? one : more);
            rig_end(&r);
            if (threads > 1 && memcmp(one, more, (size_t)e->n * sizeof *one) != 0)
                fail_msg("%s: run with %d threads differs from the first at level %d", what,
                         threads, level);
            for (int64_t i = 0; threads == 1 && i < e->n; i++)
                if (!(fabs((double)one[i] - e->want[i]) <= e->bound[i] + TINY))
                    fail_msg("%s, level %d, result %d of %d: %.9g, %.9g expected, off by %.3g, "
                             "%.3g allowed",
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
