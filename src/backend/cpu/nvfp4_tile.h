/* nvfp4_tile.h - the CPU's layout of NVFP4 matrices, and of the activations they are multiplied
 * with.
 *
 * A tile is 16 rows by 32 columns, which is two scale groups: 32 bytes of E4M3 scales,
 * [group][row], then 4 vectors of 64 bytes of codes. Lane r (32 bits) of vector v holds columns 8v
 * to 8v + 7 of row r in their stored order, the first in the lowest bits. A vector lane is thus a
 * row: sums need no horizontal step, and a tile is read from front to back. The tiles of 16 rows
 * follow one another along the columns. Rows and columns that pad the last tiles have code and
 * scale 0.
 *
 * For the integer product, activations are 16-bit integers with one f32 scale per block of 256
 * columns. Their error is at most 0.03 % of a block's norm, whatever the values are. (8 bits would
 * halve the work of a prompt and gain nothing for a single token, which is bound by memory; they
 * cost 2 % on the logits, 16 bits 0.01 %.) Weights are doubled, which makes them integers. The sum
 * of a group is at most 16 * 12 * 32639, so it is exact as an f32, in any order.
 *
 * Rows of activations lie in panels of up to 8 rows, in one of two formats:
 * - Pairs, for n > 1 rows: for each pair of columns 8v + j and 8v + 4 + j, which a lane of codes
 * holds at the same place of its two halves, the pair of each row in turn.
 * - Hi/lo bytes, for a single row, since then codes become weights fastest: x = 256 hi + lo. For
 * each 8 columns the hi of the even and of the odd ones, then the lo of both; after each 32
 * columns, for either group, -12 times the sum of x. Weights are then 2 e2m1 + 12, which are
 * unsigned bytes. */
#pragma once

#include <stdint.h>

#define CPU_TILE_ROWS  16
#define CPU_TILE_COLS  32
#define CPU_TILE_BYTES 288

#define NBI_X_I16_MAX   32639     /* 127 * 256 + 127 */
#define NBI_X_I16_TINY  0x1p-112f /* blocks with a smaller amax become zeros */
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

/* 16-bit values of one row of a panel, padded with zeros to whole tiles. The hi/lo format takes
 * NBI_X_I16_HI_LO values per 32 columns instead; only the last panel can have it. */
static inline int64_t nbi_x_i16_values(int64_t cols)
{
    return nbi_tiles_across(cols) * CPU_TILE_COLS;
}

#define NBI_X_I16_HI_LO 36

static inline int64_t nbi_x_i16_bytes(int64_t rows, int64_t cols)
{
    int64_t hi_lo = nbi_tiles_across(cols) * (NBI_X_I16_HI_LO - CPU_TILE_COLS);
    return (rows * nbi_x_i16_values(cols) + hi_lo) * (int64_t)sizeof(int16_t);
}

/* Pairs: index of column k of row 0 of n; row c is at 2c more. */
static inline int64_t nbi_x_i16_at(int64_t k, int n)
{
    return (k / 8 * 4 + k % 4) * 2 * n + k % 8 / 4;
}

/* Hi/lo bytes: byte offset of hi of column k; lo is 8 further. */
static inline int64_t nbi_x_i16_hi_lo_at(int64_t k)
{
    return k / 32 * (NBI_X_I16_HI_LO * 2) + k % 32 / 8 * 16 + k % 2 * 4 + k % 8 / 2;
}

/* Repacks up to 16 rows of codes [rows, cols/2] and scales [rows, cols/16] into one row of tiles.
 */
void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols);

/* The reverse, for rows [first, first + rows) of the 16. */
void nbi_tiles_unpack(uint8_t *codes, uint8_t *scales, const uint8_t *tiles, int first, int rows,
                      int64_t cols);
