/* wgmma.cuh - asynchronous tensor core instructions of Hopper: matrix products of a warpgroup.
 *
 * c[64, 8 NT] += a[64, 16] b[16, 8 NT] with f16 operands. Fragments of a and c are in registers, 16
 * rows a warp, laid out as for mma (mma.cuh); b is in shared memory. From wgmma_fence until a
 * wgmma_wait that covers them the instructions own the registers of a and c. Code for anything but
 * sm_90a (HAVE_WGMMA is undefined there) compiles to nothing. */
#pragma once

#include "backend/cuda/internal.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAVE_WGMMA 1
#endif

/* Keep the compiler from moving writes to these registers across this point. */
__device__ static inline void wgmma_fence_operand(uint32_t w[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        pin_registers(w[i]);
}

template <int NT> __device__ static inline void wgmma_fence_operand(float c[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT; i++)
        pin_registers(c[i]);
}

/* Low word of the descriptor of b without swizzle: core matrices of 8 rows (columns of c) with 8
 * values of K each, 128 bytes; `k_bytes` leads to the core matrix of the other 8 values. Addresses
 * count in 16 bytes, so adding 1 advances b by 16 bytes. */
__device__ static inline uint32_t wgmma_descriptor(uint32_t at, uint32_t k_bytes)
{
    return k_bytes >> 4 << 16 | at >> 4;
}
