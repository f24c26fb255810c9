/* tiles.c - repacking rows of NVFP4 into tiles. */
#include "backend/cpu/tiles.h"

#include <stdbool.h>
#include <string.h>

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
            for (int v = 0; v < (second ? 4 : 2); v++)
                memcpy(tile + 32 + 64 * v + 4 * r, row + 4 * v, 4);
        }
    }
}
