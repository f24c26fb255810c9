/* kernels_lanes.h - inner loops over vectors of LANES floats, for one .c file per instruction set.
 *
 * A template: the file that includes it has defined LANES and a few primitives. Every sum over a
 * row is taken in LANES parts, each from front to back, that are added in a fixed order; so a
 * result does not depend on what else is computed. Without LANES the header is empty, so that it
 * compiles alone. */
#pragma once

#ifdef LANES

#include <math.h>
#include <string.h>

#include "backend/cpu/kernels.h"
#include "tensor/half.h"
#include "tensor/kernels.h"

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

/* ---- primitives of the instruction set, defined by the including file ---- */

static vf from_f16(const void *p);  /* LANES values at any alignment */
static vf from_e4m3(const void *p); /* NaN codes need not survive */
static vf fused(vf a, vf b, vf c);  /* a * b + c */
static vf vmax(vf a, vf b);
static float add_up(vf v);                        /* in a fixed order */
static void add_up4(float out[4], const vf v[4]); /* each in that same order */
static float top_of(vf v);
static vi round_to_int(vf x); /* to nearest, ties to even */

/* ---- basics ---- */

static inline vf splat(float f)
{
    return f - (vf){0};
}

static inline vf load(const void *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(void *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

static inline vf from_bf16(const void *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    vi bits = __builtin_convertvector(h, vi) << 16;
    return (vf)bits;
}

static inline vf load_as(const void *p, enum nbi_dtype dtype)
{
    return dtype == NBI_F32    ? load(p)
           : dtype == NBI_BF16 ? from_bf16(p)
           : dtype == NBI_F16  ? from_f16(p)
                               : from_e4m3(p);
}

static inline int bytes_of(enum nbi_dtype dtype)
{
    return nbi_dtypes[dtype].bytes;
}

/* The first n < LANES values, the others 0. */
static inline vf load_some(const void *p, enum nbi_dtype dtype, int64_t n)
{
    uint8_t padded[4 * LANES] = {0};
    memcpy(padded, p, (size_t)(n * bytes_of(dtype)));
    return load_as(padded, dtype);
}

/* e^x for x <= 88; 0 below -87. A polynomial on [-ln2/2, ln2/2], error about one unit in the last
 * place (Cephes' coefficients). */
static inline vf vexp(vf x)
{
    vf z = vmax(x, splat(-87.0f));
    vi n = round_to_int(z * 1.44269504088896341f);
    vf f = __builtin_convertvector(n, vf);
    vf r = fused(f, splat(-0.693359375f), z);
    r = fused(f, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    vf y = fused(p, r * r, r) + 1.0f;
    vf scaled = y * (vf)((n + 127) << 23);
    return (vf)((vi)scaled & (x >= splat(-87.0f)));
}

/* ---- types ---- */

static void widen(float *y, const void *x, enum nbi_dtype dtype, int64_t n)
{
    const uint8_t *p = x;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(y + i, load_as(p + i * bytes_of(dtype), dtype));
    if (i < n)
        nbi_cpu_kernels_scalar.widen(y + i, p + i * bytes_of(dtype), dtype, n - i);
}

static void narrow(void *y, enum nbi_dtype dtype, const float *x, int64_t n)
{
    if (dtype == NBI_F32)
        memcpy(y, x, (size_t)n * sizeof *x);
    else if (dtype == NBI_BF16 || dtype == NBI_F16)
        (dtype == NBI_BF16 ? nbi_kernels()->f32_to_bf16 : nbi_kernels()->f32_to_f16)(y, x, n);
    else
        nbi_cpu_kernels_scalar.narrow(y, dtype, x, n);
}

/* ---- products with rows of floats ---- */

/* R rows of w from r on, by C rows of x from c on. */
#define PRODUCT(R, C)                                                                              \
    static inline __attribute__((always_inline)) void product_##R##x##C(                           \
        const struct nbi_product *p, enum nbi_dtype dtype, int r0, int c0)                         \
    {                                                                                              \
        vf sum[R][C];                                                                              \
        int64_t size = bytes_of(dtype), row = p->K * size, k = 0;                                  \
        const uint8_t *w = (const uint8_t *)p->w + r0 * row;                                       \
        const float *x = p->x + c0 * p->ldx;                                                       \
        memset(sum, 0, sizeof sum);                                                                \
        for (; k + LANES <= p->K; k += LANES)                                                      \
            for (int r = 0; r < R; r++) {                                                          \
                vf a = load_as(w + r * row + k * size, dtype);                                     \
                for (int c = 0; c < C; c++)                                                        \
                    sum[r][c] = fused(a, load(x + c * p->ldx + k), sum[r][c]);                     \
            }                                                                                      \
        for (int r = 0; r < R; r++)                                                                \
            for (int c = 0; c < C; c++) {                                                          \
                vf last = sum[r][c];                                                               \
                if (k < p->K)                                                                      \
                    last = fused(load_some(w + r * row + k * size, dtype, p->K - k),               \
                                 load_some(x + c * p->ldx + k, NBI_F32, p->K - k), last);          \
                float *y = p->y + (c0 + c) * p->ldy + r0 + r;                                      \
                *y = p->add ? *y + add_up(last) : add_up(last);                                    \
            }                                                                                      \
    }

PRODUCT(4, 4)
PRODUCT(4, 1)
PRODUCT(1, 1)

static inline __attribute__((always_inline)) void rows_of(const struct nbi_product *p,
                                                          enum nbi_dtype dtype)
{
    for (int c = 0; c < p->n; c += p->n - c >= 4 ? 4 : 1)
        for (int r = 0; r < p->rows; r += p->rows - r >= 4 ? 4 : 1) {
            if (p->rows - r >= 4 && p->n - c >= 4)
                product_4x4(p, dtype, r, c);
            else if (p->rows - r >= 4)
                product_4x1(p, dtype, r, c);
            else
                for (int i = 0; i < (p->n - c >= 4 ? 4 : 1); i++)
                    product_1x1(p, dtype, r, c + i);
        }
}

static void rows_float(const struct nbi_product *p)
{
    if (p->dtype == NBI_F32)
        rows_of(p, NBI_F32);
    else if (p->dtype == NBI_BF16)
        rows_of(p, NBI_BF16);
    else
        rows_of(p, NBI_F16);
}

/* ---- rows ---- */

static float inverse_norm(const float *x, float eps, int64_t n)
{
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = fused(load(x + i), load(x + i), sum);
    if (i < n) {
        vf last = load_some(x + i, NBI_F32, n - i);
        sum = fused(last, last, sum);
    }
    return 1 / sqrtf(add_up(sum) / (float)n + eps);
}

static void rmsnorm(float *y, float *rstd, const float *x, const float *w, float eps, int64_t C)
{
    float f = inverse_norm(x, eps, C);
    int64_t i = 0;
    if (rstd)
        *rstd = f;
    for (; i + LANES <= C; i += LANES)
        store(y + i, load(x + i) * f * load(w + i));
    for (; i < C; i++)
        y[i] = x[i] * f * w[i];
}

static void norm_rope(float *y, float *rstd, const float *x, const float *w, struct nbi_turn turn,
                      float eps, int64_t D)
{
    float f = inverse_norm(x, eps, D);
    int64_t half = D / 2, i = 0;
    if (rstd)
        *rstd = f;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i) * f * load(w + i), b = load(x + half + i) * f * load(w + half + i);
        vf c = load(turn.cos + i), s = load(turn.sin + i);
        store(y + i, a * c - b * s);
        store(y + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i] * f * w[i], b = x[half + i] * f * w[half + i];
        y[i] = a * turn.cos[i] - b * turn.sin[i];
        y[half + i] = b * turn.cos[i] + a * turn.sin[i];
    }
}

