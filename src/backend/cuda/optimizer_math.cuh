/* optimizer_math.cuh - AdamW and the NVFP4 codec, for sixteen elements in a thread's registers.
 *
 * Bit by bit what backend/cpu/optimizer_loops.h and tensor/codec_scalar.c compute. Files that
 * include this one are compiled with -fmad=false: a product may only be fused with a sum where
 * fmaf() says so, because the product is exact there. Code is otherwise arranged for few
 * instructions, since arithmetic and not memory limits an update. */
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

/* The counters of a run: 16 bits an element, two to a word, the earlier one in the low half. */
struct adamw_random {
    uint32_t seed[2], tensor, step;
};

__device__ static inline void random_words(uint32_t out[RUN / 2], const struct adamw_random &r,
                                           int64_t first, enum adamw_purpose purpose)
{
#pragma unroll
    for (int i = 0; i < RUN / 8; i++) {
        uint32_t c0 = (uint32_t)(first / 8) + (uint32_t)i, c1 = r.tensor, c2 = r.step, c3 = purpose;
        uint32_t k0 = r.seed[0], k1 = r.seed[1];
#pragma unroll
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        out[4 * i] = c0;
        out[4 * i + 1] = c1;
        out[4 * i + 2] = c2;
        out[4 * i + 3] = c3;
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

/* ---- moments ---- */

/* A moment's codes of a run, as they lie in memory, and the scale of its group. */
template <enum nb_moment_type KIND> struct moment_run {
    static constexpr int WORDS = KIND == NB_MOMENT_F32    ? 16
                                 : KIND == NB_MOMENT_BF16 ? 8
                                 : KIND == NB_MOMENT_INT8 ? 4
                                                          : 2;
    uint32_t words[WORDS];
    uint32_t scale;
};

template <enum nb_moment_type KIND>
__device__ static inline void moment_load(struct moment_run<KIND> &c, const struct nbi_moment &s,
                                          int64_t first, int valid)
{
    const void *values = (const void *)s.values.at, *scales = (const void *)s.scales.at;
    if constexpr (KIND == NB_MOMENT_F32)
        load_run<uint32_t, RUN>(c.words, values, first, valid);
    else if constexpr (KIND == NB_MOMENT_BF16)
        load_run<uint16_t, RUN>(c.words, values, first, valid);
    else if constexpr (KIND == NB_MOMENT_INT8)
        load_run<uint8_t, RUN>(c.words, values, first, valid);
    else
        load_run<uint8_t, RUN / 2>(c.words, values, first / 2, (valid + 1) / 2);
    c.scale = 0;
    if (KIND == NB_MOMENT_INT8 && valid > 0)
        c.scale = ((const uint16_t *)scales)[first / 32];
    if (KIND == NB_MOMENT_NVFP4 && valid > 0)
        c.scale = ((const uint8_t *)scales)[first / 16];
}

/* S is the scale of the tensor; 0: nothing is stored yet. */
template <enum nb_moment_type KIND, bool IS_V>
__device__ static inline void moment_decode(float x[RUN], const struct moment_run<KIND> &c, float S)
{
    if constexpr (KIND == NB_MOMENT_F32 || KIND == NB_MOMENT_BF16) {
        decode_floats(x, c.words, KIND == NB_MOMENT_BF16);
    } else if constexpr (KIND == NB_MOMENT_INT8) {
        float scale = f16_value((uint16_t)c.scale);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            uint32_t byte = c.words[i / 4] >> 8 * (i % 4) & 0xFF;
            if (IS_V) {
                float r = divide_by(small_float(byte), 255.0f, 1.0f / 255.0f) * scale;
                x[i] = r * r;
            } else {
                float code = small_float(byte ^ 0x80) - 128.0f;
                x[i] = divide_normal(code, 254.0f - fabsf(code)) * scale;
            }
        }
    } else {
        float scale = e4m3_value(c.scale);
        float unit = scale * S * 0x1p-4f;
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            uint32_t code = c.words[i / 8] >> 4 * (i % 8) & 15;
            float r = IS_V ? small_float(code + 1) * unit : e2m1_value(code) * scale * S;
            x[i] = S == 0 ? 0.0f : IS_V ? r * r : r;
        }
    }
}

/* Rounds p to a neighbour so that the mean of the square is kept. */
__device__ static inline uint32_t round_root(float p, float random)
{
    int32_t code = (int32_t)p;
    float low = (float)code, fraction = (p - low) * (p + low);
    return (uint32_t)code + (random * fmaf(2.0f, low, 1.0f) < fraction ? 1 : 0);
}

/* Rounds so that the mean of the decoded value c / (254 - c) is kept. Its neighbour is
 * 254 / ((254 - c) (253 - c)) away. */
