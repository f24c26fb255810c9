/* kernels_avx2.c - the inner loops with 256-bit vectors; same bytes as kernels_scalar.c.
 *
 * The quantiser works on 8 neighbouring blocks at a time, a block per lane: vector i holds value i
 * of every block. Maxima, scales and errors are then plain vertical arithmetic, and each lane sums
 * its errors in the order of the scalar code. The other loops have a value per lane. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "tensor/kernels.h"
#include "tensor/nvfp4.h"

#define BLOCK    NBI_NVFP4_BLOCK
#define LANES    8
#define MAX_ROWS 16
#define EXPONENT 0x7F800000 /* the exponent bits of an f32 */

/* One row of a group, transposed: magnitudes, and the signs already where the codes keep theirs,
 * in bit 3 of each nibble (values 0 to 7 and 8 to 15). */
struct row {
    __m256 a[BLOCK];
    __m256i sign[2];
};

static inline __m256i dwords(int v)
{
    return _mm256_set1_epi32(v);
}

static inline __m256 floats(float v)
{
    return _mm256_set1_ps(v);
}

/* Lanes of b where mask is all ones, of a where it is zero. */
static inline __m256i select_dwords(__m256i a, __m256i b, __m256i mask)
{
    return _mm256_blendv_epi8(a, b, mask);
}

/* Only the exponent of v, as the power of two below it, times 2^shift. `low` is or-ed into the
 * mantissa. */
static inline __m256 power_below(__m256 v, int shift, int low)
{
    __m256i e = _mm256_and_si256(_mm256_castps_si256(v), dwords(EXPONENT));
    return _mm256_castsi256_ps(_mm256_add_epi32(e, dwords((shift << 23) + low)));
}

/* E4M3 codes of v >= 0, as nbi_f32_to_e4m3 and clamp_code. Adding 2^(e + 20) leaves the three
 * mantissa bits that E4M3 has, correctly rounded, at the bottom of the sum. */
static inline __m256i e4m3_codes(__m256 v)
{
    v = _mm256_min_ps(v, floats(NBI_NVFP4_MAX_SCALE));
    __m256 magic = power_below(_mm256_max_ps(v, floats(0x1p-6f)), 20, 0);
    __m256i magic_bits = _mm256_castps_si256(magic);
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(v, magic)), magic_bits);
    __m256i exponent = _mm256_sub_epi32(_mm256_srli_epi32(magic_bits, 20), /* 8 (e + 6) */
                                        dwords(8 * (127 + 20 - 6)));
    return _mm256_max_epi32(_mm256_add_epi32(n, exponent), dwords(0x01));
}

/* Values of E4M3 codes 0x00 to 0x7E. Subnormal codes are common as scales, so they come from an
 * integer and not from a subnormal f32, which some CPUs multiply very slowly. */
static inline __m256 e4m3_values(__m256i code)
{
    __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(code, 20), dwords(120 << 23));
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(code), floats(0x1p-9f));
    __m256i is_small = _mm256_cmpgt_epi32(dwords(8), code);
    return _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
}

/* v[k] becomes element k of the four vectors, in each 128-bit lane. */
static inline void transpose_elements(__m256 v[4])
{
    __m256 a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
    __m256 c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(a, c, 0x44);
    v[1] = _mm256_shuffle_ps(a, c, 0xEE);
    v[2] = _mm256_shuffle_ps(b, d, 0x44);
    v[3] = _mm256_shuffle_ps(b, d, 0xEE);
}

/* Half of a row: values 8 half to 8 half + 7 of n <= 8 blocks. The lanes of missing blocks repeat
 * the first and are never stored. */
static inline void load_half(struct row *row, const float *x, int half, int n)
{
    __m256 part[2][4]; /* [g][k]: blocks 4 g to 4 g + 3, values k and k + 4 */
    /* Unrolled, these arrays stay in registers. */
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            int block = 4 * g + k < n ? 4 * g + k : 0;
            part[g][k] = _mm256_loadu_ps(x + block * BLOCK + 8 * half);
        }
        transpose_elements(part[g]);
    }
    __m256i sign_bit = dwords(INT32_MIN), sign = dwords(0);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m256 v[2] = {_mm256_permute2f128_ps(part[0][k], part[1][k], 0x20),
                       _mm256_permute2f128_ps(part[0][k], part[1][k], 0x31)};
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) { /* value 4 j + k of the half */
            __m256i bits = _mm256_castps_si256(v[j]), s = _mm256_and_si256(bits, sign_bit);
            row->a[8 * half + 4 * j + k] = _mm256_castsi256_ps(_mm256_xor_si256(bits, s));
            sign = _mm256_or_si256(sign, _mm256_srlv_epi32(s, dwords(28 - 4 * (4 * j + k))));
        }
    }
    row->sign[half] = sign;
}

