/* tiles.h - NVFP4 matrices, and what they are multiplied with, as the CPU's products want them.
 *
 * A tile is 16 rows by 32 columns, two scale groups wide: 32 bytes of E4M3 scales, [group][row],
 * then 4 vectors of 64 bytes of codes. Lane r of vector v, 32 bits, holds columns 8v to 8v + 7 of
 * row r as they are stored, the first in the lowest bits. So a vector lane is a row, sums need no
 * horizontal step, and a tile is read from front to back. Tiles of 16 rows follow one another along
 * the columns. What is missing to whole tiles has code and scale 0.
 *
 * Activations for the integer product are whole numbers of 16 bits with an f32 scale for each block
 * of 256. Their error is at most 0.03 % of a block's norm, whatever is in it. (8 bits would be half
 * the work in a prompt and no gain for a token, which waits for memory; they cost 2 % on the
 * logits, these 0.01 %.) Rows lie in panels of up to 8: for each pair of columns, the pair of each
 * row of the panel. A pair is what a vector lane of codes has at the same place of its two words:
 * columns 8v + j and 8v + 4 + j. Weights are doubled, which makes them whole numbers; a group's sum
 * is at most 16 * 12 * 32767, so it is exact as a float. */
#pragma once

#include <stdint.h>

#define NBI_TILE_ROWS  16
#define NBI_TILE_COLS  32
#define NBI_TILE_BYTES 288

#define NBI_Q16_MAX   32767
#define NBI_Q16_TINY  0x1p-112f /* blocks below count as zeros */
#define NBI_Q16_BLOCK 256

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

/* Of one row: whole numbers, with zeros up to a whole tile, and scales. */
static inline int64_t nbi_q16_values(int64_t cols)
{
    return nbi_tiles_across(cols) * NBI_TILE_COLS;
}

static inline int64_t nbi_q16_blocks(int64_t cols)
{
    return (cols + NBI_Q16_BLOCK - 1) / NBI_Q16_BLOCK;
}

/* Where column k of the first row of a panel of n rows is; row c is 2c further. */
static inline int64_t nbi_q16_at(int64_t k, int n)
{
    return (k / 8 * 4 + k % 4) * 2 * n + k % 8 / 4;
}

/* Repacks `rows` <= 16 rows of codes [rows, cols/2] and scales [rows, cols/16] into the tiles of
 * one row of them. */
void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols);
