/* test_cpu_kernels.c - every microkernel on every instruction set against arithmetic in double, and
 * that a result depends on its own row alone.
 *
 * Error bounds. U = 2^-24 is half a unit in the last place: an f32 operation is off by at most U
 * times its result. A sum of n products in any order, fused or not, is off by at most (n + 1) U
 * times the sum of their magnitudes; a factor applied afterwards adds one U. Each underflow is off
 * by at most 2^-149, times later factors. Random signs stay far below these bounds; a lost or
 * doubled product is far above. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/microkernels.h"
#include "base/rng.h"
#include "runner.h"
#include "stored.h"

#define U         0x1p-24
#define UNDERFLOW 0x1p-149
#define ROWS      CPU_TILE_ROWS
#define X_ROWS    NBI_X_PANEL_ROWS
#define COUNT(a)  (sizeof(a) / sizeof *(a))

/* ---- random input ---- */

enum values { ORDINARY, LARGE, TINY, ZERO, MIXED, ROW_OF_ZEROS, VALUES };

static uint64_t drawn;

static uint32_t bits32(void)
{
    return nbi_philox(4, drawn++, 0).v[0];
}

/* In (-1, 1). */
static float uniform(void)
{
    return 2 * nbi_uniform(bits32()) - 1;
}

static float value(enum values kind)
{
    switch (kind) {
    case LARGE:
        return uniform() * 1e15f;
    case TINY:
        return uniform() * 1e-30f;
    case ZERO:
        return bits32() & 1 ? 0.0f : -0.0f;
    case MIXED:
        return ldexpf(uniform(), (int)(bits32() % 40) - 20);
    default:
        return uniform();
    }
}

static void *bytes_of(int64_t n)
{
    void *p = malloc((size_t)n);
    assert_non_null(p);
    return p;
}

