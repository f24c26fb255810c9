/* test_nvfp4.c - the NVFP4 codec against references that fraction no code with it: exact
 * comparisons in double for the codes, recomputed errors for the search of scales, literal bytes
 * for the layouts; and every codec table against the scalar one, byte by byte. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#define B       NBI_NVFP4_BLOCK
#define METHODS 3

static const double grid[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/* ---- independent references ---- */

static double e4m3(int code)
{
    int e = code >> 3 & 15, m = code & 7;
    double v = (code & 0x7F) == 0x7F ? (double)NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return code & 0x80 ? -v : v;
}

static double e2m1(int code)
{
    return code & 8 ? -grid[code & 7] : grid[code & 7];
}

/* The code of x under a scale. A midpoint times a scale has few bits, so the comparison is exact.
 */
static int ref_code(float x, double scale)
{
    double a = fabs((double)x);
    int code = 0;
    for (int c = 0; c < 7; c++) {
        double mid = (grid[c] + grid[c + 1]) / 2 * scale;
        if (a > mid || (a == mid && c % 2 == 1))
            code = c + 1;
    }
    return code | (signbit(x) ? 8 : 0);
}

/* The E4M3 code nearest to amax / 6, found by comparing amax with six times each midpoint. */
static int ref_rtn(float amax)
{
    if (amax == 0)
        return 0x38;
    int code = 0;
    for (int c = 0; c < 0x7E; c++) {
        double mid = 6 * (e4m3(c) + e4m3(c + 1)) / 2;
        if (amax > mid || (amax == mid && c % 2 == 1))
            code = c + 1;
    }
    return code < 1 ? 1 : code;
}

static float ref_amax(const float *x, int rows, int64_t stride)
{
    float amax = 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < B; i++)
            if (fabsf(x[r * stride * B + i]) > amax)
                amax = fabsf(x[r * stride * B + i]);
    return amax;
}

/* Squared error of a column of blocks under a scale code. */
static double ref_error(const float *x, int rows, int64_t stride, int scale_code)
{
    double sum = 0, scale = e4m3(scale_code);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < B; i++) {
            float v = x[r * stride * B + i];
            double d = (double)v - e2m1(ref_code(v, scale)) * scale;
            sum += d * d;
        }
    return sum;
}

static int nibble_of(const uint8_t *q, int64_t i)
{
    return i % 2 ? q[i / 2] >> 4 : q[i / 2] & 15;
}

/* ---- data ---- */

enum kind { GAUSS, SPARSE, TIES, OUTLIER, SUBNORMAL, ANY_BITS, ZEROS, KINDS };

static float sample(enum kind kind, float sigma, uint64_t seed, uint64_t i)
{
    struct nbi_philox r = nbi_philox(seed, i, 77);
    float normal[4];
    nbi_philox_normal4(normal, seed, i, 78);
    float sign = r.v[0] & 1 ? -1.0f : 1.0f;
    switch (kind) {
    case SPARSE:
        return r.v[1] % 3 ? normal[0] * sigma : sign * 0.0f;
    case TIES: /* quarters of a code: 24 quarters are 6 */
        return sign * (float)(r.v[1] % 25) / 4 * (float)e4m3(0x30 + (int)(seed % 16)) * sigma;
    case OUTLIER:
        return normal[0] * sigma * (r.v[1] % 16 ? 1.0f : 30.0f);
    case SUBNORMAL:
        return nbi_f32_from_bits(r.v[1] & 0x807FFFFF);
    case ANY_BITS: /* any finite number */
        return nbi_f32_from_bits((r.v[1] & 0x7F800000) == 0x7F800000 ? r.v[1] ^ 0x40000000
                                                                     : r.v[1]);
    case ZEROS:
        return sign * 0.0f;
    default:
        return normal[0] * sigma;
    }
}

static float *make(int64_t n, enum kind kind, float sigma, uint64_t seed)
{
    float *x = malloc((size_t)n * sizeof *x + 1);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = sample(kind, sigma, seed, (uint64_t)i);
    return x;
}

/* Four normal values per counter, for large arrays. */
static float *make_gauss(int64_t n, float sigma, uint64_t seed)
{
    float *x = malloc((size_t)n * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i += 4) {
        nbi_philox_normal4(x + i, seed, (uint64_t)i / 4, 0);
        for (int k = 0; k < 4; k++)
            x[i + k] *= sigma;
    }
    return x;
}

static const struct nbi_codec_table *table(int level)
{
    static bool told[NBI_SIMD_AVX512 + 1];
    const struct nbi_codec_table *k = nbi_codec_table_at((enum nbi_simd)level);
    if (!k && !told[level])
        print_message("SKIP: this CPU or build lacks %s\n", nbi_simd_name((enum nbi_simd)level));
    told[level] = true;
    return k;
}

/* ---- every table against the scalar one ---- */

