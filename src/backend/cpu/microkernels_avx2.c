/* microkernels_avx2.c - inner loops in AVX2 with FMA and F16C: 8 floats per vector, two vectors for
 * the 16 rows of a tile. */
#define LANES      8
#define QUERY_TILE 2
#define MR         6
#define NR_VECTORS 2 /* MR by NR_VECTORS accumulators fill the registers */
#define X_TILE     3 /* rows of x against four rows of w, in dot products of floats */
#include "backend/cpu/microkernels_simd.h"
#include "backend/cpu/optimizer_loops.h"

#include <immintrin.h>

/* ---- primitives ---- */

static inline vf load_f16(const void *p)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
}

/* An E4M3 value, its bits shifted left by seven, is the f16 of 2^-8 times that value. */
static inline vf load_e4m3(const void *p)
{
    __m128i u16 = _mm_cvtepu8_epi16(_mm_loadl_epi64(p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(u16, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(u16, _mm_set1_epi16(0x7F)), 7);
    return (vf)_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(0x1p8f));
}

static inline vf fmadd(vf a, vf b, vf c)
{
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline vf vmax(vf a, vf b)
{
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

static inline vi round_to_int(vf x)
{
    return (vi)_mm256_cvtps_epi32((__m256)x);
}

static inline vi interleave_halves(vi v)
{
    return (vi)_mm256_permutevar8x32_epi32((__m256i)v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline vi evens_first(vi v)
{
    return (vi)_mm256_permutevar8x32_epi32((__m256i)v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

/* Adds the halves of each vector, then transposes 4 x 4 and adds. */
static inline void reduce_add4(float out[4], const vf v[4])
{
    __m128 partial[4];
    for (int i = 0; i < 4; i++)
        partial[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)v[i]),
                                _mm256_extractf128_ps((__m256)v[i], 1));
    _MM_TRANSPOSE4_PS(partial[0], partial[1], partial[2], partial[3]);
    _mm_storeu_ps(
        out, _mm_add_ps(_mm_add_ps(partial[0], partial[1]), _mm_add_ps(partial[2], partial[3])));
}

static inline float reduce_add(vf v)
{
    const vf four[4] = {v};
    float sum[4];
    reduce_add4(sum, four);
    return sum[0];
}

static inline float reduce_max(vf v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* ---- products with tiles: half a tile's rows at a time ---- */

static inline __m256 tile_scales(const uint8_t *p)
{
    return _mm256_cvtph_ps(
        _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p)), 7));
}

static inline int32_t load_i32(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Rows of x from c on, against half of a tile's rows. */
struct half {
    int c, half;
};

static inline void store_rows(const struct nbi_dot_tile *p, struct half h, int c, __m256 sum)
{
    float partial[8], *y = p->y + (h.c + c) * p->ldy + 8 * h.half;
    _mm256_storeu_ps(partial, _mm256_mul_ps(sum, _mm256_set1_ps(p->scale)));
    for (int r = 0; r < 8 && 8 * h.half + r < p->rows; r++)
        y[r] = p->add ? y[r] + partial[r] : partial[r];
}

/* The even and the odd bytes of a vector, sign-extended to 16 bits. */
static inline __m256i even_bytes(__m256i v)
{
    return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
}

static inline __m256i odd_bytes(__m256i v)
{
    return _mm256_srai_epi16(v, 8);
}

/* 2 * weight for 8 columns, as pairs of columns j and j + 4. */
static inline void weight_pairs(__m256i w[4], const uint8_t *codes_at)
{
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)codes_at);
    __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
    __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
    w[0] = even_bytes(low);
    w[1] = even_bytes(high);
    w[2] = odd_bytes(low);
    w[3] = odd_bytes(high);
}

#define HALF_X_ROWS 4

static inline __attribute__((always_inline)) void x_i16_half(const struct nbi_dot_tile *p,
                                                             struct half h, const int n)
{
    const int64_t groups = p->K / 16, step = NBI_X_I16_BLOCK / 16;
    __m256 sum[HALF_X_ROWS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm256_setzero_ps();
    for (int64_t b = 0; b * step < groups; b++) {
        int64_t end = (b + 1) * step < groups ? (b + 1) * step : groups;
        __m256 partial[HALF_X_ROWS];
        for (int c = 0; c < n; c++)
            partial[c] = _mm256_setzero_ps();
        for (int64_t g = b * step; g < end; g++) {
            const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
            const uint8_t *codes = tile + 32 + (g & 1) * 128 + 32 * h.half;
            __m256 scale = tile_scales(tile + (g & 1) * 16 + 8 * h.half);
            __m256i w[8];
            weight_pairs(w, codes);
            weight_pairs(w + 4, codes + 64);
            for (int c = 0; c < n; c++) {
                const int16_t *x = p->x_i16 + g * 16 * p->n + 2 * (h.c + c);
                __m256i d = _mm256_setzero_si256();
                for (int j = 0; j < 8; j++)
                    d = _mm256_add_epi32(
                        d, _mm256_madd_epi16(w[j], _mm256_set1_epi32(load_i32(x + 2 * p->n * j))));
                partial[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), scale, partial[c]);
            }
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm256_fmadd_ps(partial[c], _mm256_set1_ps(p->x_i16_scale[b * p->n + h.c + c]),
                                     sum[c]);
    }
    for (int c = 0; c < n; c++)
        store_rows(p, h, c, sum[c]);
}

/* Multiplies 8 columns with the bytes at x, the hi or the lo of one row. maddubs adds pairs, and
 * four of them fit 16 bits: 4 * 2 * 24 * 128 < 32768. */
static inline __m256i dot_bytes(const __m256i w[2], const int8_t *x)
{
    return _mm256_add_epi16(_mm256_maddubs_epi16(w[0], _mm256_set1_epi32(load_i32(x))),
                            _mm256_maddubs_epi16(w[1], _mm256_set1_epi32(load_i32(x + 4))));
}

/* The sum of one group for a row in hi/lo bytes, for half of a tile's rows. */
static inline __m256i hi_lo_group(const uint8_t *tile, const int8_t *x, int g, int half)
{
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i high = _mm256_setzero_si256(), low = high;
    for (int v = 2 * g; v < 2 * g + 2; v++) {
        __m256i codes =
            _mm256_loadu_si256((const __m256i *)(const void *)(tile + 32 + 64 * v + 32 * half));
        __m256i w[2] = {
            _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask))};
        high = _mm256_add_epi16(high, dot_bytes(w, x + 16 * v));
        low = _mm256_add_epi16(low, dot_bytes(w, x + 16 * v + 8));
    }
    __m256i sum = _mm256_set1_epi32(load_i32(x + 64 + 4 * g));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, ones));
    return _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_madd_epi16(high, ones), 8));
}