static float *floats_of(int64_t n, enum values kind)
{
    float *x = bytes_of(n * 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = value(kind);
    return x;
}

static int size_of(enum nbi_dtype dtype)
{
    return nbi_dtypes[dtype].bytes;
}

static void assert_near(const char *what, const char *kernels, double is, double want, double bound)
{
    if (!(fabs(is - want) <= bound))
        fail_msg("%s (%s): %.9g, %.9g expected, off by %.3g, %.3g allowed", what, kernels, is, want,
                 fabs(is - want), bound);
}

/* ---- products ---- */

enum kind { EXACT, X_I16, FLOATS };

/* Sixteen rows of w against eight rows of x, with the results in double. */
struct product {
    enum kind kind;
    enum nbi_dtype dtype;
    int64_t K, padded, blocks, ldx, ldy;
    float tensor_scale;
    uint8_t *tiles;
    uint8_t *w; /* unaligned */
    float *x;
    int16_t *x_i16; /* [X_ROWS, padded] integers in column order */
    float *x_i16_scale;
    float y0[X_ROWS][ROWS];
    double want[X_ROWS][ROWS], bound[X_ROWS][ROWS];
};

static uint8_t nibble_at(const uint8_t *codes, int64_t i)
{
    return i & 1 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
}

/* Reads a panel of n rows, independently of nvfp4_tile.h's helpers. Pairs: columns k and k + 4 of
 * each row. One row: x = 256 hi + lo in 72 bytes per 32 columns; per 8 columns the hi of the even
 * and of the odd ones, then their lo; then -12 times the sum of either group. */
static int32_t panel_get(const int16_t *q, int64_t k, int c, int n)
{
    const int8_t *bytes = (const int8_t *)q + k / 32 * 72 + k % 32 / 8 * 16 + k % 8 / 2;
    if (n == 1)
        return 256 * bytes[k & 1 ? 4 : 0] + bytes[k & 1 ? 12 : 8];
    return q[((k / 8 * 4 + k % 4) * n + c) * 2 + (k % 8 >= 4)];
}

static void panel_put(int16_t *q, int64_t k, int c, int n, int32_t x)
{
    int8_t *bytes = (int8_t *)q + k / 32 * 72 + k % 32 / 8 * 16 + k % 8 / 2;
    int32_t sum = 0, high = x >= 0 ? (x + 128) / 256 : -((127 - x) / 256);
    uint8_t *sum_at = (uint8_t *)q + k / 32 * 72 + 64 + k % 32 / 16 * 4;
    if (n > 1) {
        q[((k / 8 * 4 + k % 4) * n + c) * 2 + (k % 8 >= 4)] = (int16_t)x;
        return;
    }
    bytes[k & 1 ? 4 : 0] = (int8_t)high;
    bytes[k & 1 ? 12 : 8] = (int8_t)(x - 256 * high);
    if (k % 16)
        memcpy(&sum, sum_at, 4);
    sum -= 12 * x;
    memcpy(sum_at, &sum, 4);
}

static int64_t panel_bytes(int64_t padded, int n)
{
    return n == 1 ? padded / 32 * 72 : n * padded * 2;
}

/* The product of one row of w and one row of x, and the sum of its magnitudes. */
static double nvfp4_dot(const struct product *p, const uint8_t *codes, const uint8_t *scales, int c,
                        double *magnitude)
{
    double sum = 0;
    *magnitude = 0;
    for (int64_t k = 0; k < p->K; k++) {
        double x = (double)p->x[c * p->ldx + k];
        if (p->kind == X_I16)
            x = p->x_i16[c * p->padded + k] * 0x1p-7 *
                (double)p->x_i16_scale[c * p->blocks + k / 256];
        double term = (double)nbi_e2m1_to_f32(nibble_at(codes, k)) *
                      (double)nbi_e4m3_to_f32(scales[k / 16]) * x * (double)p->tensor_scale;
        sum += term;
        *magnitude += fabs(term);
    }
    return sum;
}

static void make_nvfp4(struct product *p)
{
    int64_t K = p->K;
    uint8_t *codes = bytes_of(ROWS * K / 2), *scales = bytes_of(ROWS * K / 16);
    for (int64_t i = 0; i < ROWS * K / 2; i++)
        codes[i] = (uint8_t)bits32();
    for (int64_t i = 0; i < ROWS * K / 16; i++)
        scales[i] = (uint8_t)(bits32() % 0x7F); /* 0 to 448 */
    p->tiles = bytes_of(nbi_tiles_bytes(ROWS, K));
    nbi_tiles_pack(p->tiles, codes, scales, ROWS, K);
    p->x_i16 = bytes_of(X_ROWS * p->padded * 2);
    p->x_i16_scale = bytes_of(X_ROWS * p->blocks * 4);
    int16_t *panel = bytes_of(panel_bytes(p->padded, 1));
    for (int c = 0; c < X_ROWS; c++) {
        nbi_microkernels_scalar.quantize_x_i16(panel, p->x_i16_scale + c * p->blocks, 1,
                                               p->x + c * p->ldx, K);
        for (int64_t k = 0; k < p->padded; k++)
            p->x_i16[c * p->padded + k] = (int16_t)panel_get(panel, k, 0, 1);
    }
    free(panel);
    for (int c = 0; c < X_ROWS; c++)
        for (int r = 0; r < ROWS; r++) {
            double magnitude;
            p->want[c][r] = nvfp4_dot(p, codes + r * K / 2, scales + r * K / 16, c, &magnitude);
            /* The sum of a group is scaled, groups are added, and the sum is scaled again. */
            p->bound[c][r] = ((double)K + 4) * (U * magnitude + 448 * UNDERFLOW);
        }
    free(codes);
    free(scales);
}

static void make_floats(struct product *p)
{
    int64_t K = p->K;
    p->w = (uint8_t *)bytes_of(ROWS * K * size_of(p->dtype) + 1) + 1;
    for (int64_t i = 0; i < ROWS * K; i++)
        put_as(p->w, p->dtype, i, 3 * uniform());
    for (int c = 0; c < X_ROWS; c++)
        for (int r = 0; r < ROWS; r++) {
            double magnitude = 0, sum = 0;
            for (int64_t k = 0; k < K; k++) {
                double term = get_as(p->w, p->dtype, r * K + k) * (double)p->x[c * p->ldx + k];
                sum += term;
                magnitude += fabs(term);
            }
            p->want[c][r] = sum;
            p->bound[c][r] = ((double)K + 2) * (U * magnitude + UNDERFLOW);
        }
}

static void product_new(struct product *p, enum kind kind, enum nbi_dtype dtype, int64_t K,
                        enum values values)
{
    *p = (struct product){.kind = kind, .dtype = dtype, .K = K, .ldx = K + 3, .ldy = ROWS + 3};
    p->padded = (K + 31) / 32 * 32;
    p->blocks = (K + 255) / 256;
    p->tensor_scale = kind == FLOATS ? 1 : 0.37f;
    p->x = floats_of((X_ROWS - 1) * p->ldx + K, values);
    if (values == ROW_OF_ZEROS)
        memset(p->x + 3 * p->ldx, 0, (size_t)K * 4);
    for (int c = 0; c < X_ROWS; c++)
        for (int r = 0; r < ROWS; r++)
            p->y0[c][r] = value(values);
    if (kind == FLOATS)
        make_floats(p);
    else
        make_nvfp4(p);
}

static void product_free(struct product *p)
{
    free(p->tiles);
    if (p->w)
        free(p->w - 1);
    free(p->x);
    free(p->x_i16);
    free(p->x_i16_scale);
}

/* Rows [r0, r0 + rows) of w against rows [c0, c0 + n) of x, on max of y0 if add is set. Other
 * elements of y must keep their values. */
struct subset {
    int r0, rows, c0, n;
};

/* Rows [c0, c0 + n) of x as one panel. */
static void make_panel(const struct product *p, struct subset part, int16_t *x_i16, float *scale)
{
    for (int c = 0; c < part.n; c++) {
        for (int64_t k = 0; k < p->padded; k++)
            panel_put(x_i16, k, c, part.n, p->x_i16[(part.c0 + c) * p->padded + k]);
        for (int64_t b = 0; b < p->blocks; b++)
            scale[b * part.n + c] = p->x_i16_scale[(part.c0 + c) * p->blocks + b];
    }
}

static void compute(const struct nbi_microkernels *k, const struct product *p, struct subset part,
                    bool add, float out[X_ROWS][ROWS])
{
    int r0 = part.r0, rows = part.rows, c0 = part.c0, n = part.n;
    int64_t count = (n - 1) * p->ldy + rows;
    float *y = bytes_of(count * 4);
    for (int64_t i = 0; i < count; i++)
        y[i] = -77;
    for (int c = 0; c < n; c++)
        memcpy(y + c * p->ldy, &p->y0[c0 + c][r0], (size_t)rows * 4);
    bool floats = p->kind == FLOATS;
    int16_t *x_i16 = bytes_of(panel_bytes(p->padded, n));
    float *x_i16_scale = bytes_of(n * p->blocks * 4);
    if (p->kind == X_I16)
        make_panel(p, part, x_i16, x_i16_scale);
    const struct nbi_dot_tile tile = {.y = y,
                                      .ldy = p->ldy,
                                      .w = floats ? p->w + r0 * p->K * size_of(p->dtype) : p->tiles,
                                      .dtype = p->dtype,
                                      .ldw = p->K,
                                      .scale = p->tensor_scale,
                                      .x = p->kind == X_I16 ? NULL : p->x + c0 * p->ldx,
                                      .ldx = p->ldx,
                                      .x_i16 = x_i16,
                                      .x_i16_scale = x_i16_scale,
                                      .K = p->K,
                                      .rows = rows,
                                      .n = n,
                                      .add = add};
    (floats ? k->rows_float : p->kind == EXACT ? k->tiles_exact : k->tiles_x_i16)(&tile);
    free(x_i16);
    free(x_i16_scale);
    for (int64_t i = 0; i < count; i++)
        if (i % p->ldy < rows)
            out[i / p->ldy][i % p->ldy] = y[i];
        else
            assert_true(y[i] == -77);
    free(y);
}

static void check_values(const struct nbi_microkernels *k, const struct product *p, bool add,
                         float full[X_ROWS][ROWS])
{
    static const char *const names[] = {"tiles_exact", "tiles_x_i16", "rows_float"};
    compute(k, p, (struct subset){0, ROWS, 0, X_ROWS}, add, full);
    for (int c = 0; c < X_ROWS; c++)
        for (int r = 0; r < ROWS; r++) {
            double y0 = add ? (double)p->y0[c][r] : 0, want = y0 + p->want[c][r];
            double bound = p->bound[c][r] + (add ? 2 * U * (fabs(want) + fabs(y0)) : 0);
            assert_near(names[p->kind], k->name, (double)full[c][r], want, bound);
        }
}

/* Any subset of rows and columns must give the same bits as all of them. */
static void check_subsets(const struct nbi_microkernels *k, const struct product *p, bool add,
                          float full[X_ROWS][ROWS])
{
    float part[X_ROWS][ROWS];
    for (int rows = 1; rows <= ROWS; rows++)
        for (int n = 1; n <= X_ROWS; n++) {
            int c0 = (int)(bits32() % (unsigned)(X_ROWS - n + 1));
            int r0 = p->kind == FLOATS ? (int)(bits32() % (unsigned)(ROWS - rows + 1)) : 0;
            compute(k, p, (struct subset){r0, rows, c0, n}, add, part);
            for (int c = 0; c < n; c++)
                if (memcmp(part[c], &full[c0 + c][r0], (size_t)rows * 4) != 0)
                    fail_msg("%s: kind %d, K %d: rows %d+%d, column %d of %d+%d differ from all's",
                             k->name, (int)p->kind, (int)p->K, r0, rows, c, c0, n);
        }
}

static void check_product(const struct nbi_microkernels *k, enum kind kind, enum nbi_dtype dtype,
                          int64_t K, enum values values)
{
    struct product p;
    float full[X_ROWS][ROWS];
    product_new(&p, kind, dtype, K, values);
    for (int add = 0; add < 2; add++) {
        check_values(k, &p, add, full);
        check_subsets(k, &p, add, full);
    }
    product_free(&p);
}

static const int64_t tile_widths[] = {16, 32, 48, 80, 272, 1024 + 16};

static void tiles_exact(const struct nbi_microkernels *k)
{
    for (size_t i = 0; i < COUNT(tile_widths); i++)
        for (int values = 0; values < VALUES; values++)
            check_product(k, EXACT, NBI_NVFP4, tile_widths[i], (enum values)values);
}

static void tiles_x_i16(const struct nbi_microkernels *k)
{
    for (size_t i = 0; i < COUNT(tile_widths); i++)
        for (int values = 0; values < VALUES; values++)
            check_product(k, X_I16, NBI_NVFP4, tile_widths[i], (enum values)values);
}

static void rows_float(const struct nbi_microkernels *k)
{
    static const int64_t widths[] = {1, 7, 16, 17, 31, 32, 48, 80, 1024 + 16, 1024 + 19};
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16};
    for (size_t t = 0; t < COUNT(types); t++)
        for (size_t i = 0; i < COUNT(widths); i++) {
            check_product(k, FLOATS, types[t], widths[i], ORDINARY);
            check_product(k, FLOATS, types[t], widths[i],
                          (enum values)(1 + (t + i) % (VALUES - 1)));
        }
}

