/* kernels_avx512.c - the inner loops with 512-bit vectors; same bytes as kernels_scalar.c.
 *
 * The quantiser works on 16 neighbouring blocks at a time, a block per lane: vector i holds value i
 * of every block. Maxima, scales and errors are then plain vertical arithmetic, and each lane sums
 * its errors in the order of the scalar code. The other loops have a value per lane. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "tensor/kernels.h"
#include "tensor/nvfp4.h"

#define BLOCK    NBI_NVFP4_BLOCK
#define LANES    16
#define MAX_ROWS 16
#define EXPONENT 0x7F800000 /* the exponent bits of an f32 */

/* One row of a group, transposed: magnitudes, and the signs already where the codes keep theirs,
 * in bit 3 of each nibble (values 0 to 7 and 8 to 15). */
struct row {
    __m512 a[BLOCK];
    __m512i sign[2];
};

static inline __m512i dwords(int v)
{
    return _mm512_set1_epi32(v);
}

static inline __m512 floats(float v)
{
    return _mm512_set1_ps(v);
}

/* Only the exponent of v, as the power of two below it, times 2^shift. `low` is or-ed into the
 * mantissa. */
static inline __m512 power_below(__m512 v, int shift, int low)
{
    __m512i e = _mm512_and_si512(_mm512_castps_si512(v), dwords(EXPONENT));
    return _mm512_castsi512_ps(_mm512_add_epi32(e, dwords((shift << 23) + low)));
}

/* E4M3 codes of v >= 0, as nbi_f32_to_e4m3 and clamp_code. Adding 2^(e + 20) leaves the three
 * mantissa bits that E4M3 has, correctly rounded, at the bottom of the sum. */
static inline __m512i e4m3_codes(__m512 v)
{
    v = _mm512_min_ps(v, floats(NBI_NVFP4_MAX_SCALE));
    __m512 magic = power_below(_mm512_max_ps(v, floats(0x1p-6f)), 20, 0);
    __m512i magic_bits = _mm512_castps_si512(magic);
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(v, magic)), magic_bits);
    __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(magic_bits, 20), /* 8 (e + 6) */
                                        dwords(8 * (127 + 20 - 6)));
    return _mm512_max_epi32(_mm512_add_epi32(n, exponent), dwords(0x01));
}

/* Values of E4M3 codes 0x00 to 0x7E. Subnormal codes are common as scales, so they come from an
 * integer and not from a subnormal f32, which some CPUs multiply very slowly. */
static inline __m512 e4m3_values(__m512i code)
{
    __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(code, 20), dwords(120 << 23));
    __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(code), floats(0x1p-9f));
    __mmask16 is_small = _mm512_cmplt_epi32_mask(code, dwords(8));
    return _mm512_mask_mov_ps(_mm512_castsi512_ps(normal), is_small, small);
}

/* v[k] becomes element k of the four vectors, in each 128-bit lane. */
static inline void transpose_elements(__m512 v[4])
{
    __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(a, c, 0x44);
    v[1] = _mm512_shuffle_ps(a, c, 0xEE);
    v[2] = _mm512_shuffle_ps(b, d, 0x44);
    v[3] = _mm512_shuffle_ps(b, d, 0xEE);
}

/* v[k] becomes 128-bit lane k of the four vectors. */
static inline void transpose_lanes(__m512 v[4])
{
    __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xEE);
    __m512 c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xEE);
    v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_f32x4(a, c, 0xDD);
    v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_f32x4(b, d, 0xDD);
}

/* Reads n <= 16 blocks; the lanes of missing ones repeat the first and are never stored. */
static inline void load_row(struct row *row, const float *x, int n)
{
    __m512 part[4][4]; /* [g][k]: blocks 4 g to 4 g + 3, values k, k + 4, k + 8, k + 12 */
    /* Unrolled, these arrays stay in registers. */
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            int block = 4 * g + k < n ? 4 * g + k : 0;
            part[g][k] = _mm512_loadu_ps(x + block * BLOCK);
        }
        transpose_elements(part[g]);
    }
    __m512i sign_bit = dwords(INT32_MIN), sign[2] = {dwords(0), dwords(0)};
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512 v[4] = {part[0][k], part[1][k], part[2][k], part[3][k]};
        transpose_lanes(v);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) { /* value 4 j + k, nibble 4 (j & 1) + k of its dword */
            __m512i bits = _mm512_castps_si512(v[j]), s = _mm512_and_si512(bits, sign_bit);
            row->a[4 * j + k] = _mm512_castsi512_ps(_mm512_xor_si512(bits, s));
            s = _mm512_srlv_epi32(s, dwords(28 - 4 * (4 * (j & 1) + k)));
            sign[j / 2] = _mm512_or_si512(sign[j / 2], s);
        }
    }
    row->sign[0] = sign[0];
    row->sign[1] = sign[1];
}

