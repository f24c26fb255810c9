/* tiles.h - NVFP4 matrices as the CPU's products want them.
 *
 * A tile is 16 rows by 32 columns, two scale groups wide: 32 bytes of E4M3 scales, [group][row],
 * then 4 vectors of 64 bytes of codes. Byte j of lane r of vector v holds row r: its low nibble is
 * column 4v + j, its high nibble column 16 + 4v + j. So a vector lane is a row, sums need no
 * horizontal step, and a tile is read from front to back. Tiles of 16 rows follow one another along
 * the columns. What is missing to whole tiles has code and scale 0.
 *
 * Activations for the integer product are whole numbers of 15 bits in blocks of 32 with an f32
 * scale, each in two bytes: 128 * high + low. (8 bits would be half the work in a prompt and no
 * gain for a token, which waits for memory; they cost 2 % on the logits, these 0.02 %.) The table
 * of weights is 2 * e2m1 + 12, which is never negative as the instruction wants it; 12 times the
 * sum of a group is subtracted, and kept for each group beside the block. */
#pragma once

#include <stdint.h>

#define NBI_TILE_ROWS  16
#define NBI_TILE_COLS  32
#define NBI_TILE_BYTES 288

#define NBI_Q15_MAX  16256     /* 127 * 128 */
#define NBI_Q15_TINY 0x1p-112f /* smaller blocks count as zeros */

struct nbi_q15_block {
    float scale;    /* of a unit, halved for the doubled weights, and times 2^8 (kernels) */
    int32_t sum[2]; /* -12 * sum over each group of 16 */
    int32_t unused;
    int8_t high[32], low[32];
};

_Static_assert(sizeof(struct nbi_q15_block) == 80, "laid out for vector loads");

static inline int64_t nbi_tiles_across(int64_t cols)
{
    return (cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
}

static inline int64_t nbi_tiles_down(int64_t rows)
{
    return (rows + NBI_TILE_ROWS - 1) / NBI_TILE_ROWS;
}

static inline int64_t nbi_tiles_bytes(int64_t rows, int64_t cols)
{
    return nbi_tiles_down(rows) * nbi_tiles_across(cols) * NBI_TILE_BYTES;
}

/* Repacks `rows` <= 16 rows of codes [rows, cols/2] and scales [rows, cols/16] into the tiles of
 * one row of them. */
void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols);