/* Buffers have exact size, and bytes between the rows must not change. */
static void compare_quantize(const struct nbi_codec_table *k, uint64_t seed)
{
    static const float sigmas[] = {1e-8f, 1e-3f, 0.02f, 1, 1e4f, 1e37f};
    struct nbi_philox r = nbi_philox(21, seed, 0);
    int64_t blocks = r.v[0] % 68, stride = blocks + r.v[1] % 3;
    int rows = r.v[2] & 1 ? 1 : 1 + (int)(r.v[2] >> 1) % 16;
    float sigma = sigmas[r.v[3] % 6];
    enum kind kind = (enum kind)(r.v[3] / 6 % KINDS);
    int64_t n = blocks ? (rows - 1) * stride + blocks : 0;
    float *x = make(n * B, kind, sigma, seed);
    uint8_t *out[2][2];
    for (int m = 0; m < METHODS; m++) {
        for (int t = 0; t < 2; t++) {
            uint8_t *q = out[t][0] = malloc((size_t)n * B / 2 + 1);
            uint8_t *s = out[t][1] = malloc((size_t)n + 1);
            memset(q, 0xAA, (size_t)n * B / 2);
            memset(s, 0xAA, (size_t)n);
            (t ? k : &nbi_codec_scalar)
                ->quantize(q, s, x, blocks, rows, stride, (enum nb_quant_method)m);
        }
        if (memcmp(out[0][1], out[1][1], (size_t)n) != 0 ||
            memcmp(out[0][0], out[1][0], (size_t)n * B / 2) != 0)
            fail_msg("%s differs: seed %d, method %d, kind %d, sigma %g, %d x %d blocks", k->name,
                     (int)seed, m, kind, (double)sigma, rows, (int)blocks);
        for (int t = 0; t < 4; t++)
            free(out[t / 2][t % 2]);
    }
    free(x);
}

static void test_nvfp4__every_table_quantizes_alike(void **state)
{
    (void)state;
    for (int level = NBI_SIMD_AVX2; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        for (uint64_t seed = 0; k && seed < 1500; seed++)
            compare_quantize(k, seed);
    }
}

/* Quotients at and next to every tie, under every scale. The first value fixes the scale. */
static void test_nvfp4__every_table_breaks_ties_alike(void **state)
{
    (void)state;
    enum { BLOCKS = 126 * 2 };
    static float x[BLOCKS * B];
    static uint8_t q[BLOCKS * B / 2], s[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        double scale = e4m3(1 + b / 2);
        x[b * B] = (float)(6 * scale);
        for (int i = 1; i < B; i++) {
            float mid = (float)((grid[i % 7] + grid[i % 7 + 1]) / 2 * scale);
            int way = (b % 2 * 15 + i) / 7 % 3;
            x[b * B + i] = way == 0 ? mid : nextafterf(mid, way == 1 ? INFINITY : 0);
        }
    }
    for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        if (!k)
            continue;
        k->quantize(q, s, x, BLOCKS, 1, BLOCKS, NB_QUANT_RTN);
        for (int b = 0; b < BLOCKS; b++) {
            assert_int_equal(s[b], 1 + b / 2);
            for (int i = 0; i < B; i++)
                assert_int_equal(nibble_of(q, b * B + i), ref_code(x[b * B + i], e4m3(s[b])));
        }
    }
}

static void test_nvfp4__every_table_computes_amax_and_error_alike(void **state)
{
    (void)state;
    const int64_t lengths[] = {0, 1, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000, 4099};
    for (int level = NBI_SIMD_AVX2; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        for (size_t l = 0; k && l < sizeof lengths / sizeof *lengths; l++) {
            int64_t n = lengths[l];
            float *x = make(n, OUTLIER, 0.02f, 5), *y = make(n, SPARSE, 0.02f, 6);
            double want[3] = {1, 2, 3}, got[3] = {1, 2, 3};
            nbi_codec_scalar.error(x, y, n, want);
            k->error(x, y, n, got);
            assert_true(fabs(got[0] - want[0]) <= 1e-12 * want[0]);
            assert_true(fabs(got[1] - want[1]) <= 1e-12 * want[1]);
            assert_true(got[2] == want[2]);
            const float specials[] = {0, -1e38f, -INFINITY, -NAN};
            for (int64_t i = 0; i < (n < 40 ? n : 40); i++)
                for (int j = 0; j < 4; j++) {
                    float was = x[i];
                    x[i] = specials[j];
                    assert_int_equal(nbi_f32_bits(k->amax(x, n)),
                                     nbi_f32_bits(nbi_codec_scalar.amax(x, n)));
                    x[i] = was;
                }
            assert_true(k->amax(x, n) == nbi_codec_scalar.amax(x, n));
            free(x);
            free(y);
        }
    }
}

/* ---- the methods ---- */

static void test_nvfp4__rtn_matches_exact_arithmetic(void **state)
{
    (void)state;
    const float sigmas[] = {1e-8f, 1e-3f, 0.02f, 1, 100, 1e4f, 1e37f};
    enum { BLOCKS = 500 };
    static uint8_t q[BLOCKS * B / 2], s[BLOCKS];
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t g = 0; g < sizeof sigmas / sizeof *sigmas; g++) {
            float *x = make(BLOCKS * B, (enum kind)kind, sigmas[g], 31 + g);
            nbi_nvfp4_quantize(q, s, x, BLOCKS, NB_QUANT_RTN, 1);
            for (int b = 0; b < BLOCKS; b++) {
                assert_int_equal(s[b], ref_rtn(ref_amax(x + b * B, 1, 0)));
                for (int i = b * B; i < b * B + B; i++)
                    assert_int_equal(nibble_of(q, i), ref_code(x[i], e4m3(s[b])));
            }
            free(x);
        }
}

