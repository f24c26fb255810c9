/* test_half.c - the small float types against formulas, brute-force searches and arithmetic in
 * double, value by value and through every codec table. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/rng.h"
#include "tensor/codec.h"
#include "tensor/half.h"

#define CODES 65536

/* ---- independent references ---- */

static double e2m1_formula(int code)
{
    int e = code >> 1 & 3, m = code & 1;
    double v = e ? ldexp(1 + m / 2.0, e - 1) : m / 2.0;
    return code & 8 ? -v : v;
}

static double e4m3_formula(int code)
{
    int e = code >> 3 & 15, m = code & 7;
    double v = e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m, -9);
    if ((code & 0x7F) == 0x7F)
        v = NAN;
    return code & 0x80 ? -v : v;
}

/* The code in 0..last whose value is nearest to a; ties go to the even code. */
static int nearest(double a, const double *values, int last)
{
    if (a >= values[last])
        return last;
    int best = 0;
    for (int c = 1; c <= last; c++) {
        double was = fabs(a - values[best]), is = fabs(a - values[c]);
        if (is < was || (is == was && c % 2 == 0))
            best = c;
    }
    return best;
}

/* Bits of a >= 0, rounded to nearest even, in a type with `bits` mantissa bits and smallest normal
 * exponent `emin`; infinity from 2^(emax + 1) on. Every step is exact in double. */
static uint32_t round_reference(double a, int bits, int emin, int emax)
{
    int e;
    frexp(a, &e);
    e = a == 0 || e - 1 < emin ? emin : e - 1;
    double n = floor(ldexp(a, bits - e)), rest = ldexp(a, bits - e) - n;
    if (rest > 0.5 || (rest == 0.5 && fmod(n, 2) == 1))
        n++;
    if (n == ldexp(1, bits + 1)) {
        n /= 2;
        e++;
    }
    if (e > emax)
        return (uint32_t)(emax - emin + 2) << bits;
    /* A subnormal n is below 2^bits; a normal one carries its leading 1 into the exponent. */
    return ((uint32_t)(e - emin) << bits) + (uint32_t)n;
}

static uint16_t f16_reference(float f)
{
    uint32_t sign = signbit(f) ? 0x8000 : 0;
    return (uint16_t)(sign | round_reference(isinf(f) ? 1e300 : fabs((double)f), 10, -14, 15));
}

static uint16_t bf16_reference(float f)
{
    uint32_t sign = signbit(f) ? 0x8000 : 0;
    return (uint16_t)(sign | round_reference(isinf(f) ? 1e300 : fabs((double)f), 7, -126, 127));
}

/* Value of a finite or infinite code of such a type. */
static double value_reference(uint32_t code, int bits, int emin, int emax)
{
    int e = (int)((code & 0x7FFF) >> bits);
    double m = ldexp(code & ((1u << bits) - 1), -bits);
    double v = e > emax - emin + 1 ? (double)INFINITY
               : e                 ? ldexp(1 + m, e - 1 + emin)
                                   : ldexp(m, emin);
    return code & 0x8000 ? -v : v;
}

/* ---- helpers ---- */

static const struct nbi_codec_table *table(int level)
{
    static bool told[NBI_SIMD_AVX512 + 1];
    const struct nbi_codec_table *k = nbi_codec_table_at((enum nbi_simd)level);
    if (!k && !told[level])
        print_message("SKIP: this CPU or build lacks %s\n", nbi_simd_name((enum nbi_simd)level));
    told[level] = true;
    return k;
}

static void check_e4m3(float f)
{
    static double values[127];
    if (values[126] == 0)
        for (int c = 0; c < 127; c++)
            values[c] = e4m3_formula(c);
    int want = nearest(fabs((double)f), values, 126) | (signbit(f) ? 0x80 : 0);
    if (nbi_f32_to_e4m3(f) != want)
        fail_msg("e4m3 of %a is %02x, not %02x", (double)f, nbi_f32_to_e4m3(f), (unsigned)want);
}

static void check_e2m1(float f)
{
    static double values[8];
    if (values[7] == 0)
        for (int c = 0; c < 8; c++)
            values[c] = e2m1_formula(c);
    int want = nearest(fabs((double)f), values, 7) | (signbit(f) ? 8 : 0);
    if (nbi_f32_to_e2m1(f) != want)
        fail_msg("e2m1 of %a is %x, not %x", (double)f, nbi_f32_to_e2m1(f), (unsigned)want);
}

static void check_around(float f, void (*check)(float))
{
    for (int sign = 0; sign < 2; sign++, f = -f) {
        check(f);
        check(nextafterf(f, INFINITY));
        check(nextafterf(f, -INFINITY));
    }
}

