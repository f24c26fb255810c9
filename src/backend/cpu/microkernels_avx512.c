/* microkernels_avx512.c - inner loops in AVX-512 with VNNI: 16 floats per vector, one vector lane
 * per row of a tile. */
#define LANES      16
#define QUERY_TILE 4
#define MR         12
#define NR_VECTORS 2 /* MR by NR_VECTORS accumulators fill the registers */
#define X_TILE     6 /* rows of x against four rows of w, in dot products of floats */
#include "backend/cpu/microkernels_simd.h"
#include "backend/cpu/optimizer_loops.h"

#include <immintrin.h>

/* ---- primitives ---- */

static inline vf load_f16(const void *p)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
}

/* An E4M3 value, its bits shifted left by seven, is the f16 of 2^-8 times that value. */
static inline __m512 e4m3_scaled(const void *p)
{
    __m256i u16 = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(u16, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(u16, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}

static inline vf load_e4m3(const void *p)
{
    return (vf)_mm512_mul_ps(e4m3_scaled(p), _mm512_set1_ps(0x1p8f));
}

static inline vf fmadd(vf a, vf b, vf c)
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

static inline vi interleave_halves(vi v)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return (vi)_mm512_permutexvar_epi32(order, (__m512i)v);
}

static inline vi evens_first(vi v)
{
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return (vi)_mm512_permutexvar_epi32(order, (__m512i)v);
}

/* The sum of the four quarters. */
static inline __m128 sum_quarters(vf v)
{
    __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

static inline float reduce_add(vf v)
{
    __m128 q = sum_quarters(v), pair = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

static inline float reduce_max(vf v)
{
    return _mm512_reduce_max_ps((__m512)v);
}

/* Transposes 4 x 4, then adds. */
static inline void reduce_add4(float out[4], const vf v[4])
{
    __m128 partial[4];
    for (int i = 0; i < 4; i++)
        partial[i] = sum_quarters(v[i]);
    _MM_TRANSPOSE4_PS(partial[0], partial[1], partial[2], partial[3]);
    _mm_storeu_ps(
        out, _mm_add_ps(_mm_add_ps(partial[0], partial[2]), _mm_add_ps(partial[1], partial[3])));
}

/* ---- products with tiles ---- */

/* Scales are positive: no sign bit to move. */
static inline __m512 tile_scales(const uint8_t *p)
{
    __m256i u16 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(u16, 7));
}

/* d + w . (the pair at x), in every lane. In assembly, since compilers load the pair with an
 * instruction of its own, which costs 5 %. */
static inline __m512i dot_pair(__m512i d, __m512i w, const int16_t *x)
{
    __asm__("vpdpwssd %2%{1to16%}, %1, %0"
            : "+v"(d)
            : "v"(w), "m"(*(const int16_t(*)[2])(const void *)x));
    return d;
}

/* Writes the results of one row of x; lanes are rows of w. */
static inline void store_rows(const struct nbi_dot_tile *p, int c, __m512 sum)
{
    __mmask16 mask = (__mmask16)((1u << p->rows) - 1);
    float *y = p->y + c * p->ldy;
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(p->scale));
    if (p->add)
        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sum);
    _mm512_mask_storeu_ps(y, mask, sum);
}

/* partial[c] += a group of 16 columns: vectors 2g and 2g + 1 of the tile. */
static inline __attribute__((always_inline)) void
x_i16_group(__m512 *partial, const uint8_t *tile, const int16_t *x, const int g, const int n)
{
    const __m512i table = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    __m512 scale = tile_scales(tile + 16 * g);
    __m512i d[NBI_X_PANEL_ROWS];
    for (int c = 0; c < n; c++)
        d[c] = _mm512_setzero_si512();
    for (int v = 0; v < 2; v++) {
        __m512i codes = _mm512_loadu_si512(tile + 32 + 64 * (2 * g + v));
        for (int j = 0; j < 4; j++) { /* the table is repeated, so the fifth bit does not matter */
            __m512i w = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, (unsigned)j * 4), table);
            for (int c = 0; c < n; c++)
                d[c] = dot_pair(d[c], w, x + ((4 * v + j) * n + c) * 2);
        }
    }
    for (int c = 0; c < n; c++)
        partial[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[c]), scale, partial[c]);
}