/* The searches compare sums in f32, so a code that is better only because of their rounding may
 * win. */
static void check_search(const float *x, int rows, int64_t stride, int sweep, int four_over_six)
{
    const double close = 1 + 1e-5;
    int rtn = ref_rtn(ref_amax(x, rows, stride));
    double best = ref_error(x, rows, stride, sweep);
    for (int code = rtn - 2; code <= rtn + 6; code++)
        if (code >= 1 && code <= 0x7E)
            assert_true(best <= close * ref_error(x, rows, stride, code));
    assert_true(sweep >= rtn - 2 && sweep <= rtn + 6);
    int rtn_1_5 = ref_rtn(ref_amax(x, rows, stride) * 1.5f);
    double of_two = ref_error(x, rows, stride, four_over_six);
    assert_true(four_over_six == rtn || abs(four_over_six - rtn_1_5) <= 1);
    assert_true(of_two <= close * ref_error(x, rows, stride, rtn));
    assert_true(best <= close * of_two);
}

static void test_nvfp4__searches_find_the_smallest_error(void **state)
{
    (void)state;
    const float sigmas[] = {1e-3f, 0.02f, 1, 100, 1e4f};
    const enum kind kinds[] = {GAUSS, SPARSE, TIES, OUTLIER};
    enum { BLOCKS = 150 };
    static uint8_t q[BLOCKS * B / 2], sweep[BLOCKS], four[BLOCKS];
    for (int k = 0; k < 4; k++)
        for (size_t g = 0; g < sizeof sigmas / sizeof *sigmas; g++) {
            float *x = make(BLOCKS * B, kinds[k], sigmas[g], 41 + g);
            nbi_nvfp4_quantize(q, four, x, BLOCKS, NB_QUANT_4OVER6, 1);
            nbi_nvfp4_quantize(q, sweep, x, BLOCKS, NB_QUANT_SWEEP, 1);
            for (int b = 0; b < BLOCKS; b++) {
                if (ref_amax(x + b * B, 1, 0) > 0)
                    check_search(x + b * B, 1, 0, sweep[b], four[b]);
                for (int i = b * B; i < b * B + B; i++) /* the codes fit the chosen scale */
                    assert_int_equal(nibble_of(q, i), ref_code(x[i], e4m3(sweep[b])));
            }
            free(x);
        }
}

static double snr(const float *x, int64_t n, enum nb_quant_method method, float tensor_scale)
{
    uint8_t *q = malloc((size_t)n / 2), *s = malloc((size_t)n / B);
    float *y = malloc((size_t)n * sizeof *y);
    double sums[3] = {0};
    nbi_nvfp4_quantize(q, s, x, n / B, method, tensor_scale);
    nbi_nvfp4_dequantize_f32(y, q, s, n / B, tensor_scale);
    nbi_codec_scalar.error(x, y, n, sums);
    free(q);
    free(s);
    free(y);
    return 10 * log10(sums[1] / sums[0]);
}

static void test_nvfp4__error_of_a_gaussian_matrix_is_within_bounds(void **state)
{
    (void)state;
    const int64_t n = 1024 * 1024;
    float *x = make_gauss(n, 0.02f, 51);
    float two = nbi_nvfp4_tensor_scale(nbi_codec_table()->amax(x, n));
    double db[2][METHODS];
    for (int level = 0; level < 2; level++)
        for (int m = 0; m < METHODS; m++)
            db[level][m] = snr(x, n, (enum nb_quant_method)m, level ? two : 1);
    print_message("SNR in dB, sigma 0.02: single-level rtn %.3f, 4over6 %.3f, sweep %.3f; "
                  "two-level (2^%d) rtn %.3f, 4over6 %.3f, sweep %.3f\n",
                  db[0][0], db[0][1], db[0][2], ilogbf(two), db[1][0], db[1][1], db[1][2]);
    assert_true(db[0][NB_QUANT_RTN] >= 19.7 && db[0][NB_QUANT_SWEEP] >= 20.9);
    assert_true(db[1][NB_QUANT_RTN] >= 20.4 && db[1][NB_QUANT_SWEEP] >= 21.7);
    for (int level = 0; level < 2; level++) {
        assert_true(db[level][NB_QUANT_4OVER6] > db[level][NB_QUANT_RTN]);
        assert_true(db[level][NB_QUANT_SWEEP] > db[level][NB_QUANT_4OVER6]);
    }
    free(x);
}

/* The example of docs/NVFP4.md.
 *
 * The largest magnitude is 3.1; 3.1 / 6 = 0.51667 lies between the E4M3 values 0.5 (0x30) and
 * 0.5625 (0x31), nearer to 0.5. So the scale s is 0.5 and each value is doubled, then rounded:
 *
 *   x         3.1    -2.5    1.25   0.875  -0.125       0     0.3    -0.8
 *   x/s       6.2      -5     2.5    1.75   -0.25       0     0.6    -1.6
 *   e2m1        6      -4       2       2      -0       0     0.5    -1.5
 *   code        7       E       4       4       8       0       1       B
 *   y           3      -2       1       1      -0       0    0.25   -0.75
 *   byte               E7              44              08              B1
 *
 *   x           1       2      -3    0.45    -1.6     2.2     0.1    -0.6
 *   x/s         2       4      -6     0.9    -3.2     4.4     0.2    -1.2
 *   e2m1        2       4      -6       1      -3       4       0      -1
 *   code        4       6       F       2       D       6       0       A
 *   y           1       2      -3     0.5    -1.5       2       0    -0.5
 *   byte               64              2F              6D              A0
 *
 * 6.2 saturates. -5, 2.5, 1.75 and -0.25 are ties; each goes to the even code of its neighbours.
 * The squared error is 0.43125. Both searches prefer 1.5 times that scale, 0.75 (0x34), which maps
 * the largest value to 4 instead of 6; their squared error is 0.25625. */
