/* mma.cuh - conversions and reductions that go with the fragments of mma.sync (ptx.cuh). */
#pragma once

#include "backend/cuda/internal.cuh"

/* Two e4m3, the first in the low byte, to f16. Exact. */
__device__ static inline uint32_t e4m3_to_f16(uint32_t pair)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

/* Over the four lanes that hold the same rows of c. */
__device__ static inline float quad_max(float v)
{
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, 2));
}

__device__ static inline float quad_sum(float v)
{
    v += __shfl_xor_sync(0xFFFFFFFF, v, 1);
    return v + __shfl_xor_sync(0xFFFFFFFF, v, 2);
}
