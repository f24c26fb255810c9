/* scales.c - NVFP4 matrices without codes: makes those of a part from block scales and master. */
#include "backend/cpu/internal.h"
#include "tensor/nvfp4.h"

#define STRIP 512 /* columns converted at a time */

void nbi_cpu_make_codes(const struct nbi_microkernels *k, const struct nbi_weight *w, int64_t row,
                        int64_t col, int64_t cols, uint8_t *codes)
{
    const uint8_t *scales = (const uint8_t *)host(w->scales) + (row * w->cols + col) / 16;
    const uint8_t *master = host(w->master);
    float x[STRIP];
    NBI_BUG_IF(!w->master.at);
    for (int64_t c = 0; c < cols; c += STRIP) {
        int64_t n = min(cols - c, STRIP);
        k->to_f32(x, master + nbi_dtype_bytes(w->master_dtype, row * w->cols + col + c),
                  w->master_dtype, n);
        nbi_nvfp4_encode(codes + c / 2, scales + c / 16, x, n / 16, w->tensor_scale);
    }
}

void nbi_cpu_make_tiles(const struct nbi_microkernels *k, const struct nbi_weight *w, int64_t row,
                        int64_t col, int64_t cols, uint8_t *tiles)
{
    uint8_t codes[CPU_TILE_ROWS * STRIP / 2], scales[CPU_TILE_ROWS * STRIP / 16];
    int rows = (int)min(w->rows - row, CPU_TILE_ROWS);
    cols = min(w->cols - col, cols);
    for (int64_t c = 0; c < cols; c += STRIP) {
        int64_t n = min(cols - c, STRIP);
        for (int r = 0; r < rows; r++) {
            int64_t block = ((row + r) * w->cols + col + c) / 16;
            nbi_cpu_make_codes(k, w, row + r, col + c, n, codes + r * n / 2);
            memcpy(scales + r * n / 16, (const uint8_t *)host(w->scales) + block, (size_t)n / 16);
        }
        nbi_tiles_pack(tiles + nbi_tiles_across(c) * CPU_TILE_BYTES, codes, scales, rows, n);
    }
}