static const float example[B] = {3.1f, -2.5f, 1.25f, 0.875f, -0.125f, 0.0f, 0.3f, -0.8f,
                                 1.0f, 2.0f,  -3.0f, 0.45f,  -1.6f,   2.2f, 0.1f, -0.6f};

static void test_nvfp4__quantizes_the_documented_example(void **state)
{
    (void)state;
    const uint8_t codes[METHODS][B / 2] = {{0xE7, 0x44, 0x08, 0xB1, 0x64, 0x2F, 0x6D, 0xA0},
                                           {0xD6, 0x23, 0x08, 0xA1, 0x53, 0x1E, 0x5C, 0xA0},
                                           {0xD6, 0x23, 0x08, 0xA1, 0x53, 0x1E, 0x5C, 0xA0}};
    const uint8_t scales[METHODS] = {0x30, 0x34, 0x34};
    const float values[B] = {3.0f, -2.0f, 1.0f,  1.0f, -0.0f, 0.0f, 0.25f, -0.75f,
                             1.0f, 2.0f,  -3.0f, 0.5f, -1.5f, 2.0f, 0.0f,  -0.5f};
    for (int m = 0; m < METHODS; m++) {
        uint8_t q[B / 2], s;
        float y[B];
        nbi_nvfp4_quantize(q, &s, example, 1, (enum nb_quant_method)m, 1);
        assert_int_equal(s, scales[m]);
        assert_memory_equal(q, codes[m], sizeof q);
        nbi_nvfp4_dequantize_f32(y, q, &s, 1, 1);
        if (m == NB_QUANT_RTN)
            assert_memory_equal(y, values, sizeof y);
    }
}

static void test_nvfp4__zero_blocks_get_scale_one(void **state)
{
    (void)state;
    float x[B] = {0};
    x[3] = -0.0f;
    for (int m = 0; m < METHODS; m++) {
        uint8_t q[B / 2], s;
        const uint8_t want[B / 2] = {0, 0x80};
        nbi_nvfp4_quantize(q, &s, x, 1, (enum nb_quant_method)m, 1);
        assert_int_equal(s, 0x38);
        assert_memory_equal(q, want, sizeof q);
    }
}

/* A tensor scale divides the values first: exactly if it is a power of two, else with one rounding.
 */
static void test_nvfp4__tensor_scale_divides_first(void **state)
{
    (void)state;
    enum { BLOCKS = 600 };
    const float scales[] = {0x1p-9f, 0x1p5f, 0.3f, 1e-4f};
    static uint8_t q[2][BLOCKS * B / 2], s[2][BLOCKS];
    static float divided[BLOCKS * B];
    float *x = make(BLOCKS * B, GAUSS, 0.02f, 61);
    for (int t = 0; t < 4; t++)
        for (int m = 0; m < METHODS; m++) {
            for (int i = 0; i < BLOCKS * B; i++)
                divided[i] = (float)((double)x[i] / (double)scales[t]);
            nbi_nvfp4_quantize(q[0], s[0], x, BLOCKS, (enum nb_quant_method)m, scales[t]);
            nbi_nvfp4_quantize(q[1], s[1], divided, BLOCKS, (enum nb_quant_method)m, 1);
            assert_memory_equal(q[0], q[1], sizeof q[0]);
            assert_memory_equal(s[0], s[1], sizeof s[0]);
        }
    free(x);
}

/* ---- tiles ---- */

static void check_tiles(int64_t rows, int64_t cols, float t, enum nb_quant_method method)
{
    int64_t n = rows * cols, stride = cols / B;
    float *x = make(n, GAUSS, 0.02f, (uint64_t)(rows * 1000 + cols));
    float *v = malloc((size_t)n * sizeof *v);
    uint8_t *q = malloc((size_t)n / 2), *s = malloc((size_t)(n / B));
    for (int64_t i = 0; i < n; i++)
        v[i] = x[i] / t;
    nbi_nvfp4_quantize_tiles(q, s, x, rows, cols, method, t);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < stride; j++) {
            int64_t top = r - r % B, tall = rows - top < B ? rows - top : B;
            const float *tile = v + (top * stride + j) * B;
            int code = s[r * stride + j];
            if (method == NB_QUANT_RTN)
                assert_int_equal(code, ref_rtn(ref_amax(tile, (int)tall, stride)));
            assert_int_equal(code, s[top * stride + j]);
            if (method == NB_QUANT_SWEEP && r == top)
                for (int c = 1; c <= 0x7E; c++)
                    if (abs(c - ref_rtn(ref_amax(tile, (int)tall, stride)) - 2) <= 4)
                        assert_true(ref_error(tile, (int)tall, stride, code) <=
                                    1.0001 * ref_error(tile, (int)tall, stride, c));
            for (int64_t i = (r * stride + j) * B; i < (r * stride + j + 1) * B; i++)
                assert_int_equal(nibble_of(q, i), ref_code(v[i], e4m3(code)));
        }
    free(x);
    free(v);
    free(q);
    free(s);
}

