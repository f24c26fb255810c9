/* mma.cuh - tensor cores: products of small matrices by a warp. */
#pragma once

#include "backend/cuda/internal.cuh"

/* Two e4m3, the first in the low byte, as f16: exact. */
__device__ static inline uint32_t widen_e4m3(uint32_t pair)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

/* c[16, 8] += a[16, 16] b[16, 8], f16 or bf16 operands. Lane 4g + t has of c the rows g (c[0],
 * c[1]) and g + 8 (c[2], c[3]), columns 2t and 2t + 1; of a the same rows (a[0], a[1]), columns 2t
 * and 2t + 1, and 8 columns on (a[2], a[3]); of b the rows 2t, 2t + 1 (b0) and 8 on (b1), column
 * g. */
template <bool BF>
__device__ static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (BF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* From an address in shared memory. */
__device__ static inline void load_shared(uint32_t w[4], uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Four matrices of 8 x 8; lane l gives the row l % 8 of matrix l / 8. */
__device__ static inline void load_matrices(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Over the four lanes that share rows of c. */
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
