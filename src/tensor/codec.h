/* codec.h - the codec's inner loops, as one table of functions per instruction set. codec_scalar.c
 * defines the results; the others must return the same bytes (tests/unit/test_nvfp4.c compares all
 * that the CPU supports). */
#pragma once

#include "base/sys.h"
#include "nibble/files.h"

struct nbi_codec_table {
    const char *name;

    /* Quantises columns of `rows` blocks that share a scale: for r < rows <= 16 and j < blocks,
     * block (r, j) is at x + (r * stride + j) * 16, its codes at q + (r * stride + j) * 8 and its
     * scale at s + r * stride + j. rows is 1 for ordinary quantisation. Values must be finite. */
    void (*quantize)(uint8_t *q, uint8_t *s, const float *x, int64_t blocks, int rows,
                     int64_t stride, enum nb_quant_method method);

    /* y[i] = (e2m1 * e4m3) * tensor_scale, rounded after each product. */
    void (*dequantize_f32)(float *y, const uint8_t *q, const uint8_t *s, int64_t blocks,
                           float tensor_scale);

    /* Conversions of n values, as in half.h. */
    void (*bf16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f16_to_f32)(float *y, const uint16_t *x, int64_t n);
    void (*f32_to_bf16)(uint16_t *y, const float *x, int64_t n);
    void (*f32_to_f16)(uint16_t *y, const float *x, int64_t n);

    /* Largest absolute value, compared by bit pattern, so that NaN and infinity are returned; 0 if
     * n is 0. */
    float (*amax)(const float *x, int64_t n);

    /* Adds to sums: squared error of y against x, squares of x, count of y[i] == 0. */
    void (*error)(const float *x, const float *y, int64_t n, double sums[3]);
};

extern const struct nbi_codec_table nbi_codec_scalar;
#if defined(__x86_64__)
extern const struct nbi_codec_table nbi_codec_avx2, nbi_codec_avx512;
#endif

/* The fastest table that this CPU supports. */
const struct nbi_codec_table *nbi_codec_table(void);

/* The table of one level; NULL if the CPU or the build lacks it. */
const struct nbi_codec_table *nbi_codec_table_at(enum nbi_simd level);
