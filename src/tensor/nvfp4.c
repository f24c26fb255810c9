/* nvfp4.c - the codec above the inner loops: tensor scales, tiles, stochastic rounding, hi + lo,
 * ggml's order of nibbles. */
#include "tensor/nvfp4.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "tensor/codec.h"
#include "tensor/half.h"

#define BLOCK NBI_NVFP4_BLOCK
#define CHUNK 256 /* blocks per stack buffer: 16 KiB of f32 */

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* y = x / t, with at most one rounding; exact for powers of two, where the cheaper product is used.
 */
static void divide(float *y, const float *x, int64_t n, float t)
{
    float inverse = 1.0f / t;
    bool power_of_two = (nbi_f32_bits(t) & 0x7FFFFF) == 0 && isnormal(inverse);
    for (int64_t i = 0; i < n; i++)
        y[i] = power_of_two ? x[i] * inverse : x[i] / t;
}

void nbi_nvfp4_quantize(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                        enum nb_quant_method method, float tensor_scale)
{
    const struct nbi_codec_table *k = nbi_codec_table();
    if (tensor_scale == 1.0f) {
        k->quantize(q, s, x, blocks, 1, blocks, method);
        return;
    }
    float buf[CHUNK * BLOCK];
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        int64_t n = min64(CHUNK, blocks - b);
        divide(buf, x + b * BLOCK, n * BLOCK, tensor_scale);
        k->quantize(q + b * BLOCK / 2, s + b, buf, n, 1, n, method);
    }
}

void nbi_nvfp4_encode(uint8_t *q, const uint8_t *s, const float *x, int64_t blocks,
                      float tensor_scale)
{
    float v[BLOCK];
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, q += BLOCK / 2) {
        float scale = nbi_e4m3_to_f32(s[b]);
        divide(v, x, BLOCK, tensor_scale);
        for (int i = 0; i < BLOCK; i += 2)
            q[i / 2] =
                (uint8_t)(nbi_f32_to_e2m1(v[i] / scale) | nbi_f32_to_e2m1(v[i + 1] / scale) << 4);
    }
}

void nbi_nvfp4_quantize_tiles(uint8_t *q, uint8_t *s, const float *x, int64_t rows, int64_t cols,
                              enum nb_quant_method method, float tensor_scale)
{
    /* A strip of 16 tiles passes through the buffer at a time. */
    enum { STRIP_BLOCKS = CHUNK / BLOCK };
    const struct nbi_codec_table *k = nbi_codec_table();
    float buf[CHUNK * BLOCK];
    uint8_t codes[CHUNK * BLOCK / 2], scales[CHUNK];
    int64_t stride = cols / BLOCK;
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK)
        for (int64_t j = 0; j < stride; j += STRIP_BLOCKS) {
            int tile_rows = (int)min64(BLOCK, rows - r0);
            int64_t strip_blocks = min64(STRIP_BLOCKS, stride - j);
            for (int r = 0; r < tile_rows; r++)
                divide(buf + r * strip_blocks * BLOCK, x + ((r0 + r) * stride + j) * BLOCK,
                       strip_blocks * BLOCK, tensor_scale);
            k->quantize(codes, scales, buf, strip_blocks, tile_rows, strip_blocks, method);
            for (int r = 0; r < tile_rows; r++) {
                int64_t at = (r0 + r) * stride + j;
                memcpy(q + at * BLOCK / 2, codes + r * strip_blocks * BLOCK / 2,
                       (size_t)strip_blocks * BLOCK / 2);
                memcpy(s + at, scales + r * strip_blocks, (size_t)strip_blocks);
            }
        }
}

/* The smallest E4M3 code whose value is at least v. */
static uint8_t e4m3_round_up(float v)
{
    uint8_t code = nbi_f32_to_e4m3(v);
    if (nbi_e4m3_to_f32(code) < v && code < 0x7E)
        code++;
    return code < 0x01 ? 0x01 : code;
}

/* Rounds a to one of its two neighbours; u is uniform over 0 to 65535. */
static uint8_t round_stochastic(float a, uint32_t u)
{
    uint8_t low = 7;
    while (low > 0 && nbi_e2m1_to_f32(low) > a)
        low--;
    if (low == 7)
        return 7;
    float below = nbi_e2m1_to_f32(low), above = nbi_e2m1_to_f32((uint8_t)(low + 1));
    float fraction = (a - below) / (above - below);
    return (uint8_t)(low + (fraction > ((float)u + 0.5f) * 0x1p-16f));
}