/* ---- integers for activations ---- */

/* unit = scale / 2^7 is the value of one step. Rounding is off by half a step; two roundings before
 * it and that of the scale add 4 U * 32639 < 0.008 steps. */
static void check_x_i16(const int16_t *q, const float *scale, int c, int n, const float *x,
                        int64_t K)
{
    for (int64_t b = 0; b * 256 < K; b++) {
        double unit = (double)scale[b * n + c] * 0x1p-7;
        int32_t max = 0;
        float amax = 0;
        for (int64_t k = b * 256; k < (b + 1) * 256 && k < (K + 31) / 32 * 32; k++) {
            int32_t is = panel_get(q, k, c, n);
            float v = k < K ? x[k] : 0;
            assert_near("quantize_x_i16", "", is * unit, (double)v, 0.508 * unit);
            max = abs(is) > max ? abs(is) : max;
            amax = fabsf(v) > amax ? fabsf(v) : amax;
        }
        assert_int_equal(max, amax > 0 ? NBI_X_I16_MAX : 0);
        assert_near("scale", "", unit * NBI_X_I16_MAX, (double)amax, 4 * U * (double)amax);
    }
}

/* Each row of panels of each size; the other rows of the panel must keep their values. */
static void quantize_x_i16(const struct nbi_microkernels *k)
{
    static const int64_t widths[] = {1, 5, 16, 31, 32, 33, 48, 80, 256, 272, 1024 + 16};
    for (size_t w = 0; w < COUNT(widths); w++)
        for (int values = 0; values < VALUES; values++) {
            int64_t K = widths[w], padded = (K + 31) / 32 * 32, blocks = (K + 255) / 256;
            int n = 1 + (int)(bits32() % X_ROWS), c = (int)(bits32() % (unsigned)n);
            float *x = floats_of(K, (enum values)values);
            int64_t bytes = panel_bytes(padded, n);
            int16_t *is = bytes_of(bytes), *scalar = bytes_of(bytes);
            float *scale = bytes_of(n * blocks * 4), *scalar_scale = bytes_of(n * blocks * 4);
            x[K - 1] = values == LARGE ? -FLT_MAX : x[K - 1];
            memset(is, 0x55, (size_t)bytes);
            memset(scalar, 0x55, (size_t)bytes);
            memset(scale, 0x55, (size_t)(n * blocks * 4));
            memset(scalar_scale, 0x55, (size_t)(n * blocks * 4));
            k->quantize_x_i16(is + 2 * c, scale + c, n, x, K);
            nbi_microkernels_scalar.quantize_x_i16(scalar + 2 * c, scalar_scale + c, n, x, K);
            check_x_i16(is, scale, c, n, x, K);
            for (int64_t b = 0; b < blocks; b++)
                scale[b * n + c] += 0.0f; /* may be -0 for rows of zeros */
            assert_memory_equal(is, scalar, bytes);
            assert_memory_equal(scale, scalar_scale, n * blocks * 4);
            x[bits32() % (uint32_t)K] = values & 1 ? NAN : -INFINITY; /* must show in the scale */
            k->quantize_x_i16(is + 2 * c, scale + c, n, x, K);
            bool shows = false;
            for (int64_t b = 0; b < blocks; b++)
                shows = shows || isnan(scale[b * n + c]);
            assert_true(shows);
            free(x);
            free(is);
            free(scalar);
            free(scale);
            free(scalar_scale);
        }
}

