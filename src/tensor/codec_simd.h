/* codec_simd.h - the inner loops over vectors of LANES values; same bytes as codec_scalar.c.
 *
 * This is a template with one .c file per instruction set. That file defines LANES and the type vm,
 * includes this header, and then defines the primitives declared below and the table. Without LANES
 * the header is empty, so that it compiles alone.
 *
 * The quantiser works on LANES adjacent blocks at a time, one block per lane: vector i holds value
 * i of every block. Maxima, scales and errors are then vertical arithmetic, and each lane sums its
 * errors in the order of the scalar code. The other loops hold one value per lane. */
#pragma once

#ifdef LANES

#include <string.h>

#include "tensor/codec.h"
#include "tensor/nvfp4.h"

#define BLOCK    NBI_NVFP4_BLOCK
#define MAX_ROWS 16
#define EXPONENT 0x7F800000u /* the exponent bits of an f32 */

/* LANES floats, integers, bit patterns and halves (f16 or bf16), with the operators of C; half as
 * many doubles; and bytes, of which the first LANES are used. A vm is the result of a comparison.
 */
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t vh __attribute__((vector_size(2 * LANES)));
typedef double vd __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(16)));

/* One row of a group, transposed: magnitudes, and signs at their position in the codes, bit 3 of
 * each nibble (values 0 to 7 and 8 to 15). */
struct row {
    vf a[BLOCK];
    vu sign[2];
};

/* The primitives. A minimum or maximum is b where a is NaN. */
static inline vf vf_min(vf a, vf b);
static inline vf vf_max(vf a, vf b);
static inline vi vi_min(vi a, vi b);
static inline vi vi_max(vi a, vi b);

/* c + a * b and c - a * b, rounded once. */
static inline vf vf_fma(vf a, vf b, vf c);
static inline vf vf_fnma(vf a, vf b, vf c);
static inline vd vd_fma(vd a, vd b, vd c);

/* Comparisons; the lanes of b where mask is set, of a elsewhere; the number of lanes set. */
static inline vm vf_less(vf a, vf b);
static inline vm vf_equal(vf a, vf b);
static inline vm vi_less(vi a, vi b);
static inline vi vi_select(vi a, vi b, vm mask);
static inline int vm_count(vm mask);

/* Integers from halves (sign-extended) and from bytes (zero-extended), and back for values that
 * fit. */
static inline vi vi_from_halves(vh v);
static inline vi vi_from_bytes(vb v);
static inline vh vi_to_halves(vi v);
static inline vb vi_to_bytes(vi v);

/* f16 as in half.h, except that vf_from_f16 need not handle infinities and NaNs. */
static inline vf vf_from_f16(vh v);
static inline vh vf_to_f16(vf v);

/* LANES / 2 values as doubles; the sum of a vector. */
static inline vd vd_load(const float *x);
static inline double vd_sum(vd v);

/* Reads n <= LANES blocks and passes their values through `split`. Lanes of missing blocks repeat
 * the first block and are never stored. */
static inline void load_row(struct row *row, const float *x, int n);

/* low[0], high[0], low[1], high[1] and so on. */
static inline void interleave(vu pairs[2], vu low, vu high);

/* Decodes one block: the codes index its eight possible magnitudes. */
static inline void decode_block(float *y, const uint8_t *q, float scale, float tensor_scale);

static inline vf vf_all(float v)
{
    return v - (vf){0};
}

static inline vi vi_all(int v)
{
    return v | (vi){0};
}