__device__ static inline uint32_t round_m8(float m, float inverse, float random)
{
    float x = fminf(fabsf(m) * inverse, 1.0f);
    int32_t code = (int32_t)divide_normal(254.0f * x, 1.0f + x);
    float low = (float)code;
    float fraction = (x * (254.0f - low) - low) * (253.0f - low) * (1.0f / 254.0f);
    code += random < fraction ? 1 : 0;
    return (uint32_t)(bits_of(m) >> 31 ? -code : code) & 0xFF;
}

/* E2M1 codes are evenly spaced in min(2a, a + 2, a/2 + 4), which is linear between them. */
__device__ static inline uint32_t round_m4(float m, float inverse, float random)
{
    float a = fminf(fabsf(m) * inverse, 6.0f);
    float p = fminf(fminf(2.0f * a, a + 2.0f), 0.5f * a + 4.0f);
    return (uint32_t)(int32_t)(p + random) | bits_of(m) >> 31 << 3;
}

/* Sets c.scale, and returns what a magnitude is to be multiplied with for its code. All lanes of a
 * warp call it together. */
template <enum nb_moment_type KIND, bool IS_V>
__device__ static inline float moment_scale(struct moment_run<KIND> &c, uint32_t amax, float S)
{
    if constexpr (KIND == NB_MOMENT_INT8) {
        amax = max(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 1));
        c.scale = f16_up(float_of(amax));
        return c.scale > 0 ? (IS_V ? 255.0f : 1.0f) / f16_value((uint16_t)c.scale) : 0.0f;
    }
    c.scale = e4m3_up(float_of(amax) / (IS_V ? S : 6.0f * S));
    return (IS_V ? 16.0f : 1.0f) / S / e4m3_value(c.scale);
}

/* The code of m or sqrt(v). v is at least 1 unless it is 0 (int8), or its level 1 (nvfp4). */
template <enum nb_moment_type KIND, bool IS_V>
__device__ static inline uint32_t moment_code(float r, float inverse, float random)
{
    if constexpr (KIND == NB_MOMENT_INT8 && IS_V)
        return max(round_root(fminf(r * inverse, 255.0f), random), bits_of(r) > 0 ? 1u : 0u);
    else if constexpr (KIND == NB_MOMENT_INT8)
        return round_m8(r, inverse, random);
    else if constexpr (IS_V)
        return max(round_root(fminf(r * inverse, 16.0f), random), 1u) - 1;
    else
        return round_m4(r, inverse, random);
}

/* Encodes m or v. normal: sqrt_normal has the root of each v. All lanes of a warp call it together.
 */
template <enum nb_moment_type KIND, bool IS_V>
__device__ static inline void moment_encode(struct moment_run<KIND> &c, const float x[RUN], float S,
                                            bool normal, const struct adamw_random &at,
                                            int64_t first)
{
    constexpr int PER_WORD = RUN / moment_run<KIND>::WORDS, BITS = 32 / PER_WORD;
    uint32_t random[RUN / 2];
    float root[RUN], inverse = 0;
    if constexpr (KIND != NB_MOMENT_F32)
        random_words(random, at, first, IS_V ? ADAMW_V : ADAMW_M);
    if constexpr (KIND == NB_MOMENT_INT8 || KIND == NB_MOMENT_NVFP4) {
        if (IS_V && normal) {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                root[i] = sqrt_normal(x[i]);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++)
                root[i] = IS_V ? sqrtf(x[i]) : x[i];
        }
        inverse = moment_scale<KIND, IS_V>(c, amax_bits(root), S);
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        uint32_t code;
        if constexpr (KIND == NB_MOMENT_F32)
            code = bits_of(x[i]);
        else if constexpr (KIND == NB_MOMENT_BF16)
            code = round_bf16(x[i], random_bits(random, i));
        else
            code = moment_code<KIND, IS_V>(root[i], inverse, random_fraction(random, i));
        c.words[i / PER_WORD] =
            (i % PER_WORD ? c.words[i / PER_WORD] : 0) | code << BITS * (i % PER_WORD);
    }
}

template <enum nb_moment_type KIND>
__device__ static inline void
moment_store(const struct nbi_moment &s, const struct moment_run<KIND> &c, int64_t first, int valid)
{
    void *values = (void *)s.values.at, *scales = (void *)s.scales.at;
    if constexpr (KIND == NB_MOMENT_F32)
        store_run<uint32_t, RUN>(values, first, c.words, valid);
    else if constexpr (KIND == NB_MOMENT_BF16)
        store_run<uint16_t, RUN>(values, first, c.words, valid);
    else if constexpr (KIND == NB_MOMENT_INT8)
        store_run<uint8_t, RUN>(values, first, c.words, valid);
    else
        store_run<uint8_t, RUN / 2>(values, first / 2, c.words, (valid + 1) / 2);
    if (KIND == NB_MOMENT_INT8 && valid > 0 && first % 32 == 0)
        ((uint16_t *)scales)[first / 32] = (uint16_t)c.scale;
    if (KIND == NB_MOMENT_NVFP4 && valid > 0)
        ((uint8_t *)scales)[first / 16] = (uint8_t)c.scale;
}

/* ---- blocks of NVFP4 ---- */

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