/* ---- tiles ---- */

static void test_cpu_kernels__tiles_hold_the_codes_of_their_rows(void **state)
{
    static const int64_t widths[] = {16, 32, 48, 64, 80, 1024 + 16};
    (void)state;
    for (size_t w = 0; w < COUNT(widths); w++)
        for (int rows = 1; rows <= ROWS; rows++) {
            int64_t cols = widths[w], bytes = nbi_tiles_bytes(rows, cols);
            uint8_t *tiles = bytes_of(bytes), *codes = bytes_of(rows * cols / 2);
            uint8_t *scales = bytes_of(rows * cols / 16);
            for (int64_t i = 0; i < rows * cols / 2; i++)
                codes[i] = (uint8_t)bits32();
            for (int64_t i = 0; i < rows * cols / 16; i++)
                scales[i] = (uint8_t)bits32();
            memset(tiles, 0xEE, (size_t)bytes);
            nbi_tiles_pack(tiles, codes, scales, rows, cols);
            for (int r = 0; r < ROWS; r++)
                for (int64_t k = 0; k < nbi_tiles_across(cols) * 32; k++) {
                    /* nvfp4_tile.h: scales [group][row], then nibble k%8 of lane r of vector
                     * k%32/8. */
                    const uint8_t *tile = tiles + k / 32 * 288;
                    const uint8_t *lane = tile + 32 + k % 32 / 8 * 64 + r * 4;
                    bool there = r < rows && k < cols;
                    assert_int_equal(nibble_at(lane, k % 8),
                                     there ? nibble_at(codes, r * cols + k) : 0);
                    assert_int_equal(tile[k % 32 / 16 * 16 + r],
                                     there ? scales[(r * cols + k) / 16] : 0);
                }
            free(tiles);
            free(codes);
            free(scales);
        }
}

