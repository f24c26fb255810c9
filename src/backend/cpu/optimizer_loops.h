/* optimizer_loops.h - the inner loops of the optimizer, compiled once per instruction set.
 *
 * Plain loops, which compilers vectorise. Every step is one correctly rounded operation and every
 * sum has one order, so all versions give the same bits. */
#pragma once

#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"
#include "base/rng.h"
#include "tensor/codec.h"
#include "tensor/half.h"

/* ---- statistics ---- */

typedef float grad_values __attribute__((vector_size(32)));
typedef int32_t grad_bits __attribute__((vector_size(32)));
typedef double grad_sums __attribute__((vector_size(64)));

struct grad_lanes {
    grad_sums squares;
    grad_bits amax, finite; /* amax as bits, which order magnitudes; finite: minus the number of
                               finite values */
};

static inline void grad_add(struct grad_lanes *l, const float x[8])
{
    grad_bits bits;
    memcpy(&bits, x, sizeof bits);
    bits &= INT32_MAX;
    grad_bits finite = bits < 0x7F800000;
    bits &= finite;
    grad_sums d = __builtin_convertvector((grad_values)bits, grad_sums);
    grad_bits more = bits > l->amax;
    l->squares += d * d;
    l->amax = (bits & more) | (l->amax & ~more);
    l->finite += finite;
}

/* Adds the next n <= 16 elements; missing ones count as zeros. */
static inline void grad_add_bf16(struct grad_lanes l[2], const uint16_t *x, int64_t n)
{
    uint16_t half[16] = {0};
    float f[16];
    memcpy(half, x, (size_t)n * sizeof *half);
    for (int j = 0; j < 16; j++)
        f[j] = nbi_bf16_to_f32(half[j]);
    grad_add(&l[0], f);
    grad_add(&l[1], f + 8);
}

/* Element i goes to partial sum i % 16; these are added in order. Squares are exact in double. */
static void grad_stats(struct nbi_grad_partial *out, const void *grad, bool bf16, int64_t n)
{
    struct grad_lanes l[2] = {0};
    const float *x = grad;
    const uint16_t *half = grad;
    float last[16] = {0};
    int32_t amax = 0;
    int64_t i = 0;
    for (; i + 16 <= n && bf16; i += 16)
        grad_add_bf16(l, half + i, 16);
    for (; i + 16 <= n; i += 16) {
        grad_add(&l[0], x + i);
        grad_add(&l[1], x + i + 8);
    }
    if (bf16) {
        grad_add_bf16(l, half + i, n - i);
    } else {
        memcpy(last, x + i, (size_t)(n - i) * sizeof *last);
        grad_add(&l[0], last);
        grad_add(&l[1], last + 8);
    }
    *out = (struct nbi_grad_partial){.nonfinite = i + 16};
    for (int j = 0; j < 16; j++) {
        out->squares += l[j / 8].squares[j % 8];
        out->nonfinite += l[j / 8].finite[j % 8];
        amax = l[j / 8].amax[j % 8] > amax ? l[j / 8].amax[j % 8] : amax;
    }
    out->amax = nbi_f32_from_bits((uint32_t)amax);
}

/* ---- AdamW, in blocks of elements that are held on the stack ---- */

/* Elements of a block, for which each purpose takes 16 counters of Philox. A short last block is
 * padded with zeros, which are not stored. */
#define ADAMW_BLOCK 128

/* What random bits are used for: the last word of their counter. */
enum adamw_purpose { ADAMW_MASTER, ADAMW_M, ADAMW_V };

/* One moment of a block as it is stored, and the random bits for rounding it. */
struct adamw_codes {
    union {
        _Alignas(64) uint16_t bf16[ADAMW_BLOCK];
        int8_t m8[ADAMW_BLOCK];
        uint8_t v8[ADAMW_BLOCK];
        uint8_t nibbles[ADAMW_BLOCK / 2];
    };
    union {
        uint16_t f16[ADAMW_BLOCK / 32];
        uint8_t e4m3[ADAMW_BLOCK / 16];
    };
    _Alignas(64) uint16_t random[ADAMW_BLOCK];
};

