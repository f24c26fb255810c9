/* codec_avx2.c - the primitives of codec_simd.h with 256-bit vectors. */
#if defined(__x86_64__)

#include <immintrin.h>

#define LANES 8
typedef __m256i vm;
#include "tensor/codec_simd.h"

static inline vf vf_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

static inline vi vi_min(vi a, vi b)
{
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

static inline vi vi_max(vi a, vi b)
{
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf vf_fnma(vf a, vf b, vf c)
{
    return _mm256_fnmadd_ps(a, b, c);
}

static inline vd vd_fma(vd a, vd b, vd c)
{
    return _mm256_fmadd_pd(a, b, c);
}

static inline vm vf_less(vf a, vf b)
{
    return (__m256i)(a < b);
}

static inline vm vf_equal(vf a, vf b)
{
    return (__m256i)(a == b);
}

static inline vm vi_less(vi a, vi b)
{
    return (__m256i)(a < b);
}

static inline vi vi_select(vi a, vi b, vm mask)
{
    return (vi)_mm256_blendv_epi8((__m256i)a, (__m256i)b, mask);
}

static inline int vm_count(vm mask)
{
    return __builtin_popcount((unsigned)_mm256_movemask_ps((vf)mask));
}

static inline vi vi_from_halves(vh v)
{
    return (vi)_mm256_cvtepi16_epi32((__m128i)v);
}

static inline vi vi_from_bytes(vb v)
{
    return (vi)_mm256_cvtepu8_epi32((__m128i)v);
}

static inline vh vi_to_halves(vi v)
{
    __m256i i = (__m256i)v;
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
}

static inline vb vi_to_bytes(vi v)
{
    __m128i words = (__m128i)vi_to_halves(v);
    return (vb)_mm_packus_epi16(words, words);
}

static inline vf vf_from_f16(vh v)
{
    return _mm256_cvtph_ps((__m128i)v);
}

static inline vh vf_to_f16(vf v)
{
    return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vd vd_load(const float *x)
{
    return _mm256_cvtps_pd(_mm_loadu_ps(x));
}

static inline double vd_sum(vd v)
{
    return (v[0] + v[1]) + (v[2] + v[3]);
}

/* v[k] becomes element k of the four vectors, in each 128-bit lane. */
static inline void transpose_elements(vf v[4])
{
    vf a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
    vf c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(a, c, 0x44);
    v[1] = _mm256_shuffle_ps(a, c, 0xEE);
    v[2] = _mm256_shuffle_ps(b, d, 0x44);
    v[3] = _mm256_shuffle_ps(b, d, 0xEE);
}

/* Half of a row: values 8 half to 8 half + 7. */
static inline void load_half(struct row *row, const float *x, int half, int n)
{
    vf part[2][4]; /* [g][k]: blocks 4 g to 4 g + 3, values k and k + 4 */
    /* Unrolled, so that these arrays stay in registers. */
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            int block = 4 * g + k < n ? 4 * g + k : 0;
            part[g][k] = vf_load(x + block * BLOCK + 8 * half);
        }
        transpose_elements(part[g]);
    }
    vu sign = {0};
    vf *a = row->a + 8 * half;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        sign |= split(&a[k], _mm256_permute2f128_ps(part[0][k], part[1][k], 0x20), k);
        sign |= split(&a[k + 4], _mm256_permute2f128_ps(part[0][k], part[1][k], 0x31), k + 4);
    }
    row->sign[half] = sign;
}

static inline void load_row(struct row *row, const float *x, int n)
{
    load_half(row, x, 0, n);
    load_half(row, x, 1, n);
}

static inline void interleave(vu pairs[2], vu low, vu high)
{
    __m256i a = _mm256_unpacklo_epi32((__m256i)low, (__m256i)high);
    __m256i b = _mm256_unpackhi_epi32((__m256i)low, (__m256i)high);
    pairs[0] = (vu)_mm256_permute2x128_si256(a, b, 0x20);
    pairs[1] = (vu)_mm256_permute2x128_si256(a, b, 0x31);
}

/* The codes select magnitudes, then set the sign. */
static inline void decode_block(float *y, const uint8_t *q, float scale, float tensor_scale)
{
    const vf e2m1 = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const vu nibble = {0, 4, 8, 12, 16, 20, 24, 28};
    vf values = e2m1 * scale * tensor_scale;
    for (int half = 0; half < 2; half++) {
        uint32_t codes;
        memcpy(&codes, q + 4 * half, sizeof codes);
        vu index = codes >> nibble; /* only the low three bits are used */
        vf v = _mm256_permutevar8x32_ps(values, (__m256i)index);
        vu bits = (vu)v ^ index >> 3 << 31;
        memcpy(y + 8 * half, &bits, sizeof bits);
    }
}

const struct nbi_codec_table nbi_codec_avx2 = {
    .name = "avx2",
    .quantize = quantize,
    .dequantize_f32 = dequantize_f32,
    .bf16_to_f32 = bf16_to_f32,
    .f16_to_f32 = f16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .f32_to_f16 = f32_to_f16,
    .amax = amax,
    .error = error,
};

#endif