void nbi_nvfp4_quantize_sr(uint8_t *q, uint8_t *s, const float *x, int64_t blocks,
                           float tensor_scale, struct nbi_nvfp4_random random)
{
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, q += BLOCK / 2) {
        float v[BLOCK], amax = 0;
        divide(v, x, BLOCK, tensor_scale);
        for (int i = 0; i < BLOCK; i++)
            amax = fmaxf(amax, fabsf(v[i]));
        s[b] = amax == 0 ? 0x38 : e4m3_round_up(amax / 6.0f);
        float scale = nbi_e4m3_to_f32(s[b]);
        struct nbi_philox bits[2];
        for (int h = 0; h < 2; h++)
            bits[h] = nbi_philox(random.seed, 2 * (uint64_t)(random.first_block + b) + (uint64_t)h,
                                 random.stream);
        for (int i = 0; i < BLOCK; i++) {
            uint32_t u = bits[i / 8].v[i % 8 / 2] >> 16 * (i & 1) & 0xFFFF;
            uint8_t code = round_stochastic(fabsf(v[i] / scale), u);
            code |= signbit(v[i]) ? 8 : 0;
            q[i / 2] = (uint8_t)(i & 1 ? q[i / 2] | code << 4 : code);
        }
    }
}

void nbi_nvfp4_dequantize_f32(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale)
{
    nbi_codec_table()->dequantize_f32(y, q, s, blocks, tensor_scale);
}

void nbi_nvfp4_split_hi_lo(float *y, const float *x, int64_t blocks, float t)
{
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, y += BLOCK) {
        float hi[BLOCK], residual[BLOCK];
        uint8_t q[BLOCK / 2], s;
        nbi_nvfp4_quantize(q, &s, x, 1, NB_QUANT_RTN, t);
        nbi_nvfp4_dequantize_f32(hi, q, &s, 1, t);
        for (int i = 0; i < BLOCK; i++)
            residual[i] = x[i] - hi[i];
        nbi_nvfp4_quantize(q, &s, residual, 1, NB_QUANT_RTN, NBI_NVFP4_LO_SCALE * t);
        nbi_nvfp4_dequantize_f32(y, q, &s, 1, NBI_NVFP4_LO_SCALE * t);
        for (int i = 0; i < BLOCK; i++)
            y[i] += hi[i];
    }
}

static void dequantize_half(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                            float tensor_scale,
                            void (*from_f32)(uint16_t *, const float *, int64_t))
{
    float buf[CHUNK * BLOCK];
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        int64_t n = min64(CHUNK, blocks - b);
        nbi_codec_table()->dequantize_f32(buf, q + b * BLOCK / 2, s + b, n, tensor_scale);
        from_f32(y + b * BLOCK, buf, n * BLOCK);
    }
}

void nbi_nvfp4_dequantize_f16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                              float tensor_scale)
{
    dequantize_half(y, q, s, blocks, tensor_scale, nbi_codec_table()->f32_to_f16);
}

void nbi_nvfp4_dequantize_bf16(uint16_t *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                               float tensor_scale)
{
    dequantize_half(y, q, s, blocks, tensor_scale, nbi_codec_table()->f32_to_bf16);
}

/* Spreads the eight nibbles of x, lowest first, over the eight bytes of the result; and back. */
static uint64_t nibbles_to_bytes(uint64_t x)
{
    x = (x | x << 16) & 0x0000FFFF0000FFFFull;
    x = (x | x << 8) & 0x00FF00FF00FF00FFull;
    return (x | x << 4) & 0x0F0F0F0F0F0F0F0Full;
}

static uint32_t bytes_to_nibbles(uint64_t x)
{
    x &= 0x0F0F0F0F0F0F0F0Full;
    x = (x | x >> 4) & 0x00FF00FF00FF00FFull;
    x = (x | x >> 8) & 0x0000FFFF0000FFFFull;
    return (uint32_t)(x | x >> 16);
}

void nbi_nvfp4_to_gguf(uint8_t *out, const uint8_t *q, const uint8_t *s, int64_t superblocks)
{
    for (int64_t b = 0; b < superblocks; b++, out += 36, s += 4) {
        memcpy(out, s, 4);
        for (int sub = 0; sub < 4; sub++, q += 8) {
            uint32_t half[2]; /* values 0 to 7, values 8 to 15 */
            memcpy(half, q, 8);
            uint64_t paired = nibbles_to_bytes(half[0]) | nibbles_to_bytes(half[1]) << 4;
            memcpy(out + 4 + 8 * sub, &paired, 8);
        }
    }
}

void nbi_nvfp4_from_gguf(uint8_t *q, uint8_t *s, const uint8_t *in, int64_t superblocks)
{
    for (int64_t b = 0; b < superblocks; b++, in += 36, s += 4) {
        memcpy(s, in, 4);
        for (int sub = 0; sub < 4; sub++, q += 8) {
            uint64_t paired;
            memcpy(&paired, in + 4 + 8 * sub, 8);
            uint32_t half[2] = {bytes_to_nibbles(paired), bytes_to_nibbles(paired >> 4)};
            memcpy(q, half, 8);
        }
    }
}