/* What each block's squared error would be under the scales of `code`.
 *
 * Quotients are kept 2^22 times too large, so that their own exponent bits are the constant whose
 * addition rounds them to E2M1: y + 2^(22 + e) has a last place of 2^(e - 1), the spacing of E2M1
 * from 2^e on (below 1 as from 1 on). The products by 2^-22 and of value and scale are exact, so
 * fusing them with the addition changes nothing; d * d would round, and stays apart. */
static inline __m512 group_error(const struct row *row, int rows, __m512i code)
{
    __m512 scale = e4m3_values(code), sum = floats(0);
    __m512 inverse = _mm512_mul_ps(_mm512_div_ps(floats(1), scale), floats(0x1p22f));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++) {
            __m512 a = row[r].a[i];
            __m512 y = _mm512_min_ps(_mm512_mul_ps(a, inverse), floats(0x6p22f));
            __m512 magic = power_below(_mm512_max_ps(y, floats(0x1p22f)), 0, 0);
            __m512 rounded = _mm512_sub_ps(_mm512_fmadd_ps(y, floats(0x1p-22f), magic), magic);
            __m512 d = _mm512_fnmadd_ps(rounded, scale, a);
            sum = _mm512_add_ps(sum, _mm512_mul_ps(d, d));
        }
    return sum;
}

/* Keeps the better of the best codes so far and `code`; the earlier one at a tie. */
static inline void try_codes(const struct row *row, int rows, __m512i code, __m512i *best,
                             __m512 *least)
{
    __m512 sum = group_error(row, rows, code);
    __mmask16 better = _mm512_cmp_ps_mask(sum, *least, _CMP_LT_OQ);
    *least = _mm512_mask_mov_ps(*least, better, sum);
    *best = _mm512_mask_mov_epi32(*best, better, code);
}

static __m512i choose(const struct row *row, int rows, enum nb_quant_method method)
{
    __m512 amax = floats(0);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++)
            amax = _mm512_max_ps(amax, row[r].a[i]);
    __m512 base = _mm512_div_ps(amax, floats(6)), least = floats(__builtin_inff());
    __m512i rtn = e4m3_codes(base), best = rtn;
    if (method != NB_QUANT_RTN)
        try_codes(row, rows, rtn, &best, &least);
    if (method == NB_QUANT_4OVER6)
        try_codes(row, rows, e4m3_codes(_mm512_mul_ps(base, floats(1.5f))), &best, &least);
    for (int d = -2; method == NB_QUANT_SWEEP && d <= 6; d++) {
        __m512i code = _mm512_add_epi32(rtn, dwords(d));
        if (d != 0)
            try_codes(row, rows,
                      _mm512_min_epi32(_mm512_max_epi32(code, dwords(0x01)), dwords(0x7E)), &best,
                      &least);
    }
    __mmask16 zero = _mm512_cmp_ps_mask(amax, floats(0), _CMP_EQ_OQ);
    return _mm512_mask_mov_epi32(best, zero, dwords(0x38));
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
static inline __m512i encode_half(const __m512 a[BLOCK / 2], __m512 scale, __m512 inverse)
{
    __m512i codes = dwords(0);
#pragma GCC unroll 8
    for (int i = BLOCK / 2 - 1; i >= 0; i--) {
        __m512 y = _mm512_mul_ps(a[i], inverse);
        y = _mm512_fmadd_ps(_mm512_fnmadd_ps(y, scale, a[i]), inverse, y);
        y = _mm512_min_ps(y, floats(6));
        __m512 magic = power_below(_mm512_max_ps(y, floats(1)), 22, 6);
        __m512i n = _mm512_castps_si512(_mm512_add_ps(y, magic));
        n = _mm512_add_epi32(n, _mm512_srli_epi32(_mm512_castps_si512(magic), 22));
        codes = _mm512_slli_epi32(codes, 4);
        codes = _mm512_or_si512(codes, _mm512_and_si512(n, dwords(7)));
    }
    return codes;
}

/* 8 bytes a block and a byte a block for the first n lanes. */
static inline void store_row(uint8_t *q, uint8_t *s, __m512i low, __m512i high, __m512i code, int n)
{
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i pairs[2] = {_mm512_permutex2var_epi32(low, first, high),
                        _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, dwords(8)), high)};
    __m128i scales = _mm512_cvtepi32_epi8(code);
    memcpy(q, pairs, (size_t)n * BLOCK / 2);
    memcpy(s, &scales, (size_t)n);
}

