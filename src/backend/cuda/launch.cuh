/* launch.cuh - programmatic dependent launch (PDL), which lets consecutive kernels overlap.
 *
 * Decode kernels take a few microseconds each, so the gap between two of them counts. A kernel
 * launched by pdl_launch becomes resident as soon as all CTAs of its predecessor have called
 * pdl_trigger and there is space on the multiprocessors. Meanwhile it may fetch weights.
 *
 * Before pdl_wait returns it must not touch anything that an earlier kernel writes or reads: only
 * weights, and what was complete at the last upload, since no kernel starts before a copy ends. */
#pragma once

#include "backend/cuda/internal.cuh"

/* The next kernel may start as soon as there is space for its CTAs. */
__device__ static inline void pdl_trigger(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until all earlier kernels have ended and their writes are visible. */
__device__ static inline void pdl_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
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