static inline vf vf_load(const float *x)
{
    vf v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline vh vh_load(const uint16_t *x)
{
    vh v;
    memcpy(&v, x, sizeof v);
    return v;
}

/* Stores the magnitude of value i of each block; returns the signs, shifted to their nibble. */
static inline vu split(vf *a, vf v, int i)
{
    vu sign = (vu)v & 0x80000000u;
    *a = (vf)((vu)v ^ sign);
    return sign >> (28 - 4 * (i % 8));
}

/* The power of two given by v's exponent, times 2^shift. `low` is or-ed into the mantissa. */
static inline vf power_below(vf v, unsigned shift, unsigned low)
{
    return (vf)(((vu)v & EXPONENT) + ((shift << 23) + low));
}

/* E4M3 codes of v >= 0, as nbi_f32_to_e4m3 and clamp_code. Adding 2^(e + 20) leaves the three
 * mantissa bits of E4M3, correctly rounded, at the bottom of the sum. */
static inline vi e4m3_codes(vf v)
{
    v = vf_min(v, vf_all(NBI_NVFP4_MAX_SCALE));
    vf magic = power_below(vf_max(v, vf_all(0x1p-6f)), 20, 0);
    vi n = (vi)(v + magic) - (vi)magic;
    vi exponent = ((vi)magic >> 20) - 8 * (127 + 20 - 6); /* 8 (e + 6) */
    return vi_max(n + exponent, vi_all(0x01));
}

/* Values of E4M3 codes 0x00 to 0x7E. Subnormal codes are common as scales, so they are converted
 * from an integer: some CPUs multiply a subnormal f32 very slowly. */
static inline vf e4m3_values(vi code)
{
    vi normal = (code << 20) + (120 << 23);
    vf small = __builtin_convertvector(code, vf) * 0x1p-9f;
    return (vf)vi_select(normal, (vi)small, vi_less(code, vi_all(8)));
}

/* Returns each block's squared error if `code` were its scale.
 *
 * Quotients are scaled by 2^22, so that the power of two whose addition rounds them to E2M1 has
 * their own exponent bits: y + 2^(22 + e) has a last place of 2^(e - 1), the spacing of E2M1 from
 * 2^e on (below 1 the same as from 1 on). The products by 2^-22 and of value and scale are exact,
 * so fusing them with the addition changes nothing; d * d would round, so it is not fused. */
static inline vf group_error(const struct row *row, int rows, vi code)
{
    vf scale = e4m3_values(code), inverse = 1.0f / scale * 0x1p22f, sum = {0};
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++) {
            vf a = row[r].a[i];
            vf y = vf_min(a * inverse, vf_all(0x6p22f));
            vf magic = power_below(vf_max(y, vf_all(0x1p22f)), 0, 0);
            vf d = vf_fnma(vf_fma(y, vf_all(0x1p-22f), magic) - magic, scale, a);
            sum += d * d;
        }
    return sum;
}

/* Updates the best codes so far with `code`; the earlier one wins a tie. */
static inline void try_scale(const struct row *row, int rows, vi code, vi *best, vf *best_error)
{
    vf sum = group_error(row, rows, code);
    vm better = vf_less(sum, *best_error);
    *best_error = (vf)vi_select((vi)*best_error, (vi)sum, better);
    *best = vi_select(*best, code, better);
}

static vi choose(const struct row *row, int rows, enum nb_quant_method method)
{
    vf max = {0};
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < BLOCK; i++)
            max = vf_max(max, row[r].a[i]);
    vf base = max / 6.0f, best_error = vf_all(__builtin_inff());
    vi rtn = e4m3_codes(base), best = rtn;
    if (method != NB_QUANT_RTN)
        try_scale(row, rows, rtn, &best, &best_error);
    if (method == NB_QUANT_4OVER6)
        try_scale(row, rows, e4m3_codes(base * 1.5f), &best, &best_error);
    for (int d = -2; method == NB_QUANT_SWEEP && d <= 6; d++)
        if (d != 0)
            try_scale(row, rows, vi_min(vi_max(rtn + d, vi_all(0x01)), vi_all(0x7E)), &best,
                      &best_error);
    return vi_select(best, vi_all(0x38), vf_equal(max, vf_all(0)));
}

/* Encodes eight values as E2M1 codes in a dword, the first lowest, without signs.
 *
 * The quotient is a times the rounded inverse, corrected by the exact remainder. This is much
 * cheaper than a division, and on the same side of every tie of E2M1: a scale has four significant
 * bits, so no quotient other than a tie itself lies within half a last place of one. (The
 * correction turns an infinite quotient into NaN, and the minimum turns NaN into 6.)
 *
 * The sum with 2^(22 + e) ends in n = y / 2^(e - 1), and the code is n + 2 e. Twice the biased
 * exponent is 2 e + 298; adding 6 makes the constant a multiple of 8. */
static inline vu encode_half(const vf a[BLOCK / 2], vf scale, vf inverse)
{
    vu codes = {0};
#pragma GCC unroll 8
    for (int i = BLOCK / 2 - 1; i >= 0; i--) {
        vf y = a[i] * inverse;
        y = vf_min(vf_fma(vf_fnma(y, scale, a[i]), inverse, y), vf_all(6));
        vf magic = power_below(vf_max(y, vf_all(1)), 22, 6);
        vu n = (vu)(y + magic) + ((vu)magic >> 22);
        codes = codes << 4 | (n & 7);
    }
    return codes;
}

