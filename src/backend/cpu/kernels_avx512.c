/* kernels_avx512.c - inner loops in AVX-512 with VNNI; 16 floats a vector, a row of a tile a lane.
 */
#define LANES 16
#include "backend/cpu/kernels_lanes.h"

#include <immintrin.h>

/* ---- primitives ---- */

static inline vf from_f16(const void *p)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
}

/* The bits of an E4M3 value, seven places up, are those of an f16 of 2^-8 of it. */
static inline __m512 e4m3_scaled(const void *p)
{
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}

static inline vf from_e4m3(const void *p)
{
    return (vf)_mm512_mul_ps(e4m3_scaled(p), _mm512_set1_ps(0x1p8f));
}

static inline vf fused(vf a, vf b, vf c)
{
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline vf vmax(vf a, vf b)
{
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

static inline vi round_to_int(vf x)
{
    return (vi)_mm512_cvtps_epi32((__m512)x);
}

static inline float add_up(vf v)
{
    return _mm512_reduce_add_ps((__m512)v);
}

static inline float top_of(vf v)
{
    return _mm512_reduce_max_ps((__m512)v);
}

/* Sums of four vectors. */
static inline void add_up4(float out[4], const vf v[4])
{
    /* Quarters of each vector are added; then four by four is turned and added. */
    __m128 part[4];
    for (int i = 0; i < 4; i++) {
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]),
                                    _mm512_extractf32x8_ps((__m512)v[i], 1));
        part[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(part[0], part[1]), _mm_add_ps(part[2], part[3])));
}

/* A group of 16 is a vector. */
static void quantize_block(struct nbi_q15_block *out, const float *x)
{
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    float amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    __m512 inverse = _mm512_set1_ps(amax >= NBI_Q15_TINY ? NBI_Q15_MAX / amax : 0);
    __m512i q[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)),
                    _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse))};
    for (int g = 0; g < 2; g++) {
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q[g], _mm512_set1_epi32(64)), 7);
        __m512i low = _mm512_sub_epi32(q[g], _mm512_slli_epi32(high, 7));
        _mm_storeu_si128((__m128i *)(void *)(out->high + 16 * g), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(void *)(out->low + 16 * g), _mm512_cvtepi32_epi8(low));
        out->sum[g] = -12 * _mm512_reduce_add_epi32(q[g]);
    }
    /* NaN and infinities must show. */
    bool odd = (_mm512_fpclass_ps_mask(a, 0x99) | _mm512_fpclass_ps_mask(b, 0x99)) != 0;
    out->scale = odd ? NAN : amax / NBI_Q15_MAX * 0x1p7f;
    out->unused = 0;
}

static void quantize_q15(struct nbi_q15_block *out, const float *x, int64_t K)
{
    int64_t b = 0;
    for (; (b + 1) * 32 <= K; b++)
        quantize_block(out + b, x + b * 32);
    if (b * 32 < K)
        nbi_cpu_kernels_scalar.quantize_q15(out + b, x + b * 32, K - b * 32);
}

/* ---- products with tiles ---- */

/* Scales are positive, so the sign needs no care. */
static inline __m512 tile_scales(const uint8_t *p)
{
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
}

/* Four bytes, in every lane. */
static inline __m512i ints(const int8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* Results of one column: lanes are rows. */
static inline void put(const struct nbi_product *p, int c, __m512 sum)
{
    __mmask16 mask = (__mmask16)((1u << p->rows) - 1);
    float *y = p->y + c * p->ldy;
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(p->scale));
    if (p->add)
        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sum);
    _mm512_mask_storeu_ps(y, mask, sum);
}

