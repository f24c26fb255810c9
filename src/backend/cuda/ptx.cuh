/* ptx.cuh - all inline PTX of the backend, one small function an instruction.
 *
 * Kernels also run on the host, where there is no GPU (tests/emulated/README.md): there each of
 * these functions has a twin in tests/emulated/ptx_host.h, which the build includes first. So a new
 * instruction takes a function here and one there, and no other file has asm. Addresses in shared
 * memory are what smem_addr (device_math.cuh) returns. Functions say "elected" where one lane of a
 * whole warp executes the instruction, and "whole warp" where all lanes must call them together. */
#pragma once

#ifndef NB_EMULATED

#include <cuda_runtime.h>
#include <stdint.h>

/* L2 cache policy (createpolicy.fractional.L2::evict_first) for data that is read once, such as
 * weights: it must not evict what CTAs exchange through L2. */
#define L2_EVICT_FIRST 0x12F0000000000000ull

/* ---- the compiler ---- */

/* Hides from the compiler where x comes from. It then recomputes values that are cheap to derive
 * from x where they are used, instead of keeping them in registers across a long loop. */
__device__ static inline int opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* Keep the compiler from moving writes to these registers across this point. */
__device__ static inline void pin_registers(uint32_t w[4])
{
    asm volatile("" : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])::"memory");
}

__device__ static inline void pin_registers(float c[4])
{
    asm volatile("" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])::"memory");
}

/* ---- approximate functions ---- */

__device__ static inline float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float rcp_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float rsqrt_approx(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- loads and stores ---- */

__device__ static inline void load_shared(uint32_t w[4], uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

__device__ static inline uint32_t load_shared_word(uint32_t from)
{
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}

__device__ static inline void store_shared(uint32_t to, const uint32_t w[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

/* The same loads, of data that the compiler does not see being written: it may move other accesses
 * to memory across them. */
__device__ static inline uint4 ld_shared_v4(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from));
    return v;
}

__device__ static inline float2 ld_shared_v2(uint32_t from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from));
    return v;
}

__device__ static inline uint32_t ld_shared(uint32_t from)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
}

__device__ static inline void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* Relaxed, at the scope of the GPU: between CTAs that run at the same time. */
__device__ static inline uint64_t load_relaxed(const void *from)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

__device__ static inline void load_relaxed_two(const unsigned long long *from,
                                               unsigned long long out[2])
{
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(out[0]), "=l"(out[1])
                 : "l"(from)
                 : "memory");
}

__device__ static inline void store_relaxed(uint32_t *to, uint32_t v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ static inline void store_relaxed(uint64_t *to, uint64_t v)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

__device__ static inline void add_relaxed_one(uint32_t *to)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

__device__ static inline void add_relaxed(unsigned long long *to, unsigned long long v)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

/* ---- matrices ---- */

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

/* ldmatrix: four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8. */
__device__ static inline void load_matrices(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* load_matrices, each matrix transposed. */
__device__ static inline void load_matrices_transposed(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* An 8 x 8 matrix of which each lane has two neighbours of a row. */
__device__ static inline uint32_t transpose_8x8(uint32_t matrix)
{
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

/* ---- cp.async: copies of each thread ---- */

__device__ static inline void cp_async_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Stores 16 zeros if not `real`; then `from` is not read. */
__device__ static inline void cp_async_16(uint32_t to, const void *from, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

__device__ static inline void cp_async_4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(from) : "memory");
}

/* What the thread has started since the last commit becomes a group. */
__device__ static inline void cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING groups of the thread are still running. */
template <int PENDING> __device__ static inline void cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ static inline void cp_async_wait_all(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

/* The thread arrives when all its copies so far have completed. */
__device__ static inline void cp_async_mbarrier_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

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
#if __CUDA_ARCH__ >= 900
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

/* ---- from compute capability 9.0 on: dependent launch ---- */

/* The next kernel may start as soon as there is space for its CTAs. */
__device__ static inline void launch_dependents(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Waits until all earlier kernels have ended and their writes are visible. */
__device__ static inline void wait_for_prerequisites(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- from 9.0 on: clusters ---- */

/* Makes initialized mbarriers visible to the cluster and to bulk copies. */
__device__ static inline void fence_mbarrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* The barrier of a cluster; what was written before it is not made visible. */
__device__ static inline void cluster_barrier_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* The address in CTA `rank` of the cluster. */
__device__ static inline uint32_t map_to_cta(uint32_t address, int rank)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

/* Stores into another CTA and adds its four bytes to an mbarrier there. */
__device__ static inline void store_async(uint32_t to, float v, uint32_t bar)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
                 "[%0], %1, [%2];" ::"r"(to),
                 "f"(v), "r"(bar)
                 : "memory");
}

/* ---- from 9.0 on: bulk copies ---- */

/* Arrives and announces bytes of the phase. */
__device__ static inline void mbarrier_expect(uint32_t bar, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ static inline void mbarrier_expect_elected(uint32_t bar, int bytes)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n"
                 "}" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}

__device__ static inline void bulk_copy_elected(uint32_t to, const void *from, int bytes,
                                                uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

/* The same with L2_EVICT_FIRST. */
__device__ static inline void bulk_copy_evict_first_elected(uint32_t to, const void *from,
                                                            int bytes, uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(L2_EVICT_FIRST)
                 : "memory");
}

/* Two copies of the same size to consecutive places, with L2_EVICT_FIRST. Announces them, too. */
__device__ static inline void bulk_copy_two_elected(uint32_t to, const void *first,
                                                    const void *second, int bytes, uint32_t bar)
{
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
}

/* The same where the size is known to the compiler. */
template <int BYTES>
__device__ static inline void bulk_copy_two_elected(uint32_t to, const void *first,
                                                    const void *second, uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %5;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %4, [%3], %6;\n"
                 "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0 + %4], [%2], %4, [%3], %6;\n"
                 "}" ::"r"(to),
                 "l"(first), "l"(second), "r"(bar), "n"(BYTES), "n"(2 * BYTES), "l"(L2_EVICT_FIRST)
                 : "memory");
}

/* A box of a two-dimensional tensor; x and y are its first column and row. A pointer to void in
 * place of MAP would change how the compiler computes the address of the map. */
template <typename MAP>
__device__ static inline void tensor_copy_elected(uint32_t to, const MAP *map, int x, int y,
                                                  uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xFFFFFFFF;\n"
                 "@one cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n"
                 "}" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar)
                 : "memory");
}

/* Makes a tensor map that the host has written visible to tensor copies. */
__device__ static inline void fence_tensor_map(const void *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/* Orders ordinary accesses to shared memory before later bulk copies into it. */
__device__ static inline void fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- sm_90a: wgmma, see wgmma.cuh. Other code compiles to nothing. ---- */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_ASM(text, ...) asm volatile(text __VA_ARGS__)
#else
#define WGMMA_ASM(text, ...)
#endif

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

/* c[64, 8 NT] += a[64, 16] b[16, 8 NT] in f16. b: the low word of its descriptor; next: its high
 * word, from 8 columns of c to the next in units of 16 bytes. */
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

#endif
