/* test_cpu_kernels.c - every inner loop of the CPU backend, at every instruction set, against
 * arithmetic in double; and that a result depends on its own row alone.
 *
 * The bounds. U = 2^-24 is half a unit in the last place: an operation on floats is off by U times
 * its result. A sum of n products in any order, fused or not, is off by at most (n + 1) U times the
 * sum of their magnitudes; a factor applied afterwards adds one U. What underflows is off by at
 * most 2^-149 each time, times what it is multiplied with later. Random signs stay far below this;
 * a lost or a doubled product is far above it. */
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
#define COLUMNS   NBI_X_PANEL_ROWS
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

enum kind { EXACT, Q16, FLOATS };

/* Sixteen rows against eight, and what comes out in double. */
struct product {
    enum kind kind;
    enum nbi_dtype dtype;
    int64_t K, padded, blocks, ldx, ldy;
    float tensor_scale;
    uint8_t *tiles;
    uint8_t *w; /* at an odd address */
    float *x;
    int16_t *x_i16; /* [COLUMNS, padded] whole numbers in order */
    float *x_i16_scale;
    float y0[COLUMNS][ROWS];
    double want[COLUMNS][ROWS], bound[COLUMNS][ROWS];
};

static uint8_t nibble_at(const uint8_t *codes, int64_t i)
{
    return i & 1 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
}

/* A panel of n rows of whole numbers as tiles.h says: pairs of columns k and k + 4 of each row; a
 * row alone in bytes, x = 256 h + l, 72 for 32 columns: for each 8 of them the h of the even and of
 * the odd columns and the l of both, then -12 times the sums of both groups. */
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

