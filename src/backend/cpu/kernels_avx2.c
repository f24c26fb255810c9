/* kernels_avx2.c - inner loops in AVX2 with FMA and F16C; 8 floats a vector, two vectors a tile's
 * rows. */
#define LANES 8
#include "backend/cpu/kernels_lanes.h"

#include <immintrin.h>

/* ---- primitives ---- */

static inline vf from_f16(const void *p)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
}

/* The bits of an E4M3 value, seven places up, are those of an f16 of 2^-8 of it. */
static inline vf from_e4m3(const void *p)
{
    __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7F)), 7);
    return (vf)_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(0x1p8f));
}

static inline vf fused(vf a, vf b, vf c)
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

/* Sums of four vectors: halves of each are added; then four by four is turned and added. */
static inline void add_up4(float out[4], const vf v[4])
{
    __m128 part[4];
    for (int i = 0; i < 4; i++)
        part[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)v[i]),
                             _mm256_extractf128_ps((__m256)v[i], 1));
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(part[0], part[1]), _mm_add_ps(part[2], part[3])));
}

static inline float add_up(vf v)
{
    const vf four[4] = {v};
    float sum[4];
    add_up4(sum, four);
    return sum[0];
}

static inline float top_of(vf v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* ---- activations as integers ---- */

static void quantize_q15(struct nbi_q15_block *out, const float *x, int64_t K)
{
    int64_t b = 0;
    for (; (b + 1) * 32 <= K; b++) {
        struct nbi_q15_block *block = &out[b];
        vf part[32 / LANES], top = splat(0), odd = splat(0);
        for (int i = 0; i < 32 / LANES; i++) {
            part[i] = load(x + b * 32 + i * LANES);
            top = vmax(top, vmax(part[i], -part[i]));
            odd += part[i] * 0.0f; /* NaN if one of them is not finite */
        }
        float amax = top_of(top), inverse = amax >= NBI_Q15_TINY ? NBI_Q15_MAX / amax : 0;
        for (int i = 0; i < 32 / LANES; i++) {
            vi q = round_to_int(part[i] * inverse), high = (q + 64) >> 7, low = q - (high << 7);
            vb h = __builtin_convertvector(high, vb), l = __builtin_convertvector(low, vb);
            memcpy(block->high + i * LANES, &h, sizeof h);
            memcpy(block->low + i * LANES, &l, sizeof l);
        }
        for (int g = 0; g < 2; g++) {
            int32_t sum = 0;
            for (int j = 0; j < 16; j++)
                sum += 128 * block->high[g * 16 + j] + block->low[g * 16 + j];
            block->sum[g] = -12 * sum;
        }
        block->scale = (amax + add_up(odd)) / NBI_Q15_MAX * 0x1p7f;
        block->unused = 0;
    }
    if (b * 32 < K)
        nbi_cpu_kernels_scalar.quantize_q15(out + b, x + b * 32, K - b * 32);
}

/* ---- products with tiles: half a tile's rows at a time ---- */

static inline __m256 tile_scales(const uint8_t *p)
{
    return _mm256_cvtph_ps(
        _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p)), 7));
}

static inline int32_t load_int(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Columns from c on, of half a tile's rows. */
struct half {
    int c, half;
};

static inline void put(const struct nbi_product *p, struct half h, int c, __m256 sum)
{
    float part[8], *y = p->y + (h.c + c) * p->ldy + 8 * h.half;
    _mm256_storeu_ps(part, _mm256_mul_ps(sum, _mm256_set1_ps(p->scale)));
    for (int r = 0; r < 8 && 8 * h.half + r < p->rows; r++)
        y[r] = p->add ? y[r] + part[r] : part[r];
}

/* Four products of pairs fit 16 bits: 4 * 2 * 24 * 127 < 32768. */
static inline __m256i part_dot(const __m256i w[4], const int8_t *q)
{
    __m256i d = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(load_int(q)));
    for (int v = 1; v < 4; v++)
        d = _mm256_add_epi16(d, _mm256_maddubs_epi16(w[v], _mm256_set1_epi32(load_int(q + 4 * v))));
    return _mm256_madd_epi16(d, _mm256_set1_epi16(1));
}

