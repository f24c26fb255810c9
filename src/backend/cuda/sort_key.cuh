/* sort_key.cuh - logits as numbers that sort: value and id in one. */
#pragma once

#include "backend/cuda/internal.cuh"

#define NONFINITE_KEY (~(uint64_t)0)

/* Larger for larger values, and for lower ids among equals. What is not finite is above all. */
__device__ static inline uint64_t key_of(float v, uint32_t id)
{
    uint32_t b = __float_as_uint(v + 0.0f); /* there is one zero */
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

/* The largest of a warp's, for all its lanes. */
__device__ static inline uint64_t warp_best(uint64_t key)
{
    for (int o = 16; o > 0; o >>= 1) {
        uint64_t other = __shfl_xor_sync(0xFFFFFFFF, key, o);
        key = other > key ? other : key;
    }
    return key;
}

/* The largest of a CTA's, for all its threads. */
__device__ static inline uint64_t block_best(uint64_t key)
{
    __shared__ uint64_t part[32];
    key = warp_best(key);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = key;
    __syncthreads();
    return warp_best(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
}