/* ---- tests ---- */

static void test_half__decodes_every_small_code(void **state)
{
    (void)state;
    for (int c = 0; c < 16; c++) {
        float v = nbi_e2m1_to_f32((uint8_t)c);
        assert_true(v == e2m1_formula(c) && !signbit(v) == (c < 8));
        assert_int_equal(nbi_f32_to_e2m1(v), c);
    }
    for (int c = 0; c < 256; c++) {
        float v = nbi_e4m3_to_f32((uint8_t)c);
        assert_true(!signbit(v) == (c < 128));
        if ((c & 0x7F) == 0x7F)
            assert_true(isnan(v));
        else
            assert_true(v == e4m3_formula(c));
        assert_int_equal(nbi_f32_to_e4m3(v), c);
    }
}

static void test_half__rounds_midpoints_to_even(void **state)
{
    (void)state;
    for (int c = 0; c < 126; c++) {
        check_around((float)((e4m3_formula(c) + e4m3_formula(c + 1)) / 2), check_e4m3);
        check_around((float)e4m3_formula(c + 1), check_e4m3);
    }
    for (int c = 0; c < 7; c++) {
        check_around((float)((e2m1_formula(c) + e2m1_formula(c + 1)) / 2), check_e2m1);
        check_around((float)e2m1_formula(c + 1), check_e2m1);
    }
    const float edges[] = {0.0f, 0x1p-149f, 0x1p-126f, 7.0f, 464.0f, 480.0f, 3e38f, INFINITY};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        check_around(edges[i] == INFINITY ? 3.4e38f : edges[i], check_e4m3);
        check_around(edges[i] == INFINITY ? 3.4e38f : edges[i], check_e2m1);
    }
    assert_int_equal(nbi_f32_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(nbi_f32_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(nbi_f32_to_e2m1(-INFINITY), 15);
    assert_int_equal(nbi_f32_to_e4m3(NAN) & 0x7F, 0x7F);
    assert_int_equal(nbi_f32_to_e2m1(NAN) & 7, 7);
}

static void test_half__rounds_random_values_to_nearest(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 1500000; i++) {
        struct nbi_philox r = nbi_philox(11, i, 0);
        /* One value of any exponent, and one each where the codes are dense. */
        float any = nbi_f32_from_bits(r.v[0]);
        float e4m3 = ldexpf(nbi_uniform(r.v[1]) + 1, (int)(r.v[0] % 22) - 12);
        float e2m1 = nbi_uniform(r.v[2]) * 8;
        if (!isnan(any)) {
            check_e4m3(isinf(any) ? 1 : any);
            check_e2m1(isinf(any) ? 1 : any);
        }
        check_e4m3(r.v[3] & 1 ? -e4m3 : e4m3);
        check_e2m1(r.v[3] & 2 ? -e2m1 : e2m1);
        check_e2m1(ldexpf(e2m1, -(int)(r.v[3] >> 2 & 3)));
    }
}

static void test_half__every_code_survives_f32(void **state)
{
    (void)state;
    uint16_t *in = malloc(CODES * sizeof *in), *round_trip = malloc(CODES * sizeof *round_trip);
    float *f32 = malloc(CODES * sizeof *f32);
    for (int c = 0; c < CODES; c++)
        in[c] = (uint16_t)c;
    for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        for (int type = 0; k && type < 2; type++) { /* f16, bf16 */
            (type ? k->bf16_to_f32 : k->f16_to_f32)(f32, in, CODES);
            (type ? k->f32_to_bf16 : k->f32_to_f16)(round_trip, f32, CODES);
            for (int c = 0; c < CODES; c++) {
                uint32_t inf = type ? 0x7F80 : 0x7C00, quiet = type ? 0x40 : 0x200;
                bool nan = (c & 0x7FFF) > (int)inf;
                uint32_t bits = nbi_f32_bits(f32[c]);
                if (nan) { /* the payload is kept; conversion to the small type makes it quiet */
                    uint32_t payload = (uint32_t)c & (type ? 0x7F : 0x3FF);
                    assert_int_equal(bits, (uint32_t)(c & 0x8000) << 16 | 0x7F800000 |
                                               payload << (type ? 16 : 13));
                    assert_int_equal(round_trip[c], (uint32_t)c | quiet);
                    continue;
                }
                double want = type ? value_reference((uint32_t)c, 7, -126, 127)
                                   : value_reference((uint32_t)c, 10, -14, 15);
                assert_int_equal(bits, nbi_f32_bits((float)want));
                assert_int_equal(round_trip[c], c);
            }
        }
    }
    free(in);
    free(round_trip);
    free(f32);
}

