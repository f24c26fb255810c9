/* half.h - scalar conversions between f32 and the small float types; they define the results.
 *
 * Conversions to smaller types round to nearest, ties to even. bf16 and f16 overflow to infinity
 * and keep NaN. E4M3 (the "fn" variant: no infinities, 0x7F and 0xFF are NaN) saturates at 448,
 * E2M1 at 6. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Under nvcc, for the host and the device. */
#ifdef __CUDACC__
#define NBI_HOST_DEVICE __host__ __device__
#else
#define NBI_HOST_DEVICE
#endif

NBI_HOST_DEVICE static inline uint32_t nbi_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

NBI_HOST_DEVICE static inline float nbi_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline float nbi_bf16_to_f32(uint16_t h)
{
    return nbi_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t nbi_f32_to_bf16(float f)
{
    uint32_t u = nbi_f32_bits(f);
    if ((u & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(u >> 16 | 0x40); /* quiet NaN; rounding could turn it into infinity */
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static inline float nbi_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 31)
        return nbi_f32_from_bits(sign | 0x7F800000 | mantissa << 13);
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    return nbi_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t nbi_f32_to_f16(float f)
{
    uint32_t u = nbi_f32_bits(f), a = u & 0x7FFFFFFF;
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    if (a > 0x7F800000)
        return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x1FF)); /* quiet NaN, payload kept */
    if (a >= 0x477FF000)
        return sign | 0x7C00; /* 65520 and above round to infinity */
    if (a < 0x38800000)       /* below 2^-14: a multiple of 2^-24 */
        return (uint16_t)(sign | (uint16_t)rintf(nbi_f32_from_bits(a) * 0x1p24f));
    a += 0xFFF + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

NBI_HOST_DEVICE static inline float nbi_e4m3_to_f32(uint8_t c)
{
    uint32_t sign = (uint32_t)(c & 0x80) << 24, exponent = c >> 3 & 15, mantissa = c & 7;
    if ((c & 0x7F) == 0x7F)
        return nbi_f32_from_bits(sign | 0x7FC00000);
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-9f;
        return sign ? -f : f;
    }
    return nbi_f32_from_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

NBI_HOST_DEVICE static inline uint8_t nbi_f32_to_e4m3(float f)
{
    uint32_t u = nbi_f32_bits(f), a = u & 0x7FFFFFFF;
    uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    if (a > 0x7F800000)
        return sign | 0x7F;
    if (a >= nbi_f32_bits(448.0f))
        return sign | 0x7E;
    if (a < nbi_f32_bits(0x1p-6f)) /* a multiple of 2^-9; 8 of them are the first normal code */
        return (uint8_t)(sign | (uint8_t)rintf(nbi_f32_from_bits(a) * 0x1p9f));
    a += 0x7FFFF + (a >> 20 & 1);
    return (uint8_t)(sign | (a - (120u << 23)) >> 20);
}

NBI_HOST_DEVICE static inline float nbi_e2m1_to_f32(uint8_t c)
{
    static const float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return table[c & 15];
}

/* NaN becomes 6 with its sign: callers check for non-finite input first. */
NBI_HOST_DEVICE static inline uint8_t nbi_f32_to_e2m1(float f)
{
    float a = fabsf(f);
    uint8_t code = a <= 0.25f   ? 0
                   : a < 0.75f  ? 1
                   : a <= 1.25f ? 2
                   : a < 1.75f  ? 3
                   : a <= 2.5f  ? 4
                   : a < 3.5f   ? 5
                   : a <= 5.0f  ? 6
                                : 7;
    return (uint8_t)(code | (signbit(f) ? 8 : 0));
}