/* One row of x in hi/lo bytes. The same sums in the same order as x_i16_half, hence the same bits.
 */
static void x_i16_hi_lo(const struct nbi_dot_tile *p)
{
    const int64_t groups = p->K / 16, step = NBI_X_I16_BLOCK / 16;
    const int8_t *x = (const int8_t *)p->x_i16;
    for (struct half h = {0}; h.half < 2 && p->rows > 8 * h.half; h.half++) {
        __m256 sum = _mm256_setzero_ps();
        for (int64_t b = 0; b * step < groups; b++) {
            int64_t end = (b + 1) * step < groups ? (b + 1) * step : groups;
            __m256 partial = _mm256_setzero_ps();
            for (int64_t g = b * step; g < end; g++) {
                const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
                __m256i d = hi_lo_group(tile, x + g / 2 * 2 * NBI_X_I16_HI_LO, g & 1, h.half);
                partial = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d),
                                          tile_scales(tile + (g & 1) * 16 + 8 * h.half), partial);
            }
            sum = _mm256_fmadd_ps(partial, _mm256_set1_ps(p->x_i16_scale[b]), sum);
        }
        store_rows(p, h, 0, sum);
    }
}

/* The low three bits are the magnitude, the fourth is the sign. */
static inline __m256 decode_e2m1(__m256i codes)
{
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
}

