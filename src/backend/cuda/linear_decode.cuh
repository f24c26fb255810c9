/* linear_decode.cuh - what the kernels for products of few rows share: who has which part of the
 * matrices, and tiles from shared memory as operands. */
#pragma once

#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/pack_activations.cuh"

/* So many for each, and one more for the first of them. */
struct cut {
    int each, more;
};

struct product {
    float *y[NBI_LINEAR_MAX];
    const uint8_t *tiles[NBI_LINEAR_MAX];
    int first[NBI_LINEAR_MAX]; /* row of tiles where each matrix begins */
    int rows[NBI_LINEAR_MAX];
    float scale[NBI_LINEAR_MAX];
    int count, tile_rows, tile_cols;
    int slices; /* of columns, each of `lines` CTAs */
    int lines, passes;
    struct cut row_cut, col_cut; /* rows of tiles for a line, pairs if gated; columns for a slice */
    int slots;                   /* columns of x that shared memory has room for */
    int ways;                    /* at most, whatever N is */
    const uint8_t *x;
    const float *x_scale;
    float *parts; /* [slices, N, rows], if there are several */
    int N, n_tiles;
    bool add;
    bool gated;     /* rows of tiles are those of gate and up in turn */
    struct x16 act; /* where SwiGLU of both goes then */
};

/* ---- who has what ---- */

/* A row of tiles: its matrix, and which of that it is. */
struct place {
    int m, tile;
};

__device__ static inline struct place place_of(const struct product &a, int row)
{
    int m = 0;
    if (a.gated)
        return {row & 1, row >> 1};
    while (m + 1 < a.count && row >= a.first[m + 1])
        m++;
    return {m, row - a.first[m]};
}

struct range {
    int begin, end;
};

/* a / b, below 100,000: divisions would take long before anything is asked for. */
__device__ static inline int quotient(int a, int b)
{
    return (int)__fdividef((float)a + 0.5f, (float)b);
}

__device__ static inline struct range even(int count, int i, int of)
{
    return {quotient(count * i, of), quotient(count * (i + 1), of)};
}

__device__ static inline struct range cut_at(const struct cut &c, int i)
{
    int begin = i * c.each + min(i, c.more);
    return {begin, begin + c.each + (i < c.more)};
}

/* Gate and up stay together. */
__device__ static inline struct range rows_of(const struct product &a, struct range r)
{
    return {r.begin << a.gated, r.end << a.gated};
}

/* Rows of tiles of a CTA, and its columns. */
struct part {
    struct range rows, cols;
    int slice;
};

__device__ static inline struct part part_of(const struct product &a, int cta)
{
    int slice = 0, line = cta;
    for (; line >= a.lines; line -= a.lines)
        slice++;
    return {rows_of(a, cut_at(a.row_cut, line)), cut_at(a.col_cut, slice), slice};
}

/* Which of some slots is in turn, and which time that is. */
struct turn {
    int slot;
    uint32_t parity;
};

__device__ static inline void next_turn(struct turn &t, int slots)
{
    t.parity ^= t.slot + 1 == slots;
    t.slot = t.slot + 1 == slots ? 0 : t.slot + 1;
}

/* ---- tiles ---- */

/* A lane's part of a tile in shared memory: half its codes, and its scales. */
__device__ static inline void codes_at(uint32_t codes[4], uint32_t tile, int half)
{
    load_shared(codes, tile + (half * 32 + threadIdx.x % 32) * 16);
}

__device__ static inline uint32_t scales_at(uint32_t tile)
{
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(v)
                 : "r"(tile + 1024 + threadIdx.x % 32 * 4)
                 : "memory");
    return v;
}

/* Of four quarters, two each: the scale times 2^7, so the weight times 2^-7. */
__device__ static inline void widen_scales(__half2 by[2], uint32_t scales)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t h = __byte_perm(scales, 0, i ? 0x3424 : 0x1404) >> 1; /* as f16, times 2^-8 */
        by[i] = __hmul2(*(__half2 *)&h, __float2half2_rn(32768.0f));
    }
}

/* Half a tile as operands: w[p] is pair p. */
__device__ static inline void widen_half(uint32_t w[4][4], const uint32_t word[4],
                                         const __half2 by[2])
{
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint32_t pair = e2m1_pair(word[q], p);
            __half2 one = q % 2 ? __high2half2(by[q / 2]) : __low2half2(by[q / 2]);
            __half2 v = __hmul2(*(__half2 *)&pair, one);
            w[p][q] = *(uint32_t *)&v;
        }
}

/* The same of tiles that lie one behind the other in shared memory. */
template <int COUNT>
__device__ static inline void widen_tiles(uint32_t w[COUNT][4][4], uint32_t tiles, int half)
{
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        uint32_t codes[4];
        __half2 by[2];
        codes_at(codes, tiles + r * CUDA_TILE_BYTES, half);
        widen_scales(by, scales_at(tiles + r * CUDA_TILE_BYTES));
        widen_half(w[r], codes, by);
    }
}

/* ---- linear_whole.cu ---- */

/* Whether there are few enough rows of x, and all columns of them fit shared memory. */
bool nbi_cuda_whole_fits(const struct nbi_stream *s, const struct product *p);
enum nb_status nbi_cuda_linear_whole(struct nbi_stream *s, const struct product *p);