static void test_nvfp4__tiles_share_a_scale(void **state)
{
    (void)state;
    const int64_t shapes[][2] = {{1, 16},  {16, 16},  {17, 32},  {15, 256}, {33, 272},
                                 {48, 48}, {31, 528}, {64, 320}, {2, 1024}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_tiles(shapes[i][0], shapes[i][1], 1, NB_QUANT_RTN);
        check_tiles(shapes[i][0], shapes[i][1], 0x1p-11f, NB_QUANT_RTN);
        check_tiles(shapes[i][0], shapes[i][1], 0x1p-11f, NB_QUANT_4OVER6);
        check_tiles(shapes[i][0], shapes[i][1], 0x1p-11f, NB_QUANT_SWEEP);
    }
}

/* ---- stochastic rounding ---- */

static void test_nvfp4__stochastic_rounding_repeats_and_can_be_split(void **state)
{
    (void)state;
    enum { BLOCKS = 40 };
    static uint8_t q[3][BLOCKS * B / 2], s[3][BLOCKS];
    float *x = make(BLOCKS * B, GAUSS, 0.02f, 71);
    nbi_nvfp4_quantize_sr(q[0], s[0], x, BLOCKS, 0x1p-8f, (struct nbi_nvfp4_random){9, 3, 100});
    for (int cut = 0; cut <= BLOCKS; cut += 13) {
        nbi_nvfp4_quantize_sr(q[1], s[1], x, cut, 0x1p-8f, (struct nbi_nvfp4_random){9, 3, 100});
        nbi_nvfp4_quantize_sr(q[1] + cut * B / 2, s[1] + cut, x + cut * B, BLOCKS - cut, 0x1p-8f,
                              (struct nbi_nvfp4_random){9, 3, 100 + cut});
        assert_memory_equal(q[0], q[1], sizeof q[0]);
        assert_memory_equal(s[0], s[1], sizeof s[0]);
    }
    /* Another seed, stream or first block gives other codes. */
    for (int other = 0; other < 3; other++) {
        nbi_nvfp4_quantize_sr(q[2], s[2], x, BLOCKS, 0x1p-8f,
                              (struct nbi_nvfp4_random){other == 0 ? 10 : 9, other == 1 ? 4 : 3,
                                                        other == 2 ? 140 : 100});
        assert_memory_equal(s[0], s[2], sizeof s[0]);
        assert_memory_not_equal(q[0], q[2], sizeof q[0]);
    }
    free(x);
}

/* The lower neighbour of a on the grid, and the fraction of the way to the upper one. */
static int ref_floor(double a, double *fraction)
{
    int low = 6;
    while (grid[low] > a)
        low--;
    *fraction = (a - grid[low]) / (grid[low + 1] - grid[low]);
    return low;
}

static void test_nvfp4__stochastic_rounding_uses_the_documented_bits(void **state)
{
    (void)state;
    enum { BLOCKS = 64 };
    static uint8_t q[BLOCKS * B / 2], s[BLOCKS];
    float *x = make(BLOCKS * B, SPARSE, 1, 72);
    nbi_nvfp4_quantize_sr(q, s, x, BLOCKS, 1,
                          (struct nbi_nvfp4_random){0x123456789ABCDEF0, 5, 1000});
    for (int b = 0; b < BLOCKS; b++) {
        double amax = ref_amax(x + b * B, 1, 0), scale = e4m3(s[b]);
        assert_true(scale * 6 >= amax && (e4m3(s[b] - 1) * 6 < amax || amax == 0));
        for (int i = 0; i < B; i++) {
            struct nbi_philox r =
                nbi_philox(0x123456789ABCDEF0, 2 * (1000u + (uint64_t)b) + (uint64_t)(i / 8), 5);
            uint32_t word = r.v[i % 8 / 2], u = i % 2 ? word >> 16 : word & 0xFFFF;
            double fraction, v = (double)x[b * B + i];
            int low = ref_floor(fabs(v) / scale, &fraction);
            int want = (low + (fraction * 65536 > u + 0.5)) | (signbit(x[b * B + i]) ? 8 : 0);
            assert_int_equal(nibble_of(q, b * B + i), want);
        }
    }
    free(x);
}

static void test_nvfp4__stochastic_rounding_is_unbiased(void **state)
{
    (void)state;
    enum { BLOCKS = 8, SEEDS = 4096 };
    static uint8_t q[BLOCKS * B / 2], s[BLOCKS];
    static float y[BLOCKS * B];
    static double sum[BLOCKS * B];
    float *x = make(BLOCKS * B, GAUSS, 0.02f, 73);
    const float t = 0x1p-10f;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        nbi_nvfp4_quantize_sr(q, s, x, BLOCKS, t, (struct nbi_nvfp4_random){seed, 0, 0});
        nbi_nvfp4_dequantize_f32(y, q, s, BLOCKS, t);
        for (int i = 0; i < BLOCKS * B; i++)
            sum[i] += (double)y[i];
    }
    for (int i = 0; i < BLOCKS * B; i++) {
        double scale = e4m3(s[i / B]) * (double)t, fraction;
        int low = ref_floor(fabs((double)x[i]) / scale, &fraction);
        double gap = (grid[low + 1] - grid[low]) * scale;
        double deviation = gap * sqrt(fraction * (1 - fraction) / SEEDS);
        /* The 16 random bits of a value resolve its fraction to 2^-16. */
        assert_true(fabs(sum[i] / SEEDS - (double)x[i]) <= 5 * deviation + gap * 0x1p-16);
    }
    free(x);
}

