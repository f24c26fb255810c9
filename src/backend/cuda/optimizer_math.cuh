/* optimizer_math.cuh - the optimizer's arithmetic, for sixteen elements in a thread's registers:
 * conversions, division, arrays in memory, random bits.
 *
 * This, optimizer_moments.cuh and nvfp4_sweep.cuh compute bit by bit what
 * backend/cpu/optimizer_loops.h and tensor/codec_scalar.c do. Files that include them are compiled
 * with -fmad=false: a product may only be fused with a sum where fmaf() says so, because the
 * product is exact there. Code is otherwise arranged for few instructions, since arithmetic and not
 * memory limits an update. */
#pragma once

#include "backend/cuda/device_math.cuh"

extern "C" {
#include "backend/ops_train.h"
#include "tensor/half.h"
}

/* Elements of a thread: a block of NVFP4, and half a group of 32 of an int8 moment, which two
 * neighbouring lanes share. Each purpose takes two counters of Philox. */
#define RUN 16

/* What random bits are used for: the last word of their counter. */
enum adamw_purpose { ADAMW_MASTER, ADAMW_M, ADAMW_V };

/* ---- small conversions ---- */

__device__ static inline uint32_t bits_of(float x)
{
    return nbi_f32_bits(x);
}

__device__ static inline float float_of(uint32_t bits)
{
    return nbi_f32_from_bits(bits);
}

/* n < 2^23 as a float. */
__device__ static inline float small_float(uint32_t n)
{
    return float_of(n | 0x4B000000) - 8388608.0f;
}

/* E4M3 codes 0x00 to 0x7E, and E2M1 codes: moved to where f32 has exponent and mantissa they are
 * the value times a power of two, subnormals included. */
__device__ static inline float e4m3_value(uint32_t code)
{
    return float_of(code << 20) * 0x1p120f;
}

__device__ static inline float e2m1_value(uint32_t code)
{
    return float_of((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
}

__device__ static inline float f16_value(uint16_t code)
{
    return __half2float(__ushort_as_half(code));
}

/* The smallest f16 that is >= v, for v >= 0; and the smallest E4M3, which is at least 2^-9. */
__device__ static inline uint16_t f16_up(float v)
{
    uint16_t code = __half_as_ushort(__float2half_rn(v));
    if (f16_value(code) < v)
        code++;
    return code < 0x7BFF ? code : 0x7BFF;
}

__device__ static inline uint8_t e4m3_up(float v)
{
    uint32_t code = nbi_f32_to_e4m3(v);
    if (e4m3_value(code) < v)
        code++;
    return (uint8_t)(code < 0x01 ? 0x01 : code < 0x7E ? code : 0x7E);
}

/* The largest magnitude, as bits, which order magnitudes. */
__device__ static inline uint32_t amax_bits(const float x[RUN])
{
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < RUN; i++)
        amax = max(amax, bits_of(x[i]) & 0x7FFFFFFF);
    return amax;
}

/* ---- division and square root ----
 *
 * What the compiler makes of / and sqrtf begins with these instructions and then, with as many
 * again, treats operands near the ends of the range of exponents. Where these cannot occur the
 * results are the same: correctly rounded. */

/* a / b for normal b and quotients; or some quotient below 1 for a below 2^-100. */
__device__ static inline float divide_normal(float a, float b)
{
    float y = rcp_approx(b);
    y = fmaf(y, fmaf(-b, y, 1.0f), y);
    float q = a * y;
    return fmaf(y, fmaf(-b, q, a), q);
}

/* The same for a b whose reciprocal, correctly rounded, is known. */
__device__ static inline float divide_by(float a, float b, float reciprocal)
{
    float q = a * reciprocal;
    return fmaf(reciprocal, fmaf(-b, q, a), q);
}

__device__ static inline float sqrt_normal(float x)
{
    float y = rsqrt_approx(x), root = x * y;
    return fmaf(fmaf(-root, root, x), 0.5f * y, root);
}

/* ---- arrays in memory ---- */

/* COUNT elements of an array from `first` on, as words; those from `valid` on are zero. Whole runs
 * are aligned to their size or to 16 bytes. */
template <typename T, int COUNT>
__device__ static inline void load_run(uint32_t *out, const void *p, int64_t first, int valid)
{
    constexpr int WORDS = COUNT * (int)sizeof(T) / 4, PER_WORD = 4 / (int)sizeof(T);
    const T *from = (const T *)p + first;
    if (valid < COUNT) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            out[i] = 0;
#pragma unroll
            for (int j = 0; j < PER_WORD; j++)
                if (i * PER_WORD + j < valid)
                    out[i] |= (uint32_t)from[i * PER_WORD + j] << 32 / PER_WORD * j;
        }
    } else if constexpr (WORDS == 2) {
        const uint2 v = *(const uint2 *)from;
        out[0] = v.x;
        out[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i + 4 <= WORDS; i += 4) {
            const uint4 v = ((const uint4 *)from)[i / 4];
            out[i] = v.x;
            out[i + 1] = v.y;
            out[i + 2] = v.z;
            out[i + 3] = v.w;
        }
    }
}