/* 16 random bits for each element from `first` on; nbi_op_adamw has the definition. */
static inline void adamw_random(uint16_t out[ADAMW_BLOCK], const struct nbi_adamw_args *a,
                                int64_t first, enum adamw_purpose purpose)
{
    enum { COUNTERS = ADAMW_BLOCK / 8 };
    uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS], words[COUNTERS][4];
    uint32_t k0 = (uint32_t)a->op->seed, k1 = (uint32_t)(a->op->seed >> 32);
    for (int i = 0; i < COUNTERS; i++) {
        c0[i] = (uint32_t)(first / 8) + (uint32_t)i;
        c1[i] = a->op->tensor;
        c2[i] = a->op->step;
        c3[i] = purpose;
    }
    /* Not unrolled: GCC would no longer vectorise it. */
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 1
        for (int i = 0; i < COUNTERS; i++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)p1;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < COUNTERS; i++) {
        words[i][0] = c0[i];
        words[i][1] = c1[i];
        words[i][2] = c2[i];
        words[i][3] = c3[i];
    }
    memcpy(out, words, sizeof words);
}

/* ---- scales of groups ---- */

static inline float adamw_amax(const float *x, int n)
{
    uint32_t amax = 0; /* as bits, which order magnitudes */
    for (int i = 0; i < n; i++) {
        uint32_t bits = nbi_f32_bits(x[i]) & 0x7FFFFFFF;
        amax = bits > amax ? bits : amax;
    }
    return nbi_f32_from_bits(amax);
}

/* The smallest f16 that is >= v, for v >= 0; and the smallest E4M3, which is at least 2^-9. */
static inline uint16_t adamw_f16_up(float v)
{
    uint16_t code = nbi_f32_to_f16(v);
    if (nbi_f16_to_f32(code) < v)
        code++;
    return code < 0x7BFF ? code : 0x7BFF;
}

static inline uint8_t adamw_e4m3_up(float v)
{
    uint8_t code = nbi_f32_to_e4m3(v);
    if (nbi_e4m3_to_f32(code) < v)
        code++;
    return code < 0x01 ? 0x01 : code < 0x7E ? code : 0x7E;
}

/* Repeats the scale of each group for each of its elements. */
static inline void adamw_broadcast(float out[ADAMW_BLOCK], const float *scales, int group)
{
    for (int g = 0; g < ADAMW_BLOCK / group; g++)
        for (int i = 0; i < group; i++)
            out[g * group + i] = scales[g];
}

/* ---- moments: decoding ---- */

static inline void adamw_from_bf16(float x[ADAMW_BLOCK], const uint16_t half[ADAMW_BLOCK])
{
    for (int i = 0; i < ADAMW_BLOCK; i++)
        x[i] = nbi_bf16_to_f32(half[i]);
}

static inline void adamw_decode_int8(float x[ADAMW_BLOCK], const struct adamw_codes *c, bool is_v)
{
    float s[ADAMW_BLOCK / 32], scale[ADAMW_BLOCK];
    for (int g = 0; g < ADAMW_BLOCK / 32; g++)
        s[g] = nbi_f16_to_f32(c->f16[g]);
    adamw_broadcast(scale, s, 32);
    if (is_v) {
        for (int i = 0; i < ADAMW_BLOCK; i++) {
            float r = (float)c->v8[i] / 255.0f * scale[i];
            x[i] = r * r;
        }
    } else {
        for (int i = 0; i < ADAMW_BLOCK; i++) {
            float code = c->m8[i];
            x[i] = code / (254.0f - fabsf(code)) * scale[i];
        }
    }
}

static inline void adamw_decode_v4(float x[ADAMW_BLOCK], const struct adamw_codes *c, float S)
{
    float s[ADAMW_BLOCK / 16], scale[ADAMW_BLOCK];
    uint8_t codes[ADAMW_BLOCK];
    for (int g = 0; g < ADAMW_BLOCK / 16; g++)
        s[g] = nbi_e4m3_to_f32(c->e4m3[g]) * S * 0x1p-4f;
    adamw_broadcast(scale, s, 16);
    for (int i = 0; i < ADAMW_BLOCK / 2; i++) {
        codes[2 * i] = c->nibbles[i] & 15;
        codes[2 * i + 1] = c->nibbles[i] >> 4;
    }
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float r = (float)(codes[i] + 1) * scale[i];
        x[i] = r * r;
    }
}

/* Loads n elements of m or v from `at` on. S is the scale of the tensor; 0: nothing is stored yet.
 */
