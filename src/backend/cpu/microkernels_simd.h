/* microkernels_simd.h - inner loops over vectors of LANES floats, compiled once per instruction
 * set.
 *
 * A template: the including .c file defines LANES and a few primitives. Every sum over a row
 * consists of LANES partial sums, each in the order of the row, which are added in a fixed order;
 * so a result does not depend on what else is computed. Without LANES the header is empty, so that
 * it compiles by itself. */
#pragma once

#ifdef LANES

#include <math.h>
#include <string.h>

#include "backend/cpu/microkernels.h"
#include "tensor/codec.h"
#include "tensor/half.h"

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int16_t vs __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

/* ---- primitives of the instruction set, defined by the including file ---- */

static vf load_f16(const void *p);  /* LANES values at any alignment */
static vf load_e4m3(const void *p); /* NaN codes need not stay NaN */
static vf fmadd(vf a, vf b, vf c);  /* a * b + c */
static vf vmax(vf a, vf b);
static float reduce_add(vf v);                        /* in a fixed order */
static void reduce_add4(float out[4], const vf v[4]); /* each in the order of reduce_add */
static float reduce_max(vf v);
static vi round_to_int(vf x);      /* to nearest, ties to even */
static vi interleave_halves(vi v); /* each eight values in the order 0 4 1 5 2 6 3 7 */
static vi evens_first(vi v);       /* each eight values in the order 0 2 4 6 1 3 5 7 */

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

static inline vf load_bf16(const void *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    vi bits = __builtin_convertvector(h, vi) << 16;
    return (vf)bits;
}

static inline vf load_as(const void *p, enum nbi_dtype dtype)
{
    return dtype == NBI_F32    ? load(p)
           : dtype == NBI_BF16 ? load_bf16(p)
           : dtype == NBI_F16  ? load_f16(p)
                               : load_e4m3(p);
}

static inline int bytes_of(enum nbi_dtype dtype)
{
    return nbi_dtypes[dtype].bytes;
}

/* The first n < LANES values; the others are 0. */
static inline vf load_partial(const void *p, enum nbi_dtype dtype, int64_t n)
{
    uint8_t padded[4 * LANES] = {0};
    memcpy(padded, p, (size_t)(n * bytes_of(dtype)));
    return load_as(padded, dtype);
}

/* e^x for x <= 88, and 0 below -87. A polynomial on [-ln2/2, ln2/2] with Cephes' coefficients,
 * accurate to about one unit in the last place. */
