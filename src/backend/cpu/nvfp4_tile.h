/* nvfp4_tile.h - NVFP4 matrices, and what they are multiplied with, as the CPU's products want
 * them.
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
 * logits, these 0.01 %.) Weights are doubled, which makes them whole numbers; a group's sum is at
 * most 16 * 12 * 32639, so it is exact as a float, however it is computed.
 *
 * Rows lie in panels of up to 8. Several rows: for each pair of columns, the pair of each row. A
 * pair is what a lane of codes has at the same place of its two words: columns 8v + j and
 * 8v + 4 + j. One row alone is cut into bytes, x = 256 h + l, since then codes become weights
 * fastest: for each 8 columns the h of the even ones, of the odd ones, then the l of both; and
 * behind each 32 columns, for both groups, -12 times the sum of x: the weights are then 2 e2m1 +
 * 12, as unsigned bytes. */
#pragma once

#include <stdint.h>

#define CPU_TILE_ROWS  16
#define CPU_TILE_COLS  32
#define CPU_TILE_BYTES 288

#define NBI_X_I16_MAX   32639     /* 127 * 256 + 127 */
#define NBI_X_I16_TINY  0x1p-112f /* blocks below count as zeros */
#define NBI_X_I16_BLOCK 256

static inline int64_t nbi_tiles_across(int64_t cols)
{
    return (cols + CPU_TILE_COLS - 1) / CPU_TILE_COLS;
}

static inline int64_t nbi_tiles_down(int64_t rows)
{
    return (rows + CPU_TILE_ROWS - 1) / CPU_TILE_ROWS;
}

static inline int64_t nbi_tiles_bytes(int64_t rows, int64_t cols)
{
    return nbi_tiles_down(rows) * nbi_tiles_across(cols) * CPU_TILE_BYTES;
}

static inline int64_t nbi_x_i16_blocks(int64_t cols)
{
    return (cols + NBI_X_I16_BLOCK - 1) / NBI_X_I16_BLOCK;
}

/* Of a panel's row, in units of 16 bits; the last columns are filled up with zeros. A row alone
 * takes NBI_X_I16_HI_LO for a tile's columns, and there is at most one. */
static inline int64_t nbi_x_i16_values(int64_t cols)
{
    return nbi_tiles_across(cols) * CPU_TILE_COLS;
}

#define NBI_X_I16_HI_LO 36

static inline int64_t nbi_x_i16_bytes(int64_t rows, int64_t cols)
{
    int64_t single = nbi_tiles_across(cols) * (NBI_X_I16_HI_LO - CPU_TILE_COLS);
    return (rows * nbi_x_i16_values(cols) + single) * (int64_t)sizeof(int16_t);
}

/* Where column k of the first of n > 1 rows is; row c is 2c further. */
static inline int64_t nbi_x_i16_at(int64_t k, int n)
{
    return (k / 8 * 4 + k % 4) * 2 * n + k % 8 / 4;
}

/* Where the byte h of column k of a row alone is, in bytes; l is 8 further. */
static inline int64_t nbi_x_i16_hi_lo_at(int64_t k)
{
    return k / 32 * (NBI_X_I16_HI_LO * 2) + k % 32 / 8 * 16 + k % 2 * 4 + k % 8 / 2;
}

/* Repacks `rows` <= 16 rows of codes [rows, cols/2] and scales [rows, cols/16] into the tiles of
 * one row of them. */
void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols);

/* The reverse for rows [first, first + rows) of the 16. */
void nbi_tiles_unpack(uint8_t *codes, uint8_t *scales, const uint8_t *tiles, int first, int rows,
                      int64_t cols);