static inline void adamw_load(float x[ADAMW_BLOCK], const struct nbi_moment *s, bool is_v, float S,
                              int64_t at, int64_t n)
{
    struct adamw_codes c;
    int64_t scale_at, scale_bytes;
    if (s->kind == NB_MOMENT_NVFP4 && S == 0)
        n = 0;
    int64_t value_at = nbi_moment_bytes(s->kind, at, &scale_at);
    int64_t bytes = nbi_moment_bytes(s->kind, n, &scale_bytes);
    if (n < ADAMW_BLOCK) {
        memset(&c, 0, sizeof c);
        memset(x, 0, ADAMW_BLOCK * sizeof *x);
    }
    if (s->kind == NB_MOMENT_F32) {
        memcpy(x, (const uint8_t *)host(s->values) + value_at, (size_t)bytes);
        return;
    }
    memcpy(c.v8, (const uint8_t *)host(s->values) + value_at, (size_t)bytes);
    if (scale_bytes > 0)
        memcpy(c.e4m3, (const uint8_t *)host(s->scales) + scale_at, (size_t)scale_bytes);
    if (s->kind == NB_MOMENT_BF16)
        adamw_from_bf16(x, c.bf16);
    else if (s->kind == NB_MOMENT_INT8)
        adamw_decode_int8(x, &c, is_v);
    else if (is_v)
        adamw_decode_v4(x, &c, S);
    else
        nbi_codec_table()->dequantize_f32(x, c.nibbles, c.e4m3, ADAMW_BLOCK / 16, S);
}

/* ---- moments: encoding ---- */

/* The next two work on bits, since compilers turn comparisons into branches, and loops with
 * branches are not vectorised. adamw_negative: 1 if the sign bit is set. adamw_clamp: min(x, max)
 * for x >= 0; NaN becomes max. */
static inline uint32_t adamw_negative(float x)
{
    return nbi_f32_bits(x) >> 31;
}

static inline float adamw_clamp(float x, float max)
{
    uint32_t bits = nbi_f32_bits(x), limit = nbi_f32_bits(max);
    return nbi_f32_from_bits(bits < limit ? bits : limit);
}

static inline void adamw_round_bf16(uint16_t y[ADAMW_BLOCK], const float x[ADAMW_BLOCK],
                                    const uint16_t random[ADAMW_BLOCK])
{
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        uint32_t bits = nbi_f32_bits(x[i]);
        bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
        y[i] = (uint16_t)((nan ? bits | 0x400000 : bits + random[i]) >> 16);
    }
}

/* Stores the scale s of each group of 32, its amax rounded up, and returns max / s per element. */
static inline void adamw_scales_f16(struct adamw_codes *c, float inverse[ADAMW_BLOCK],
                                    const float x[ADAMW_BLOCK], float max)
{
    float factor[ADAMW_BLOCK / 32];
    for (int g = 0; g < ADAMW_BLOCK / 32; g++) {
        c->f16[g] = adamw_f16_up(adamw_amax(x + 32 * g, 32));
        factor[g] = c->f16[g] > 0 ? max / nbi_f16_to_f32(c->f16[g]) : 0.0f;
    }
    adamw_broadcast(inverse, factor, 32);
}

/* Stores the scale s of each group of 16, its amax / max rounded up, and returns numerator / s per
 * element. */
static inline void adamw_scales_e4m3(struct adamw_codes *c, float inverse[ADAMW_BLOCK],
                                     const float x[ADAMW_BLOCK], float max, float numerator)
{
    float factor[ADAMW_BLOCK / 16];
    for (int g = 0; g < ADAMW_BLOCK / 16; g++) {
        c->e4m3[g] = adamw_e4m3_up(adamw_amax(x + 16 * g, 16) / max);
        factor[g] = numerator / nbi_e4m3_to_f32(c->e4m3[g]);
    }
    adamw_broadcast(inverse, factor, 16);
}

/* Rounds so that the mean of the decoded value c / (254 - c) is kept. Its neighbour is
 * 254 / ((254 - c) (253 - c)) away. */
