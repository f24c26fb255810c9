/* nvfp4_tile.cuh - numbers on the device, and how NVFP4 matrices lie there. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

extern "C" {
#include "tensor/dtype.h"
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- numbers ---- */

/* A float of one of the types of weights and caches. */
__device__ static inline float load_f32(const void *p, int64_t i, enum nbi_dtype dtype)
{
    switch (dtype) {
    case NBI_F32:
        return ((const float *)p)[i];
    case NBI_F16:
        return __half2float(((const __half *)p)[i]);
    case NBI_BF16:
        return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    default: /* NBI_E4M3 */
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const uint8_t *)p)[i], __NV_E4M3)));
    }
}

/* COUNT of them, `step` apart from i on, those before `end`; 0 for others. All are asked for before
 * the first one is needed. */
template <typename T, int COUNT>
__device__ static inline void load_raw(T out[COUNT], const void *p, int i, int step, int end)
{
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        out[j] = i + j * step < end ? ((const T *)p)[i + j * step] : T{};
}

template <int COUNT>
__device__ static inline void load_f32_n(float out[COUNT], const void *p, int i, int step, int end,
                                         enum nbi_dtype dtype)
{
    if (dtype == NBI_F32) {
        load_raw<float, COUNT>(out, p, i, step, end);
        return;
    }
    uint16_t raw[COUNT];
    load_raw<uint16_t, COUNT>(raw, p, i, step, end);
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        out[j] = dtype == NBI_F16 ? __half2float(__ushort_as_half(raw[j]))
                                  : __uint_as_float((uint32_t)raw[j] << 16);
}

/* Rounded to the nearest even; E4M3 saturates and keeps NaN. */
__device__ static inline void store_f32(void *p, int64_t i, enum nbi_dtype dtype, float v)
{
    switch (dtype) {
    case NBI_F32:
        ((float *)p)[i] = v;
        break;
    case NBI_F16:
        ((__half *)p)[i] = __float2half_rn(v);
        break;
    case NBI_BF16:
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
        break;
    default:
        ((uint8_t *)p)[i] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
    }
}

__device__ static inline float warp_sum(float v)
{
    for (int o = 16; o > 0; o >>= 1)
        v += __shfl_xor_sync(0xFFFFFFFF, v, o);
    return v;
}

__device__ static inline float warp_max(float v)
{
    for (int o = 16; o > 0; o >>= 1)
        v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, o));
    return v;
}

#define NBI_NORM_THREADS 512 /* for rmsnorm_rstd to be the same everywhere */

/* 1 / sqrt(mean(x^2) + eps) of a row, by a CTA. */
__device__ static inline float rmsnorm_rstd(const float *row, int64_t C, float eps)
{
    __shared__ float part[32];
    float sum = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        sum += row[c] * row[c];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
    return 1.0f / sqrtf(sum / (float)C + eps);
}

__device__ static inline float swiglu(float gate, float up)
{
    return gate / (1 + expf(-gate)) * up;
}

__device__ static inline float4 swiglu4(float4 g, float4 u)
{
    return make_float4(swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w));
}

/* An address in shared memory, as instructions of PTX take it. */
__device__ static inline uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Hides where x comes from: what is quickly computed from it is then computed again, instead of
 * kept in registers that are needed otherwise. */
__device__ static inline int opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* ---- tiles ---- */

/* How NVFP4 matrices are kept: tiles of 16 rows and 128 columns in row-major order, padded with
 * zeros. Lane l = 4 g + t of a warp has rows g and g + 8, and of each the blocks 2t and 2t + 1: its
 * 64 codes are 16 bytes at 16 l and 16 bytes at 512 + 16 l, its scales four bytes at 1024 + 4 l.
 *
 * Word w of those codes (0 to 7) is half h = w / 4 of the four quarters q = w % 4: quarter 0 is row
 * g of block 2t, 1 is row g + 8 of it, 2 and 3 the same of block 2t + 1. Half h has elements 8h to
 * 8h + 7 of the block, as four pairs; e2m1_pair takes one out as two f16. Those four quarters are
 * the operand A of mma.m16n8k16 with pair p of all eight blocks as its sixteen columns.
 *
 * Scales: bytes 0 to 3 are quarters 0 to 3. */
#define CUDA_TILE_ROWS  16
#define CUDA_TILE_COLS  128
#define CUDA_TILE_BYTES 1152

struct tile_shape {
    int rows, cols; /* in tiles */
};

static inline struct tile_shape tiles_of(int64_t rows, int64_t cols)
{
    return {(int)ceil_div(rows, CUDA_TILE_ROWS), (int)ceil_div(cols, CUDA_TILE_COLS)};
}

/* Where the bits of pair p (0 to 3) lie in each 16-bit half of a word: sign, and the three others
 * from the top. As an f16 the three belong at bits 11, 10 and 9, which makes it the value times
 * 2^-14. Sign and value of pairs 2 and 3 have different ways to go: a product is both shifts at
 * once, and what else comes of it stays below bit 9, or is between 12 and 14. */
__device__ static inline uint32_t e2m1_pair(uint32_t word, int p)
{
    switch (p) {
    case 0: /* sign 15, value 11 to 9 */
        return word & 0x8E008E00;
    case 1: /* sign 12, value 8 to 6 */
        return (word << 3) & 0x8E008E00;
    case 2: /* sign 14, value 5 to 3 */
        return (word & 0x40384038) * ((1 << 1) + (1 << 6)) & 0x8E008E00;
    default: /* sign 13, value 2 to 0 */
        return (word & 0x20072007) * ((1 << 2) + (1 << 9)) & 0x8E008E00;
    }
}

/* The eight codes of a word as they are stored: in order, the first in the lowest four bits. */
__device__ static inline uint32_t stored_codes(uint32_t word)
{
    uint32_t codes = 0;
    for (int p = 0; p < 4; p++) {
        uint32_t pair = e2m1_pair(word, p);
        pair = (pair >> 12 & 0x00080008) | (pair >> 9 & 0x00070007);
        codes |= ((pair | pair >> 12) & 0xFF) << 8 * p;
    }
    return codes;
}