/* n <= 16 blocks of each row. */
static inline void quantize_group(uint8_t *q, uint8_t *s, const float *x, int n, int rows,
                                  int64_t stride, enum nb_quant_method method)
{
    struct row row[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        load_row(&row[r], x + r * stride * BLOCK, n);
    __m512i code = choose(row, rows, method);
    __m512 scale = e4m3_values(code), inverse = _mm512_div_ps(floats(1), scale);
    for (int r = 0; r < rows; r++) {
        __m512i low = encode_half(row[r].a, scale, inverse);
        __m512i high = encode_half(row[r].a + BLOCK / 2, scale, inverse);
        store_row(q + r * stride * BLOCK / 2, s + r * stride, _mm512_or_si512(low, row[r].sign[0]),
                  _mm512_or_si512(high, row[r].sign[1]), code, n);
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

/* Values of any 16 E4M3 codes: negative ones and NaN occur in files of others. */
static inline void decode_scales(float out[LANES], const uint8_t *s, int n)
{
    __m128i bytes = _mm_setzero_si128();
    memcpy(&bytes, s, (size_t)n);
    __m512i code = _mm512_cvtepu8_epi32(bytes), low = _mm512_and_si512(code, dwords(0x7F));
    __m512i bits = _mm512_castps_si512(e4m3_values(low));
    bits =
        _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(low, dwords(0x7F)), dwords(0x7FC00000));
    __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(code, low), 24);
    _mm512_storeu_ps(out, _mm512_castsi512_ps(_mm512_or_si512(bits, sign)));
}

/* One block: the codes select from the 16 values that its scale allows. */
static inline void decode_block(float *y, const uint8_t *q, float scale, float tensor_scale)
{
    const __m512 e2m1 = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512 values = _mm512_mul_ps(_mm512_mul_ps(e2m1, floats(scale)), floats(tensor_scale));
    /* A byte per 64 bits; its high nibble moves to the upper dword. The permutation looks at four
     * bits of each index only. */
    __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)q));
    __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
    _mm512_storeu_ps(y, _mm512_permutexvar_ps(index, values));
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
        __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i)));
        _mm512_storeu_si512(y + i, _mm512_slli_epi32(h, 16));
    }
    nbi_kernels_scalar.bf16_to_f32(y + i, x + i, n - i);
}

/* The instruction makes signalling NaNs quiet and half.h does not, so infinities and NaNs are built
 * from their bits. */
static void f16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i h = _mm256_loadu_si256((const __m256i *)(x + i));
        __m512i bits = _mm512_cvtepi16_epi32(h); /* copies of the sign at the top */
        __m512i special = _mm512_or_si512(_mm512_slli_epi32(bits, 13), dwords(EXPONENT));
        __m512i exponent = _mm512_and_si512(bits, dwords(0x7C00));
        __m512i ordinary = _mm512_castps_si512(_mm512_cvtph_ps(h));
        __mmask16 is_special = _mm512_cmpeq_epi32_mask(exponent, dwords(0x7C00));
        _mm512_storeu_si512(y + i, _mm512_mask_mov_epi32(ordinary, is_special, special));
    }
    nbi_kernels_scalar.f16_to_f32(y + i, x + i, n - i);
}

static void f32_to_bf16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m512 v = _mm512_loadu_ps(x + i);
        __m512i u = _mm512_castps_si512(v), high = _mm512_srli_epi32(u, 16);
        __m512i odd = _mm512_and_si512(high, dwords(1));
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, dwords(0x7FFF)), odd);
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        __m512i h = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan,
                                          _mm512_or_si512(high, dwords(0x40)));
        _mm256_storeu_si256((__m256i *)(y + i), _mm512_cvtepi32_epi16(h));
    }
    nbi_kernels_scalar.f32_to_bf16(y + i, x + i, n - i);
}

static void f32_to_f16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i h =
            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256((__m256i *)(y + i), h);
    }
    nbi_kernels_scalar.f32_to_f16(y + i, x + i, n - i);
}

static float amax(const float *x, int64_t n)
{
    __m512i most[2] = {dwords(0), dwords(0)}, magnitude = dwords(INT32_MAX);
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int h = 0; h < 2; h++) {
            __m512i a = _mm512_and_si512(_mm512_loadu_si512(x + i + h * LANES), magnitude);
            most[h] = _mm512_max_epi32(most[h], a);
        }
    /* The scalar code finishes: it takes the maxima of the lanes like values. */
    float last[LANES + 1];
    _mm512_storeu_si512(last, _mm512_max_epi32(most[0], most[1]));
    last[LANES] = nbi_kernels_scalar.amax(x + i, n - i);
    return nbi_kernels_scalar.amax(last, LANES + 1);
}

static void error(const float *x, const float *y, int64_t n, double sums[3])
{
    __m512d noise[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    __m512d signal[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    int64_t i = 0, zeros = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int h = 0; h < 2; h++) {
            __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * h));
            __m512d d = _mm512_sub_pd(a, _mm512_cvtps_pd(_mm256_loadu_ps(y + i + 8 * h)));
            noise[h] = _mm512_fmadd_pd(d, d, noise[h]);
            signal[h] = _mm512_fmadd_pd(a, a, signal[h]);
        }
        __mmask16 zero = _mm512_cmp_ps_mask(_mm512_loadu_ps(y + i), floats(0), _CMP_EQ_OQ);
        zeros += __builtin_popcount(zero);
    }
    sums[0] += _mm512_reduce_add_pd(_mm512_add_pd(noise[0], noise[1]));
    sums[1] += _mm512_reduce_add_pd(_mm512_add_pd(signal[0], signal[1]));
    sums[2] += (double)zeros;
    nbi_kernels_scalar.error(x + i, y + i, n - i, sums);
}

const struct nbi_kernels nbi_kernels_avx512 = {
    .name = "avx512",
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