/* ---- rows ---- */

/* A sum of squares is off by (C + 1) U of itself; the root halves that; mean, epsilon, root,
 * inverse and two products add U each. */
static double norm_error(int64_t C)
{
    return (((double)C + 1) / 2 + 6) * U;
}

static double inverse_norm(const float *x, int64_t C, float eps)
{
    double sum = 0;
    for (int64_t i = 0; i < C; i++)
        sum += (double)x[i] * (double)x[i];
    return 1 / sqrt(sum / (double)C + (double)eps);
}

static void rmsnorm(const struct nbi_microkernels *k)
{
    static const int64_t widths[] = {1, 15, 16, 32, 48, 80, 128, 1024 + 16, 1031};
    for (size_t w = 0; w < COUNT(widths); w++)
        for (int values = 0; values < VALUES; values++) {
            int64_t C = widths[w];
            float rstd = 0, eps = 1e-6f, *x = floats_of(C, (enum values)values);
            float *weight = floats_of(C, ORDINARY), *y = floats_of(C, ORDINARY);
            double f = inverse_norm(x, C, eps);
            k->rmsnorm(y, &rstd, x, weight, eps, C);
            assert_near("rstd", k->name, (double)rstd, f, norm_error(C) * f);
            for (int64_t i = 0; i < C; i++) {
                double want = (double)x[i] * f * (double)weight[i];
                assert_near("rmsnorm", k->name, (double)y[i], want,
                            norm_error(C) * fabs(want) + UNDERFLOW);
            }
            k->rmsnorm(x, NULL, x, weight, eps, C);
            assert_memory_equal(x, y, C * 4);
            free(x);
            free(y);
            free(weight);
        }
}

static const int64_t head_sizes[] = {2, 6, 24, 32, 64, 80, 96, 128, 256};

static void norm_rope(const struct nbi_microkernels *k)
{
    for (size_t w = 0; w < COUNT(head_sizes); w++)
        for (int values = 0; values < VALUES; values++) {
            int64_t D = head_sizes[w], h = D / 2;
            float rstd = 0, eps = 1e-6f, *x = floats_of(D, (enum values)values);
            float *weight = floats_of(D, ORDINARY), *y = floats_of(D, ORDINARY);
            float *co = floats_of(h, ORDINARY), *si = floats_of(h, ORDINARY);
            double f = inverse_norm(x, D, eps);
            k->norm_rope(y, &rstd, x, weight, (struct nbi_rope_row){co, si}, eps, D);
            assert_near("rstd", k->name, (double)rstd, f, norm_error(D) * f);
            for (int64_t i = 0; i < h; i++) {
                double a = (double)x[i] * f * (double)weight[i], c = (double)co[i];
                double b = (double)x[i + h] * f * (double)weight[i + h], s = (double)si[i];
                double e = norm_error(D) + 3 * U;
                assert_near("norm_rope", k->name, (double)y[i], a * c - b * s,
                            e * (fabs(a * c) + fabs(b * s)) + 4 * UNDERFLOW);
                assert_near("norm_rope", k->name, (double)y[i + h], b * c + a * s,
                            e * (fabs(b * c) + fabs(a * s)) + 4 * UNDERFLOW);
            }
            k->norm_rope(x, NULL, x, weight, (struct nbi_rope_row){co, si}, eps, D);
            assert_memory_equal(x, y, D * 4);
            free(x);
            free(y);
            free(weight);
            free(co);
            free(si);
        }
}

/* The exponential is accurate to 4 U; sum, quotient and product add U each. Where e^-gate exceeds
 * e^87, the sigmoid may be anything from 0 to e^-87. */
static void swiglu(const struct nbi_microkernels *k)
{
    static const float gates[] = {0,     -0.0f,  1,   -1,   20,   -20,   86.9f, -86.9f, 87,    -87,
                                  88.5f, -88.5f, 100, -100, 1000, -1000, 1e20f, -1e20f, 1e-30f};
    for (int64_t n = 1; n <= 67; n++) {
        float *gate = floats_of(n, ORDINARY), *up = floats_of(n, ORDINARY);
        float *y = floats_of(n, ORDINARY);
        for (int64_t i = 0; i < n; i++)
            gate[i] = bits32() & 1 ? gates[bits32() % COUNT(gates)] : 20 * gate[i];
        k->swiglu(y, gate, up, n);
        for (int64_t i = 0; i < n; i++) {
            double g = (double)gate[i], u = (double)up[i], want = g / (1 + exp(-g)) * u;
            double cut = g < -86 ? fabs(g * u) * exp(-86.0) : 0;
            assert_near("swiglu", k->name, (double)y[i], want,
                        8 * U * fabs(want) + cut + UNDERFLOW);
        }
        k->swiglu(gate, gate, up, n);
        /* The SIMD loop and its scalar rest may differ, but the result of an element must not
         * depend on its neighbours. */
        assert_memory_equal(gate, y, n * 4);
        free(gate);
        free(up);
        free(y);
    }
}