static void swiglu(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf g = load(gate + i);
        /* Beyond 87 the sigmoid is 0 or 1 to the last bit but one; vexp takes nothing above. */
        store(y + i, g / (1.0f + vexp(-vmax(g, splat(-87.0f)))) * load(up + i));
    }
    if (i < n)
        nbi_cpu_kernels_scalar.swiglu(y + i, gate + i, up + i, n - i);
}

static int64_t argmax(const float *x, int64_t n)
{
    int64_t i = 0, at = 0;
    vf top = splat(-INFINITY);
    for (; i + LANES <= n; i += LANES)
        top = vmax(top, load(x + i));
    float best = top_of(top);
    for (; i < n; i++)
        best = x[i] > best ? x[i] : best;
    while (at < n && !(x[at] == best))
        at++;
    return at < n ? at : 0;
}

/* ---- attention ---- */

/* Rows of a store as floats: where they are, if they are floats, else converted. */
static const float *rows_as_floats(const struct nbi_attend *a, const uint8_t *p, int64_t start,
                                   int64_t n, int64_t *stride)
{
    if (a->dtype == NBI_F32) {
        *stride = a->stride / 4;
        return (const float *)(const void *)(p + start * a->stride);
    }
    for (int64_t i = 0; i < n; i++)
        widen(a->scratch + i * a->D, p + (start + i) * a->stride, a->dtype, a->D);
    *stride = a->D;
    return a->scratch;
}

