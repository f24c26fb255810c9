/* launch.cuh - how kernels are launched, and how they declare dynamic shared memory.
 *
 * Kernels also run on the host (tests/emulated/README.md), compiled as C++. Three rules make a
 * kernel run in both places:
 *
 *   CU_LAUNCH(kernel, grid, block, smem, stream, arguments...) or pdl_launch instead of <<<>>>;
 *   a template with commas stands in parentheses: CU_LAUNCH((k_name<128, true>), ...)
 *   CU_DYNAMIC_SMEM(name, alignment) instead of extern __shared__
 *   PTX only in ptx.cuh, where each instruction has a twin for the host
 *
 * Everything else is plain CUDA: __shared__, warp intrinsics, atomics, barriers. There, lanes of a
 * warp do not run in step, shared memory starts as NaN and copies complete as late as they may.
 *
 * Programmatic dependent launch (PDL) lets consecutive kernels overlap. Decode kernels take a few
 * microseconds each, so the gap between two of them counts. A kernel launched by pdl_launch becomes
 * resident as soon as all CTAs of its predecessor have called pdl_trigger and there is space on the
 * multiprocessors. Meanwhile it may fetch weights.
 *
 * Before pdl_wait returns it must not touch anything that an earlier kernel writes or reads: only
 * weights, and what was complete at the last upload, since no kernel starts before a copy ends. */
#pragma once

#include "backend/cuda/internal.cuh"

#ifndef NB_EMULATED /* otherwise tests/emulated/cuda_host.h defines them */
#define CU_LAUNCH(kernel, grid, block, smem, stream, ...)                                          \
    kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define CU_DYNAMIC_SMEM(name, alignment)                                                           \
    extern __shared__ __align__(alignment)                                                         \
    uint8_t name[]
#endif

/* The next kernel may start as soon as there is space for its CTAs. */
__device__ static inline void pdl_trigger(void)
{
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
}

/* Waits until all earlier kernels have ended and their writes are visible. */
__device__ static inline void pdl_wait(void)
{
#if __CUDA_ARCH__ >= 900
    wait_for_prerequisites();
#endif
}

/* A grid of CTAs, in clusters of `cluster` along x. */
struct launch_grid {
    dim3 grid;
    unsigned cluster;

    launch_grid(unsigned x) : grid(x), cluster(1)
    {
    }
    launch_grid(dim3 g, unsigned each = 1) : grid(g), cluster(each)
    {
    }
};

/* Launches a kernel with `smem` bytes of dynamic shared memory. Without PDL and clusters (kernels
 * compiled for less than 9.0) it is a plain launch. */
template <typename... P, typename... A>
static inline cudaError_t pdl_launch(struct nbi_stream *s, void (*kernel)(P...),
                                     const struct launch_grid &ctas, int threads, int smem,
                                     const A &...args)
{
    cudaLaunchAttribute attrs[3] = {};
    cudaLaunchConfig_t c = {};
    attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[0].val.programmaticStreamSerializationAllowed = 1;
    attrs[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attrs[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attrs[2].id = cudaLaunchAttributeClusterDimension;
    attrs[2].val.clusterDim = {ctas.cluster, 1, 1};
    c.gridDim = ctas.grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = (size_t)smem;
    c.stream = s->queue;
    c.attrs = attrs;
    c.numAttrs = s->cuda->ptx_version < 90 ? 0 : ctas.cluster > 1 ? 3 : 2;
    return cudaLaunchKernelEx(&c, kernel, P(args)...);
}
