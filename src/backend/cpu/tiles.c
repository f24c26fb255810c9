/* tiles.c - repacking rows of NVFP4 into tiles. */
#include "backend/cpu/tiles.h"

#include <stdbool.h>
#include <string.h>

/* Eight nibbles as the low halves of eight bytes. */
static uint64_t spread(uint32_t nibbles)
{
    uint64_t x = nibbles;
    x = (x | x << 16) & 0x0000FFFF0000FFFFu;
    x = (x | x << 8) & 0x00FF00FF00FF00FFu;
    return (x | x << 4) & 0x0F0F0F0F0F0F0F0Fu;
}

/* Columns 8i to 8i + 7 of both groups of a row: two lanes' worth of codes. */
static void pack_eight(uint8_t *codes, const uint8_t *low, const uint8_t *high, int i, int lane)
{
    uint32_t a = 0, b = 0;
    memcpy(&a, low + 4 * i, 4);
    if (high)
        memcpy(&b, high + 4 * i, 4);
    uint64_t bytes = spread(a) | spread(b) << 4;
    memcpy(codes + 2 * i * 64 + lane * 4, &bytes, 4);
    bytes >>= 32;
    memcpy(codes + (2 * i + 1) * 64 + lane * 4, &bytes, 4);
}

void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols)
{
    int64_t groups = cols / 16;
    if (rows < NBI_TILE_ROWS || groups % 2)
        memset(tiles, 0, (size_t)(nbi_tiles_across(cols) * NBI_TILE_BYTES));
    for (int64_t t = 0; t < nbi_tiles_across(cols); t++) {
        uint8_t *tile = tiles + t * NBI_TILE_BYTES;
        bool second = 2 * t + 1 < groups;
        for (int r = 0; r < rows; r++) {
            const uint8_t *row = codes + r * (cols / 2) + t * 16;
            tile[r] = scales[r * groups + 2 * t];
            if (second)
                tile[16 + r] = scales[r * groups + 2 * t + 1];
            pack_eight(tile + 32, row, second ? row + 8 : NULL, 0, r);
            pack_eight(tile + 32, row, second ? row + 8 : NULL, 1, r);
        }
    }
}