/* score[i] = q . rows[i] * scale, four rows at a time. */
static void scores_of(float *score, const float *q, const float *rows, int64_t stride, int64_t n,
                      int64_t D, float scale)
{
    for (int64_t i = 0; i < n; i += 4) {
        vf sum[4] = {splat(0), splat(0), splat(0), splat(0)};
        const float *row[4];
        float four[4];
        int64_t d = 0, left = n - i < 4 ? n - i : 4;
        for (int64_t j = 0; j < 4; j++)
            row[j] = rows + (i + (j < left ? j : 0)) * stride;
        for (; d + LANES <= D; d += LANES) {
            vf x = load(q + d);
            for (int j = 0; j < 4; j++)
                sum[j] = fused(x, load(row[j] + d), sum[j]);
        }
        for (int j = 0; d < D && j < 4; j++)
            sum[j] = fused(load_some(q + d, NBI_F32, D - d), load_some(row[j] + d, NBI_F32, D - d),
                           sum[j]);
        add_up4(four, sum);
        for (int64_t j = 0; j < left; j++)
            score[i + j] = four[j] * scale;
    }
}

/* y = y * keep + sum p[i] rows[i]; four vectors of y at a time. */
static void weigh(float *y, float keep, const float *p, const float *rows, int64_t stride,
                  int64_t n, int64_t D)
{
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) {
        vf sum[4];
        for (int j = 0; j < 4; j++)
            sum[j] = load(y + d + j * LANES) * keep;
        for (int64_t i = 0; i < n; i++) {
            vf weight = splat(p[i]);
            for (int j = 0; j < 4; j++)
                sum[j] = fused(weight, load(rows + i * stride + d + j * LANES), sum[j]);
        }
        for (int j = 0; j < 4; j++)
            store(y + d + j * LANES, sum[j]);
    }
    for (; d < D; d++) {
        y[d] *= keep;
        for (int64_t i = 0; i < n; i++)
            y[d] += p[i] * rows[i * stride + d];
    }
}

/* score[0, n) becomes e^(score - high); their sum. */
static float exponentials(float *score, float high, int64_t n)
{
    vf sum = splat(0);
    for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; i++)
        score[i] = -INFINITY;
    for (int64_t i = 0; i < n; i += LANES) {
        vf e = vexp(load(score + i) - high);
        store(score + i, e);
        sum += e;
    }
    return add_up(sum);
}

static void attend(const struct nbi_attend *a)
{
    float scale = 1 / sqrtf((float)a->D), top[NBI_SHARED_MAX], sum[NBI_SHARED_MAX];
    float *scores = a->scratch + NBI_KEY_BLOCK * a->D;
    memset(a->y, 0, (size_t)(a->heads * a->D) * sizeof *a->y);
    for (int h = 0; h < a->heads; h++) {
        top[h] = -INFINITY;
        sum[h] = 0;
    }
    for (int64_t start = 0; start < a->count; start += NBI_KEY_BLOCK) {
        int64_t n = a->count - start < NBI_KEY_BLOCK ? a->count - start : NBI_KEY_BLOCK, stride;
        float keep[NBI_SHARED_MAX];
        const float *rows = rows_as_floats(a, a->k, start, n, &stride);
        for (int h = 0; h < a->heads; h++) {
            float *score = scores + h * NBI_KEY_BLOCK, high = top[h];
            scores_of(score, a->q + h * a->D, rows, stride, n, a->D, scale);
            for (int64_t i = 0; i < n; i++)
                high = score[i] > high ? score[i] : high;
            keep[h] = expf(top[h] - high);
            sum[h] = sum[h] * keep[h] + exponentials(score, high, n);
            top[h] = high;
        }
        rows = rows_as_floats(a, a->v, start, n, &stride);
        for (int h = 0; h < a->heads; h++)
            weigh(a->y + h * a->D, keep[h], scores + h * NBI_KEY_BLOCK, rows, stride, n, a->D);
    }
    for (int h = 0; h < a->heads; h++) {
        for (int64_t d = 0; d < a->D; d++)
            a->y[h * a->D + d] /= sum[h];
        if (a->lse)
            a->lse[h] = top[h] + logf(sum[h]);
    }
}

#endif