static inline void adamw_encode_m8(struct adamw_codes *c, const float m[ADAMW_BLOCK])
{
    float inverse[ADAMW_BLOCK];
    adamw_scales_f16(c, inverse, m, 1.0f);
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float x = adamw_clamp(fabsf(m[i]) * inverse[i], 1.0f);
        int32_t code = (int32_t)(254.0f * x / (1.0f + x)), sign = -(int32_t)adamw_negative(m[i]);
        float low = (float)code, random = (float)c->random[i] * 0x1p-16f;
        float fraction = (x * (254.0f - low) - low) * (253.0f - low) * (1.0f / 254.0f);
        code += (int32_t)adamw_negative(random - fraction);
        c->m8[i] = (int8_t)((code ^ sign) - sign);
    }
}

/* Rounds p to a neighbour so that the mean of the square is kept. */
static inline int32_t adamw_round_root(float p, uint16_t random)
{
    int32_t code = (int32_t)p;
    float low = (float)code, fraction = (p - low) * (p + low);
    return code +
           (int32_t)adamw_negative((float)random * 0x1p-16f * (2.0f * low + 1.0f) - fraction);
}

static inline void adamw_encode_v8(struct adamw_codes *c, const float r[ADAMW_BLOCK])
{
    float inverse[ADAMW_BLOCK];
    adamw_scales_f16(c, inverse, r, 255.0f);
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float p = adamw_clamp(r[i] * inverse[i], 255.0f);
        int32_t code = adamw_round_root(p, c->random[i]);
        int32_t min_code = (int32_t)((0 - nbi_f32_bits(r[i])) >> 31); /* 0 if r is 0, else 1 */
        c->v8[i] = (uint8_t)(code > min_code ? code : min_code);
    }
}

static inline void adamw_pack_nibbles(uint8_t *out, const uint8_t codes[ADAMW_BLOCK])
{
    for (int i = 0; i < ADAMW_BLOCK / 2; i++)
        out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

/* E2M1 codes are evenly spaced in min(2a, a + 2, a/2 + 4), which is linear between them. */
static inline void adamw_encode_m4(struct adamw_codes *c, const float m[ADAMW_BLOCK], float S)
{
    float inverse[ADAMW_BLOCK];
    uint8_t codes[ADAMW_BLOCK];
    adamw_scales_e4m3(c, inverse, m, 6.0f * S, 1.0f / S);
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float a = adamw_clamp(fabsf(m[i]) * inverse[i], 6.0f);
        float p = adamw_clamp(adamw_clamp(2.0f * a, a + 2.0f), 0.5f * a + 4.0f);
        int32_t code = (int32_t)(p + (float)c->random[i] * 0x1p-16f);
        codes[i] = (uint8_t)((uint32_t)code | adamw_negative(m[i]) << 3);
    }
    adamw_pack_nibbles(c->nibbles, codes);
}

static inline void adamw_encode_v4(struct adamw_codes *c, const float r[ADAMW_BLOCK], float S)
{
    float inverse[ADAMW_BLOCK];
    uint8_t codes[ADAMW_BLOCK];
    adamw_scales_e4m3(c, inverse, r, S, 16.0f / S);
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float p = adamw_clamp(r[i] * inverse[i], 16.0f);
        int32_t level = adamw_round_root(p, c->random[i]);
        codes[i] = (uint8_t)(level > 1 ? level - 1 : 0);
    }
    adamw_pack_nibbles(c->nibbles, codes);
}

static inline void adamw_store(const struct nbi_adamw_args *a, bool is_v,
                               const float x[ADAMW_BLOCK], int64_t at, int64_t n)
{
    const struct nbi_moment *s = is_v ? &a->op->v : &a->op->m;
    float S = is_v ? a->v_scale[1] : a->m_scale[1], root[ADAMW_BLOCK];
    struct adamw_codes c;
    int64_t scale_at, scale_bytes;
    int64_t value_at = nbi_moment_bytes(s->kind, at, &scale_at);
    int64_t bytes = nbi_moment_bytes(s->kind, n, &scale_bytes);
    uint8_t *values = (uint8_t *)host(s->values) + value_at;
    if (s->kind == NB_MOMENT_F32) {
        memcpy(values, x, (size_t)bytes);
        return;
    }
    adamw_random(c.random, a, at, is_v ? ADAMW_V : ADAMW_M);
    if (is_v && s->kind != NB_MOMENT_BF16)
        for (int i = 0; i < ADAMW_BLOCK; i++)
            root[i] = sqrtf(x[i]);
    if (s->kind == NB_MOMENT_BF16)
        adamw_round_bf16(c.bf16, x, c.random);
    else if (s->kind == NB_MOMENT_INT8)
        is_v ? adamw_encode_v8(&c, root) : adamw_encode_m8(&c, x);
    else
        is_v ? adamw_encode_v4(&c, root, S) : adamw_encode_m4(&c, x, S);
    memcpy(values, c.v8, (size_t)bytes);
    if (scale_bytes > 0)
        memcpy((uint8_t *)host(s->scales) + scale_at, c.e4m3, (size_t)scale_bytes);
}