static inline vf vexp(vf x)
{
    vf z = vmax(splat(-87.0f), x); /* NaN stays NaN */
    vi n = round_to_int(z * 1.44269504088896341f);
    vf f = __builtin_convertvector(n, vf);
    vf r = fmadd(f, splat(-0.693359375f), z);
    r = fmadd(f, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fmadd(p, r, splat(1.3981999507e-3f));
    p = fmadd(p, r, splat(8.3334519073e-3f));
    p = fmadd(p, r, splat(4.1665795894e-2f));
    p = fmadd(p, r, splat(1.6666665459e-1f));
    p = fmadd(p, r, splat(5.0000001201e-1f));
    vf y = fmadd(p, r * r, r) + 1.0f;
    vf scaled = y * (vf)((n + 127) << 23);
    return (vf)((vi)scaled & ~(x < splat(-87.0f)));
}

/* ---- types ---- */

static void to_f32(float *y, const void *x, enum nbi_dtype dtype, int64_t n)
{
    const uint8_t *p = x;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(y + i, load_as(p + i * bytes_of(dtype), dtype));
    if (i < n)
        nbi_microkernels_scalar.to_f32(y + i, p + i * bytes_of(dtype), dtype, n - i);
}

static void from_f32(void *y, enum nbi_dtype dtype, const float *x, int64_t n)
{
    if (dtype == NBI_F32)
        memcpy(y, x, (size_t)n * sizeof *x);
    else if (dtype == NBI_BF16 || dtype == NBI_F16)
        (dtype == NBI_BF16 ? nbi_codec_table()->f32_to_bf16 : nbi_codec_table()->f32_to_f16)(y, x,
                                                                                             n);
    else
        nbi_microkernels_scalar.from_f32(y, dtype, x, n);
}

/* ---- products with rows of floats ---- */

/* Writes the dot products of R rows of w with row c of x. */
static inline __attribute__((always_inline)) void
store_sums(const struct nbi_dot_tile *p, const vf *sum, const int R, int r, int c)
{
    float *y = p->y + c * p->ldy + r, all[4];
    if (R == 4)
        reduce_add4(all, sum);
    else
        all[0] = reduce_add(sum[0]);
    for (int i = 0; i < R; i++)
        y[i] = p->add ? y[i] + all[i] : all[i];
}

/* R rows of w from r0 on by C rows of x from c0 on; R is 1 or 4. */
#define DOT_TILE(R, C)                                                                             \
    static inline __attribute__((always_inline)) void dot_##R##x##C(                               \
        const struct nbi_dot_tile *p, enum nbi_dtype dtype, int r0, int c0)                        \
    {                                                                                              \
        vf sum[C][R];                                                                              \
        int64_t size = bytes_of(dtype), row = p->ldw * size, k = 0;                                \
        const uint8_t *w = (const uint8_t *)p->w + r0 * row;                                       \
        const float *x = p->x + c0 * p->ldx;                                                       \
        memset(sum, 0, sizeof sum);                                                                \
        for (; k + LANES <= p->K; k += LANES)                                                      \
            for (int r = 0; r < R; r++) {                                                          \
                vf a = load_as(w + r * row + k * size, dtype);                                     \
                for (int c = 0; c < C; c++)                                                        \
                    sum[c][r] = fmadd(a, load(x + c * p->ldx + k), sum[c][r]);                     \
            }                                                                                      \
        for (int r = 0; r < R && k < p->K; r++) {                                                  \
            vf a = load_partial(w + r * row + k * size, dtype, p->K - k);                          \
            for (int c = 0; c < C; c++)                                                            \
                sum[c][r] =                                                                        \
                    fmadd(a, load_partial(x + c * p->ldx + k, NBI_F32, p->K - k), sum[c][r]);      \
        }                                                                                          \
        for (int c = 0; c < C; c++)                                                                \
            store_sums(p, sum[c], R, r0, c0 + c);                                                  \
    }

DOT_TILE(4, X_TILE)
DOT_TILE(4, 4)
DOT_TILE(4, 1)
DOT_TILE(1, 1)

/* Rows of x for the next tile: as many as fill the registers, unless that leaves an awkward rest.
 */
static inline int next_x_rows(int left)
{
    return left >= X_TILE && left % X_TILE <= left % 4 ? X_TILE : left >= 4 ? 4 : 1;
}

static inline __attribute__((always_inline)) void dot_rows(const struct nbi_dot_tile *p,
                                                           enum nbi_dtype dtype)
{
    for (int c = 0, n; c < p->n; c += n) {
        int r = 0;
        n = next_x_rows(p->n - c);
        for (; r + 4 <= p->rows; r += 4) {
            if (n == X_TILE)
                dot_4xX_TILE(p, dtype, r, c);
            else if (n == 4)
                dot_4x4(p, dtype, r, c);
            else
                dot_4x1(p, dtype, r, c);
        }
        for (; r < p->rows; r++)
            for (int i = 0; i < n; i++)
                dot_1x1(p, dtype, r, c + i);
    }
}

static void rows_float(const struct nbi_dot_tile *p)
{
    if (p->dtype == NBI_F32)
        dot_rows(p, NBI_F32);
    else if (p->dtype == NBI_BF16)
        dot_rows(p, NBI_BF16);
    else
        dot_rows(p, NBI_F16);
}

/* ---- activations as whole numbers ---- */

/* Writes the values of columns [k, k + LANES) to a panel of n > 1 rows. */
static inline void store_pairs(int16_t *q, int n, int64_t k, vi values)
{
    vs words = __builtin_convertvector(interleave_halves(values), vs);
    int32_t w[LANES / 2];
    memcpy(w, &words, sizeof w);
    for (int i = 0; i < LANES / 2; i++)
        memcpy(q + k * n + i * 2 * n, &w[i], sizeof w[i]);
}