/* What each block's squared error would be under the scales of `code`.
 *
 * Quotients are kept 2^22 times too large, so that their own exponent bits are the constant whose
 * addition rounds them to E2M1: y + 2^(22 + e) has a last place of 2^(e - 1), the spacing of E2M1
 * from 2^e on (below 1 as from 1 on). The products by 2^-22 and of value and scale are exact, so
 * fusing them with the addition changes nothing; d * d would round, and stays apart. */
static inline __m256 group_error(const struct row *row, int rows, __m256i code)
{
    __m256 scale = e4m3_values(code), sum = floats(0);
    __m256 inverse = _mm256_mul_ps(_mm256_div_ps(floats(1), scale), floats(0x1p22f));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++) {
            __m256 a = row[r].a[i];
            __m256 y = _mm256_min_ps(_mm256_mul_ps(a, inverse), floats(0x6p22f));
            __m256 magic = power_below(_mm256_max_ps(y, floats(0x1p22f)), 0, 0);
            __m256 rounded = _mm256_sub_ps(_mm256_fmadd_ps(y, floats(0x1p-22f), magic), magic);
            __m256 d = _mm256_fnmadd_ps(rounded, scale, a);
            sum = _mm256_add_ps(sum, _mm256_mul_ps(d, d));
        }
    return sum;
}

/* Keeps the better of the best codes so far and `code`; the earlier one at a tie. */
static inline void try_codes(const struct row *row, int rows, __m256i code, __m256i *best,
                             __m256 *least)
{
    __m256 sum = group_error(row, rows, code);
    __m256 better = _mm256_cmp_ps(sum, *least, _CMP_LT_OQ);
    *least = _mm256_blendv_ps(*least, sum, better);
    *best = select_dwords(*best, code, _mm256_castps_si256(better));
}

static __m256i choose(const struct row *row, int rows, enum nb_quant_method method)
{
    __m256 amax = floats(0);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++)
            amax = _mm256_max_ps(amax, row[r].a[i]);
    __m256 base = _mm256_div_ps(amax, floats(6)), least = floats(__builtin_inff());
    __m256i rtn = e4m3_codes(base), best = rtn;
    if (method != NB_QUANT_RTN)
        try_codes(row, rows, rtn, &best, &least);
    if (method == NB_QUANT_4OVER6)
        try_codes(row, rows, e4m3_codes(_mm256_mul_ps(base, floats(1.5f))), &best, &least);
    for (int d = -2; method == NB_QUANT_SWEEP && d <= 6; d++) {
        __m256i code = _mm256_add_epi32(rtn, dwords(d));
        if (d != 0)
            try_codes(row, rows,
                      _mm256_min_epi32(_mm256_max_epi32(code, dwords(0x01)), dwords(0x7E)), &best,
                      &least);
    }
    __m256 zero = _mm256_cmp_ps(amax, floats(0), _CMP_EQ_OQ);
    return select_dwords(best, dwords(0x38), _mm256_castps_si256(zero));
}

/* Eight values as E2M1 codes in a dword, the first lowest, without signs.
 *
 * The quotient is a times the rounded inverse, corrected by the exact remainder: much cheaper than
 * a division, and on the same side of every tie of E2M1, because a scale has four significant bits
 * and so no quotient but a tie itself lies within half a last place of one. (The correction makes a
 * NaN of an infinite quotient, and the minimum makes 6 of a NaN.)
 *
 * The sum with 2^(22 + e) ends in n = y / 2^(e - 1), and the code is n + 2 e. Twice the biased
 * exponent is 2 e + 298; the 6 makes that a multiple of 8. */