/* ---- the step ---- */

static inline void adamw_step(const struct nbi_adamw_args *a, float w[ADAMW_BLOCK],
                              float m[ADAMW_BLOCK], float v[ADAMW_BLOCK],
                              const float g[ADAMW_BLOCK])
{
    float limit = a->op->max_update > 0 ? a->op->max_update : INFINITY,
          decay = a->op->lr * a->op->decay;
    const float grad_scale = a->grad_scale;
    float rest1 = 1.0f - a->op->beta1, rest2 = 1.0f - a->op->beta2;
    const struct nbi_op_adamw p = *a->op; /* a copy, which the stores below cannot alias */
    for (int i = 0; i < ADAMW_BLOCK; i++) {
        float d = g[i] * grad_scale;
        m[i] = p.beta1 * m[i] + rest1 * d;
        v[i] = p.beta2 * v[i] + rest2 * (d * d);
        float u = m[i] / p.correct1 / (sqrtf(v[i] / p.correct2) + p.eps);
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
        w[i] = w[i] - decay * w[i] - p.lr * u;
    }
}

static inline void adamw_block(const struct nbi_adamw_args *a, int64_t at, int64_t n,
                               float running_max[2])
{
    _Alignas(64) float w[ADAMW_BLOCK], g[ADAMW_BLOCK], m[ADAMW_BLOCK], v[ADAMW_BLOCK];
    _Alignas(64) uint16_t half[ADAMW_BLOCK], random[ADAMW_BLOCK];
    bool f32_master = a->op->dtype == NBI_F32;
    int64_t from = at - a->op->grad_first;
    uint8_t *master = (uint8_t *)host(a->op->master) + at * (f32_master ? 4 : 2);
    if (n < ADAMW_BLOCK) {
        memset(g, 0, sizeof g);
        memset(w, 0, sizeof w);
        memset(half, 0, sizeof half);
    }
    if (a->op->grad_bf16) {
        memset(half, 0, sizeof half);
        memcpy(half, (const uint16_t *)host(a->op->grad) + from, (size_t)n * sizeof *half);
        adamw_from_bf16(g, half);
    } else {
        memcpy(g, (const float *)host(a->op->grad) + from, (size_t)n * sizeof *g);
    }
    adamw_load(m, &a->op->m, false, a->m_scale[0], at, n);
    adamw_load(v, &a->op->v, true, a->v_scale[0], at, n);
    if (f32_master) {
        memcpy(w, master, (size_t)n * sizeof *w);
    } else {
        memcpy(half, master, (size_t)n * sizeof *half);
        adamw_from_bf16(w, half);
    }
    adamw_step(a, w, m, v, g);
    if (f32_master) {
        memcpy(master, w, (size_t)n * sizeof *w);
    } else {
        adamw_random(random, a, at, ADAMW_MASTER);
        adamw_round_bf16(half, w, random);
        memcpy(master, half, (size_t)n * sizeof *half);
    }
    adamw_store(a, false, m, at, n);
    adamw_store(a, true, v, at, n);
    float amax[2] = {adamw_amax(m, ADAMW_BLOCK), sqrtf(adamw_amax(v, ADAMW_BLOCK))};
    for (int i = 0; i < 2; i++)
        running_max[i] = amax[i] > running_max[i] ? amax[i] : running_max[i];
}

static void adamw(const struct nbi_adamw_args *a, int64_t first, int64_t count,
                  float running_max[2])
{
    for (int64_t i = 0; i < count; i += ADAMW_BLOCK)
        adamw_block(a, first + i, count - i < ADAMW_BLOCK ? count - i : ADAMW_BLOCK, running_max);
}