/* The same for a row in hi/lo bytes, without the sums. */
static inline void store_hi_lo(int8_t *q, int64_t k, vi values)
{
    vi high = (values + 128) >> 8, low = values - (high << 8);
    vb h = __builtin_convertvector(evens_first(high), vb);
    vb l = __builtin_convertvector(evens_first(low), vb);
    int8_t *at = q + k / 32 * (2 * NBI_X_I16_HI_LO) + k % 32 * 2;
    for (int i = 0; i < LANES / 8; i++) {
        memcpy(at + 16 * i, (const int8_t *)&h + 8 * i, 8);
        memcpy(at + 16 * i + 8, (const int8_t *)&l + 8 * i, 8);
    }
}

/* Writes -12 times the sum of a group. The sum is exact as a float. */
static inline void store_group_sum(int8_t *q, int64_t k, vf sum)
{
    int32_t s = -12 * (int32_t)reduce_add(sum);
    memcpy(q + k / 32 * (2 * NBI_X_I16_HI_LO) + 64 + k % 32 / 16 * 4, &s, sizeof s);
}

/* Columns [k, k + LANES) of a row of K; zeros from K on. */
static inline vf load_padded(const float *x, int64_t k, int64_t K)
{
    return k + LANES <= K ? load(x + k) : k < K ? load_partial(x + k, NBI_F32, K - k) : splat(0);
}

static void quantize_x_i16(int16_t *q, float *scale, int n, const float *x, int64_t K)
{
    for (int64_t b = 0; b * NBI_X_I16_BLOCK < K; b++) {
        int64_t first = b * NBI_X_I16_BLOCK, left = nbi_x_i16_values(K) - first;
        int64_t end = first + (left < NBI_X_I16_BLOCK ? left : NBI_X_I16_BLOCK);
        vf max = splat(0), nonfinite = splat(0);
        for (int64_t k = first; k < end; k += LANES) {
            vf v = load_padded(x, k, K);
            max = vmax(max, vmax(v, -v));
            nonfinite += v * 0.0f; /* NaN if a value is non-finite */
        }
        float amax = reduce_max(max), nan = reduce_add(nonfinite);
        bool usable = amax >= NBI_X_I16_TINY && nan == 0;
        float inverse = usable ? NBI_X_I16_MAX / amax : 0;
        vf sum = splat(0);
        for (int64_t k = first; k < end; k += LANES) {
            vi v = usable ? round_to_int(load_padded(x, k, K) * inverse) : (vi){0};
            if (n > 1) {
                store_pairs(q, n, k, v);
                continue;
            }
            store_hi_lo((int8_t *)q, k, v);
            sum = (k % 16 ? sum : splat(0)) + __builtin_convertvector(v, vf);
            if ((k + LANES) % 16 == 0)
                store_group_sum((int8_t *)q, k, sum);
        }
        scale[b * n] = nan == 0 ? amax / NBI_X_I16_MAX * 0x1p7f : NAN;
    }
}

/* ---- rows ---- */

static float inverse_norm(const float *x, float eps, int64_t n)
{
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = fmadd(load(x + i), load(x + i), sum);
    if (i < n) {
        vf last = load_partial(x + i, NBI_F32, n - i);
        sum = fmadd(last, last, sum);
    }
    return 1 / sqrtf(reduce_add(sum) / (float)n + eps);
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

static void norm_rope(float *y, float *rstd, const float *x, const float *w,
                      struct nbi_rope_row rope, float eps, int64_t D)
{
    float f = inverse_norm(x, eps, D);
    int64_t half = D / 2, i = 0;
    if (rstd)
        *rstd = f;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i) * f * load(w + i), b = load(x + half + i) * f * load(w + half + i);
        vf c = load(rope.cos + i), s = load(rope.sin + i);
        store(y + i, a * c - b * s);
        store(y + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i] * f * w[i], b = x[half + i] * f * w[half + i];
        y[i] = a * rope.cos[i] - b * rope.sin[i];
        y[half + i] = b * rope.cos[i] + a * rope.sin[i];
    }
}

static void swiglu(float *y, const float *gate, const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf g = load(gate + i);
        /* From 87 on the sigmoid is 0 or 1 to within one unit in the last place; vexp does not take
         * larger values. */
        store(y + i, g / (1.0f + vexp(-vmax(splat(-87.0f), g))) * load(up + i));
    }
    if (i < n)
        nbi_microkernels_scalar.swiglu(y + i, gate + i, up + i, n - i);
}