static inline __attribute__((always_inline)) void exact_half(const struct nbi_dot_tile *p,
                                                             struct half h, const int n)
{
    int half = h.half;
    const float *x = p->x + h.c * p->ldx;
    __m256 sum[HALF_X_ROWS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm256_setzero_ps();
    for (int64_t g = 0; g < p->K / 16; g++) {
        const uint8_t *tile = (const uint8_t *)p->w + g / 2 * CPU_TILE_BYTES;
        __m256 scale =
            _mm256_mul_ps(tile_scales(tile + (g & 1) * 16 + 8 * half), _mm256_set1_ps(0x1p8f));
        __m256 partial[HALF_X_ROWS];
        for (int c = 0; c < n; c++)
            partial[c] = _mm256_setzero_ps();
        for (int v = 0; v < 2; v++) {
            __m256i codes = _mm256_loadu_si256(
                (const __m256i *)(const void *)(tile + 32 + (g & 1) * 128 + 64 * v + 32 * half));
            for (int j = 0; j < 8; j++) {
                __m256 w = decode_e2m1(codes);
                codes = _mm256_srli_epi32(codes, 4);
                for (int c = 0; c < n; c++)
                    partial[c] = _mm256_fmadd_ps(
                        w, _mm256_set1_ps(x[c * p->ldx + g * 16 + 8 * v + j]), partial[c]);
            }
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm256_fmadd_ps(partial[c], scale, sum[c]);
    }
    for (int c = 0; c < n; c++)
        store_rows(p, h, c, sum[c]);
}

/* A constant number of rows lets the compiler keep their sums in registers. */
#define BY_HALVES(product)                                                                         \
    for (struct half h = {0}; h.c < p->n; h.c += HALF_X_ROWS)                                      \
        for (h.half = 0; h.half < 2 && p->rows > 8 * h.half; h.half++)                             \
            switch (p->n - h.c) {                                                                  \
            case 1:                                                                                \
                product(p, h, 1);                                                                  \
                break;                                                                             \
            case 2:                                                                                \
                product(p, h, 2);                                                                  \
                break;                                                                             \
            case 3:                                                                                \
                product(p, h, 3);                                                                  \
                break;                                                                             \
            default:                                                                               \
                product(p, h, 4);                                                                  \
            }

static void tiles_x_i16(const struct nbi_dot_tile *p)
{
    if (p->n == 1)
        x_i16_hi_lo(p);
    else
        BY_HALVES(x_i16_half)
}

static void tiles_exact(const struct nbi_dot_tile *p)
{
    BY_HALVES(exact_half)
}

/* One row of the tile at a time: each of the four vectors holds four bytes of its codes. */
static void tile_to_f32(float *low, float *high, int64_t ld, const uint8_t *tile)
{
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    float scale[32];
    for (int i = 0; i < 32; i += 8)
        _mm256_storeu_ps(scale + i, _mm256_mul_ps(tile_scales(tile + i), _mm256_set1_ps(0x1p8f)));
    for (int v = 0; v < 4; v++)
        for (int r = 0; r < CPU_TILE_ROWS; r++) {
            __m256i codes = _mm256_set1_epi32(load_i32(tile + 32 + 64 * v + 4 * r));
            __m256 w = decode_e2m1(_mm256_srlv_epi32(codes, shift));
            _mm256_storeu_ps((v < 2 ? low : high) + r * ld + v % 2 * 8,
                             _mm256_mul_ps(w, _mm256_set1_ps(scale[v / 2 * 16 + r])));
        }
}

const struct nbi_microkernels nbi_microkernels_avx2 = {
    .name = "avx2",
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
