/* nvfp4.h - the NVFP4 codec (docs/NVFP4.md explains it by an example).
 *
 * A block is 16 consecutive values of a row. Its codes are 8 bytes, two E2M1 values per byte, the
 * earlier one in the low nibble. Its scale is one E4M3 byte, stored apart from the codes, in the
 * same order. A tensor has one more scale, an f32, which is 1 in single-level files:
 *
 *     value = e2m1 * e4m3 * tensor_scale
 *
 * The product of the first two is exact in bf16, f16 and f32. The third factor rounds once in f32
 * (and once more on conversion to bf16 or f16), and not at all if it is a power of two, which every
 * tensor scale made by nibble is.
 *
 * A matrix whose columns are a multiple of 16 is one sequence of blocks, so most functions take a
 * number of blocks and no shape. All versions (scalar, AVX2, AVX-512) return the same bytes. */
#pragma once

#include "base/sys.h"
#include "nibble/files.h"
#include "tensor/half.h"

#define NBI_NVFP4_BLOCK     16
#define NBI_NVFP4_MAX_SCALE 448.0f                       /* largest E4M3 value, code 0x7E */
#define NBI_NVFP4_MAX       (6.0f * NBI_NVFP4_MAX_SCALE) /* largest value with tensor scale 1 */

/* How a block's scale is chosen. `base` is amax / 6, which maps the largest value to the largest
 * code. Codes are limited to 0x01 (2^-9) to 0x7E (448); a block of zeros gets 0x38 (1.0).
 *
 *   rtn     base rounded to nearest even
 *   4over6  that, or 1.5 * base rounded likewise, whichever has the smaller squared error
 *   sweep   of the nine codes from rtn - 2 to rtn + 6, the one with the smallest squared error
 *
 * Squared errors are summed in f32 over the block, first value first; the earlier candidate wins a
 * tie (sweep: rtn first, then from the lowest code up). */

/* Quantises `blocks` blocks of x / tensor_scale. q: 8 bytes per block, s: 1 byte per block,
 * disjoint from x. Values must be finite. */
void nbi_nvfp4_quantize(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                        enum nb_quant_method method, float tensor_scale);

/* The codes alone, for scales that nbi_nvfp4_quantize has chosen for x: the same bytes. */
void nbi_nvfp4_encode(uint8_t *q, const uint8_t *s, const float *x, int64_t blocks,
                      float tensor_scale);

/* Quantises with one scale per tile of 16 x 16 values a matrix of rows x cols values. cols is a
 * multiple of 16; the last tiles may have fewer rows. s still holds one byte per 1 x 16 block,
 * equal within a tile. */
void nbi_nvfp4_quantize_tiles(uint8_t *q, uint8_t *s, const float *x, int64_t rows, int64_t cols,
                              enum nb_quant_method method, float tensor_scale);

/* The random bits of stochastic rounding: block b uses Philox with key seed and counter (2
 * (first_block + b) + {0, 1}, stream), 16 bits per value, low half-word first. */
struct nbi_nvfp4_random {
    uint64_t seed, stream;
    int64_t first_block; /* index of the first block in its tensor */
};

/* Quantises with stochastic rounding. Unbiased, E[dequantised] = x, while amax / tensor_scale <=
 * 2688. The scale is the smallest code that does not clip (base rounded up), and each value goes to
 * one of its two neighbours with the probability that keeps its mean. */
void nbi_nvfp4_quantize_sr(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                           float tensor_scale, struct nbi_nvfp4_random random);

void nbi_nvfp4_dequantize_f32(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale);
void nbi_nvfp4_dequantize_f16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale);
void nbi_nvfp4_dequantize_bf16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                               float tensor_scale);

/* The tensor scale for values up to amax: the smallest power of two t with amax / t <= 6 * 448; 1
 * if amax is 0. A power of two loses nothing compared with amax / 2688 (E4M3 has exponent bits to
 * spare) and makes every later product and inversion exact. */
NBI_HOST_DEVICE static inline float nbi_nvfp4_tensor_scale(float amax)
{
    if (!(amax > 0) || !isfinite(amax))
        return 1.0f;
    int e;
    float m = frexpf(amax / NBI_NVFP4_MAX, &e); /* m in [0.5, 1) */
    e -= m == 0.5f;
    return ldexpf(1.0f, e < -100 ? -100 : e); /* keeps 1 / t and every product normal */
}

/* Whether values up to amax can be quantised with an existing tensor scale without clipping. */
static inline bool nbi_nvfp4_fits(float amax, float tensor_scale)
{
    return amax / tensor_scale <= NBI_NVFP4_MAX;
}

/* Activations for FP4 tensor cores are a sum of two NVFP4 values: hi is x quantised by rtn with
 * tensor scale t, lo is the residual x - hi quantised by rtn with NBI_NVFP4_LO_SCALE * t.
 *
 * If t is nbi_nvfp4_tensor_scale(max |x|), a quarter is the smallest power of two with which no lo
 * clips: block scales of hi are at most 448 t, and the residual at most one block scale (half the
 * gap from 4 to 6), which is 1792 quarters of t; the limit is 2688. The true amax of the residual
 * would sometimes allow a smaller factor, but it costs another reduction and helps only blocks
 * with subnormal scales, 2^-14 of the largest scale.
 *
 * The residual is exact in f32. So is the sum: both are multiples of 2^-12 t, below 2^12 t. Its
 * error is at most 1 / 31 of a block's largest value and 0.9 % RMS for normally distributed values;
 * one NVFP4 value has 9.5 %, bf16 0.17 %. */
#define NBI_NVFP4_LO_SCALE 0.25f

/* y = hi + lo; y may be x. Values must be finite, t a power of two. */
void nbi_nvfp4_split_hi_lo(float *y, const float *x, int64_t blocks, float t);

/* Block scales as FP4 tensor cores read them (cuBLASLt's VEC16_UE4M3): padded tiles of 128 rows x 4
 * blocks, the tiles of 128 rows consecutive. Within a tile, rows r, r + 32, r + 64 and r + 96 are
 * adjacent. Returns the bytes for a matrix, and the offset of one scale. */
NBI_HOST_DEVICE static inline int64_t nbi_nvfp4_swizzled_bytes(int64_t rows, int64_t cols)
{
    int64_t col_tiles = (cols + 4 * NBI_NVFP4_BLOCK - 1) / (4 * NBI_NVFP4_BLOCK);
    return (rows + 127) / 128 * col_tiles * 512;
}

NBI_HOST_DEVICE static inline int64_t nbi_nvfp4_swizzled_at(int64_t row, int64_t block,
                                                            int64_t cols)
{
    int64_t col_tiles = (cols + 4 * NBI_NVFP4_BLOCK - 1) / (4 * NBI_NVFP4_BLOCK);
    return (row / 128 * col_tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
           block % 4;
}

/* Converts to and from ggml's order of nibbles: `superblocks` of 4 blocks, 36 bytes each in GGUF (4
 * scales, then per block 8 bytes that pair value j with value j + 8). */
void nbi_nvfp4_to_gguf(uint8_t *out, const uint8_t *q, const uint8_t *s, int64_t superblocks);
void nbi_nvfp4_from_gguf(uint8_t *q, uint8_t *s, const uint8_t *in, int64_t superblocks);