static void argmax(const struct nbi_microkernels *k)
{
    for (int64_t n = 1; n <= 150; n++)
        for (int kind = 0; kind < 5; kind++) {
            float *x = floats_of(n, ORDINARY);
            int64_t want = (int64_t)(bits32() % (uint32_t)n),
                    again = (int64_t)(bits32() % (uint32_t)n);
            for (int64_t i = 0; i < n; i++)
                x[i] = kind == 1   ? -INFINITY
                       : kind == 2 ? -1e30f + 1e29f * x[i]
                       : kind == 3 ? -0.0f
                                   : x[i];
            float max = kind == 2 ? -1e28f : kind == 3 ? 1e-40f : kind == 4 ? INFINITY : 2.0f;
            if (kind == 1) {
                want = 0; /* all equal: the first */
            } else {
                x[want] = x[again] = max;
                want = again < want ? again : want;
            }
            assert_int_equal(k->argmax(x, n), want);
            for (int64_t i = 0; i < n; i++)
                x[i] = NAN;
            assert_in_range(k->argmax(x, n), 0, n - 1);
            free(x);
        }
}

/* ---- types ---- */

static void check_to_f32(const struct nbi_microkernels *k, enum nbi_dtype dtype, uint32_t codes)
{
    int size = size_of(dtype);
    for (int64_t n = 1; n <= codes; n = n < 70                       ? n + 1
                                        : n * 4 > codes && n < codes ? codes
                                                                     : n * 4) {
        uint8_t *p = (uint8_t *)bytes_of(n * size + 1) + 1;
        float *y = floats_of(n, ORDINARY);
        for (int64_t i = 0; i < n; i++) {
            uint32_t code = n == codes ? (uint32_t)i : bits32();
            if (dtype == NBI_F32)
                code = bits32();
            memcpy(p + i * size, &code, (size_t)size);
        }
        k->to_f32(y, p, dtype, n);
        for (int64_t i = 0; i < n; i++) {
            float want = (float)get_as(p, dtype, i);
            if (isnan(want) && dtype == NBI_E4M3)
                continue; /* an E4M3 NaN need not stay NaN */
            if (isnan(want) ? !isnan(y[i]) : memcmp(&y[i], &want, 4) != 0)
                fail_msg("%s: to_f32 of %s: %g, %g expected", k->name, nbi_dtypes[dtype].name,
                         (double)y[i], (double)want);
        }
        free(p - 1);
        free(y);
    }
}

static void to_f32(const struct nbi_microkernels *k)
{
    check_to_f32(k, NBI_F32, 1000);
    check_to_f32(k, NBI_F16, 65536);
    check_to_f32(k, NBI_BF16, 65536);
    check_to_f32(k, NBI_E4M3, 256);
}

/* At addresses aligned to one element only, and unaligned for bytes. */
static void from_f32(const struct nbi_microkernels *k)
{
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    for (size_t t = 0; t < COUNT(types); t++)
        for (int64_t n = 1; n <= 300; n++) {
            int size = size_of(types[t]);
            float *x = floats_of(n, MIXED);
            uint8_t *is = bytes_of((n + 1) * size), *want = bytes_of(n * size);
            for (int64_t i = 0; i < n; i++) {
                uint32_t any = bits32();
                if (i % 3 == 0 && (any & 0x7F800000) != 0x7F800000)
                    memcpy(&x[i], &any, 4);
                put_as(want, types[t], i, x[i]);
            }
            k->from_f32(is + size, types[t], x, n);
            assert_memory_equal(is + size, want, n * size);
            free(x);
            free(is);
            free(want);
        }
}

/* ---- attention ---- */

#define HEADS      8
#define QUERY_ROWS 5 /* rows of queries */

enum scores { SPREAD, FLAT, STEEP, SCORES };

/* The reference is computed for the last query row; earlier rows see as many keys or fewer. */
struct attention {
    struct nbi_attention_tile tile;
    uint8_t *kv;
    float *q;
    int32_t last[QUERY_ROWS];
    int64_t count; /* keys of the last row */
    double want[HEADS * 256], bound[HEADS * 256], lse[HEADS], lse_bound[HEADS];
};

/* A score of D products is off by (D + 3) U of their magnitudes, once more scaled, and so is its
 * exponential, relatively; the exponential adds 4 U, and subtracting the maximum U of the
 * difference. Probabilities and their sum are off by that much each; sums over keys add U per key
 * and per block. */