/* ---- decoding ---- */

static void check_decoded(const float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                          float t, const char *name)
{
    for (int64_t i = 0; i < blocks * B; i++) {
        /* At amax 2 + 4 + 24 significant bits: exact in double, then one rounding. */
        double exact = e2m1(nibble_of(q, i)) * e4m3(s[i / B]) * (double)t;
        bool same = isnan(exact) ? isnan(y[i]) : nbi_f32_bits(y[i]) == nbi_f32_bits((float)exact);
        if (!same)
            fail_msg("%s: code %x, scale %02x, %a gives %a", name, nibble_of(q, i), s[i / B],
                     (double)t, (double)y[i]);
    }
}

static void test_nvfp4__dequantizes_by_the_formula(void **state)
{
    (void)state;
    enum { BLOCKS = 256 };
    const float scales[] = {1, 0x1p-10f, 0x1p-100f, 0.3f, 7.1e-5f, 1e36f, 0x1p-139f};
    static uint8_t q[BLOCKS * B / 2], s[BLOCKS];
    static float y[BLOCKS * B];
    static uint16_t h[BLOCKS * B];
    for (int b = 0; b < BLOCKS; b++) {
        s[b] = (uint8_t)b;
        for (int i = 0; i < B / 2; i++) /* all codes, in an order that differs by block */
            q[b * B / 2 + i] = (uint8_t)(((2 * i + b) & 15) | ((2 * i + 1 + b) & 15) << 4);
    }
    for (size_t t = 0; t < sizeof scales / sizeof *scales; t++) {
        for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
            const struct nbi_codec_table *k = table(level);
            if (!k)
                continue;
            k->dequantize_f32(y, q, s, BLOCKS, scales[t]);
            check_decoded(y, q, s, BLOCKS, scales[t], k->name);
        }
        nbi_nvfp4_dequantize_f16(h, q, s, BLOCKS, scales[t]);
        for (int i = 0; i < BLOCKS * B; i++)
            assert_true(isnan(y[i]) ? (h[i] & 0x7FFF) > 0x7C00 : h[i] == nbi_f32_to_f16(y[i]));
        nbi_nvfp4_dequantize_bf16(h, q, s, BLOCKS, scales[t]);
        for (int i = 0; i < BLOCKS * B; i++)
            assert_true(isnan(y[i]) ? (h[i] & 0x7FFF) > 0x7F80 : h[i] == nbi_f32_to_bf16(y[i]));
    }
}

/* The product of code and scale is exact in both half types, as the header says. */
static void test_nvfp4__single_level_is_exact_in_half_types(void **state)
{
    (void)state;
    for (int scale = 0; scale < 0x7F; scale++)
        for (int code = 0; code < 16; code++) {
            uint8_t q[B / 2] = {(uint8_t)code}, s = (uint8_t)scale;
            uint16_t f16[B], bf16[B];
            double exact = e2m1(code) * e4m3(scale);
            nbi_nvfp4_dequantize_f16(f16, q, &s, 1, 1);
            nbi_nvfp4_dequantize_bf16(bf16, q, &s, 1, 1);
            assert_true((double)nbi_f16_to_f32(f16[0]) == exact);
            assert_true((double)nbi_bf16_to_f32(bf16[0]) == exact);
        }
}

static void test_nvfp4__dequantizes_any_number_of_blocks(void **state)
{
    (void)state;
    for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        for (int64_t blocks = 0; k && blocks < 40; blocks++) {
            uint8_t *q = malloc((size_t)blocks * B / 2 + 1), *s = malloc((size_t)blocks + 1);
            float *y = malloc((size_t)blocks * B * sizeof *y + 1);
            for (int64_t i = 0; i < blocks * B / 2; i++)
                q[i] = (uint8_t)(i * 37 + 11);
            for (int64_t i = 0; i < blocks; i++)
                s[i] = (uint8_t)(i * 53 + 3);
            k->dequantize_f32(y, q, s, blocks, 0.7f);
            check_decoded(y, q, s, blocks, 0.7f, k->name);
            free(q);
            free(s);
            free(y);
        }
    }
}

/* ---- tensor scales and layouts ---- */

static void check_tensor_scale(float amax)
{
    int e;
    float t = nbi_nvfp4_tensor_scale(amax);
    assert_true(frexpf(t, &e) == 0.5f);
    assert_true((double)amax / (double)t <= 2688);
    if (t > 0x1p-100f) /* the smallest tensor scale */
        assert_true((double)amax / (double)t > 1344);
}

