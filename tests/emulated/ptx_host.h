/* ptx_host.h - the functions of src/backend/cuda/ptx.cuh by their meaning. */
#pragma once

#include <immintrin.h>

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

/* ---- matrices ---- */

/* Eight halves of registers. */
template <bool BF> static inline __m256 nb_floats(__m128i halves)
{
    if (BF)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    return _mm256_cvtph_ps(halves);
}

/* What a lane brings to mma. */
struct nb_mma {
    float *c;
    const uint32_t *a;
    uint32_t b[2];
};

/* A[row][k] of all lanes; a register has two neighbours in K. */
template <bool BF> static inline void nb_gather_a(float a[16][16], void *const *lanes)
{
    for (int l = 0; l < 32; l++) {
        float eight[8];
        _mm256_storeu_ps(
            eight, nb_floats<BF>(_mm_loadu_si128((const __m128i *)((nb_mma *)lanes[l])->a)));
        for (int r = 0; r < 4; r++)
            memcpy(&a[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8], &eight[2 * r], 8);
    }
}

/* Adds A times 8 columns b[k][column] to the registers c. Products and their sum are exact to f64,
 * and rounded once. */
static inline void nb_multiply(void *const *lanes, int first, const float a[16][16],
                               const double b[16][8])
{
    typedef double double4 __attribute__((vector_size(32)));
    for (int row = 0; row < 16; row++) {
        double4 low = {}, high = {}, column[2];
        for (int k = 0; k < 16; k++) {
            double v = (double)a[row][k];
            memcpy(column, b[k], sizeof column);
            low += v * column[0];
            high += v * column[1];
        }
        for (int n = 0; n < 8; n++) {
            float *c = &((nb_mma *)lanes[row % 8 * 4 + n / 2])->c[first + row / 8 * 2 + n % 2];
            *c = (float)((n < 4 ? low[n] : high[n - 4]) + (double)*c);
        }
    }
}

template <bool BF> static void nb_mma_finish(void *const *lanes, uint32_t arrived)
{
    float a[16][16];
    double b[16][8];
    if (arrived != 0xFFFFFFFF)
        emulated::fail("mma needs all lanes of a warp, not %08x", arrived);
    nb_gather_a<BF>(a, lanes);
    for (int l = 0; l < 32; l++) {
        __m256 halves = nb_floats<BF>(_mm_loadl_epi64((const __m128i *)((nb_mma *)lanes[l])->b));
        double four[4];
        _mm256_storeu_pd(four, _mm256_cvtps_pd(_mm256_castps256_ps128(halves)));
        for (int i = 0; i < 4; i++)
            b[l % 4 * 2 + i / 2 * 8 + i % 2][l / 4] = four[i];
    }
    nb_multiply(lanes, 0, a, b);
}

template <bool BF>
static inline void mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, NB_FILE_LINE)
{
    nb_mma mine = {c, a, {b0, b1}};
    emulated::meet(0xFFFFFFFF, &mine, nb_mma_finish<BF>, NB_PLACE("mma"));
}

struct nb_matrices {
    uint32_t w[4];
    const uint16_t *row; /* that this lane points to */
};

template <bool TRANSPOSED> static void nb_matrices_finish(void *const *lanes, uint32_t arrived)
{
    if (arrived != 0xFFFFFFFF)
        emulated::fail("ldmatrix needs all lanes of a warp, not %08x", arrived);
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) {
                int row = TRANSPOSED ? l % 4 * 2 + e : l / 4,
                    col = TRANSPOSED ? l / 4 : l % 4 * 2 + e;
                uint16_t v = ((nb_matrices *)lanes[8 * i + row])->row[col];
                memcpy((char *)&((nb_matrices *)lanes[l])->w[i] + 2 * e, &v, 2);
            }
}

template <bool TRANSPOSED>
static inline void nb_load_matrices(uint32_t w[4], uint32_t from, emulated::place at)
{
    nb_matrices mine = {{}, (const uint16_t *)emulated::shared_pointer(from)};
    if (from % 16 != 0)
        emulated::fail("ldmatrix from %#x is not aligned", from);
    emulated::meet(0xFFFFFFFF, &mine, nb_matrices_finish<TRANSPOSED>, at);
    memcpy(w, mine.w, sizeof mine.w);
}

static inline void load_matrices(uint32_t w[4], uint32_t from, NB_FILE_LINE)
{
    nb_load_matrices<false>(w, from, NB_PLACE("ldmatrix"));
}

static inline void load_matrices_transposed(uint32_t w[4], uint32_t from, NB_FILE_LINE)
{
    nb_load_matrices<true>(w, from, NB_PLACE("ldmatrix.trans"));
}

static void nb_transpose_finish(void *const *lanes, uint32_t)
{
    uint16_t m[8][8];
    for (int l = 0; l < 32; l++)
        memcpy(&m[l / 4][l % 4 * 2], lanes[l], 4);
    for (int l = 0; l < 32; l++)
        for (int e = 0; e < 2; e++)
            memcpy((char *)lanes[l] + 2 * e, &m[l % 4 * 2 + e][l / 4], 2);
}

static inline uint32_t transpose_8x8(uint32_t matrix, NB_FILE_LINE)
{
    emulated::meet(0xFFFFFFFF, &matrix, nb_transpose_finish, NB_PLACE("movmatrix"));
    return matrix;
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

/* ---- wgmma: done when it is issued ---- */

static inline void wgmma_fence(void)
{
}

static inline void wgmma_commit(void)
{
}

template <int PENDING> static inline void wgmma_wait(void)
{
}

struct nb_wgmma {
    nb_mma mma; /* first, for nb_gather_a and nb_multiply */
    uint32_t b, next;
};

/* The 16 rows of one warp. Core matrices of b: eight columns with eight values of K each. */
template <int NT> static void nb_wgmma_finish(void *const *lanes, uint32_t arrived)
{
    const nb_wgmma *g = (const nb_wgmma *)lanes[0];
    const uint32_t at = (g->b & 0xFFFF) << 4, k_bytes = g->b >> 16 << 4, n_bytes = g->next << 4;
    float a[16][16];
    double b[16][8];
    if (arrived != 0xFFFFFFFF)
        emulated::fail("wgmma needs all lanes of a warp, not %08x", arrived);
    nb_gather_a<false>(a, lanes);
    for (int t = 0; t < NT; t++) {
        for (int n = 0; n < 8; n++)
            for (int k = 0; k < 16; k += 8) {
                uint32_t row = at + (uint32_t)(t * (int)n_bytes + k / 8 * (int)k_bytes + n * 16);
                float eight[8];
                _mm256_storeu_ps(eight, _mm256_cvtph_ps(nb_load_shared<__m128i>(row)));
                for (int i = 0; i < 8; i++)
                    b[k + i][n] = (double)eight[i];
            }
        nb_multiply(lanes, 4 * t, a, b);
    }
}

template <int NT>
static inline void wgmma_f16(float c[NT][4], const uint32_t a[4], uint32_t b, uint32_t next,
                             NB_FILE_LINE)
{
    nb_wgmma mine = {{&c[0][0], a, {}}, b, next};
    emulated::meet(0xFFFFFFFF, &mine, nb_wgmma_finish<NT>, NB_PLACE("wgmma"));
}