static int64_t argmax(const float *x, int64_t n)
{
    int64_t i = 0, at = 0;
    vf max = splat(-INFINITY);
    for (; i + LANES <= n; i += LANES)
        max = vmax(max, load(x + i));
    float best = reduce_max(max);
    for (; i < n; i++)
        best = x[i] > best ? x[i] : best;
    while (at < n && !(x[at] == best))
        at++;
    return at < n ? at : 0;
}

/* ---- attention ---- */

/* The keys or values of one block, as floats. */
struct rows {
    const float *p;
    int64_t stride, n, D;
};

/* The block in place if it is f32, else converted to the scratch. */
static struct rows rows_as_floats(const struct nbi_attention_tile *a, const uint8_t *p,
                                  int64_t start, int64_t n)
{
    p = nbi_attention_kv_block(a, p, start);
    if (a->dtype == NBI_F32)
        return (struct rows){(const float *)(const void *)p, a->stride / 4, n, a->D};
    for (int64_t i = 0; i < n; i++)
        to_f32(a->scratch + i * a->D, p + i * a->stride, a->dtype, a->D);
    return (struct rows){a->scratch, a->D, n, a->D};
}

/* The state of one query. */
struct query {
    const float *q;
    float *y, *score; /* score [NBI_KEY_BLOCK] */
    int64_t count;    /* keys it sees */
    float max, sum;
};

/* Scores of Q queries for four keys. `whole`: D is a multiple of LANES, known at compile time. */
static inline __attribute__((always_inline)) void score_4_keys(const struct query *t, const int Q,
                                                               const float *const row[4], int64_t D,
                                                               int64_t at, const bool whole)
{
    float scale = 1 / sqrtf((float)D);
    vf sum[QUERY_TILE][4];
    int64_t d = 0;
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < 4; j++)
            sum[q][j] = splat(0);
    for (; d + LANES <= D; d += LANES)
        for (int j = 0; j < 4; j++) {
            vf key = load(row[j] + d);
            for (int q = 0; q < Q; q++)
                sum[q][j] = fmadd(load(t[q].q + d), key, sum[q][j]);
        }
    if (!whole)
        for (int j = 0; j < 4; j++) {
            vf key = load_partial(row[j] + d, NBI_F32, D - d);
            for (int q = 0; q < Q; q++)
                sum[q][j] = fmadd(load_partial(t[q].q + d, NBI_F32, D - d), key, sum[q][j]);
        }
    for (int q = 0; q < Q; q++) {
        float four[4];
        reduce_add4(four, sum[q]);
        for (int j = 0; j < 4; j++)
            t[q].score[at + j] = four[j] * scale;
    }
}

/* Scores of Q queries for n keys, including keys that a query does not see. */
static inline __attribute__((always_inline)) void score_keys(const struct query *t, const int Q,
                                                             struct rows k, int64_t n)
{
    for (int64_t i = 0; i < n; i += 4) {
        const float *row[4];
        for (int64_t j = 0; j < 4; j++)
            row[j] = k.p + (i + j < n ? i + j : i) * k.stride;
        if (k.D % LANES == 0)
            score_4_keys(t, Q, row, k.D, i, true);
        else
            score_4_keys(t, Q, row, k.D, i, false);
    }
}

/* y += score . values of keys [from, v.n), for V vectors of y from column d on. */
static inline __attribute__((always_inline)) void add_values_tile(const struct query *t,
                                                                  const int Q, struct rows v,
                                                                  int64_t from, int64_t d,
                                                                  const int V)
{
    vf sum[QUERY_TILE][4];
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < V; j++)
            sum[q][j] = load(t[q].y + d + j * LANES);
    for (int64_t i = from; i < v.n; i++)
        for (int j = 0; j < V; j++) {
            vf value = load(v.p + i * v.stride + d + j * LANES);
            for (int q = 0; q < Q; q++)
                sum[q][j] = fmadd(splat(t[q].score[i]), value, sum[q][j]);
        }
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < V; j++)
            store(t[q].y + d + j * LANES, sum[q][j]);
}

