/* wgmma.cuh - tensor cores of Hopper: products of a team of four warps, which go on by themselves.
 *
 * c[64, 8 NT] += a[64, 16] b[16, 8 NT]: of a and c each warp has 16 rows in its registers as in an
 * mma (mma.cuh); b is in shared memory. Between team_products_begin and a wait for them registers
 * of a and c are the products' own. Without Hopper's own instructions (WGMMA_HERE) nothing of this
 * does anything. */
#pragma once

#include "backend/cuda/internal.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_HERE       1
#define WGMMA(text, ...) asm volatile(text __VA_ARGS__)
#else
#define WGMMA(text, ...)
#endif

/* Registers have their values here, and not later. */
__device__ static inline void keep(uint32_t w[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("" : "+r"(w[i][0]), "+r"(w[i][1]), "+r"(w[i][2]), "+r"(w[i][3])::"memory");
}

template <int NT> __device__ static inline void keep(float c[NT][4])
{
#pragma unroll
    for (int i = 0; i < NT; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

__device__ static inline void team_products_begin(void)
{
    WGMMA("wgmma.fence.sync.aligned;", ::: "memory");
}

__device__ static inline void team_products_end(void)
{
    WGMMA("wgmma.commit_group.sync.aligned;", ::: "memory");
}

/* Until at most LEFT of what ended is still under way. */
template <int LEFT> __device__ static inline void team_products_wait(void)
{
    WGMMA("wgmma.wait_group.sync.aligned %0;", ::"n"(LEFT) : "memory");
}

/* Of b: matrices of 8 rows (of c's columns) with 8 of the 16 each, 128 bytes; the others of the 16
 * are `other` bytes on. 16 bytes on it is one more. */
__device__ static inline uint32_t team_operand(uint32_t at, uint32_t other)
{
    return other >> 4 << 16 | at >> 4;
}

/* The next 8 rows of b are `next` times 16 bytes on. */
template <int NT>
__device__ static inline void team_product(float c[NT][4], const uint32_t a[4], uint32_t b,
                                           uint32_t next);

template <>
__device__ inline void team_product<1>(float c[1][4], const uint32_t a[4], uint32_t b,
                                       uint32_t next)
{
    WGMMA("{\n"
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
__device__ inline void team_product<2>(float c[2][4], const uint32_t a[4], uint32_t b,
                                       uint32_t next)
{
    WGMMA("{\n"
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
__device__ inline void team_product<4>(float c[4][4], const uint32_t a[4], uint32_t b,
                                       uint32_t next)
{
    WGMMA("{\n"
          ".reg .b64 b;\n"
          "mov.b64 b, {%20, %21};\n"
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
          "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
          "{%16,%17,%18,%19}, b, 1, 1, 1, 0;\n"
          "}",
          : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
            "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
            "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}

template <>
__device__ inline void team_product<8>(float c[8][4], const uint32_t a[4], uint32_t b,
                                       uint32_t next)
{
    WGMMA("{\n"
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
