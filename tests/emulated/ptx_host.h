/* ptx_host.h - the functions of src/backend/cuda/ptx.cuh by their meaning. */
#pragma once

/* ---- the compiler, approximate functions ---- */

static inline int opaque(int x)
{
    return x;
}

template <typename T> static inline void pin_registers(T *)
{
}

static inline float exp2_approx(float x)
{
    return exp2f(x);
}

static inline float rcp_approx(float x)
{
    return 1 / x;
}

static inline float rsqrt_approx(float x)
{
    return rsqrtf(x);
}

/* ---- loads and stores ---- */

template <typename T> static inline T nb_load_shared(uint32_t from)
{
    T v;
    memcpy(&v, emulated::shared_pointer(from), sizeof v);
    return v;
}

static inline void load_shared(uint32_t w[4], uint32_t from)
{
    memcpy(w, emulated::shared_pointer(from), 16);
}

static inline uint32_t load_shared_word(uint32_t from)
{
    return nb_load_shared<uint32_t>(from);
}

static inline void store_shared(uint32_t to, const uint32_t w[4])
{
    memcpy(emulated::shared_pointer(to), w, 16);
}

static inline uint4 ld_shared_v4(uint32_t from)
{
    return nb_load_shared<uint4>(from);
}

static inline float2 ld_shared_v2(uint32_t from)
{
    return nb_load_shared<float2>(from);
}

static inline uint32_t ld_shared(uint32_t from)
{
    return nb_load_shared<uint32_t>(from);
}

static inline void prefetch_l2(const void *)
{
}

/* Relaxed loads stand in loops that wait, so other threads run first. */
static inline uint64_t load_relaxed(const void *from, NB_FILE_LINE)
{
    emulated::poll(NB_PLACE("load_relaxed"));
    return *(const uint64_t *)from;
}

static inline void load_relaxed_two(const unsigned long long *from, unsigned long long out[2],
                                    NB_FILE_LINE)
{
    emulated::poll(NB_PLACE("load_relaxed_two"));
    memcpy(out, from, 16);
}

template <typename T> static inline void store_relaxed(T *to, T v)
{
    *to = v;
    emulated::progress();
}

static inline void add_relaxed_one(uint32_t *to)
{
    atomicAdd(to, 1u);
}

static inline void add_relaxed(unsigned long long *to, unsigned long long v)
{
    atomicAdd(to, v);
}

/* ---- cp.async, mbarriers ---- */

static inline void cp_async_16(uint32_t to, const void *from, bool real = true)
{
    emulated::cp_async(to, real ? from : nullptr, 16);
}

static inline void cp_async_4(uint32_t to, const void *from)
{
    emulated::cp_async(to, from, 4);
}

static inline void cp_async_commit(void)
{
    emulated::cp_async_commit();
}

template <int PENDING> static inline void cp_async_wait(void)
{
    emulated::cp_async_wait(PENDING);
}

static inline void cp_async_wait_all(void)
{
    emulated::cp_async_wait_all();
}

static inline void cp_async_mbarrier_arrive(uint32_t bar)
{
    emulated::cp_async_arrive(bar);
}

static inline void mbarrier_init(uint32_t bar, int count)
{
    emulated::mbarrier_init(bar, count);
}

static inline void mbarrier_inval(uint32_t bar)
{
    emulated::mbarrier_inval(bar);
}

static inline void mbarrier_arrive(uint32_t bar)
{
    emulated::mbarrier_arrive(bar, 0);
}

static inline bool mbarrier_try_wait(uint32_t bar, uint32_t parity, NB_FILE_LINE)
{
    bool done = emulated::mbarrier_test(bar, parity);
    if (!done)
        emulated::poll(NB_PLACE("mbarrier_try_wait"));
    return done;
}

/* ---- from compute capability 9.0 on ---- */

static inline void launch_dependents(void)
{
}

static inline void wait_for_prerequisites(void)
{
}

static inline void fence_mbarrier_init(void)
{
}

static inline void cluster_barrier_relaxed(NB_FILE_LINE)
{
    emulated::cluster_barrier(NB_PLACE("barrier.cluster"));
}

static inline uint32_t map_to_cta(uint32_t address, int rank)
{
    return (uint32_t)(rank + 1) << 24 | address;
}

static inline void store_async(uint32_t to, float v, uint32_t bar)
{
    emulated::remote_store(to, v, bar);
}

static inline void mbarrier_expect(uint32_t bar, int bytes)
{
    emulated::mbarrier_arrive(bar, bytes);
}

/* elect.sync: whether this is the elected lane. All lanes meet. */
static inline bool nb_elect(const char *what, const char *file, int line)
{
    emulated::meet(0xFFFFFFFF, nullptr, [](void *const *, uint32_t) {}, {what, file, line});
    return emulated::lane_index() == 0;
}

static inline void mbarrier_expect_elected(uint32_t bar, int bytes, NB_FILE_LINE)
{
    if (nb_elect("mbarrier_expect_elected", file, line))
        emulated::mbarrier_arrive(bar, bytes);
}

static inline void bulk_copy_elected(uint32_t to, const void *from, int bytes, uint32_t bar,
                                     NB_FILE_LINE)
{
    if (nb_elect("bulk_copy_elected", file, line))
        emulated::bulk_copy(to, from, bytes, bar);
}

static inline void bulk_copy_evict_first_elected(uint32_t to, const void *from, int bytes,
                                                 uint32_t bar, NB_FILE_LINE)
{
    bulk_copy_elected(to, from, bytes, bar, file, line);
}

static inline void bulk_copy_two_elected(uint32_t to, const void *first, const void *second,
                                         int bytes, uint32_t bar, NB_FILE_LINE)
{
    if (!nb_elect("bulk_copy_two_elected", file, line))
        return;
    emulated::mbarrier_arrive(bar, 2 * bytes);
    emulated::bulk_copy(to, first, bytes, bar);
    emulated::bulk_copy(to + (uint32_t)bytes, second, bytes, bar);
}

template <int BYTES>
static inline void bulk_copy_two_elected(uint32_t to, const void *first, const void *second,
                                         uint32_t bar, NB_FILE_LINE)
{
    bulk_copy_two_elected(to, first, second, BYTES, bar, file, line);
}

static inline void tensor_copy_elected(uint32_t, const void *, int, int, uint32_t)
{
    emulated::fail("tensor copies are not emulated");
}

static inline void fence_tensor_map(const void *)
{
}

static inline void fence_proxy_async(void)
{
}