static inline __attribute__((always_inline)) void add_values(const struct query *t, const int Q,
                                                             struct rows v, int64_t from)
{
    int64_t d = 0;
    for (; d + 4 * LANES <= v.D; d += 4 * LANES)
        add_values_tile(t, Q, v, from, d, 4);
    for (; d + LANES <= v.D; d += LANES)
        add_values_tile(t, Q, v, from, d, 1);
    for (int q = 0; q < Q; q++)
        for (int64_t rest = d; rest < v.D; rest++)
            for (int64_t i = from; i < v.n; i++)
                t[q].y[rest] += t[q].score[i] * v.p[i * v.stride + rest];
}

/* Replaces the scores of n keys by e^(score - maximum) and updates sum and maximum. Returns the
 * factor for what was summed before. */
static float softmax_block(struct query *t, int64_t n)
{
    vf high = splat(t->max), sum = splat(0);
    for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; i++)
        t->score[i] = -INFINITY;
    for (int64_t i = 0; i < n; i += LANES)
        high = vmax(high, load(t->score + i));
    float max = reduce_max(high);
    for (int64_t i = 0; i < n; i += LANES) {
        vf e = vexp(load(t->score + i) - max);
        store(t->score + i, e);
        sum += e;
    }
    float keep = expf(t->max - max);
    t->sum = t->sum * keep + reduce_add(sum);
    t->max = max;
    return keep;
}

static void scale_row(float *y, float by, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(y + i, load(y + i) * by);
    for (; i < n; i++)
        y[i] *= by;
}

static int64_t visible_keys(const struct query *t, int64_t start, int64_t n)
{
    int64_t visible = t->count - start;
    return visible < 0 ? 0 : visible < n ? visible : n;
}

/* Scores and softmax of the keys from `start` on for Q queries; each sees at least one of them, and
 * none sees more than the last query. */
static inline __attribute__((always_inline)) void score_block(struct query *t, const int Q,
                                                              struct rows k, int64_t start)
{
    score_keys(t, Q, k, visible_keys(&t[Q - 1], start, k.n)); /* the last query sees most */
    for (int q = 0; q < Q; q++) {
        float keep = softmax_block(&t[q], visible_keys(&t[q], start, k.n));
        if (start > 0 && keep != 1)
            scale_row(t[q].y, keep, k.D);
    }
}

/* Adds the values for Q queries: all at once for the keys that all of them see, then one by one. */
static inline __attribute__((always_inline)) void value_block(struct query *t, const int Q,
                                                              struct rows v, int64_t start)
{
    int64_t n = v.n, all = n;
    for (int q = 0; q < Q; q++)
        all = visible_keys(&t[q], start, n) < all ? visible_keys(&t[q], start, n) : all;
    v.n = all;
    add_values(t, Q, v, 0);
    for (int q = 0; q < Q; q++) {
        v.n = visible_keys(&t[q], start, n);
        if (v.n > all)
            add_values(t + q, 1, v, all);
    }
}

/* Calls block for QUERY_TILE queries at a time, then for single ones. */
#define FOR_QUERY_TILES(block, t, n, rows, start)                                                  \
    do {                                                                                           \
        int at = 0;                                                                                \
        for (; at + QUERY_TILE <= (n); at += QUERY_TILE)                                           \
            block((t) + at, QUERY_TILE, rows, start);                                              \
        for (; at < (n); at++)                                                                     \
            block((t) + at, 1, rows, start);                                                       \
    } while (0)

static void attention(const struct nbi_attention_tile *a)
{
    struct query t[NBI_QUERY_BLOCK];
    int n = a->rows * a->heads, from = 0;
    int64_t keys =
        a->last[a->rows - 1] - a->first + 1; /* the last row sees all keys that any row sees */
    for (int i = 0; i < n; i++) {
        int64_t r = i / a->heads, at = r * a->ldq + i % a->heads * a->D;
        t[i] = (struct query){.q = a->q + at,
                              .y = a->y + at,
                              .score = a->scratch + NBI_KEY_BLOCK * a->D + i * NBI_KEY_BLOCK,
                              .count = a->last[r] - a->first + 1,
                              .max = -INFINITY};
        memset(t[i].y, 0, (size_t)a->D * sizeof *t[i].y);
    }
    for (int64_t start = 0; start < keys; start += NBI_KEY_BLOCK) {
        int64_t count = keys - start < NBI_KEY_BLOCK ? keys - start : NBI_KEY_BLOCK;
        while (t[from].count <= start)
            from++;
        struct rows k = rows_as_floats(a, a->k, start, count);
        FOR_QUERY_TILES(score_block, t + from, n - from, k, start);
        struct rows v = rows_as_floats(a, a->v, start, count);
        FOR_QUERY_TILES(value_block, t + from, n - from, v, start);
    }
    for (int i = 0; i < n; i++) {
        for (int64_t d = 0; d < a->D; d++)
            t[i].y[d] /= t[i].sum;
        if (a->lse)
            a->lse[i / a->heads * a->ld_lse + i % a->heads] = t[i].max + logf(t[i].sum);
    }
}