static inline __m256i group_dot(const __m256i w[4], const int8_t *high, const int8_t *low,
                                int32_t sum)
{
    __m256i d = _mm256_slli_epi32(part_dot(w, high), 7);
    return _mm256_add_epi32(_mm256_add_epi32(d, part_dot(w, low)), _mm256_set1_epi32(sum));
}

#define HALF_COLUMNS 4

static inline __attribute__((always_inline)) void q15_half(const struct nbi_product *p,
                                                           struct half h, const int n)
{
    int64_t blocks = nbi_tiles_across(p->K);
    int half = h.half;
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i low = _mm256_set1_epi8(15);
    __m256 sum[HALF_COLUMNS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *tile = (const uint8_t *)p->w + b * NBI_TILE_BYTES;
        __m256 s0 = tile_scales(tile + 8 * half), s1 = tile_scales(tile + 16 + 8 * half);
        __m256i w0[4], w1[4];
        for (int v = 0; v < 4; v++) {
            __m256i codes =
                _mm256_loadu_si256((const __m256i *)(const void *)(tile + 32 + 64 * v + 32 * half));
            w0[v] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, low));
            w1[v] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
        }
        for (int c = 0; c < n; c++) {
            const struct nbi_q15_block *block = &p->q15[(h.c + c) * blocks + b];
            __m256i d0 = group_dot(w0, block->high, block->low, block->sum[0]);
            __m256i d1 = group_dot(w1, block->high + 16, block->low + 16, block->sum[1]);
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(d0), s0);
            part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d1), s1, part);
            sum[c] = _mm256_fmadd_ps(part, _mm256_set1_ps(block->scale), sum[c]);
        }
    }
    for (int c = 0; c < n; c++)
        put(p, h, c, sum[c]);
}

/* The low three bits choose the magnitude, the fourth is the sign. */
static inline __m256 decode(__m256i codes)
{
    const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
}

static inline __attribute__((always_inline)) void exact_half(const struct nbi_product *p,
                                                             struct half h, const int n)
{
    int half = h.half;
    const float *x = p->x + h.c * p->ldx;
    __m256 sum[HALF_COLUMNS];
    for (int c = 0; c < n; c++)
        sum[c] = _mm256_setzero_ps();
    for (int64_t g = 0; g < p->K / 16; g++) {
        const uint8_t *tile = (const uint8_t *)p->w + g / 2 * NBI_TILE_BYTES;
        __m256 scale =
            _mm256_mul_ps(tile_scales(tile + (g & 1) * 16 + 8 * half), _mm256_set1_ps(0x1p8f));
        __m256 part[HALF_COLUMNS];
        for (int c = 0; c < n; c++)
            part[c] = _mm256_setzero_ps();
        for (int v = 0; v < 4; v++) {
            __m256i codes =
                _mm256_loadu_si256((const __m256i *)(const void *)(tile + 32 + 64 * v + 32 * half));
            codes = _mm256_srl_epi32(codes, _mm_cvtsi32_si128(g & 1 ? 4 : 0));
            for (int j = 0; j < 4; j++) {
                __m256 w = decode(codes);
                codes = _mm256_srli_epi32(codes, 8);
                for (int c = 0; c < n; c++)
                    part[c] = _mm256_fmadd_ps(w, _mm256_set1_ps(x[c * p->ldx + g * 16 + 4 * v + j]),
                                              part[c]);
            }
        }
        for (int c = 0; c < n; c++)
            sum[c] = _mm256_fmadd_ps(part[c], scale, sum[c]);
    }
    for (int c = 0; c < n; c++)
        put(p, h, c, sum[c]);
}

/* A constant number of columns keeps their sums in registers. */
#define BY_HALVES(product)                                                                         \
    for (struct half h = {0}; h.c < p->n; h.c += HALF_COLUMNS)                                     \
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

static void tiles_q15(const struct nbi_product *p)
{
    BY_HALVES(q15_half)
}

static void tiles_exact(const struct nbi_product *p)
{
    BY_HALVES(exact_half)
}

const struct nbi_cpu_kernels nbi_cpu_kernels_avx2 = {
    .name = "avx2",
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
