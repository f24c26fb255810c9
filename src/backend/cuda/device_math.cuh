/* device_math.cuh - device code that most kernels share: conversions, reductions, norm, SwiGLU.
 *
 * Kernels that must agree to the last bit, such as a fused norm and the plain one, both use these
 * functions. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

extern "C" {
#include "tensor/dtype.h"
}

#include "backend/cuda/ptx.cuh"

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- conversions ---- */

/* Element i of an array of f32, f16, bf16 or E4M3. */
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

/* Elements i, i + step, ... (COUNT of them); 0 for those at or after `end`. Issues all loads before
 * the first value is used. */
template <typename T, int COUNT>
__device__ static inline void load_raw(T out[COUNT], const void *p, int i, int step, int end)
{
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        out[j] = i + j * step < end ? ((const T *)p)[i + j * step] : T{};
}

/* The same as f32, from f32, f16 or bf16. */
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

/* Rounds to nearest even; E4M3 saturates and keeps NaN. */
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

/* ---- warps ---- */

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

/* ---- operations on rows ---- */

/* Threads of a CTA that calls rmsnorm_rstd. The order of its sum, and so its bits, depend on it. */
#define NBI_NORM_THREADS 512

/* 1 / sqrt(mean(x^2) + eps) of a row, computed by a CTA. */
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

/* ---- addresses ---- */

/* An address in shared memory in the form that PTX instructions take. */
__device__ static inline uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
