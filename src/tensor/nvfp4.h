/* nvfp4.h - the NVFP4 codec (docs/NVFP4.md tells it with an example).
 *
 * A block is 16 consecutive values of a row. Its codes are 8 bytes, two E2M1 values a byte, the
 * earlier one in the low nibble; its scale is one E4M3 byte, kept apart from the codes, in the same
 * order. A tensor has one f32 scale more, 1 in single-level files:
 *
 *     value = e2m1 * e4m3 * tensor_scale
 *
 * The product of the first two is exact in bf16, f16 and f32; the third factor rounds once in f32
 * (and once more on the way to bf16 or f16), and not at all if it is a power of two, as every
 * tensor scale that nibble makes.
 *
 * A matrix whose columns are a multiple of 16 is one run of blocks, so most functions take a number
 * of blocks and no shape. All paths (scalar, AVX2, AVX-512) give the same bytes. */
#pragma once

#include "base/sys.h"
#include "nibble.h"
#include "tensor/half.h"

#define NBI_NVFP4_BLOCK     16
#define NBI_NVFP4_MAX_SCALE 448.0f                       /* largest E4M3 value, code 0x7E */
#define NBI_NVFP4_MAX       (6.0f * NBI_NVFP4_MAX_SCALE) /* largest value with tensor scale 1 */

/* How a block's scale is chosen; `base` is amax / 6, which maps the largest value to the largest
 * code. Codes stay within 0x01 (2^-9) and 0x7E (448); a block of zeros gets 0x38 (1.0).
 *
 *   rtn     base rounded to nearest even
 *   4over6  that, or 1.5 * base rounded likewise, whichever has the smaller squared error
 *   sweep   of the nine codes from rtn - 2 to rtn + 6, the one with the smallest squared error
 *
 * Squared errors are sums in f32 over the block, first value first; the earlier candidate wins a
 * tie (sweep: rtn first, then from the lowest code up). */

/* quantise `blocks` blocks of x / tensor_scale.
 * q: 8 bytes a block, s: 1 byte a block, disjoint from x. Values must be finite. */
void nbi_nvfp4_quantize(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                        enum nb_quant_method method, float tensor_scale);

/* The same with one scale for a tile of 16 x 16 values: rows x cols values, cols a multiple of 16;
 * the last tiles may have fewer rows. s still holds one byte per 1 x 16 block, equal in a tile. */
void nbi_nvfp4_quantize_tiles(uint8_t *q, uint8_t *s, const float *x, int64_t rows, int64_t cols,
                              enum nb_quant_method method, float tensor_scale);

/* Where the random bits of stochastic rounding come from: those of block b are Philox with key
 * seed and counter (2 (first_block + b) + {0, 1}, stream), 16 bits a value, low half-word first. */
struct nbi_nvfp4_random {
    uint64_t seed, stream;
    int64_t first_block; /* place of the first block in its tensor */
};

/* Stochastic rounding: unbiased, E[dequantised] = x, while amax / tensor_scale <= 2688. The scale
 * is the smallest code that does not clip (base rounded up), and each value goes to one of its two
 * neighbours with the probability that keeps its mean. */
void nbi_nvfp4_quantize_sr(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                           float tensor_scale, struct nbi_nvfp4_random random);

void nbi_nvfp4_dequantize_f32(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale);
void nbi_nvfp4_dequantize_f16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale);
void nbi_nvfp4_dequantize_bf16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                               float tensor_scale);

/* The two-level tensor scale for values up to amax: the smallest power of two t with
 * amax / t <= 6 * 448; 1 for amax 0. A power of two loses nothing against amax / 2688 (E4M3 has
 * exponent bits to spare) and makes every later product and inversion exact. */
NBI_HOST_DEVICE static inline float nbi_nvfp4_tensor_scale(float amax)
{
    if (!(amax > 0) || !isfinite(amax))
        return 1.0f;
    int e;
    float m = frexpf(amax / NBI_NVFP4_MAX, &e); /* m in [0.5, 1) */
    e -= m == 0.5f;
    return ldexpf(1.0f, e < -100 ? -100 : e); /* keeps 1 / t and every product normal */
}

/* Whether tensors with this amax can share an existing tensor scale: no value clips. */
static inline bool nbi_nvfp4_fits(float amax, float tensor_scale)
{
    return amax / tensor_scale <= NBI_NVFP4_MAX;
}

/* Values as a sum of two terms, as activations go to FP4 tensor cores: x quantised by rtn with
 * tensor scale t, and what that leaves, quantised by rtn with NBI_NVFP4_LO_SCALE * t.
 *
 * Where t is nbi_nvfp4_tensor_scale of the largest |x|, a quarter is the smallest power of two with
 * which nothing of the second clips: scales of the first's blocks are up to 448 t, a block leaves
 * up to once its scale (half the gap from 4 to 6), and that is 1792 quarters of t where 2688 fit.
 * The true largest of what is left would now and then allow a smaller one, for another reduction,
 * and be of use only to blocks whose scales are subnormal: 2^-14 of the largest.
 *
 * What is left is exact in f32. So is the sum: multiples of 2^-12 t, below 2^12 t. It is off by up
 * to 1 / 31 of a block's largest value, and by 0.9 % as root of mean squares of normal values,
 * where one term is off by 9.5 % and bf16 by 0.17 %. */
#define NBI_NVFP4_LO_SCALE 0.25f

/* y: that sum; it may be x. Values must be finite, t a power of two. */
void nbi_nvfp4_split_hi_lo(float *y, const float *x, int64_t blocks, float t);

/* Scales as FP4 tensor cores take them (cuBLASLt's VEC16_UE4M3): pieces of 128 rows and 4 blocks,
 * padded, the pieces of 128 rows one after another; in a piece the rows r, r + 32, r + 64 and
 * r + 96 lie beside each other. Bytes of the scales of a matrix, and the place of one. */
NBI_HOST_DEVICE static inline int64_t nbi_nvfp4_swizzled_bytes(int64_t rows, int64_t cols)
{
    int64_t wide = (cols + 4 * NBI_NVFP4_BLOCK - 1) / (4 * NBI_NVFP4_BLOCK);
    return (rows + 127) / 128 * wide * 512;
}

NBI_HOST_DEVICE static inline int64_t nbi_nvfp4_swizzled_at(int64_t row, int64_t block,
                                                            int64_t cols)
{
    int64_t wide = (cols + 4 * NBI_NVFP4_BLOCK - 1) / (4 * NBI_NVFP4_BLOCK);
    return (row / 128 * wide + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

/* Codes with the nibbles of ggml's 64-value block and back: `superblocks` of 4 blocks each, 36
 * bytes in GGUF form (4 scales, then per block 8 bytes that pair value j with value j + 8). */
void nbi_nvfp4_to_gguf(uint8_t *out, const uint8_t *q, const uint8_t *s, int64_t superblocks);
void nbi_nvfp4_from_gguf(uint8_t *q, uint8_t *s, const uint8_t *in, int64_t superblocks);