/* d + w . (the four bytes at x), in every lane. */
static inline __m512i dot_4_bytes(__m512i d, __m512i w, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(d)
            : "v"(w), "m"(*(const int8_t(*)[4])(const void *)x));
    return d;
}

/* The sum of one group for a row in hi/lo bytes: vectors 2g and 2g + 1 of the tile. */
static inline __m512i hi_lo_group(const uint8_t *tile, const int8_t *x, int g)
{
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i mask = _mm512_set1_epi8(15);
    int32_t sum;
    memcpy(&sum, x + 64 + 4 * g, sizeof sum);
    __m512i high = _mm512_setzero_si512(), low = _mm512_set1_epi32(sum);
    for (int v = 2 * g; v < 2 * g + 2; v++) {
        __m512i codes = _mm512_loadu_si512(tile + 32 + 64 * v);
        __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
        codes = _mm512_srli_epi16(codes, 4);
        __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
        high = dot_4_bytes(high, even, x + 16 * v);
        low = dot_4_bytes(low, even, x + 16 * v + 8);
        high = dot_4_bytes(high, odd, x + 16 * v + 4);
        low = dot_4_bytes(low, odd, x + 16 * v + 12);
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

/* One row of x in hi/lo bytes. The same sums in the same order as x_i16_panel, hence the same bits.
 */
static void x_i16_hi_lo(const struct nbi_dot_tile *p)
{
    const int64_t tiles = nbi_tiles_across(p->K), step = NBI_X_I16_BLOCK / CPU_TILE_COLS;
    const int8_t *x = (const int8_t *)p->x_i16;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t b = 0; b * step < tiles; b++) {
        int64_t end = (b + 1) * step < tiles ? (b + 1) * step : tiles;
        __m512 partial = _mm512_setzero_ps();
        for (int64_t t = b * step; t < end; t++) {
            const uint8_t *tile = (const uint8_t *)p->w + t * CPU_TILE_BYTES;
            for (int g = 0; g < 2; g++) {
                __m512i d = hi_lo_group(tile, x + t * 2 * NBI_X_I16_HI_LO, g);
                partial =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), tile_scales(tile + 16 * g), partial);
            }
        }
        sum = _mm512_fmadd_ps(partial, _mm512_set1_ps(p->x_i16_scale[b]), sum);
    }
    store_rows(p, 0, sum);
}