static inline __m256i encode_half(const __m256 a[BLOCK / 2], __m256 scale, __m256 inverse)
{
    __m256i codes = dwords(0);
#pragma GCC unroll 8
    for (int i = BLOCK / 2 - 1; i >= 0; i--) {
        __m256 y = _mm256_mul_ps(a[i], inverse);
        y = _mm256_fmadd_ps(_mm256_fnmadd_ps(y, scale, a[i]), inverse, y);
        y = _mm256_min_ps(y, floats(6));
        __m256 magic = power_below(_mm256_max_ps(y, floats(1)), 22, 6);
        __m256i n = _mm256_castps_si256(_mm256_add_ps(y, magic));
        n = _mm256_add_epi32(n, _mm256_srli_epi32(_mm256_castps_si256(magic), 22));
        codes = _mm256_slli_epi32(codes, 4);
        codes = _mm256_or_si256(codes, _mm256_and_si256(n, dwords(7)));
    }
    return codes;
}

/* 8 bytes a block and a byte a block for the first n lanes. */
static inline void store_row(uint8_t *q, uint8_t *s, __m256i low, __m256i high, __m256i code, int n)
{
    __m256i a = _mm256_unpacklo_epi32(low, high), b = _mm256_unpackhi_epi32(low, high);
    __m256i pairs[2] = {_mm256_permute2x128_si256(a, b, 0x20),
                        _mm256_permute2x128_si256(a, b, 0x31)};
    __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    __m128i scales = _mm_packus_epi16(words, words);
    memcpy(q, pairs, (size_t)n * BLOCK / 2);
    memcpy(s, &scales, (size_t)n);
}

/* n <= 8 blocks of each row. */
static inline void quantize_group(uint8_t *q, uint8_t *s, const float *x, int n, int rows,
                                  int64_t stride, enum nb_quant_method method)
{
    struct row row[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        load_half(&row[r], x + r * stride * BLOCK, 0, n);
        load_half(&row[r], x + r * stride * BLOCK, 1, n);
    }
    __m256i code = choose(row, rows, method);
    __m256 scale = e4m3_values(code), inverse = _mm256_div_ps(floats(1), scale);
    for (int r = 0; r < rows; r++) {
        __m256i low = encode_half(row[r].a, scale, inverse);
        __m256i high = encode_half(row[r].a + BLOCK / 2, scale, inverse);
        store_row(q + r * stride * BLOCK / 2, s + r * stride, _mm256_or_si256(low, row[r].sign[0]),
                  _mm256_or_si256(high, row[r].sign[1]), code, n);
    }
}

static void quantize(uint8_t *q, uint8_t *s, const float *x, int64_t blocks, int rows,
                     int64_t stride, enum nb_quant_method method)
{
    int64_t j = 0;
    for (; j + LANES <= blocks; j += LANES)
        quantize_group(q + j * BLOCK / 2, s + j, x + j * BLOCK, LANES, rows, stride, method);
    if (j < blocks)
        quantize_group(q + j * BLOCK / 2, s + j, x + j * BLOCK, (int)(blocks - j), rows, stride,
                       method);
}

/* Values of any 8 E4M3 codes: negative ones and NaN occur in files of others. */
static inline void decode_scales(float out[LANES], const uint8_t *s, int n)
{
    __m128i bytes = _mm_setzero_si128();
    memcpy(&bytes, s, (size_t)n);
    __m256i code = _mm256_cvtepu8_epi32(bytes), low = _mm256_and_si256(code, dwords(0x7F));
    __m256i bits = _mm256_castps_si256(e4m3_values(low));
    bits = select_dwords(bits, dwords(0x7FC00000), _mm256_cmpeq_epi32(low, dwords(0x7F)));
    __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(code, low), 24);
    _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_or_si256(bits, sign)));
}

/* One block: the codes select from the 8 magnitudes that its scale allows, then flip the sign. */
static inline void decode_block(float *y, const uint8_t *q, float scale, float tensor_scale)
{
    const __m256 e2m1 = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i nibble = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    __m256 values = _mm256_mul_ps(_mm256_mul_ps(e2m1, floats(scale)), floats(tensor_scale));
    for (int half = 0; half < 2; half++) {
        int32_t codes;
        memcpy(&codes, q + 4 * half, sizeof codes);
        __m256i index = _mm256_srlv_epi32(dwords(codes), nibble); /* three bits of it matter */
        __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(index, 3), 31);
        __m256 v = _mm256_permutevar8x32_ps(values, index);
        _mm256_storeu_ps(y + 8 * half, _mm256_xor_ps(v, _mm256_castsi256_ps(sign)));
    }
}

