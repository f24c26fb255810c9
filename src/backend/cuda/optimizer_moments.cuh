/* optimizer_moments.cuh - Adam's moments as they are stored: decoding and encoding of a run.
 *
 * struct nbi_moment has the formats; backend/cpu/optimizer_loops.h the definition, bit by bit. */
#pragma once

#include "backend/cuda/optimizer_math.cuh"

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