static void test_nvfp4__tensor_scale_is_the_smallest_power_of_two(void **state)
{
    (void)state;
    assert_true(nbi_nvfp4_tensor_scale(0) == 1);
    assert_true(nbi_nvfp4_tensor_scale(2688) == 1 && nbi_nvfp4_tensor_scale(2689) == 2);
    assert_true(nbi_nvfp4_fits(2688, 1) && !nbi_nvfp4_fits(2689, 1) && nbi_nvfp4_fits(2689, 2));
    for (int e = -126; e <= 116; e++) {
        float edge = ldexpf(2688, e);
        check_tensor_scale(edge);
        check_tensor_scale(nextafterf(edge, 0));
        check_tensor_scale(nextafterf(edge, INFINITY));
    }
    for (uint32_t i = 0; i < 20000; i++) {
        float amax = nbi_f32_from_bits(nbi_philox(81, i, 0).v[0] & 0x7FFFFFFF);
        if (isfinite(amax) && amax > 0)
            check_tensor_scale(amax);
    }
}

static void test_nvfp4__writes_the_nibble_order_of_ggml(void **state)
{
    (void)state;
    /* Four blocks of codes: 0 to 15; 15 to 0; eight times 3, then C; 1 and 2 alternating. */
    const uint8_t q[32] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0xEF, 0xCD, 0xAB,
                           0x89, 0x67, 0x45, 0x23, 0x01, 0x33, 0x33, 0x33, 0x33, 0xCC, 0xCC,
                           0xCC, 0xCC, 0x21, 0x21, 0x21, 0x21, 0x21, 0x21, 0x21, 0x21};
    const uint8_t s[4] = {0x38, 0x40, 0x01, 0x7E};
    /* The scales, then byte j of each block: value j low, value j + 8 high. */
    const uint8_t want[36] = {0x38, 0x40, 0x01, 0x7E, 0x80, 0x91, 0xA2, 0xB3, 0xC4,
                              0xD5, 0xE6, 0xF7, 0x7F, 0x6E, 0x5D, 0x4C, 0x3B, 0x2A,
                              0x19, 0x08, 0xC3, 0xC3, 0xC3, 0xC3, 0xC3, 0xC3, 0xC3,
                              0xC3, 0x11, 0x22, 0x11, 0x22, 0x11, 0x22, 0x11, 0x22};
    uint8_t out[36], q2[32], s2[4];
    nbi_nvfp4_to_gguf(out, q, s, 1);
    assert_memory_equal(out, want, sizeof want);
    nbi_nvfp4_from_gguf(q2, s2, want, 1);
    assert_memory_equal(q2, q, sizeof q);
    assert_memory_equal(s2, s, sizeof s);
}

static void test_nvfp4__nibble_order_round_trips(void **state)
{
    (void)state;
    enum { SUPER = 33 };
    static uint8_t q[SUPER * 32], s[SUPER * 4], out[SUPER * 36], q2[SUPER * 32], s2[SUPER * 4];
    for (int i = 0; i < SUPER * 32; i++)
        q[i] = (uint8_t)nbi_philox(91, (uint64_t)i, 0).v[0];
    for (int i = 0; i < SUPER * 4; i++)
        s[i] = (uint8_t)nbi_philox(92, (uint64_t)i, 0).v[0];
    nbi_nvfp4_to_gguf(out, q, s, SUPER);
    for (int64_t i = 0; i < SUPER * 64; i++) { /* the rule, value by value */
        int64_t in_block = i % B;
        const uint8_t *block = out + i / 64 * 36 + 4 + i % 64 / B * 8;
        assert_int_equal(nibble_of(q, i),
                         in_block < 8 ? block[in_block] & 15 : block[in_block - 8] >> 4);
    }
    nbi_nvfp4_from_gguf(q2, s2, out, SUPER);
    assert_memory_equal(q, q2, sizeof q);
    assert_memory_equal(s, s2, sizeof s);
}

/* Checks offsets from the start of the storage: tiles of 128 rows x 4 blocks, those of the same
 * rows consecutive; within a tile, 32 groups of four rows that are 32 apart, four blocks each. */
static void check_swizzle(int64_t rows, int64_t cols)
{
    int64_t row_tiles = (rows + 127) / 128, col_tiles = (cols + 63) / 64, at = 0;
    for (int64_t r = 0; r < row_tiles; r++)
        for (int64_t c = 0; c < col_tiles; c++)
            for (int i = 0; i < 32; i++)
                for (int j = 0; j < 4; j++)
                    for (int k = 0; k < 4; k++)
                        assert_int_equal(
                            nbi_nvfp4_swizzled_at(128 * r + 32 * j + i, 4 * c + k, cols), at++);
    assert_int_equal(nbi_nvfp4_swizzled_bytes(rows, cols), at);
}

static void test_nvfp4__swizzled_scales_are_stored_in_tiles(void **state)
{
    static const int64_t rows[] = {1, 127, 128, 129, 300}, cols[] = {16, 64, 80, 336, 2560};
    (void)state;
    for (int i = 0; i < 25; i++)
        check_swizzle(rows[i / 5], cols[i % 5]);
    /* The formula of cuBLASLt's manual, with shifts. */
    for (int64_t m = 0; m < 300; m++)
        for (int64_t k = 0; k < 21; k++)
            assert_int_equal(nbi_nvfp4_swizzled_at(m, k, 336), ((m >> 7) * 6 + (k >> 2)) * 512 +
                                                                   (m & 31) * 16 +
                                                                   (m >> 5 & 3) * 4 + (k & 3));
}