/* The product of one row and one column: its value and the sum of magnitudes. */
static double nvfp4_dot(const struct product *p, const uint8_t *codes, const uint8_t *scales, int c,
                        double *magnitude)
{
    double sum = 0;
    *magnitude = 0;
    for (int64_t k = 0; k < p->K; k++) {
        double x = (double)p->x[c * p->ldx + k];
        if (p->kind == Q16)
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
    p->x_i16 = bytes_of(COLUMNS * p->padded * 2);
    p->x_i16_scale = bytes_of(COLUMNS * p->blocks * 4);
    int16_t *panel = bytes_of(panel_bytes(p->padded, 1));
    for (int c = 0; c < COLUMNS; c++) {
        nbi_microkernels_scalar.quantize_x_i16(panel, p->x_i16_scale + c * p->blocks, 1,
                                               p->x + c * p->ldx, K);
        for (int64_t k = 0; k < p->padded; k++)
            p->x_i16[c * p->padded + k] = (int16_t)panel_get(panel, k, 0, 1);
    }
    free(panel);
    for (int c = 0; c < COLUMNS; c++)
        for (int r = 0; r < ROWS; r++) {
            double magnitude;
            p->want[c][r] = nvfp4_dot(p, codes + r * K / 2, scales + r * K / 16, c, &magnitude);
            /* A group's sum is scaled, then the groups are added, then scaled. */
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
    for (int c = 0; c < COLUMNS; c++)
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
    p->x = floats_of((COLUMNS - 1) * p->ldx + K, values);
    if (values == ROW_OF_ZEROS)
        memset(p->x + 3 * p->ldx, 0, (size_t)K * 4);
    for (int c = 0; c < COLUMNS; c++)
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

/* Rows [r0, r0 + rows) against columns [c0, c0 + n), with y0 as what is there before. Whatever else
 * lies in y stays as it is. */
struct part {
    int r0, rows, c0, n;
};

/* Rows [c0, c0 + n) as one panel. */
static void make_panel(const struct product *p, struct part part, int16_t *x_i16, float *scale)
{
    for (int c = 0; c < part.n; c++) {
        for (int64_t k = 0; k < p->padded; k++)
            panel_put(x_i16, k, c, part.n, p->x_i16[(part.c0 + c) * p->padded + k]);
        for (int64_t b = 0; b < p->blocks; b++)
            scale[b * part.n + c] = p->x_i16_scale[(part.c0 + c) * p->blocks + b];
    }
}

static void compute(const struct nbi_microkernels *k, const struct product *p, struct part part,
                    bool add, float out[COLUMNS][ROWS])
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
    if (p->kind == Q16)
        make_panel(p, part, x_i16, x_i16_scale);
    const struct nbi_dot_tile job = {.y = y,
                                     .ldy = p->ldy,
                                     .w = floats ? p->w + r0 * p->K * size_of(p->dtype) : p->tiles,
                                     .dtype = p->dtype,
                                     .ldw = p->K,
                                     .scale = p->tensor_scale,
                                     .x = p->kind == Q16 ? NULL : p->x + c0 * p->ldx,
                                     .ldx = p->ldx,
                                     .x_i16 = x_i16,
                                     .x_i16_scale = x_i16_scale,
                                     .K = p->K,
                                     .rows = rows,
                                     .n = n,
                                     .add = add};
    (floats ? k->rows_float : p->kind == EXACT ? k->tiles_exact : k->tiles_x_i16)(&job);
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
                         float full[COLUMNS][ROWS])
{
    static const char *const names[] = {"tiles_exact", "tiles_x_i16", "rows_float"};
    compute(k, p, (struct part){0, ROWS, 0, COLUMNS}, add, full);
    for (int c = 0; c < COLUMNS; c++)
        for (int r = 0; r < ROWS; r++) {
            double y0 = add ? (double)p->y0[c][r] : 0, want = y0 + p->want[c][r];
            double bound = p->bound[c][r] + (add ? 2 * U * (fabs(want) + fabs(y0)) : 0);
            assert_near(names[p->kind], k->name, (double)full[c][r], want, bound);
        }
}

/* The same bits from rows and columns computed in any smaller company. */
static void check_company(const struct nbi_microkernels *k, const struct product *p, bool add,
                          float full[COLUMNS][ROWS])
{
    float part[COLUMNS][ROWS];
    for (int rows = 1; rows <= ROWS; rows++)
        for (int n = 1; n <= COLUMNS; n++) {
            int c0 = (int)(bits32() % (unsigned)(COLUMNS - n + 1));
            int r0 = p->kind == FLOATS ? (int)(bits32() % (unsigned)(ROWS - rows + 1)) : 0;
            compute(k, p, (struct part){r0, rows, c0, n}, add, part);
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
    float full[COLUMNS][ROWS];
    product_new(&p, kind, dtype, K, values);
    for (int add = 0; add < 2; add++) {
        check_values(k, &p, add, full);
        check_company(k, &p, add, full);
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
            check_product(k, Q16, NBI_NVFP4, tile_widths[i], (enum values)values);
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

/* unit = scale / 2^7 is the value of a step. rint leaves half a step; the two roundings on the way
 * and that of the scale are off by 4 U * 32639 < 0.008 steps. */
static void check_x_i16(const int16_t *q, const float *scale, int c, int n, const float *x,
                        int64_t K)
{
    for (int64_t b = 0; b * 256 < K; b++) {
        double unit = (double)scale[b * n + c] * 0x1p-7;
        int32_t top = 0;
        float amax = 0;
        for (int64_t k = b * 256; k < (b + 1) * 256 && k < (K + 31) / 32 * 32; k++) {
            int32_t is = panel_get(q, k, c, n);
            float v = k < K ? x[k] : 0;
            assert_near("quantize_x_i16", "", is * unit, (double)v, 0.508 * unit);
            top = abs(is) > top ? abs(is) : top;
            amax = fabsf(v) > amax ? fabsf(v) : amax;
        }
        assert_int_equal(top, amax > 0 ? NBI_X_I16_MAX : 0);
        assert_near("scale", "", unit * NBI_X_I16_MAX, (double)amax, 4 * U * (double)amax);
    }
}

/* Every row of panels of every width; the rows beside it stay as they are. */
static void quantize_x_i16(const struct nbi_microkernels *k)
{
    static const int64_t widths[] = {1, 5, 16, 31, 32, 33, 48, 80, 256, 272, 1024 + 16};
    for (size_t w = 0; w < COUNT(widths); w++)
        for (int values = 0; values < VALUES; values++) {
            int64_t K = widths[w], padded = (K + 31) / 32 * 32, blocks = (K + 255) / 256;
            int n = 1 + (int)(bits32() % COLUMNS), c = (int)(bits32() % (unsigned)n);
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
                scale[b * n + c] += 0.0f; /* of zeros it may be -0 */
            assert_memory_equal(is, scalar, bytes);
            assert_memory_equal(scale, scalar_scale, n * blocks * 4);
            x[bits32() % (uint32_t)K] = values & 1 ? NAN : -INFINITY; /* it shows */
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
                    /* tiles.h: scales [group][row], then nibble k%8 of lane r of vector k%32/8. */
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

/* Squares are positive, so their sum is off by (C + 1) U of itself; the root halves that; mean,
 * epsilon, root, inverse and two products add one each. */
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

/* The exponential is good to 2 units (4 U), sum, quotient and product to 1 U each. Where e^-gate
 * exceeds e^87 the sigmoid may be anything from 0 to e^-87. */
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
        /* Vectors and what is left over may differ, place by place the result may not. */
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
            float top = kind == 2 ? -1e28f : kind == 3 ? 1e-40f : kind == 4 ? INFINITY : 2.0f;
            if (kind == 1) {
                want = 0; /* all equal: the first */
            } else {
                x[want] = x[again] = top;
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
                continue; /* need not survive */
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

/* An element off an aligned address; bytes at odd ones. */
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

#define HEADS 8
#define LINES 5 /* rows of queries */

enum scores { SPREAD, FLAT, STEEP, SCORES };

/* The reference is of the last row of queries; those before see fewer keys, or as many. */
struct attention {
    struct nbi_attention_tile job;
    uint8_t *kv;
    float *q;
    int32_t last[LINES];
    int64_t count; /* of the last row */
    double want[HEADS * 256], bound[HEADS * 256], lse[HEADS], lse_bound[HEADS];
};

/* A score of D products is off by (D + 3) U of their magnitudes, once more scaled; so is,
 * relatively, its exponential, for which 4 U are added, and once more where it is compared with the
 * maximum (the difference is off by U of itself). Weights and their sum are off by so much each,
 * and the sums over keys by one U a key and a block. */
static void attend_reference(struct attention *t, int h)
{
    const struct nbi_attention_tile *a = &t->job;
    const float *q = a->q + (LINES - 1) * a->ldq + h * a->D;
    double *score = bytes_of(t->count * 8), top = -INFINITY, sum = 0, worst = 0, lowest = INFINITY;
    for (int64_t i = 0; i < t->count; i++) {
        double s = 0, magnitude = 0;
        for (int64_t d = 0; d < a->D; d++) {
            double term = (double)q[d] * get_as(a->k + i * a->stride, a->dtype, d);
            s += term;
            magnitude += fabs(term);
        }
        score[i] = s / sqrt((double)a->D);
        worst = fmax(worst, ((double)a->D + 4) * U * magnitude / sqrt((double)a->D));
        top = fmax(top, score[i]);
        lowest = fmin(lowest, score[i]);
    }
    worst += U * fmin(top - lowest, 90) + 4 * U;
    for (int64_t i = 0; i < t->count; i++)
        sum += exp(score[i] - top);
    double error = expm1(2 * worst) + ((double)t->count * 2 + 16) * U;
    for (int64_t d = 0; d < a->D; d++) {
        double y = 0, magnitude = 0;
        for (int64_t i = 0; i < t->count; i++) {
            double term = exp(score[i] - top) / sum * get_as(a->v + i * a->stride, a->dtype, d);
            y += term;
            magnitude += fabs(term);
        }
        t->want[h * a->D + d] = y;
        t->bound[h * a->D + d] = error * magnitude + (double)t->count * 1e-37;
    }
    t->lse[h] = top + log(sum);
    t->lse_bound[h] = error + 2 * U * (fabs(top) + fabs(log(sum)));
    free(score);
}

/* Keys and values lie side by side at an odd address (floats: at one that is not aligned to more
 * than they need), and end where the memory ends. */
static void attention_new(struct attention *t, enum nbi_dtype dtype, int64_t D, int64_t count,
                          enum scores kind)
{
    int size = size_of(dtype), off = dtype == NBI_F32 ? 4 : 1;
    int64_t values = (2 * count + 1) * D;
    t->kv = bytes_of(off + values * size);
    t->q = floats_of(LINES * (HEADS * D + 3), kind == FLAT ? ZERO : ORDINARY);
    for (int64_t i = 0; i < values; i++)
        put_as(t->kv + off, dtype, i, (kind == STEEP ? 12 : 2) * uniform());
    for (int64_t i = 0; i < LINES * (HEADS * D + 3); i++)
        t->q[i] *= kind == STEEP ? 12 : 1;
    t->count = count;
    for (int r = LINES; r-- > 0;) {
        int32_t fewer = (int32_t)(bits32() % 3 ? bits32() % 2 : bits32() % 70);
        int32_t next = r == LINES - 1 ? (int32_t)count + 6 : t->last[r + 1];
        t->last[r] = r == LINES - 1 ? next : next - fewer > 7 ? next - fewer : 7;
    }
    t->job = (struct nbi_attention_tile){.q = t->q,
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
        attend_reference(t, h);
}

static void attention_free(struct attention *t)
{
    free(t->kv);
    free(t->q);
}

struct queries {
    int r0, rows, h0, heads;
};

/* y [LINES, HEADS, D] with 3 floats between rows that stay as they are; lse [LINES, HEADS]. */
static void attend_some(const struct nbi_microkernels *k, const struct attention *t,
                        struct queries some, float *y, float *lse)
{
    struct nbi_attention_tile job = t->job;
    size_t scratch = (size_t)nbi_attention_floats(job.D) * sizeof(float);
    int64_t at = some.r0 * job.ldq + some.h0 * job.D;
    job.scratch = aligned_alloc(64, scratch);
    assert_non_null(job.scratch);
    memset(job.scratch, 0xFF, scratch);
    job.q += at;
    job.y = y + at;
    job.last += some.r0;
    job.rows = some.rows;
    job.heads = some.heads;
    job.lse = lse ? lse + some.r0 * job.ld_lse + some.h0 : NULL;
    k->attention(&job);
    free(job.scratch);
}

static void check_attention(const struct nbi_microkernels *k, const struct attention *t)
{
    int64_t D = t->job.D, ld = t->job.ldq, floats = LINES * ld;
    float *y = floats_of(floats, ORDINARY), *part = floats_of(floats, ORDINARY);
    float lse[LINES * HEADS], part_lse[LINES * HEADS];
    memcpy(part, y, (size_t)floats * 4);
    attend_some(k, t, (struct queries){0, LINES, 0, HEADS}, y, lse);
    const float *last = y + (LINES - 1) * ld;
    for (int h = 0; h < HEADS; h++) {
        assert_near("lse", k->name, (double)lse[(LINES - 1) * HEADS + h], t->lse[h],
                    t->lse_bound[h]);
        for (int64_t d = 0; d < D; d++)
            assert_near("attention", k->name, (double)last[h * D + d], t->want[h * D + d],
                        t->bound[h * D + d]);
    }
    /* The same bits in smaller company, and without lse; nothing else is written. */
    for (int r = 0; r < LINES; r++)
        for (int h = 0, heads; h < HEADS; h += heads) {
            heads = 1 + (int)(bits32() % (unsigned)(HEADS - h));
            memset(part + r * ld + h * D, 0xFF, (size_t)(heads * D) * 4);
            attend_some(k, t, (struct queries){r, 1, h, heads}, part, h & 1 ? NULL : part_lse);
            if (!(h & 1))
                assert_memory_equal(part_lse + r * HEADS + h, lse + r * HEADS + h, heads * 4);
        }
    assert_memory_equal(part, y, floats * 4);
    free(y);
    free(part);
}

/* A key that is no number makes every row that sees it none. */
static void check_nan(const struct nbi_microkernels *k, int64_t count)
{
    struct attention t;
    attention_new(&t, NBI_F32, 64, count, SPREAD);
    float *y = floats_of(LINES * t.job.ldq, ORDINARY);
    put_as(t.kv + 4, NBI_F32, count / 2 * 128, NAN);
    attend_some(k, &t, (struct queries){0, LINES, 0, HEADS}, y, NULL);
    for (int64_t i = 0; i < HEADS * 64; i++)
        assert_true(isnan(y[(LINES - 1) * t.job.ldq + i]));
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
    int turn = 0;
    for (size_t d = 0; d < COUNT(types); d++)
        for (size_t h = 0; h < COUNT(head_sizes); h++)
            for (size_t c = 0; c < COUNT(counts); c++) {
                if (counts[c] == 1000 && head_sizes[h] > 96 && (d + h) % 2)
                    continue; /* time */
                attention_new(t, types[d], head_sizes[h], counts[c],
                              (enum scores)(turn++ % SCORES));
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

/* Whoever adds a slot to the table adds it to the list: eleven functions here, eight that
 * test_backward.c tests through the operations that use them, two that are in test_optimizer.c;
 * before them a name and two numbers. */
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
