/* attention.cuh - what the attention kernels share: arguments, split sizes, pages, packing.
 *
 * Scores are in units of log2, so that softmax takes exp2 only. KV rows outside a query's range may
 * hold NaN and must not enter a product, not even times 0. */
#pragma once

#include "backend/cuda/launch.cuh"
#include "backend/cuda/mma.cuh"

#define LOG2E 1.4426950408889634f
#define LN2   0.6931471805599453f

/* Online softmax rescales only when the maximum has grown by more than this (in log2). Until then
 * weights are up to 2^8 times larger than with the true maximum, which costs no precision. */
#define RESCALE_LOG2 8.0f

/* Batch-invariant calls cut a row by its own length: splits of at least this many keys, and at most
 * this many splits. */
#define INVARIANT_SPLIT_KEYS 256

struct attention_args {
    float *y, *lse; /* lse: may be NULL */
    const float *q; /* in kernels with BF16 the elements of q and y are bf16 */
    const uint8_t *k, *v;
    const int32_t *first, *last;
    const int32_t *pages, *tables; /* pages: NULL if keys are contiguous */
    /* attention.cu: values [N, NH, splits, D], then maximum and sum [N, NH, splits, 2] */
    float *partials;
    int32_t *arrived; /* attention_decode.cu: finished splits [N, NKV]; zeros between calls */
    int N, NH, NKV, D, group, splits; /* group: query heads that share a key head */
    bool batch_invariant;
    float scale; /* log2(e) / sqrt(D) */
};

/* Keys of a split in a batch-invariant call: whole pages, from the row's length alone. */
__device__ static inline int invariant_split_keys(int count)
{
    const int all = NBI_INVARIANT_SPLITS * NBI_PAGE;
    return max(INVARIANT_SPLIT_KEYS, ((count - 1) / all + 1) * NBI_PAGE);
}

/* What leads from a row of a sequence, and from others of its page, to the row of the KV cache. */
__device__ static inline int page_offset(const int32_t *pages, int row)
{
    return pages ? (__ldg(pages + row / NBI_PAGE) - row / NBI_PAGE) * NBI_PAGE : 0;
}

/* ---- operands ---- */

/* To the range of f16, since infinity would become NaN in a product. NaN stays NaN. */
__device__ static inline float clamp_f16(float x)
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

/* The rounding error of pack<BF>(lo, hi), packed. */
template <bool BF>
__device__ static inline uint32_t pack_residual(uint32_t packed, float lo, float hi)
{
    float2 f =
        BF ? __bfloat1622float2(*(__nv_bfloat162 *)&packed) : __half22float2(*(__half2 *)&packed);
    return pack<BF>(lo - f.x, hi - f.y);
}

/* Offset of a 16-byte chunk in rows of D 16-bit numbers. The xor swizzle puts the same chunk of
 * eight rows into different banks. */
template <int D> __device__ static inline uint32_t swizzled_at(int row, int chunk)
{
    return (uint32_t)(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

/* ---- kernels on tensor cores ---- */

#define DECODE_GROUP_MAX 8

/* attention_decode.cu: N up to NBI_DECODE_ATTENTION_ROWS, D 64 or 128, 16-bit or e4m3 cache, group
 * up to DECODE_GROUP_MAX. If rope.N > 0 it applies rope as well; each row's own key is then the
 * last that it attends to. Unless `packed` is NULL, y may go to s->x_f16 as well, packed as x of a
 * product: *packed says so. */
enum nb_status nbi_cuda_attention_decode(struct nbi_stream *s, const struct nbi_op_attention *a,
                                         const struct attention_args &k,
                                         const struct rope_args &rope, bool *packed);

/* attention_prefill.cu: D 64 or 128. With bf16 also the keys and values are, without pages. */
enum nb_status nbi_cuda_attention_prefill(struct nbi_stream *s, const struct nbi_op_attention *a,
                                          const struct attention_args &k);
