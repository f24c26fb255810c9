/* roofline.cu - the measured limits of this device: memory bandwidth and matrix products.
 *
 * `bench` compares its results with them. */
#include <math.h>
#include <stdlib.h>

#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/launch.cuh"

extern "C" {
#include "tensor/nvfp4.h"
}

#define BYTES ((int64_t)2 << 30) /* read for the bandwidth */
#ifndef NB_ROOFLINE_SIZE         /* smaller where kernels run on the host */
#define NB_ROOFLINE_SIZE 8192
#endif
#define SIZE   NB_ROOFLINE_SIZE /* rows and columns of the matrices */
#define ROUNDS 11               /* the median counts */

__global__ static void k_read(uint32_t *out, const uint4 *p, int64_t n)
{
    uint32_t sum = 0;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = i + j * step < n ? __ldcs(p + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x9E3779B9) /* never; keeps the compiler from dropping the loads */
        *out = sum;
}

/* Random bf16 between 0.5 and 1 of either sign; the same bytes serve as E2M1 codes. With zeros the
 * device would draw less power and run at higher clocks. */
__global__ static void k_fill(uint16_t *out, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t h = (uint32_t)i * 2654435761u;
    if (i < n)
        out[i] = (uint16_t)(0x3F00 | (h >> 16 & 0x8000) | (h >> 9 & 0x7F));
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median time of what `start` queues, in milliseconds; 0: it failed. */
template <typename F> static float time_rounds(cudaStream_t queue, F start)
{
    cudaEvent_t from = NULL, to = NULL;
    float ms[ROUNDS] = {0};
    bool ok = cudaEventCreate(&from) == cudaSuccess && cudaEventCreate(&to) == cudaSuccess;
    for (int r = 0; r < ROUNDS && ok; r++) {
        cudaEventRecord(from, queue);
        ok = start();
        cudaEventRecord(to, queue);
        ok = ok && cudaEventSynchronize(to) == cudaSuccess &&
             cudaEventElapsedTime(&ms[r], from, to) == cudaSuccess;
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    qsort(ms, ROUNDS, sizeof *ms, by_value);
    cudaGetLastError();
    return ok ? ms[ROUNDS / 2] : 0;
}

double nbi_cuda_roofline_bandwidth(struct nbi_backend *be)
{
    struct cuda *cuda = (struct cuda *)be;
    uint8_t *block = NULL;
    float ms = 0;
    cudaSetDevice(cuda->index);
    if (cudaMalloc(&block, BYTES) == cudaSuccess && cudaMemset(block, 1, BYTES) == cudaSuccess)
        ms = time_rounds(cuda->queue, [&] {
            CU_LAUNCH(k_read, (unsigned)cuda->sms * 8, 256, 0, cuda->queue, (uint32_t *)block,
                      (const uint4 *)block, BYTES / 16);
            return cudaGetLastError() == cudaSuccess;
        });
    cudaFree(block);
    cudaGetLastError();
    return ms > 0 ? (double)BYTES / (double)ms * 1e3 : (double)NAN;
}

/* Prepares a product in `block`: bf16, or E2M1 with block scales of 1. */
static enum nb_status prepare_gemm(uint8_t *block, bool fp4, struct cublaslt_gemm *g,
                                   struct cublaslt_fp4 *f)
{
    const int64_t n = (int64_t)SIZE * SIZE, scales = nbi_nvfp4_swizzled_bytes(SIZE, SIZE);
    const float by[2] = {1, 0};
    uint8_t *more = block + n * 7; /* after y and the operands, which are smaller in FP4 */
    *g = (struct cublaslt_gemm){};
    g->d = block;
    g->b = block + n * 4;
    g->a = block + n * 6;
    g->M = g->N = g->K = g->lda = g->ldb = g->ldd = SIZE;
    g->scale = 1;
    g->b_transposed = true;
    CU_LAUNCH(k_fill, (unsigned)(2 * n / 256), 256, 0, 0, (uint16_t *)(block + n * 4), 2 * n);
    CU_LAUNCHED();
    if (fp4) {
        *f = (struct cublaslt_fp4){more, more, (float *)(more + scales),
                                   (float *)(more + scales) + 1};
        g->fp4 = f;
        CU_TRY(cudaMemset(more, 0x38, (size_t)scales));
        CU_TRY(cudaMemcpy(more + scales, by, sizeof by, cudaMemcpyHostToDevice));
    }
    CU_TRY(cudaDeviceSynchronize());
    return NB_OK;
}

/* Multiplications per second. An FP4 product takes one pass per term of x; all of them count as
 * one product. */
static double measure_gemm(struct nbi_backend *be, bool f32)
{
    const int64_t n = (int64_t)SIZE * SIZE;
    struct nbi_stream_limits limits = {};
    struct nbi_stream *s = NULL;
    struct cublaslt_gemm g;
    struct cublaslt_fp4 f;
    uint8_t *block = NULL;
    float ms = 0;
    limits.N = NBI_DECODE_LINEAR_ROWS + 1;
    limits.K = limits.D = limits.heads = 1;
    if (be->stream_new(be, &limits, &s) != NB_OK)
        return (double)NAN;
    const bool fp4 =
        nbi_backend_has(be, NBI_CAP_FP4) && !f32; /* decided when the stream was opened */
    if (cudaMalloc(&block, (size_t)(n * 8)) == cudaSuccess &&
        prepare_gemm(block, fp4, &g, &f) == NB_OK)
        ms = time_rounds(s->queue, [&] { return nbi_cuda_cublaslt_gemm(s, &g) == NB_OK; });
    cudaFree(block);
    cudaGetLastError();
    be->stream_free(s);
    ms *= fp4 ? NBI_FP4_TERMS : 1;
    return ms > 0 ? (double)SIZE * (double)n / (double)ms * 1e3 : (double)NAN;
}

double nbi_cuda_roofline(struct nbi_backend *be)
{
    return measure_gemm(be, false);
}

double nbi_cuda_roofline_f32(struct nbi_backend *be)
{
    return measure_gemm(be, true);
}
