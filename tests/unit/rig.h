/* rig.h - a backend under test for training operations, and what goes to it and comes back:
 * activations in either type, with row strides, f32, and bytes. Each result has a guard after it.
 * The CPU has guarded memory. */
#pragma once

#include <math.h>

#include "backend/backend.h"
#include "backend/ops_train.h"
#include "base/rng.h"
#include "support.h"
#include "tensor/half.h"

#include "guarded_backend.h"
#include "on_devices.h"

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

/* ---- activations ---- */

static bool bf16;   /* their type in the current case; else f32 */
static int64_t gap; /* elements between rows of strided arguments */

/* The row stride of rows of `cols` elements; 0: contiguous. */
static inline int64_t ld_of(int64_t cols)
{
    return gap > 0 ? cols + gap : 0;
}

static inline double to_bf16(double x)
{
    return (double)nbi_bf16_to_f32(nbi_f32_to_bf16((float)x));
}

/* Random values that an activation represents. */
static inline double *random_acts(int64_t n, double scale)
{
    double *x = random_floats(n, scale);
    for (int64_t i = 0; i < n && bf16; i++)
        x[i] = to_bf16(x[i]);
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
    bf16 = false;
    gap = 0;
    if (gpu)
        gpu->close(gpu);
    gpu = NULL;
}

#define MAX_BLOCKS  32
#define GUARD       16  /* values after each result that must keep theirs */
#define GUARD_VALUE -77 /* also between rows */

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

/* Limits of a stream for N rows of up to `cols` elements. */
static inline struct nbi_stream_limits limits_of(int64_t N, int64_t cols)
{
    return (struct nbi_stream_limits){
        .N = N, .K = cols, .D = 2, .heads = 1, .training = true, .bf16 = bf16};
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

/* ---- activations of an operation ---- */

/* Uploads N rows of activations, `ld` elements apart (0: contiguous). */
static inline struct nbi_ptr put_rows(struct rig *r, const double *x, int64_t N, int64_t cols,
                                      int64_t ld)
{
    int64_t row = ld > 0 ? ld : cols, n = N * row + GUARD;
    float *f = zeros(n, sizeof *f);
    uint16_t *half = zeros(n, sizeof *half);
    for (int64_t i = 0; i < n; i++) {
        bool inside = i < N * row && i % row < cols;
        f[i] = inside ? (float)x[i / row * cols + i % row] : GUARD_VALUE;
        half[i] = nbi_f32_to_bf16(f[i]);
    }
    struct nbi_ptr p = put_bytes(r, bf16 ? (const void *)half : f, n * (bf16 ? 2 : 4));
    free(f);
    free(half);
    return p;
}

static inline struct nbi_ptr put_acts(struct rig *r, const double *x, int64_t n)
{
    return put_rows(r, x, 1, n, 0);
}

/* Rows for an operation to write, filled with NaN. */
static inline struct nbi_ptr alloc_rows(struct rig *r, int64_t N, int64_t cols, int64_t ld)
{
    double *x = zeros(N * cols, sizeof *x);
    for (int64_t i = 0; i < N * cols; i++)
        x[i] = NAN;
    struct nbi_ptr p = put_rows(r, x, N, cols, ld);
    free(x);
    return p;
}

static inline struct nbi_ptr alloc_acts(struct rig *r, int64_t n)
{
    return alloc_rows(r, 1, n, 0);
}

/* The parts of the current results that are in bf16. */
static struct {
    int64_t first, n;
} rounded[MAX_BLOCKS];
static int rounded_count;
static const float *results;

static inline void is_rounded(const float *part, int64_t n)
{
    assert_true(rounded_count < MAX_BLOCKS);
    rounded[rounded_count].first = part - results;
    rounded[rounded_count++].n = n;
}

static inline float *get_rows(struct rig *r, float *out, struct nbi_ptr p, int64_t N, int64_t cols,
                              int64_t ld)
{
    int64_t row = ld > 0 ? ld : cols, n = N * row + GUARD;
    float *f = zeros(n, sizeof *f);
    uint16_t *half = zeros(n, sizeof *half);
    assert_ok(r->be->download(r->s, bf16 ? (void *)half : f, p, n * (bf16 ? 2 : 4)));
    assert_ok(r->be->sync(r->s));
    for (int64_t i = 0; i < n; i++) {
        float value = bf16 ? nbi_bf16_to_f32(half[i]) : f[i];
        if (i < N * row && i % row < cols)
            out[i / row * cols + i % row] = value;
        else
            assert_true(value == GUARD_VALUE);
    }
    free(f);
    free(half);
    if (bf16)
        is_rounded(out, N * cols);
    return out + N * cols;
}

static inline float *get_acts(struct rig *r, float *out, struct nbi_ptr p, int64_t n)
{
    return get_rows(r, out, p, 1, n, 0);
}

/* ---- vectors of weights ---- */

static inline enum nb_status read_vector(void *ctx, int64_t first, int64_t count, void *data,
                                         void *scales)
{
    (void)scales;
    for (int64_t i = 0; i < count; i++)
        ((float *)data)[i] = (float)((const double *)ctx)[first + i];
    return NB_OK;
}

static inline struct nbi_weight put_vector(struct rig *r, double *w, int64_t n)
{
    struct nbi_weight out;
    const struct nbi_weight_source src = {
        .dtype = NBI_F32, .rows = n, .tensor_scale = 1, .read = read_vector, .ctx = w};
    assert_ok(r->be->weight_new(r->be, &src, &out));
    return out;
}