static void attention_reference(struct attention *t, int h)
{
    const struct nbi_attention_tile *a = &t->tile;
    const float *q = a->q + (QUERY_ROWS - 1) * a->ldq + h * a->D;
    double *score = bytes_of(t->count * 8), max = -INFINITY, sum = 0, worst = 0, lowest = INFINITY;
    for (int64_t i = 0; i < t->count; i++) {
        double s = 0, magnitude = 0;
        for (int64_t d = 0; d < a->D; d++) {
            double term = (double)q[d] * get_as(a->k + i * a->stride, a->dtype, d);
            s += term;
            magnitude += fabs(term);
        }
        score[i] = s / sqrt((double)a->D);
        worst = fmax(worst, ((double)a->D + 4) * U * magnitude / sqrt((double)a->D));
        max = fmax(max, score[i]);
        lowest = fmin(lowest, score[i]);
    }
    worst += U * fmin(max - lowest, 90) + 4 * U;
    for (int64_t i = 0; i < t->count; i++)
        sum += exp(score[i] - max);
    double error = expm1(2 * worst) + ((double)t->count * 2 + 16) * U;
    for (int64_t d = 0; d < a->D; d++) {
        double y = 0, magnitude = 0;
        for (int64_t i = 0; i < t->count; i++) {
            double term = exp(score[i] - max) / sum * get_as(a->v + i * a->stride, a->dtype, d);
            y += term;
            magnitude += fabs(term);
        }
        t->want[h * a->D + d] = y;
        t->bound[h * a->D + d] = error * magnitude + (double)t->count * 1e-37;
    }
    t->lse[h] = max + log(sum);
    t->lse_bound[h] = error + 2 * U * (fabs(max) + fabs(log(sum)));
    free(score);
}

/* Keys and values are interleaved at an unaligned address (f32: at one aligned to 4 bytes only) and
 * end where their allocation ends. */
static void attention_new(struct attention *t, enum nbi_dtype dtype, int64_t D, int64_t count,
                          enum scores kind)
{
    int size = size_of(dtype), off = dtype == NBI_F32 ? 4 : 1;
    int64_t values = (2 * count + 1) * D;
    t->kv = bytes_of(off + values * size);
    t->q = floats_of(QUERY_ROWS * (HEADS * D + 3), kind == FLAT ? ZERO : ORDINARY);
    for (int64_t i = 0; i < values; i++)
        put_as(t->kv + off, dtype, i, (kind == STEEP ? 12 : 2) * uniform());
    for (int64_t i = 0; i < QUERY_ROWS * (HEADS * D + 3); i++)
        t->q[i] *= kind == STEEP ? 12 : 1;
    t->count = count;
    for (int r = QUERY_ROWS; r-- > 0;) {
        int32_t fewer = (int32_t)(bits32() % 3 ? bits32() % 2 : bits32() % 70);
        int32_t next = r == QUERY_ROWS - 1 ? (int32_t)count + 6 : t->last[r + 1];
        t->last[r] = r == QUERY_ROWS - 1 ? next : next - fewer > 7 ? next - fewer : 7;
    }
    t->tile = (struct nbi_attention_tile){.q = t->q,
                                          .k = t->kv + off,
                                          .v = t->kv + off + D * size + D * size,
                                          .last = t->last,
                                          .first = 7,
                                          .stride = 2 * D * size,
                                          .ldq = HEADS * D + 3,
                                          .ld_lse = HEADS,
                                          .dtype = dtype,
                                          .heads = HEADS,
                                          .D = D};
    for (int h = 0; h < HEADS; h++)
        attention_reference(t, h);
}

static void attention_free(struct attention *t)
{
    free(t->kv);
    free(t->q);
}

struct queries {
    int r0, rows, h0, heads;
};

/* y [QUERY_ROWS, HEADS, D] has 3 floats between rows, which must keep their values; lse
 * [QUERY_ROWS, HEADS].
 */
static void run_attention(const struct nbi_microkernels *k, const struct attention *t,
                          struct queries some, float *y, float *lse)
{
    struct nbi_attention_tile tile = t->tile;
    size_t scratch = (size_t)nbi_attention_floats(tile.D) * sizeof(float);
    int64_t at = some.r0 * tile.ldq + some.h0 * tile.D;
    tile.scratch = aligned_alloc(64, scratch);
    assert_non_null(tile.scratch);
    memset(tile.scratch, 0xFF, scratch);
    tile.q += at;
    tile.y = y + at;
    tile.last += some.r0;
    tile.rows = some.rows;
    tile.heads = some.heads;
    tile.lse = lse ? lse + some.r0 * tile.ld_lse + some.h0 : NULL;
    k->attention(&tile);
    free(tile.scratch);
}