/* ---- backward ---- */

#define NR (NR_VECTORS * LANES)

/* row is a_row, passed as a constant where it is 1. c is prefetched. */
static inline __attribute__((always_inline)) void gemm_tile_by(const struct nbi_gemm_tile *t,
                                                               const int64_t row)
{
    const float *a = t->a, *b = t->b;
    vf sum[MR][NR_VECTORS];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR_VECTORS; n++) {
            sum[m][n] = splat(0);
            __builtin_prefetch(t->c + m * t->ldc + n * LANES, 1, 3);
        }
    for (int64_t k = 0; k < t->k; k++, a += t->a_col, b += t->ldb) {
        vf v[NR_VECTORS];
        for (int n = 0; n < NR_VECTORS; n++)
            v[n] = load(b + n * LANES);
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR_VECTORS; n++)
                sum[m][n] = fmadd(splat(a[m * row]), v[n], sum[m][n]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR_VECTORS; n++) {
            float *c = t->c + m * t->ldc + n * LANES;
            store(c, t->add ? load(c) + sum[m][n] : sum[m][n]);
        }
}

static void gemm_tile(const struct nbi_gemm_tile *t)
{
    if (t->a_row == 1)
        gemm_tile_by(t, 1);
    else
        gemm_tile_by(t, t->a_row);
}

typedef float v4 __attribute__((vector_size(16)));

/* Transposes 4 x 4 values. */
static inline void transpose4(float *y, int64_t ldy, const float *x, int64_t ldx, float by)
{
    v4 r[4], t[4];
    for (int i = 0; i < 4; i++) {
        memcpy(&r[i], x + i * ldx, sizeof r[i]);
        r[i] *= by;
    }
    for (int i = 0; i < 2; i++) {
        t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 4, 1, 5);
        t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 6, 3, 7);
    }
    for (int i = 0; i < 2; i++) {
        r[2 * i] = __builtin_shufflevector(t[i], t[2 + i], 0, 1, 4, 5);
        r[2 * i + 1] = __builtin_shufflevector(t[i], t[2 + i], 2, 3, 6, 7);
    }
    for (int i = 0; i < 4; i++)
        memcpy(y + i * ldy, &r[i], sizeof r[i]);
}

/* Uses up each cache line of x before the next. */
static void pack_rows(float *y, int64_t ldy, const float *x, struct nbi_strided at, float by)
{
    int64_t rows = at.rows / 4 * 4, cols = at.cols / 4 * 4;
    for (int64_t line = 0; line < cols; line += 16)
        for (int64_t r = 0; r < rows; r += 4)
            for (int64_t c = line; c < cols && c < line + 16; c += 4)
                transpose4(y + c * ldy + r, ldy, x + r * at.row + c, at.row, by);
    for (int64_t r = 0; r < at.rows; r++)
        for (int64_t c = r < rows ? cols : 0; c < at.cols; c++)
            y[c * ldy + r] = by * x[r * at.row + c];
}

static void pack(float *y, int64_t ldy, const float *x, struct nbi_strided at, float by)
{
    if (at.col == 1) {
        pack_rows(y, ldy, x, at, by);
        return;
    }
    for (int64_t c = 0; c < at.cols; c++)
        if (at.row == 1 && at.rows == MR)
            for (int r = 0; r < MR; r++)
                y[c * ldy + r] = by * x[c * at.col + r];
        else
            for (int64_t r = 0; r < at.rows; r++)
                y[c * ldy + r] = by * x[r * at.row + c * at.col];
}

