/* codec_avx512.c - the primitives of codec_simd.h with 512-bit vectors. */
#if defined(__x86_64__)

#include <immintrin.h>

#define LANES 16
typedef __mmask16 vm;
#include "tensor/codec_simd.h"

static inline vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

static inline vi vi_min(vi a, vi b)
{
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

static inline vi vi_max(vi a, vi b)
{
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf vf_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

static inline vd vd_fma(vd a, vd b, vd c)
{
    return _mm512_fmadd_pd(a, b, c);
}

static inline vm vf_less(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}

static inline vm vf_equal(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}

static inline vm vi_less(vi a, vi b)
{
    return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b);
}

static inline vi vi_select(vi a, vi b, vm mask)
{
    return (vi)_mm512_mask_mov_epi32((__m512i)a, mask, (__m512i)b);
}

static inline int vm_count(vm mask)
{
    return __builtin_popcount(mask);
}

static inline vi vi_from_halves(vh v)
{
    return (vi)_mm512_cvtepi16_epi32((__m256i)v);
}

static inline vi vi_from_bytes(vb v)
{
    return (vi)_mm512_cvtepu8_epi32((__m128i)v);
}

static inline vh vi_to_halves(vi v)
{
    return (vh)_mm512_cvtepi32_epi16((__m512i)v);
}

static inline vb vi_to_bytes(vi v)
{
    return (vb)_mm512_cvtepi32_epi8((__m512i)v);
}

static inline vf vf_from_f16(vh v)
{
    return _mm512_cvtph_ps((__m256i)v);
}

static inline vh vf_to_f16(vf v)
{
    return (vh)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vd vd_load(const float *x)
{
    return _mm512_cvtps_pd(_mm256_loadu_ps(x));
}

static inline double vd_sum(vd v)
{
    return _mm512_reduce_add_pd(v);
}

/* v[k] becomes element k of the four vectors, in each 128-bit lane. */
static inline void transpose_elements(vf v[4])
{
    vf a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    vf c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(a, c, 0x44);
    v[1] = _mm512_shuffle_ps(a, c, 0xEE);
    v[2] = _mm512_shuffle_ps(b, d, 0x44);
    v[3] = _mm512_shuffle_ps(b, d, 0xEE);
}

/* v[k] becomes 128-bit lane k of the four vectors. */
static inline void transpose_lanes(vf v[4])
{
    vf a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xEE);
    vf c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xEE);
    v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_f32x4(a, c, 0xDD);
    v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_f32x4(b, d, 0xDD);
}

static inline void load_row(struct row *row, const float *x, int n)
{
    vf part[4][4]; /* [g][k]: blocks 4 g to 4 g + 3, values k, k + 4, k + 8, k + 12 */
    /* Unrolled, so that these arrays stay in registers. */
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            part[g][k] = vf_load(x + (4 * g + k < n ? 4 * g + k : 0) * BLOCK);
        transpose_elements(part[g]);
    }
    vu sign[2] = {{0}, {0}};
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        vf v[4] = {part[0][k], part[1][k], part[2][k], part[3][k]};
        transpose_lanes(v);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            sign[j / 2] |= split(&row->a[4 * j + k], v[j], 4 * j + k);
    }
    row->sign[0] = sign[0];
    row->sign[1] = sign[1];
}

static inline void interleave(vu pairs[2], vu low, vu high)
{
    const vi first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    __m512i a = (__m512i)low, b = (__m512i)high;
    pairs[0] = (vu)_mm512_permutex2var_epi32(a, (__m512i)first, b);
    pairs[1] = (vu)_mm512_permutex2var_epi32(a, (__m512i)(first + 8), b);
}

static inline void decode_block(float *y, const uint8_t *q, float scale, float tensor_scale)
{
    const vf e2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    vf values = e2m1 * scale * tensor_scale;
    /* One byte per 64 bits; its high nibble moves to the upper dword. The permutation uses only
     * four bits of each index. */
    __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)q));
    __m512i index = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
    _mm512_storeu_ps(y, _mm512_permutexvar_ps(index, values));
}

const struct nbi_codec_table nbi_codec_avx512 = {
    .name = "avx512",
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
