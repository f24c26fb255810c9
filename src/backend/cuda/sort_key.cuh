/* sort_key.cuh - logits as 64-bit integers whose order is that of the top-k: value, then lower id.
 *
 *   bits 63-32  the value, with its bits flipped so that unsigned order is the order of floats
 *   bits 31-0   the complement of the id
 *
 * A maximum over keys is an argmax that does not depend on the order of comparisons. 0 is no key.
 */
#pragma once

#include "backend/cuda/internal.cuh"

/* Above all other keys, so that one NaN or infinity shows in the maximum. */
#define NONFINITE_KEY (~(uint64_t)0)

__device__ static inline uint64_t sort_key_of(float v, uint32_t id)
{
    uint32_t b = __float_as_uint(v + 0.0f); /* -0 becomes +0 */
    b ^= b >> 31 ? 0xFFFFFFFFu : 0x80000000u;
    return isfinite(v) ? (uint64_t)b << 32 | (0xFFFFFFFFu - id) : NONFINITE_KEY;
}

__device__ static inline float value_of(uint64_t key)
{
    uint32_t b = (uint32_t)(key >> 32);
    return __uint_as_float(b >> 31 ? b ^ 0x80000000u : ~b);
}

__device__ static inline int32_t id_of(uint64_t key)
{
    return (int32_t)(0xFFFFFFFFu - (uint32_t)key);
}

/* The maximum of a warp, in all its lanes. */
__device__ static inline uint64_t warp_max_key(uint64_t key)
{
    for (int o = 16; o > 0; o >>= 1) {
        uint64_t other = __shfl_xor_sync(0xFFFFFFFF, key, o);
        key = other > key ? other : key;
    }
    return key;
}

/* The maximum of a CTA, in all its threads. */
__device__ static inline uint64_t cta_max_key(uint64_t key)
{
    __shared__ uint64_t part[32];
    key = warp_max_key(key);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = key;
    __syncthreads();
    return warp_max_key(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
}
