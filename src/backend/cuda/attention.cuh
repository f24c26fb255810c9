/* attention.cuh - what the kernels of attention share: their arguments, pages, tensor cores.
 *
 * Scores are kept in units of log2, so that exp2 is all that is needed. Rows of the store outside
 * a row's range may hold NaN and must not reach a product, not even times 0. */
#pragma once

#include "backend/cuda/mma.cuh"

#define LOG2E 1.4426950408889634f
#define LN2   0.6931471805599453f

/* The exponent's base follows the maximum only once it lags by this much: until then values are at
 * most 2^LAG times too large, which changes no digit, and nothing need be scaled again. */
#define LAG 8.0f

#define SPLITS_MAX 256 /* pieces of a row */

/* Pieces of a row in a steady call: of so many keys at least, and so many of them at most. */
#define STEADY_KEYS   256
#define STEADY_SPLITS 32

struct attend {
    float *y, *lse; /* lse may be null */
    const float *q;
    const uint8_t *k, *v;
    const int32_t *first, *last;
    const int32_t *pages, *tables; /* pages may be null */
    float *parts;  /* plain: values [N, NH, splits, D], then maximum and sum [N, NH, splits, 2] */
    int32_t *left; /* few: parts that were left so far, [N, NKV]; zeros between calls */
    int N, NH, NKV, D, group, splits;
    bool batch_invariant;
    float scale; /* log2(e) / sqrt(D) */
};

/* Keys of a piece in a steady call, whole pages, by those of the row alone. */
__device__ static inline int steady_piece(int count)
{
    const int all = STEADY_SPLITS * NBI_PAGE;
    return max(STEADY_KEYS, ((count - 1) / all + 1) * NBI_PAGE);
}

/* What to add to a row of a sequence, and to others of its page, for that of the store. */
__device__ static inline int page_shift(const int32_t *pages, int row)
{
    return pages ? (__ldg(pages + row / NBI_PAGE) - row / NBI_PAGE) * NBI_PAGE : 0;
}

/* ---- tensor cores ---- */

__device__ static inline float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Infinity in f16 would become NaN in a product; NaN stays what it is. */
__device__ static inline float fit_f16(float x)
{
    return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
}

/* Two floats as bf16 or f16, the first in the low half. */
template <bool BF> __device__ static inline uint32_t pack(float lo, float hi)
{
    if (BF) {
        __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&b;
    }
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&h;
}

/* What rounding to pack<BF> leaves over. */
template <bool BF> __device__ static inline uint32_t pack_rest(uint32_t packed, float lo, float hi)
{
    float2 f =
        BF ? __bfloat1622float2(*(__nv_bfloat162 *)&packed) : __half22float2(*(__half2 *)&packed);
    return pack<BF>(lo - f.x, hi - f.y);
}

/* attention_decode.cu: N up to NBI_DECODE_ATTENTION_ROWS, D 64 or 128, not of f32, NH / NKV up to
 * FEW_GROUP. With rope of N rows that is done too: each row's own key is its last one. */
#define FEW_GROUP 8

enum nb_status nbi_cuda_attend_few(struct nbi_stream *s, const struct nbi_op_attention *a,
                                   const struct attend &k, const struct rope_args &rope);

/* attention_prefill.cu: D is 64 or 128. */
enum nb_status nbi_cuda_attend_tiles(struct nbi_stream *s, const struct nbi_op_attention *a,
                                     const struct attend &k);