static void dequantize_f32(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                           float tensor_scale)
{
    for (int64_t b = 0; b < blocks; b += LANES) {
        float scale[LANES];
        int n = blocks - b < LANES ? (int)(blocks - b) : LANES;
        decode_scales(scale, s + b, n);
        for (int i = 0; i < n; i++)
            decode_block(y + (b + i) * BLOCK, q + (b + i) * BLOCK / 2, scale[i], tensor_scale);
    }
}

static void bf16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + i)));
        _mm256_storeu_si256((__m256i *)(y + i), _mm256_slli_epi32(h, 16));
    }
    nbi_kernels_scalar.bf16_to_f32(y + i, x + i, n - i);
}

/* The instruction makes signalling NaNs quiet and half.h does not, so infinities and NaNs are built
 * from their bits. */
static void f16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m128i h = _mm_loadu_si128((const __m128i *)(x + i));
        __m256i bits = _mm256_cvtepi16_epi32(h); /* copies of the sign at the top */
        __m256i special = _mm256_or_si256(_mm256_slli_epi32(bits, 13), dwords(EXPONENT));
        __m256i exponent = _mm256_and_si256(bits, dwords(0x7C00));
        __m256i ordinary = _mm256_castps_si256(_mm256_cvtph_ps(h));
        __m256i is_special = _mm256_cmpeq_epi32(exponent, dwords(0x7C00));
        _mm256_storeu_si256((__m256i *)(y + i), select_dwords(ordinary, special, is_special));
    }
    nbi_kernels_scalar.f16_to_f32(y + i, x + i, n - i);
}

static void f32_to_bf16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16);
        __m256i odd = _mm256_and_si256(high, dwords(1));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, dwords(0x7FFF)), odd);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        __m256i h =
            select_dwords(_mm256_srli_epi32(sum, 16), _mm256_or_si256(high, dwords(0x40)), nan);
        __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
        _mm_storeu_si128((__m128i *)(y + i), words);
    }
    nbi_kernels_scalar.f32_to_bf16(y + i, x + i, n - i);
}

static void f32_to_f16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m128i h =
            _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(y + i), h);
    }
    nbi_kernels_scalar.f32_to_f16(y + i, x + i, n - i);
}

static float amax(const float *x, int64_t n)
{
    __m256i most[2] = {dwords(0), dwords(0)}, magnitude = dwords(INT32_MAX);
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int h = 0; h < 2; h++) {
            __m256i u = _mm256_loadu_si256((const __m256i *)(x + i + h * LANES));
            most[h] = _mm256_max_epi32(most[h], _mm256_and_si256(u, magnitude));
        }
    /* The scalar code finishes: it takes the maxima of the lanes like values. */
    float last[LANES + 1];
    _mm256_storeu_si256((__m256i *)last, _mm256_max_epi32(most[0], most[1]));
    last[LANES] = nbi_kernels_scalar.amax(x + i, n - i);
    return nbi_kernels_scalar.amax(last, LANES + 1);
}

static inline double sum_lanes(__m256d a, __m256d b)
{
    double v[4];
    _mm256_storeu_pd(v, _mm256_add_pd(a, b));
    return (v[0] + v[1]) + (v[2] + v[3]);
}

static void error(const float *x, const float *y, int64_t n, double sums[3])
{
    __m256d noise[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    __m256d signal[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    int64_t i = 0, zeros = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int h = 0; h < 2; h++) {
            __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * h));
            __m256d d = _mm256_sub_pd(a, _mm256_cvtps_pd(_mm_loadu_ps(y + i + 4 * h)));
            noise[h] = _mm256_fmadd_pd(d, d, noise[h]);
            signal[h] = _mm256_fmadd_pd(a, a, signal[h]);
        }
        __m256 zero = _mm256_cmp_ps(_mm256_loadu_ps(y + i), floats(0), _CMP_EQ_OQ);
        zeros += __builtin_popcount((unsigned)_mm256_movemask_ps(zero));
    }
    sums[0] += sum_lanes(noise[0], noise[1]);
    sums[1] += sum_lanes(signal[0], signal[1]);
    sums[2] += (double)zeros;
    nbi_kernels_scalar.error(x + i, y + i, n - i, sums);
}

const struct nbi_kernels nbi_kernels_avx2 = {
    .name = "avx2",
    .quantize = quantize,
    .dequantize_f32 = dequantize_f32,
    .bf16_to_f32 = bf16_to_f32,
    .f16_to_f32 = f16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .f32_to_f16 = f32_to_f16,
    .amax = amax,
    .error = error,
};

#endif
