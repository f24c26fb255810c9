/* linear_decode.cuh - what the linear kernels for decoding share: the division of the matrices
 * over CTAs, and NVFP4 tiles from shared memory to f16 fragments.
 *
 * "Tile row" and "tile column" count the 16 x 128 tiles of a weight matrix (nvfp4_tile.cuh). Tile
 * columns divide K. The tile rows of all matrices of a call are numbered through; of gate and up
 * they alternate (2i gate, 2i + 1 up), so that one CTA has both.
 *
 *                 K: tile columns
 *             +----------+----------+
 *   tile      | CTA 0    | CTA R    |    R = row_ctas, split_k = 2 here.
 *   rows      | CTA 1    | CTA R+1  |    With split_k > 1 the CTAs of a split write partial sums,
 *             | ...      | ...      |    which another kernel adds to y.
 *             | CTA R-1  | CTA 2R-1 |
 *             +----------+----------+
 *
 * A CTA walks its tile rows in row blocks. Within a row block K is divided once more, over warps or
 * warpgroups; the epilogue adds their sums in a fixed order. */
#pragma once

#include "backend/cuda/async_copy.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/pack_activations.cuh"

/* A count divided evenly: `base` for each, one more for the first `remainder`. */
struct even_split {
    int base, remainder;
};

/* Arguments of the kernels. */
struct linear_args {
    float *y[NBI_LINEAR_MAX];
    const uint8_t *tiles[NBI_LINEAR_MAX];
    int first[NBI_LINEAR_MAX]; /* tile row at which each matrix begins */
    int rows[NBI_LINEAR_MAX];  /* outputs of each matrix */
    float scale[NBI_LINEAR_MAX];
    int count, tile_rows, tile_cols;
    int split_k;  /* CTAs that share tile rows; each has other columns */
    int row_ctas; /* CTAs of a split */
    int row_blocks;
    struct even_split row_split; /* tile rows over row_ctas; pairs of gate and up if gated */
    struct even_split k_split;   /* tile columns over split_k */
    int x_stages;                /* of the x pipeline: tile columns in shared memory at once */
    int max_warp_split_k;        /* does not depend on N */
    const uint8_t *x;            /* packed, see pack_activations.cuh */
    const float *x_scale;
    float *partials; /* [split_k, N, rows] if split_k > 1 */
    int N, n_tiles;  /* n_tiles: tiles of 8 rows of x */
    bool add;
    bool gated;       /* the two matrices are gate and up, and SwiGLU of both goes to act */
    struct x_f16 act; /* packed as x of the next linear */
};

/* ---- work of a CTA ---- */

/* A tile row by its matrix and its number there. */
struct tile_ref {
    int matrix, row;
};

__device__ static inline struct tile_ref tile_ref_of(const struct linear_args &a, int row)
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

/* a / b for results below 100,000. An integer division would delay the first loads. */
__device__ static inline int quotient(int a, int b)
{
    return (int)__fdividef((float)a + 0.5f, (float)b);
}

__device__ static inline struct range even_range(int count, int i, int of)
{
    return {quotient(count * i, of), quotient(count * (i + 1), of)};
}

__device__ static inline struct range split_range(const struct even_split &s, int i)
{
    int begin = i * s.base + min(i, s.remainder);
    return {begin, begin + s.base + (i < s.remainder)};
}

/* Tile rows from what row_split counts: gate and up stay together. */
__device__ static inline struct range tile_rows_of(const struct linear_args &a, struct range r)
{
    return {r.begin << a.gated, r.end << a.gated};
}

/* Tile rows and tile columns of a CTA. */
struct cta_work {
    struct range rows, cols;
    int split; /* of K */
};

__device__ static inline struct cta_work cta_work_of(const struct linear_args &a, int cta)
{
    int split = 0, row_cta = cta;
    for (; row_cta >= a.row_ctas; row_cta -= a.row_ctas)
        split++;
    return {tile_rows_of(a, split_range(a.row_split, row_cta)), split_range(a.k_split, split),
            split};
}

/* A position in a pipeline: the stage, and the phase parity of its barrier. */
struct stage_phase {
    int stage;
    uint32_t parity;
};

__device__ static inline void next_stage(struct stage_phase &p, int stages)
{
    p.parity ^= p.stage + 1 == stages;
    p.stage = p.stage + 1 == stages ? 0 : p.stage + 1;
}

/* ---- tiles to fragments ---- */

/* A lane's codes of half a tile in shared memory. */
__device__ static inline void load_codes(uint32_t codes[4], uint32_t tile, int half)
{
    load_shared(codes, tile + (half * 32 + threadIdx.x % 32) * 16);
}

/* A lane's four block scales, one a byte. */
__device__ static inline uint32_t load_block_scales(uint32_t tile)
{
    return load_shared_word(tile + 1024 + threadIdx.x % 32 * 4);
}

/* Block scales of the four quarters as f16, times 2^7. Codes come out of a tile times 2^-14, so a
 * weight is times 2^-7 and the epilogue multiplies by 128. */
__device__ static inline void block_scales_to_f16(__half2 out[2], uint32_t scales)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t h = __byte_perm(scales, 0, i ? 0x3424 : 0x1404) >> 1; /* as f16, times 2^-8 */
        out[i] = __hmul2(*(__half2 *)&h, __float2half2_rn(32768.0f));
    }
}

/* Half a tile as fragments A of m16n8k16: w[p] is pair p of the codes. */
__device__ static inline void codes_to_f16(uint32_t w[4][4], const uint32_t word[4],
                                           const __half2 scales[2])
{
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint32_t pair = e2m1_pair(word[q], p);
            __half2 scale = q % 2 ? __high2half2(scales[q / 2]) : __low2half2(scales[q / 2]);
            __half2 v = __hmul2(*(__half2 *)&pair, scale);
            w[p][q] = *(uint32_t *)&v;
        }
}

/* The same for COUNT consecutive tiles in shared memory. */
template <int COUNT>
__device__ static inline void tiles_to_f16(uint32_t w[COUNT][4][4], uint32_t tiles, int half)
{
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        uint32_t codes[4];
        __half2 scales[2];
        load_codes(codes, tiles + r * CUDA_TILE_BYTES, half);
        block_scales_to_f16(scales, load_block_scales(tiles + r * CUDA_TILE_BYTES));
        codes_to_f16(w[r], codes, scales);
    }
}

/* ---- linear_decode_resident.cu ---- */

/* Whether N and K are small enough for all of a CTA's x to stay in shared memory. */
bool nbi_cuda_resident_fits(const struct nbi_stream *s, const struct linear_args *p);
enum nb_status nbi_cuda_linear_resident(struct nbi_stream *s, const struct linear_args *p);