template <typename T, int COUNT>
__device__ static inline void store_run(void *p, int64_t first, const uint32_t *words, int valid)
{
    constexpr int WORDS = COUNT * (int)sizeof(T) / 4, PER_WORD = 4 / (int)sizeof(T);
    T *to = (T *)p + first;
    if (valid < COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i < valid)
                to[i] = (T)(words[i / PER_WORD] >> 32 / PER_WORD * (i % PER_WORD));
    } else if constexpr (WORDS == 2) {
        *(uint2 *)to = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i + 4 <= WORDS; i += 4)
            ((uint4 *)to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
}

/* A run of f32 or bf16 as it lies in memory. */
__device__ static inline void load_floats(uint32_t words[RUN], const void *p, bool bf16,
                                          int64_t first, int valid)
{
    if (bf16)
        load_run<uint16_t, RUN>(words, p, first, valid);
    else
        load_run<uint32_t, RUN>(words, p, first, valid);
}

__device__ static inline void decode_floats(float x[RUN], const uint32_t words[RUN], bool bf16)
{
#pragma unroll
    for (int i = 0; i < RUN; i++)
        x[i] = float_of(!bf16 ? words[i] : i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
}

/* ---- random bits ---- */

/* Philox4x32-10, as nbi_philox(). */
__device__ static inline uint4 philox(uint4 c, uint32_t k0, uint32_t k1)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c.x, p1 = (uint64_t)0xCD9E8D57u * c.z;
        c.x = (uint32_t)(p1 >> 32) ^ c.y ^ k0;
        c.y = (uint32_t)p1;
        c.z = (uint32_t)(p0 >> 32) ^ c.w ^ k1;
        c.w = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

/* The counters of a run: 16 bits an element, two to a word, the earlier one in the low half. */
struct adamw_random {
    uint32_t seed[2], tensor, step;
};

__device__ static inline void random_words(uint32_t out[RUN / 2], const struct adamw_random &r,
                                           int64_t first, enum adamw_purpose purpose)
{
#pragma unroll
    for (int i = 0; i < RUN / 8; i++) {
        const uint4 bits =
            philox({(uint32_t)(first / 8) + (uint32_t)i, r.tensor, r.step, (uint32_t)purpose},
                   r.seed[0], r.seed[1]);
        out[4 * i] = bits.x;
        out[4 * i + 1] = bits.y;
        out[4 * i + 2] = bits.z;
        out[4 * i + 3] = bits.w;
    }
}

__device__ static inline uint32_t random_bits(const uint32_t *words, int i)
{
    return i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF;
}

/* The same divided by 2^16. As the last bits of a float of at least 2^23 they are units. */
__device__ static inline float random_fraction(const uint32_t *words, int i)
{
    uint32_t bits = __byte_perm(words[i / 2], 0x4B000000, i % 2 ? 0x7632 : 0x7610);
    return fmaf(float_of(bits), 0x1p-16f, -128.0f);
}

__device__ static inline uint16_t round_bf16(float x, uint32_t random)
{
    uint32_t bits = bits_of(x);
    bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return (uint16_t)((nan ? bits | 0x400000 : bits + random) >> 16);
}
