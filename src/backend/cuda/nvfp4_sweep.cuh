/* nvfp4_sweep.cuh - quantising a block to NVFP4 by the sweep of scales, in a thread's registers.
 *
 * The bytes are those of tensor/codec_scalar.c. Rounding follows tensor/codec_simd.h. */
#pragma once

#include "backend/cuda/optimizer_math.cuh"

/* A tensor scale to divide by. inverse 0: it is not exact, so divide. */
struct tensor_scale {
    float scale, inverse;
};

static inline struct tensor_scale tensor_scale_of(float scale)
{
    float inverse = 1.0f / scale;
    bool exact = (nbi_f32_bits(scale) & 0x7FFFFF) == 0 && isnormal(inverse);
    return {scale, exact ? inverse : 0};
}

/* x / scale, with at most one rounding. */
__device__ static inline float divide(float x, const struct tensor_scale &t)
{
    return t.inverse > 0 ? x * t.inverse : x / t.scale;
}

/* Scale and inverse of an E4M3 code; the inverse times 2^22, see block_error. */
__device__ static inline float2 sweep_entry(uint32_t code)
{
    float scale = e4m3_value(code);
    return make_float2(scale, 1.0f / scale * 0x1p22f);
}

#define SWEEP_CODES 127 /* entries of a table of them: codes 0x00 to 0x7E */

/* y rounded to E2M1, plus a power of two that is returned in *magic. y is 2^22 times a magnitude:
 * then the power of two whose addition rounds has y's own exponent, since a sum with 2^(22 + e) has
 * a last place of 2^(e - 1), the spacing of E2M1 from 2^e on. Below 1 it is the same as from 1 on.
 */
__device__ static inline float round_e2m1(float y, float *magic)
{
    *magic = float_of(bits_of(fmaxf(y, 0x1p22f)) & 0x7F800000);
    return fmaf(y, 0x1p-22f, *magic);
}

/* The squared error of a block of magnitudes under a scale, value by value. Without CLAMP no
 * quotient reaches 7, so all round to at most 6. The products by 2^-22 and of value and scale are
 * exact, so that fusing them with a sum changes nothing; d * d would round. */
template <bool CLAMP> __device__ static inline float block_error(const float a[RUN], float2 entry)
{
    float sum = 0, magic;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float y = a[i] * entry.y, rounded = round_e2m1(CLAMP ? fminf(y, 0x6p22f) : y, &magic);
        float d = fmaf(-(rounded - magic), entry.x, a[i]);
        sum += d * d;
    }
    return sum;
}

/* The scale with the smallest squared error; an earlier candidate wins a tie. `table` has
 * SWEEP_CODES entries. */
__device__ static inline uint32_t sweep(const float a[RUN], const float2 *table)
{
    float amax = float_of(amax_bits(a));
    if (amax == 0)
        return 0x38;
    int rtn = max((int)nbi_f32_to_e4m3(amax / 6.0f), 0x01), best = rtn;
    float best_error = fminf(block_error<true>(a, table[rtn]), INFINITY);
    for (int code = max(rtn - 2, 0x01); code < rtn; code++) {
        float error = block_error<true>(a, table[code]);
        best = error < best_error ? code : best;
        best_error = fminf(error, best_error);
    }
    /* Above rtn quotients are below 6. The largest code as rtn may be too small, but nothing is
     * above it. */
    for (int code = rtn + 1; code <= min(rtn + 6, 0x7E); code++) {
        float error = block_error<false>(a, table[code]);
        best = error < best_error ? code : best;
        best_error = fminf(error, best_error);
    }
    return (uint32_t)best;
}

/* The E2M1 code of a magnitude, and its value. The quotient is a times the rounded inverse,
 * corrected by the exact remainder: it is on the same side of every tie of E2M1 as the rounded
 * quotient, since a scale has four significant bits, and so no quotient other than a tie itself
 * lies within half a last place of one. The correction turns an infinite quotient into NaN, and the
 * minimum turns NaN into 6. */
__device__ static inline uint32_t encode_e2m1(float a, float2 entry, float *value)
{
    float inverse = entry.y * 0x1p-22f, y = a * inverse;
    y = fminf(fmaf(fmaf(-y, entry.x, a), inverse, y), 6.0f);
    float magic, rounded = round_e2m1(y * 0x1p22f, &magic);
    /* rounded ends in n = y / 2^(e - 1), and the code is n + 2e, where e is 0 below 1. */
    *value = rounded - magic;
    return (bits_of(rounded) + ((bits_of(magic) >> 22) - 2 * (127 + 22))) & 7;
}
