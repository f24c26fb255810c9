/* mma_host.h - tensor cores: the functions of src/backend/cuda/ptx.cuh by their meaning. */
#pragma once

#include <immintrin.h>

#include "ptx_host.h"

/* ---- mma, ldmatrix, movmatrix ---- */

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
        _mm256_storeu_ps(eight,
                         nb_floats<BF>(_mm_loadu_si128((const __m128i *)((nb_mma *)lanes[l])->a)));
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