/* Quantises a block by the references and adds it to y; v becomes the residual. */
static void ref_add_quantised(double *y, float *v)
{
    float amax = 0;
    for (int i = 0; i < B; i++)
        amax = fmaxf(amax, fabsf(v[i]));
    double scale = e4m3(ref_rtn(amax));
    for (int i = 0; i < B; i++) {
        y[i] = e2m1(ref_code(v[i], scale)) * scale;
        v[i] = (float)((double)v[i] - y[i]);
    }
}

/* Checks every block exactly, and the error of every value: at amax half the widest gap of lo,
 * whose scale is up to 17 / 16 of a sixth of half the widest gap of hi. */
static void check_hi_lo(const float *x, int64_t blocks, float t)
{
    float *y = malloc((size_t)(blocks * B) * sizeof *y);
    assert_non_null(y);
    nbi_nvfp4_split_hi_lo(y, x, blocks, t);
    for (int64_t b = 0; b < blocks; b++) {
        float v[B], amax = 0;
        double first[B], second[B];
        for (int i = 0; i < B; i++) {
            v[i] = x[b * B + i] / t;
            amax = fmaxf(amax, fabsf(v[i]));
        }
        ref_add_quantised(first, v);
        for (int i = 0; i < B; i++)
            v[i] *= 4;
        ref_add_quantised(second, v);
        for (int i = 0; i < B; i++) {
            double is = (double)y[b * B + i] / (double)t;
            assert_true(is == first[i] + second[i] / 4);
            assert_true(fabs(is - (double)(x[b * B + i] / t)) <=
                        17.0 / 96 * (17.0 / 96) * (double)amax);
        }
    }
    free(y);
}

static void test_nvfp4__hi_and_lo_are_x_and_its_residual(void **state)
{
    enum { BLOCKS = 1000 };
    static float x[BLOCKS * B], y[BLOCKS * B];
    static const float sizes[] = {1, 1e-30f, 1e30f, 7e-3f};
    /* The largest value and the largest residual: 5 is rounded to 4 with scale 448. */
    static const float edge[B] = {2688, 2240, -2240, 1, 0, -0.0f, 448, -1344, 1568, 3, 5, 100};
    (void)state;
    check_hi_lo(edge, 1, 1);
    nbi_nvfp4_split_hi_lo(y, edge, 1, 1);
    assert_true(y[0] == 2688 && y[1] == 4 * 448 + 432); /* 6 times 288, of 1792 quarters */
    for (int k = 0; k < 4; k++) {
        float amax = 0;
        double off = 0, all = 0;
        for (int i = 0; i < BLOCKS * B; i += 4)
            nbi_philox_normal4(x + i, 93, (uint64_t)i, (uint64_t)k);
        for (int i = 0; i < BLOCKS * B; i++) {
            x[i] *= sizes[k] * (float)(1 << i / B % 8);
            amax = fmaxf(amax, fabsf(x[i]));
        }
        float t = nbi_nvfp4_tensor_scale(amax);
        check_hi_lo(x, BLOCKS, t);
        memcpy(y, x, sizeof x);
        nbi_nvfp4_split_hi_lo(y, y, BLOCKS, t); /* in place */
        for (int i = 0; i < BLOCKS * B; i++) {
            off += pow((double)y[i] - (double)x[i], 2);
            all += pow((double)x[i], 2);
        }
        assert_true(sqrt(off / all) < 0.0095); /* 0.0087 is expected */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nvfp4__every_table_quantizes_alike),
        cmocka_unit_test(test_nvfp4__every_table_breaks_ties_alike),
        cmocka_unit_test(test_nvfp4__every_table_computes_amax_and_error_alike),
        cmocka_unit_test(test_nvfp4__rtn_matches_exact_arithmetic),
        cmocka_unit_test(test_nvfp4__searches_find_the_smallest_error),
        cmocka_unit_test(test_nvfp4__error_of_a_gaussian_matrix_is_within_bounds),
        cmocka_unit_test(test_nvfp4__quantizes_the_documented_example),
        cmocka_unit_test(test_nvfp4__zero_blocks_get_scale_one),
        cmocka_unit_test(test_nvfp4__tensor_scale_divides_first),
        cmocka_unit_test(test_nvfp4__tiles_share_a_scale),
        cmocka_unit_test(test_nvfp4__stochastic_rounding_repeats_and_can_be_split),
        cmocka_unit_test(test_nvfp4__stochastic_rounding_uses_the_documented_bits),
        cmocka_unit_test(test_nvfp4__stochastic_rounding_is_unbiased),
        cmocka_unit_test(test_nvfp4__dequantizes_by_the_formula),
        cmocka_unit_test(test_nvfp4__single_level_is_exact_in_half_types),
        cmocka_unit_test(test_nvfp4__dequantizes_any_number_of_blocks),
        cmocka_unit_test(test_nvfp4__tensor_scale_is_the_smallest_power_of_two),
        cmocka_unit_test(test_nvfp4__writes_the_nibble_order_of_ggml),
        cmocka_unit_test(test_nvfp4__nibble_order_round_trips),
        cmocka_unit_test(test_nvfp4__swizzled_scales_are_stored_in_tiles),
        cmocka_unit_test(test_nvfp4__hi_and_lo_are_x_and_its_residual),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