static float exp_sum(float *y, const float *x, float max, int64_t n)
{
    vf sum = splat(0);
    int64_t i = 0;
    for (; i < n; i += LANES) {
        bool whole = i + LANES <= n;
        vf z = (whole ? load(x + i) : load_partial(x + i, NBI_F32, n - i)) - max;
        vf e = (vf)((vi)vexp(z) | (z != z)); // NOLINT(misc-redundant-expression)
        if (whole) {
            store(y + i, e);
            sum += e;
        } else
            for (int64_t j = i; j < n; j++) {
                y[j] = e[j - i];
                sum[j - i] += y[j];
            }
    }
    return reduce_add(sum);
}

static void rmsnorm_bwd(float *dx, const float *dy, const float *x, const float *w, float rstd,
                        int64_t C)
{
    vf sum = splat(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= C; i += LANES)
        sum = fmadd(load(dy + i) * load(w + i), load(x + i), sum);
    for (int64_t j = i; j < C; j++)
        rest += dy[j] * w[j] * x[j];
    float f = (reduce_add(sum) + rest) / (float)C * rstd * rstd * rstd;
    for (i = 0; i + LANES <= C; i += LANES)
        store(dx + i, load(dx + i) + (load(dy + i) * load(w + i) * rstd - load(x + i) * f));
    for (; i < C; i++)
        dx[i] += dy[i] * w[i] * rstd - x[i] * f;
}

static void norm_rope_bwd(float *d, float *dw, const float *x, const float *w,
                          struct nbi_rope_row rope, float rstd, int64_t D)
{
    int64_t half = D / 2, i = 0;
    vf sum = splat(0);
    float rest = 0;
    for (; i + LANES <= half; i += LANES) {
        vf c = load(rope.cos + i), s = load(rope.sin + i);
        vf a = load(d + i) * c + load(d + half + i) * s;
        vf b = load(d + half + i) * c - load(d + i) * s;
        vf xa = load(x + i), xb = load(x + half + i);
        store(dw + i, load(dw + i) + a * xa * rstd);
        store(dw + half + i, load(dw + half + i) + b * xb * rstd);
        a *= load(w + i);
        b *= load(w + half + i);
        store(d + i, a);
        store(d + half + i, b);
        sum = fmadd(b, xb, fmadd(a, xa, sum));
    }
    for (int64_t j = i + half; i < half; i++, j++) {
        float a = d[i] * rope.cos[i] + d[j] * rope.sin[i];
        float b = d[j] * rope.cos[i] - d[i] * rope.sin[i];
        dw[i] += a * x[i] * rstd;
        dw[j] += b * x[j] * rstd;
        d[i] = a * w[i];
        d[j] = b * w[j];
        rest += d[i] * x[i] + d[j] * x[j];
    }
    float f = (reduce_add(sum) + rest) / (float)D * rstd * rstd * rstd;
    for (i = 0; i + LANES <= D; i += LANES)
        store(d + i, load(d + i) * rstd - load(x + i) * f);
    for (; i < D; i++)
        d[i] = d[i] * rstd - x[i] * f;
}

static void swiglu_bwd(float *dgate, float *dup, const float *dy, const float *gate,
                       const float *up, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf g = load(gate + i), u = load(up + i), d = load(dy + i);
        vf s = 1.0f / (1.0f + vexp(-vmax(splat(-87.0f), g)));
        store(dgate + i, d * u * s * (1.0f + g * (1.0f - s)));
        store(dup + i, d * g * s);
    }
    if (i < n)
        nbi_microkernels_scalar.swiglu_bwd(dgate + i, dup + i, dy + i, gate + i, up + i, n - i);
}

static void softmax_bwd(const struct nbi_softmax_bwd *a)
{
    for (int64_t i = 0; i < a->n; i += LANES) {
        vf lse = a->each ? load(a->lse + i) : splat(*a->lse);
        vf delta = a->each ? load(a->delta + i) : splat(*a->delta);
        vf p = vexp(load(a->p + i) * a->scale - lse);
        store(a->p + i, p);
        store(a->ds + i, p * (load(a->ds + i) - delta) * a->scale);
    }
}

#endif
