/* mma.cuh - mma.sync, and the loads and reductions that go with its fragments. */
#pragma once

#include "backend/cuda/internal.cuh"

/* Two e4m3, the first in the low byte, to f16. Exact. */
__device__ static inline uint32_t e4m3_to_f16(uint32_t pair)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

/* c[16, 8] += a[16, 16] b[16, 8] with f16 operands, or bf16 if BF. Fragments of lane 4g + t, each
 * register of a and b two neighbours in K:
 *
 *   a[0] row g,     k 2t      a[2] row g,     k 2t + 8      b0 column g, k 2t
 *   a[1] row g + 8, k 2t      a[3] row g + 8, k 2t + 8      b1 column g, k 2t + 8
 *   c[0], c[1] row g, columns 2t and 2t + 1      c[2], c[3] row g + 8, the same columns */
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

__device__ static inline void load_shared(uint32_t w[4], uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* ldmatrix: four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8. */
__device__ static inline void load_matrices(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
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