static void check_attention(const struct nbi_microkernels *k, const struct attention *t)
{
    int64_t D = t->tile.D, ld = t->tile.ldq, floats = QUERY_ROWS * ld;
    float *y = floats_of(floats, ORDINARY), *part = floats_of(floats, ORDINARY);
    float lse[QUERY_ROWS * HEADS], part_lse[QUERY_ROWS * HEADS];
    memcpy(part, y, (size_t)floats * 4);
    run_attention(k, t, (struct queries){0, QUERY_ROWS, 0, HEADS}, y, lse);
    const float *last = y + (QUERY_ROWS - 1) * ld;
    for (int h = 0; h < HEADS; h++) {
        assert_near("lse", k->name, (double)lse[(QUERY_ROWS - 1) * HEADS + h], t->lse[h],
                    t->lse_bound[h]);
        for (int64_t d = 0; d < D; d++)
            assert_near("attention", k->name, (double)last[h * D + d], t->want[h * D + d],
                        t->bound[h * D + d]);
    }
    /* Single rows and subsets of heads, with and without lse, must give the same bits and write
     * nothing else. */
    for (int r = 0; r < QUERY_ROWS; r++)
        for (int h = 0, heads; h < HEADS; h += heads) {
            heads = 1 + (int)(bits32() % (unsigned)(HEADS - h));
            memset(part + r * ld + h * D, 0xFF, (size_t)(heads * D) * 4);
            run_attention(k, t, (struct queries){r, 1, h, heads}, part, h & 1 ? NULL : part_lse);
            if (!(h & 1))
                assert_memory_equal(part_lse + r * HEADS + h, lse + r * HEADS + h, heads * 4);
        }
    assert_memory_equal(part, y, floats * 4);
    free(y);
    free(part);
}

/* A NaN key makes every row that sees it NaN. */
static void check_nan(const struct nbi_microkernels *k, int64_t count)
{
    struct attention t;
    attention_new(&t, NBI_F32, 64, count, SPREAD);
    float *y = floats_of(QUERY_ROWS * t.tile.ldq, ORDINARY);
    put_as(t.kv + 4, NBI_F32, count / 2 * 128, NAN);
    run_attention(k, &t, (struct queries){0, QUERY_ROWS, 0, HEADS}, y, NULL);
    for (int64_t i = 0; i < HEADS * 64; i++)
        assert_true(isnan(y[(QUERY_ROWS - 1) * t.tile.ldq + i]));
    free(y);
    attention_free(&t);
}

static void attention(const struct nbi_microkernels *k)
{
    check_nan(k, 1);
    check_nan(k, 70);
    static const enum nbi_dtype types[] = {NBI_F32, NBI_F16, NBI_BF16, NBI_E4M3};
    static const int64_t counts[] = {1, 3, 63, 64, 65, 129, 1000};
    struct attention *t = bytes_of(sizeof *t);
    int kind = 0;
    for (size_t d = 0; d < COUNT(types); d++)
        for (size_t h = 0; h < COUNT(head_sizes); h++)
            for (size_t c = 0; c < COUNT(counts); c++) {
                if (counts[c] == 1000 && head_sizes[h] > 96 && (d + h) % 2)
                    continue; /* would take too long */
                attention_new(t, types[d], head_sizes[h], counts[c],
                              (enum scores)(kind++ % SCORES));
                check_attention(k, t);
                attention_free(t);
            }
    free(t);
}

/* ---- one test per kernel and instruction set ---- */

static const struct nbi_microkernels *kernels_or_skip(enum nbi_simd level)
{
    const struct nbi_microkernels *k = nbi_microkernels_at(level);
    if (!k)
        skip("this CPU lacks the instruction set");
    drawn = 0;
    return k;
}

#define KERNEL_LIST(X)                                                                             \
    X(tiles_exact)                                                                                 \
    X(tiles_x_i16)                                                                                 \
    X(rows_float)                                                                                  \
    X(quantize_x_i16)                                                                              \
    X(rmsnorm)                                                                                     \
    X(norm_rope)                                                                                   \
    X(attention)                                                                                   \
    X(swiglu)                                                                                      \
    X(from_f32)                                                                                    \
    X(to_f32)                                                                                      \
    X(argmax)

#define X(slot)                                                                                    \
    static void test_cpu_kernels__##slot##_scalar(void **state)                                    \
    {                                                                                              \
        (void)state;                                                                               \
        slot(kernels_or_skip(NBI_SIMD_SCALAR));                                                    \
    }                                                                                              \
    static void test_cpu_kernels__##slot##_avx2(void **state)                                      \
    {                                                                                              \
        (void)state;                                                                               \
        slot(kernels_or_skip(NBI_SIMD_AVX2));                                                      \
    }                                                                                              \
    static void test_cpu_kernels__##slot##_avx512(void **state)                                    \
    {                                                                                              \
        (void)state;                                                                               \
        slot(kernels_or_skip(NBI_SIMD_AVX512));                                                    \
    }
KERNEL_LIST(X)
#undef X

/* A new slot of the table belongs into KERNEL_LIST. Eleven are listed, eight are tested by
 * test_backward.c through the operations that use them, two by test_optimizer.c; a name and two
 * numbers precede them. */
#define OTHER_SLOTS 10
#define X(slot)     +1
_Static_assert(sizeof(struct nbi_microkernels) ==
                   sizeof(const char *) + 2 * sizeof(int) +
                       (OTHER_SLOTS KERNEL_LIST(X)) * sizeof(void (*)(void)),
               "every slot is tested");
#undef X

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_kernels__tiles_hold_the_codes_of_their_rows),
#define X(slot)                                                                                    \
    cmocka_unit_test(test_cpu_kernels__##slot##_scalar),                                           \
        cmocka_unit_test(test_cpu_kernels__##slot##_avx2),                                         \
        cmocka_unit_test(test_cpu_kernels__##slot##_avx512),
        KERNEL_LIST(X)
#undef X
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
