/* nvfp4_tile.c - repacks rows of NVFP4 into tiles and back. */
#include "backend/cpu/nvfp4_tile.h"

#include <stdbool.h>
#include <string.h>

void nbi_tiles_pack(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales, int rows,
                    int64_t cols)
{
    int64_t groups = cols / 16;
    if (rows < CPU_TILE_ROWS || groups % 2)
        memset(tiles, 0, (size_t)(nbi_tiles_across(cols) * CPU_TILE_BYTES));
    for (int64_t t = 0; t < nbi_tiles_across(cols); t++) {
        uint8_t *tile = tiles + t * CPU_TILE_BYTES;
        bool second = 2 * t + 1 < groups;
        for (int r = 0; r < rows; r++) {
            const uint8_t *row = codes + r * (cols / 2) + t * 16;
            tile[r] = scales[r * groups + 2 * t];
            if (second)
                tile[16 + r] = scales[r * groups + 2 * t + 1];
            for (int v = 0; v < (second ? 4 : 2); v++)
                memcpy(tile + 32 + 64 * v + 4 * r, row + 4 * v, 4);
        }
    }
}

void nbi_tiles_unpack(uint8_t *codes, uint8_t *scales, const uint8_t *tiles, int first, int rows,
                      int64_t cols)
{
    int64_t groups = cols / 16;
    for (int r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *tile = tiles + g / 2 * CPU_TILE_BYTES;
            int64_t half = g % 2, row = first + r;
            uint8_t *out = codes + r * (cols / 2) + g * 8;
            scales[r * groups + g] = tile[16 * half + row];
            memcpy(out, tile + 32 + 128 * half + 4 * row, 4);
            memcpy(out + 4, tile + 96 + 128 * half + 4 * row, 4);
        }
}