/* Quantises n <= LANES blocks of each row: 8 bytes of codes and one byte of scale per block. */
static inline void quantize_group(uint8_t *q, uint8_t *s, const float *x, int n, int rows,
                                  int64_t stride, enum nb_quant_method method)
{
    struct row row[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        load_row(&row[r], x + r * stride * BLOCK, n);
    vi code = choose(row, rows, method);
    vf scale = e4m3_values(code), inverse = 1.0f / scale;
    vb bytes = vi_to_bytes(code);
    for (int r = 0; r < rows; r++) {
        vu low = encode_half(row[r].a, scale, inverse);
        vu high = encode_half(row[r].a + BLOCK / 2, scale, inverse), pairs[2];
        interleave(pairs, low | row[r].sign[0], high | row[r].sign[1]);
        memcpy(q + r * stride * BLOCK / 2, pairs, (size_t)n * BLOCK / 2);
        memcpy(s + r * stride, &bytes, (size_t)n);
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

/* Values of any E4M3 codes: files by other programs contain negative ones and NaN. */
static inline void decode_scales(float out[LANES], const uint8_t *s, int n)
{
    vb bytes = {0};
    memcpy(&bytes, s, (size_t)n);
    vi code = vi_from_bytes(bytes), low = code & 0x7F;
    vm nan = vi_less(vi_all(0x7E), low);
    vi magnitude = vi_select((vi)e4m3_values(low), vi_all(0x7FC00000), nan);
    vu bits = (vu)magnitude | (vu)(code ^ low) << 24;
    memcpy(out, &bits, sizeof bits);
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
        vu bits = (vu)vi_from_halves(vh_load(x + i)) << 16;
        memcpy(y + i, &bits, sizeof bits);
    }
    nbi_codec_scalar.bf16_to_f32(y + i, x + i, n - i);
}

/* The instructions quiet signalling NaNs and half.h does not, so infinities and NaNs are assembled
 * from their bits. */
static void f16_to_f32(float *y, const uint16_t *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vh h = vh_load(x + i);
        vi extended = vi_from_halves(h); /* the sign is extended to the top bits */
        vu special = (vu)extended << 13 | EXPONENT;
        vm is_special = vi_less(vi_all(0x7BFF), extended & 0x7FFF);
        vi bits = vi_select((vi)vf_from_f16(h), (vi)special, is_special);
        memcpy(y + i, &bits, sizeof bits);
    }
    nbi_codec_scalar.f16_to_f32(y + i, x + i, n - i);
}

static void f32_to_bf16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = vf_load(x + i);
        vu high = (vu)v >> 16, rounded = ((vu)v + 0x7FFF + (high & 1)) >> 16;
        vh h = vi_to_halves(vi_select((vi)(high | 0x40), (vi)rounded, vf_equal(v, v)));
        memcpy(y + i, &h, sizeof h);
    }
    nbi_codec_scalar.f32_to_bf16(y + i, x + i, n - i);
}

static void f32_to_f16(uint16_t *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vh h = vf_to_f16(vf_load(x + i));
        memcpy(y + i, &h, sizeof h);
    }
    nbi_codec_scalar.f32_to_f16(y + i, x + i, n - i);
}

static float amax(const float *x, int64_t n)
{
    vi max[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int h = 0; h < 2; h++)
            max[h] = vi_max(max[h], (vi)vf_load(x + i + h * LANES) & INT32_MAX);
    /* The scalar code finishes, treating the lanes' maxima as values. */
    float last[LANES + 1];
    max[0] = vi_max(max[0], max[1]);
    memcpy(last, &max[0], sizeof max[0]);
    last[LANES] = nbi_codec_scalar.amax(x + i, n - i);
    return nbi_codec_scalar.amax(last, LANES + 1);
}

static void error(const float *x, const float *y, int64_t n, double sums[3])
{
    vd error2[2] = {{0}, {0}}, signal[2] = {{0}, {0}};
    int64_t i = 0, zeros = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int h = 0; h < 2; h++) {
            vd a = vd_load(x + i + h * LANES / 2), d = a - vd_load(y + i + h * LANES / 2);
            error2[h] = vd_fma(d, d, error2[h]);
            signal[h] = vd_fma(a, a, signal[h]);
        }
        zeros += vm_count(vf_equal(vf_load(y + i), vf_all(0)));
    }
    sums[0] += vd_sum(error2[0] + error2[1]);
    sums[1] += vd_sum(signal[0] + signal[1]);
    sums[2] += (double)zeros;
    nbi_codec_scalar.error(x + i, y + i, n - i, sums);
}

#endif
