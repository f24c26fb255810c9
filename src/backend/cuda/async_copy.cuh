/* async_copy.cuh - asynchronous copies from global to shared memory that complete on an mbarrier.
 *
 * From compute capability 9.0 on these are bulk copies (cp.async.bulk): one elected lane announces
 * the bytes to the mbarrier and starts the copy. Before 9.0 each lane copies 16 bytes at a time
 * (cp.async) and arrives for itself. A phase of the mbarrier in either case:
 *
 *   mbarrier_init(bar, COPY_ARRIVALS)     once
 *   copy_expect(bar, bytes)               whole warp: total bytes of the phase
 *   copy_async(to, from, bytes, bar) ...  whole warp: any number of copies
 *   copy_arrive(bar)                      whole warp: all copies of the phase are issued
 *   mbarrier_wait(bar, parity)            whoever reads the data
 *
 * Addresses and sizes are multiples of 16. */
#pragma once

#include "backend/cuda/internal.cuh"

/* Arrivals that an mbarrier expects for one warp's copies. The host asks which of the two a kernel
 * was compiled for (nbi_cuda_ptx_version). */
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
#define HAS_BULK_COPY 1
#define COPY_ARRIVALS 1
#else
#define HAS_BULK_COPY 0
#define COPY_ARRIVALS 32
#endif

/* ---- mbarriers ---- */

/* All lanes of a warp wait for the phase. */
__device__ static inline void mbarrier_wait(uint32_t bar, uint32_t parity)
{
    while (!mbarrier_try_wait(bar, parity))
        ;
    __syncwarp();
}

/* ---- copies ---- */

/* Announces how many bytes the copies of this phase bring. */
__device__ static inline void copy_expect(uint32_t bar, int bytes)
{
#if HAS_BULK_COPY
    mbarrier_expect_elected(bar, bytes);
#endif
}

__device__ static inline void copy_async(uint32_t to, const void *from, int bytes, uint32_t bar)
{
#if HAS_BULK_COPY
    bulk_copy_elected(to, from, bytes, bar);
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
        cp_async_16(to + i, (const uint8_t *)from + i);
#endif
}

/* The same with L2_EVICT_FIRST. */
__device__ static inline void copy_async_evict_first(uint32_t to, const void *from, int bytes,
                                                     uint32_t bar)
{
#if HAS_BULK_COPY
    bulk_copy_evict_first_elected(to, from, bytes, bar);
#else
    copy_async(to, from, bytes, bar);
#endif
}

/* After the last copy of a phase. */
__device__ static inline void copy_arrive(uint32_t bar)
{
#if !HAS_BULK_COPY
    cp_async_mbarrier_arrive(bar);
#endif
}

/* A whole phase: two copies of the same size, to consecutive places. */
__device__ static inline void copy_async_two_evict_first(uint32_t to, const void *first,
                                                         const void *second, int bytes,
                                                         uint32_t bar)
{
#if HAS_BULK_COPY
    bulk_copy_two_elected(to, first, second, bytes, bar);
#else
    copy_async_evict_first(to, first, bytes, bar);
    copy_async_evict_first(to + bytes, second, bytes, bar);
    copy_arrive(bar);
#endif
}