static inline __attribute__((always_inline)) void q15_columns(const struct nbi_product *p,
                                                              const int n)
{
    int64_t blocks = nbi_tiles_across(p->K);
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[NBI_COLUMNS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *tile = (const uint8_t *)p->w + b * NBI_TILE_BYTES;
        __m512 s0 = tile_scales(tile), s1 = tile_scales(tile + 16);
        __m512i w0[4], w1[4];
        for (int v = 0; v < 4; v++) {
            __m512i codes = _mm512_loadu_si512(tile + 32 + 64 * v);
            w0[v] = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, low));
            w1[v] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
        }
        for (int c = 0; c < n; c++) {
            const struct nbi_q15_block *block = &p->q15[c * blocks + b];
            __m512i d0 = _mm512_setzero_si512(), d1 = d0;
            for (int v = 0; v < 4; v++) {
                d0 = _mm512_dpbusd_epi32(d0, w0[v], ints(block->high + 4 * v));
                d1 = _mm512_dpbusd_epi32(d1, w1[v], ints(block->high + 16 + 4 * v));
            }
            d0 = _mm512_add_epi32(_mm512_slli_epi32(d0, 7), _mm512_set1_epi32(block->sum[0]));
            d1 = _mm512_add_epi32(_mm512_slli_epi32(d1, 7), _mm512_set1_epi32(block->sum[1]));
            for (int v = 0; v < 4; v++) {
                d0 = _mm512_dpbusd_epi32(d0, w0[v], ints(block->low + 4 * v));
                d1 = _mm512_dpbusd_epi32(d1, w1[v], ints(block->low + 16 + 4 * v));
            }
            __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(d0), s0);
            part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d1), s1, part);
            sum[c] = _mm512_fmadd_ps(part, _mm512_set1_ps(block->scale), sum[c]);
        }
    }
    for (int c = 0; c < n; c++)
        put(p, c, sum[c]);
}

static inline __attribute__((always_inline)) void exact_columns(const struct nbi_product *p,
                                                                const int n)
{
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512 sum[NBI_COLUMNS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm512_setzero_ps();
    for (int64_t g = 0; g < p->K / 16; g++) {
        const uint8_t *tile = (const uint8_t *)p->w + g / 2 * NBI_TILE_BYTES;
        unsigned shift = g & 1 ? 4 : 0;
        __m512 scale = _mm512_mul_ps(tile_scales(tile + (g & 1) * 16), _mm512_set1_ps(0x1p8f));
        __m512 part[NBI_COLUMNS];
        for (int c = 0; c < n; c++)
            part[c] = _mm512_setzero_ps();
        for (int v = 0; v < 4; v++) {
            __m512i codes = _mm512_loadu_si512(tile + 32 + 64 * v);
            codes = _mm512_srl_epi32(codes, _mm_cvtsi32_si128((int)shift));
            for (int j = 0; j < 4; j++) {
                /* The permutation looks at the low four bits of each lane alone. */
                __m512 w = _mm512_permutexvar_ps(codes, table);
                codes = _mm512_srli_epi32(codes, 8);
                for (int c = 0; c < n; c++)
                    part[c] = _mm512_fmadd_ps(
                        w, _mm512_set1_ps(p->x[c * p->ldx + g * 16 + 4 * v + j]), part[c]);
            }
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm512_fmadd_ps(part[c], scale, sum[c]);
    }
    for (int c = 0; c < n; c++)
        put(p, c, sum[c]);
}

/* A constant number of columns keeps their sums in registers. */
#define BY_COLUMNS(product)                                                                        \
    switch (p->n) {                                                                                \
    case 1:                                                                                        \
        product(p, 1);                                                                             \
        break;                                                                                     \
    case 2:                                                                                        \
        product(p, 2);                                                                             \
        break;                                                                                     \
    case 3:                                                                                        \
        product(p, 3);                                                                             \
        break;                                                                                     \
    case 4:                                                                                        \
        product(p, 4);                                                                             \
        break;                                                                                     \
    case 5:                                                                                        \
        product(p, 5);                                                                             \
        break;                                                                                     \
    case 6:                                                                                        \
        product(p, 6);                                                                             \
        break;                                                                                     \
    case 7:                                                                                        \
        product(p, 7);                                                                             \
        break;                                                                                     \
    default:                                                                                       \
        product(p, 8);                                                                             \
    }

static void tiles_q15(const struct nbi_product *p)
{
    BY_COLUMNS(q15_columns)
}

static void tiles_exact(const struct nbi_product *p)
{
    BY_COLUMNS(exact_columns)
}

const struct nbi_cpu_kernels nbi_cpu_kernels_avx512 = {
    .name = "avx512",
    .tiles_exact = tiles_exact,
    .tiles_q15 = tiles_q15,
    .rows_float = rows_float,
    .quantize_q15 = quantize_q15,
    .rmsnorm = rmsnorm,
    .norm_rope = norm_rope,
    .attend = attend,
    .swiglu = swiglu,
    .narrow = narrow,
    .widen = widen,
    .argmax = argmax,
};
