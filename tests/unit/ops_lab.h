/* ops_lab.h - runs an operation on the backend under test and on the scalar CPU code, and compares
 * the results. Blocks of memory have guards after them. */
#pragma once

#include <math.h>

#include "backend/decode.h"
#include "support.h"

#include "host_weights.h"
#include "on_devices.h"

#define GUARD 64 /* bytes after each block that must keep their value */

/* ---- backends ---- */

static struct nbi_backend *scalar, *tested;

static inline struct nbi_backend *open_on(const char *device, int threads, enum nbi_simd level)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){device, threads, level}));
    return be;
}

static inline void begin_on(const char *device)
{
    if (strcmp(device, "cuda") == 0)
        need_gpu();
    drawn = 0;
    scalar = open_on("cpu", 1, NBI_SIMD_SCALAR);
    tested = open_on(device, 2, nbi_simd_level());
}

static inline void end_on(void)
{
    scalar->close(scalar);
    tested->close(tested);
}

/* ---- one operation on a backend ---- */

#define MAX_BLOCKS  32
#define MAX_WEIGHTS 16

struct lab {
    struct nbi_backend *be;
    struct nbi_stream *s;
    struct nbi_ptr blocks[MAX_BLOCKS];
    struct nbi_weight weights[MAX_WEIGHTS];
    int block_count, weight_count;
};

static inline void lab_begin(struct lab *l, struct nbi_backend *be,
                             const struct nbi_stream_limits *limits)
{
    *l = (struct lab){.be = be};
    assert_ok(be->stream_new(be, limits, &l->s));
}

static inline void lab_end(struct lab *l)
{
    for (int i = 0; i < l->block_count; i++)
        l->be->free(l->be, l->blocks[i]);
    for (int i = 0; i < l->weight_count; i++)
        l->be->weight_free(l->be, &l->weights[i]);
    l->be->stream_free(l->s);
}

/* Uploads a block; with bytes NULL, one filled with NaN. */
static inline struct nbi_ptr block(struct lab *l, const void *bytes, int64_t n)
{
    uint8_t *with_guard = zeros(n + GUARD, 1);
    memset(with_guard, 0xFF, (size_t)(n + GUARD));
    if (bytes)
        memcpy(with_guard, bytes, (size_t)n);
    assert_true(l->block_count < MAX_BLOCKS);
    struct nbi_ptr *p = &l->blocks[l->block_count++];
    assert_ok(l->be->alloc(l->be, "test", n + GUARD, p));
    assert_ok(l->be->upload(l->s, *p, with_guard, n + GUARD));
    free(with_guard);
    return *p;
}

static inline struct nbi_weight weight_from(struct lab *l, const struct nbi_weight_source *src)
{
    assert_true(l->weight_count < MAX_WEIGHTS);
    struct nbi_weight *out = &l->weights[l->weight_count++];
    assert_ok(l->be->weight_new(l->be, src, out));
    return *out;
}

static inline struct nbi_weight weight(struct lab *l, struct host_weight *w)
{
    struct nbi_weight_source src = source_of(w);
    return weight_from(l, &src);
}

/* Downloads a block and checks its guard. */
static inline void fetch(struct lab *l, void *out, struct nbi_ptr p, int64_t n)
{
    uint8_t guard[GUARD];
    assert_ok(l->be->download(l->s, out, p, n));
    assert_ok(l->be->download(l->s, guard, nbi_ptr_add(p, n), GUARD));
    assert_ok(l->be->sync(l->s));
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0xFF)
            fail_msg("byte %d after a result was written", i);
}

/* ---- comparing ---- */

static char where[160]; /* describes the current case in messages */

static inline void within(const char *what, const float *is, const float *want, const double *bound,
                          int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        double off = fabs((double)is[i] - want[i]);
        if (isnan(want[i]) ? !isnan(is[i]) : !(off <= bound[i]))
            fail_msg("%s: %s %lld is %.9g, not %.9g; %.3g allowed", where, what, (long long)i,
                     (double)is[i], (double)want[i], bound[i]);
        if (off > 0 && off / bound[i] > worst)
            worst = off / bound[i];
    }
    if (getenv("NB_TEST_VERBOSE"))
        print_message("%s: %s: %.3f of the bound\n", where, what, worst);
}

/* Allows an error of `relative` times the value plus `absolute`. */
static inline void close_to(const char *what, const float *is, const float *want, int64_t n,
                            double relative, double absolute)
{
    double *bound = zeros(n, sizeof *bound);
    for (int64_t i = 0; i < n; i++)
        bound[i] = isnan(want[i]) ? 0 : relative * fabs((double)want[i]) + absolute;
    within(what, is, want, bound, n);
    free(bound);
}

static inline void same_bytes(const char *what, const void *is, const void *want, int64_t n)
{
    const uint8_t *a = is, *b = want;
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i])
            fail_msg("%s: byte %lld of %s is %02x, not %02x", where, (long long)i, what, a[i],
                     b[i]);
}

#define COUNT(a) ((int64_t)(sizeof(a) / sizeof *(a)))

static inline float *random_floats(int64_t n, float scale)
{
    float *x = zeros(n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = scale * uniform();
    return x;
}

/* Error bound of a dot product: f32 sums, plus a relative error `off` of each product. The latter
 * are independent and add up as squares. */
static inline double dot_bound(const float *x, const double *w, int64_t K, double off)
{
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < K; k++) {
        double p = fabs(w[k] * (double)x[k]);
        sum += p;
        squares += p * p;
    }
    return 1e-6 * sum + off * sqrt(squares);
}
