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

/* L2 cache policy (createpolicy.fractional.L2::evict_first) for data that is read once, such as
 * weights: it must not evict what CTAs exchange through L2. */
#define L2_EVICT_FIRST 0x12F0000000000000ull

/* ---- mbarriers ---- */

__device__ static inline void mbarrier_init(uint32_t bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ static inline void mbarrier_inval(uint32_t bar)
{
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ static inline void mbarrier_arrive(uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .b64 state;\n"
                 "mbarrier.arrive.shared.b64 state, [%0];\n"
                 "}" ::"r"(bar)
                 : "memory");
}

/* Whether the phase of that parity has completed. */
__device__ static inline bool mbarrier_try_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
#if HAS_BULK_COPY
                 "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
                 "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done;
}

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
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n"
                 "}" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
#endif
}

__device__ static inline void copy_async(uint32_t to, const void *from, int bytes, uint32_t bar)
{
#if HAS_BULK_COPY
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i),
                     "l"((const uint8_t *)from + i)
                     : "memory");
#endif
}

/* The same with L2_EVICT_FIRST. */
__device__ static inline void copy_async_evict_first(uint32_t to, const void *from, int bytes,
                                                     uint32_t bar)
{
#if HAS_BULK_COPY
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(L2_EVICT_FIRST)
                 : "memory");
#else
    copy_async(to, from, bytes, bar);
#endif
}

/* After the last copy of a phase. */
__device__ static inline void copy_arrive(uint32_t bar)
{
#if !HAS_BULK_COPY
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

/* A whole phase: two copies of the same size, to consecutive places. */
__device__ static inline void copy_async_two_evict_first(uint32_t to, const void *first,
                                                         const void *second, int bytes,
                                                         uint32_t bar)
{
#if HAS_BULK_COPY
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared.b64 _, [%5], %6;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %4, [%5], %7;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%2], [%3], %4, [%5], %7;\n"
                 "}" ::"r"(to),
                 "l"(first), "r"(to + bytes), "l"(second), "r"(bytes), "r"(bar), "r"(2 * bytes),
                 "l"(L2_EVICT_FIRST)
                 : "memory");
#else
    copy_async_evict_first(to, first, bytes, bar);
    copy_async_evict_first(to + bytes, second, bytes, bar);
    copy_arrive(bar);
#endif
}