static inline __attribute__((always_inline)) void x_i16_panel(const struct nbi_dot_tile *p,
                                                              const int n)
{
    const int64_t tiles = nbi_tiles_across(p->K), step = NBI_X_I16_BLOCK / CPU_TILE_COLS;
    __m512 sum[NBI_X_PANEL_ROWS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm512_setzero_ps();
    for (int64_t b = 0; b * step < tiles; b++) {
        int64_t end = (b + 1) * step < tiles ? (b + 1) * step : tiles;
        __m512 partial[NBI_X_PANEL_ROWS];
        for (int c = 0; c < n; c++)
            partial[c] = _mm512_setzero_ps();
        for (int64_t t = b * step; t < end; t++) {
            const uint8_t *tile = (const uint8_t *)p->w + t * CPU_TILE_BYTES;
            x_i16_group(partial, tile, p->x_i16 + t * CPU_TILE_COLS * n, 0, n);
            x_i16_group(partial, tile, p->x_i16 + (t * CPU_TILE_COLS + 16) * n, 1, n);
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm512_fmadd_ps(partial[c], _mm512_set1_ps(p->x_i16_scale[b * n + c]), sum[c]);
    }
    for (int c = 0; c < n; c++)
        store_rows(p, c, sum[c]);
}

static inline __attribute__((always_inline)) void exact_panel(const struct nbi_dot_tile *p,
                                                              const int n)
{
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    __m512 sum[NBI_X_PANEL_ROWS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm512_setzero_ps();
    for (int64_t g = 0; g < p->K / 16; g++) {
        const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
        __m512 scale = _mm512_mul_ps(tile_scales(tile + (g & 1) * 16), _mm512_set1_ps(0x1p8f));
        __m512 partial[NBI_X_PANEL_ROWS];
        for (int c = 0; c < n; c++)
            partial[c] = _mm512_setzero_ps();
        for (int v = 0; v < 2; v++) {
            __m512i codes = _mm512_loadu_si512(tile + 32 + 64 * (2 * (g & 1) + v));
            for (int j = 0; j < 8; j++) {
                /* The permutation uses only the low four bits of each lane. */
                __m512 w = _mm512_permutexvar_ps(codes, table);
                codes = _mm512_srli_epi32(codes, 4);
                for (int c = 0; c < n; c++)
                    partial[c] = _mm512_fmadd_ps(
                        w, _mm512_set1_ps(p->x[c * p->ldx + g * 16 + 8 * v + j]), partial[c]);
            }
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm512_fmadd_ps(partial[c], scale, sum[c]);
    }
    for (int c = 0; c < n; c++)
        store_rows(p, c, sum[c]);
}

/* A constant number of rows lets the compiler keep their sums in registers. */
#define BY_X_ROWS(product)                                                                         \
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

static void tiles_x_i16(const struct nbi_dot_tile *p)
{
    if (p->n == 1)
        x_i16_hi_lo(p);
    else
        BY_X_ROWS(x_i16_panel)
}

static void tiles_exact(const struct nbi_dot_tile *p)
{
    BY_X_ROWS(exact_panel)
}

/* One row of the tile at a time: each of the four vectors holds four bytes of its codes. */
static void tile_to_f32(float *low, float *high, int64_t ld, const uint8_t *tile)
{
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                        -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    float scale[32];
    for (int g = 0; g < 2; g++)
        _mm512_storeu_ps(scale + 16 * g,
                         _mm512_mul_ps(tile_scales(tile + 16 * g), _mm512_set1_ps(0x1p8f)));
    for (int g = 0; g < 2; g++) {
        float *y = g ? high : low;
        for (int r = 0; r < CPU_TILE_ROWS; r++) {
            int32_t codes[2];
            memcpy(&codes[0], tile + 32 + 128 * g + 4 * r, 4);
            memcpy(&codes[1], tile + 32 + 128 * g + 64 + 4 * r, 4);
            __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(codes[0]), 0xFF00, codes[1]);
            __m512 w = _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shift), table);
            _mm512_storeu_ps(y + r * ld, _mm512_mul_ps(w, _mm512_set1_ps(scale[16 * g + r])));
        }
    }
}

const struct nbi_microkernels nbi_microkernels_avx512 = {
    .name = "avx512",
    .mr = MR,
    .nr = NR,
    .tiles_exact = tiles_exact,
    .tiles_x_i16 = tiles_x_i16,
    .rows_float = rows_float,
    .quantize_x_i16 = quantize_x_i16,
    .rmsnorm = rmsnorm,
    .norm_rope = norm_rope,
    .attention = attention,
    .swiglu = swiglu,
    .from_f32 = from_f32,
    .to_f32 = to_f32,
    .argmax = argmax,
    .grad_stats = grad_stats,
    .adamw = adamw,
    .exp_sum = exp_sum,
    .gemm_tile = gemm_tile,
    .pack = pack,
    .tile_to_f32 = tile_to_f32,
    .rmsnorm_bwd = rmsnorm_bwd,
    .norm_rope_bwd = norm_rope_bwd,
    .swiglu_bwd = swiglu_bwd,
    .softmax_bwd = softmax_bwd,
};