/* Bit patterns: random ones, every rounding boundary of f16 and bf16, and all classes of f32. */
static int64_t fill_patterns(float *x, int64_t n)
{
    int64_t at = 0;
    for (uint32_t c = 0; c < CODES;
         c++) /* bf16 codes, the midpoint to the next one, and neighbours */
        for (uint32_t low = 0x7FFF; low <= 0x8001; low++)
            x[at++] = nbi_f32_from_bits(c << 16 | low);
    for (uint32_t c = 0; c < 0x7C00; c++) { /* the same for f16 */
        float mid = (float)((value_reference(c, 10, -14, 15) +
                             (c == 0x7BFF ? 65536 : value_reference(c + 1, 10, -14, 15))) /
                            2);
        x[at++] = mid;
        x[at++] = nextafterf(mid, INFINITY);
        x[at++] = -nextafterf(mid, 0);
    }
    static const uint32_t classes[] = {0,          0x80000000, 1,          0x80000001,
                                       0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
                                       0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001,
                                       0x7FBFFFFF, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        x[at++] = nbi_f32_from_bits(classes[i]);
    for (uint32_t i = 0; at + 4 <= n; i++) {
        struct nbi_philox r = nbi_philox(12, i, 0);
        x[at++] = nbi_f32_from_bits(r.v[0]);
        x[at++] = nbi_f32_from_bits(r.v[1]);
        x[at++] = nbi_f32_from_bits((r.v[2] & 0x8FFFFFFF) | 0x30000000); /* the range of f16 */
        x[at++] = nbi_f32_from_bits((r.v[3] & 0x80FFFFFF) | 0x38000000); /* its subnormals */
    }
    return at;
}

static uint16_t rounded_want(float f, int type)
{
    uint32_t u = nbi_f32_bits(f);
    if (isnan(f))
        return (uint16_t)(type ? u >> 16 | 0x40 : (u >> 16 & 0x8000) | 0x7E00 | (u >> 13 & 0x1FF));
    return type ? bf16_reference(f) : f16_reference(f);
}

static void test_half__rounds_like_arithmetic_in_double(void **state)
{
    (void)state;
    int64_t n = 4000000;
    float *x = malloc((size_t)n * sizeof *x);
    uint16_t *want = malloc((size_t)n * sizeof *want), *got = malloc((size_t)n * sizeof *got);
    n = fill_patterns(x, n);
    for (int type = 0; type < 2; type++) {
        for (int64_t i = 0; i < n; i++)
            want[i] = rounded_want(x[i], type);
        for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
            const struct nbi_codec_table *k = table(level);
            if (!k)
                continue;
            (type ? k->f32_to_bf16 : k->f32_to_f16)(got, x, n);
            for (int64_t i = 0; i < n; i++)
                if (got[i] != want[i])
                    fail_msg("%s: %s of bits %08x is %04x, not %04x", k->name,
                             type ? "bf16" : "f16", nbi_f32_bits(x[i]), got[i], want[i]);
        }
    }
    free(x);
    free(want);
    free(got);
}

/* Lengths that are not a multiple of a vector, in buffers of exactly that length. */
static void test_half__converts_any_length(void **state)
{
    (void)state;
    for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = table(level);
        for (int64_t n = 0; k && n < 70; n++) {
            float *x = malloc((size_t)n * sizeof *x + 1), *y = malloc((size_t)n * sizeof *y + 1);
            uint16_t *h = malloc((size_t)n * sizeof *h + 1);
            for (int64_t i = 0; i < n; i++)
                x[i] = (float)(i - 30) * 0.37f;
            for (int type = 0; type < 2; type++) {
                (type ? k->f32_to_bf16 : k->f32_to_f16)(h, x, n);
                (type ? k->bf16_to_f32 : k->f16_to_f32)(y, h, n);
                for (int64_t i = 0; i < n; i++) {
                    assert_int_equal(h[i], rounded_want(x[i], type));
                    assert_true(y[i] == (type ? nbi_bf16_to_f32(h[i]) : nbi_f16_to_f32(h[i])));
                }
            }
            free(x);
            free(y);
            free(h);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_half__decodes_every_small_code),
        cmocka_unit_test(test_half__rounds_midpoints_to_even),
        cmocka_unit_test(test_half__rounds_random_values_to_nearest),
        cmocka_unit_test(test_half__every_code_survives_f32),
        cmocka_unit_test(test_half__rounds_like_arithmetic_in_double),
        cmocka_unit_test(test_half__converts_any_length),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
