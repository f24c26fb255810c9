/* wgmma.cuh - asynchronous tensor core instructions of Hopper: matrix products of a warpgroup.
 *
 * c[64, 8 NT] += a[64, 16] b[16, 8 NT] with f16 operands. Fragments of a and c are in registers, 16
 * rows a warp, laid out as for mma (mma.cuh); b is in shared memory. From wgmma_fence until a
 * wgmma_wait that covers them the instructions own the registers of a and c. Code for anything but
 * sm_90a (HAVE_WGMMA is undefined there) compiles to nothing. */
#pragma once

#include "backend/cuda/internal.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAVE_WGMMA           1
#define WGMMA_ASM(text, ...) asm volatile(text __VA_ARGS__)
#else
#define WGMMA_ASM(text, ...)
#endif

/* Keep the compiler from moving writes to these registers across this point. */
__device__ static inline void wgmma_fence_operand(uint32_t w[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("" : "+r"(w[i][0]), "+r"(w[i][1]), "+r"(w[i][2]), "+r"(w[i][3])::"memory");
}

template <int NT> __device__ static inline void wgmma_fence_operand(float c[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

/* Before the first of a group. */
__device__ static inline void wgmma_fence(void)
{
    WGMMA_ASM("wgmma.fence.sync.aligned;", ::: "memory");
}

__device__ static inline void wgmma_commit(void)
{
    WGMMA_ASM("wgmma.commit_group.sync.aligned;", ::: "memory");
}

/* Waits until at most PENDING committed groups are still running. */
template <int PENDING> __device__ static inline void wgmma_wait(void)
{
    WGMMA_ASM("wgmma.wait_group.sync.aligned %0;", ::"n"(PENDING) : "memory");
}

/* Low word of the descriptor of b without swizzle: core matrices of 8 rows (columns of c) with 8
 * values of K each, 128 bytes; `k_bytes` leads to the core matrix of the other 8 values. Addresses
 * count in 16 bytes, so adding 1 advances b by 16 bytes. */
__device__ static inline uint32_t wgmma_descriptor(uint32_t at, uint32_t k_bytes)
{
    return k_bytes >> 4 << 16 | at >> 4;
}

/* b: the low word of its descriptor; next: its high word, from 8 columns of c to the next in units
 * of 16 bytes. */
template <int NT>
__device__ static inline void wgmma_f16(float c[NT][4], const uint32_t a[4], uint32_t b,
                                        uint32_t next);

template <>
__device__ inline void wgmma_f16<1>(float c[1][4], const uint32_t a[4], uint32_t b, uint32_t next)
{
    WGMMA_ASM("{\n"
              ".reg .b64 b;\n"
              "mov.b64 b, {%8, %9};\n"
              "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
              "{%0,%1,%2,%3}, "
              "{%4,%5,%6,%7}, b, 1, 1, 1, 0;\n"
              "}",
              : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}

template <>
__device__ inline void wgmma_f16<2>(float c[2][4], const uint32_t a[4], uint32_t b, uint32_t next)
{
    WGMMA_ASM("{\n"
              ".reg .b64 b;\n"
              "mov.b64 b, {%12, %13};\n"
              "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
              "{%0,%1,%2,%3,%4,%5,%6,%7}, "
              "{%8,%9,%10,%11}, b, 1, 1, 1, 0;\n"
              "}",
              : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}

template <>
__device__ inline void wgmma_f16<4>(float c[4][4], const uint32_t a[4], uint32_t b, uint32_t next)
{
    WGMMA_ASM("{\n"
              ".reg .b64 b;\n"
              "mov.b64 b, {%20, %21};\n"
              "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
              "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
              "{%16,%17,%18,%19}, b, 1, 1, 1, 0;\n"
              "}",
              : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                "+f"(c[3][3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}

template <>
__device__ inline void wgmma_f16<8>(float c[8][4], const uint32_t a[4], uint32_t b, uint32_t next)
{
    WGMMA_ASM("{\n"
              ".reg .b64 b;\n"
              "mov.b64 b, {%36, %37};\n"
              "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
              "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
              "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
              "{%32,%33,%34,%35}, b, 1, 1, 1, 0;\n"
              "}",
              : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
                "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),
                "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
                "+f"(c[7][2]), "+f"(c[7][3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}
