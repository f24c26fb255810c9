/* nvfp4_tile.cuh - how NVFP4 matrices lie in device memory.
 *
 * A matrix is cut into tiles of 16 rows x 128 columns, in row-major order of tiles and padded with
 * zeros. A tile holds 16 x 8 blocks of 16 E2M1 codes with one E4M3 scale each:
 *
 *   bytes      0 .. 511   first halves of the blocks: 16 bytes for each lane
 *            512 .. 1023  second halves: 16 bytes for each lane
 *           1024 .. 1151  scales: 4 bytes for each lane
 *
 * Lane l = 4g + t of a warp owns blocks 2t and 2t + 1 of rows g and g + 8. Those four blocks are
 * its quarters:
 *
 *   quarter   0          1              2              3
 *   row       g          g + 8          g              g + 8
 *   block     2t         2t             2t + 1         2t + 1
 *
 * The 16 bytes of half h (0 or 1) are four words, one for each quarter. A word has elements 8h to
 * 8h + 7 of its block as four pairs. Pair p of the four words is the lane's share of operand A of
 * mma.m16n8k16, whose 16 columns are then pair p of all eight blocks: no shuffles are needed. The
 * four scale bytes belong to quarters 0 to 3. */
#pragma once

#include "backend/cuda/device_math.cuh"

extern "C" {
#include "backend/cuda_memory.h"
}

struct tile_shape {
    int rows, cols; /* in tiles */
};

static inline struct tile_shape tiles_of(int64_t rows, int64_t cols)
{
    return {(int)ceil_div(rows, CUDA_TILE_ROWS), (int)ceil_div(cols, CUDA_TILE_COLS)};
}

/* What e2m1_pair's values are to be multiplied with: 2^14. */
#define E2M1_PAIR_EXPONENT 14
#define E2M1_PAIR_SCALE    16384.0f

/* Pair p (0 to 3) of a word as two f16, each its value times 2^-14.
 *
 * An E2M1 code is a sign and three bits. As bits 15 and 11 to 9 of an f16 they are the value times
 * 2^-14, subnormals included. Each 16-bit half of a word holds the four pairs so that one mask, and
 * for three of them one shift or multiplication, takes a pair there. In pairs 2 and 3 sign and
 * value have different distances to go: multiplying by the sum of two powers of two does both
 * shifts at once, and its other products fall below bit 9 or on bits 12 to 14, which the mask
 * clears. */
__device__ static inline uint32_t e2m1_pair(uint32_t word, int p)
{
    switch (p) {
    case 0: /* sign 15, value 11 to 9 */
        return word & 0x8E008E00;
    case 1: /* sign 12, value 8 to 6 */
        return (word << 3) & 0x8E008E00;
    case 2: /* sign 14, value 5 to 3 */
        return (word & 0x40384038) * ((1 << 1) + (1 << 6)) & 0x8E008E00;
    default: /* sign 13, value 2 to 0 */
        return (word & 0x20072007) * ((1 << 2) + (1 << 9)) & 0x8E008E00;
    }
}

/* The eight codes of a word in the order of files: the first in the lowest four bits. */
__device__ static inline uint32_t stored_codes(uint32_t word)
{
    uint32_t codes = 0;
    for (int p = 0; p < 4; p++) {
        uint32_t pair = e2m1_pair(word, p);
        pair = (pair >> 12 & 0x00080008) | (pair >> 9 & 0x00070007);
        codes |= ((pair | pair >> 12) & 0xFF) << 8 * p;
    }
    return codes;
}

/* Values k to k + 3 of a row of an NVFP4 matrix, without the tensor scale; k is a multiple of 4. */
__device__ static inline void load_tile4(float out[4], const uint8_t *tiles, int64_t row, int64_t k,
                                         int64_t K)
{
    int64_t tile_cols = (K + CUDA_TILE_COLS - 1) / CUDA_TILE_COLS;
    const uint8_t *t = tiles + (row / 16 * tile_cols + k / 128) * CUDA_TILE_BYTES;
    int r = (int)(row % 16), block = (int)(k % 128) / 16, lane = (r & 7) * 4 + block / 2;
    int quarter = (r >> 3) + 2 * (block & 1), half = (int)(k % 16) / 8;
    uint32_t word = ((const uint32_t *)t)[half * 128 + lane * 4 + quarter];
    float scale = load_f32(t, 1024 + lane * 4 + quarter, NBI_E4M3) * E2M1_PAIR_SCALE;
    for (int i = 0; i < 2; i++) {
        uint32_t pair = e2m1_pair(word, (int)(k % 8) / 2 + i);
        float2 v = __half22float2(*(const __half2 *)&pair);
        out[2 * i] = v.x * scale;
        out[2 * i + 1] = v.y * scale;
    }
}
