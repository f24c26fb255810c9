/* linear.cu - products.
 *
 * exact: f32 on the plain cores, any type, sums in an order that depends on K alone.
 * Up to NBI_SMALL_BATCH rows of x: tensor cores straight from the tiles. x is rounded to f16 times
 * a power of two per row; weights are exact in f16. The sums are split over warps by the shape of
 * the matrix alone, so a row of y does not depend on its company.
 * More rows: the matrix becomes bf16, which is exact too, a slice at a time, and cuBLASLt does the
 * product with x rounded to bf16. */
#include "backend/cuda/internal.cuh"

/* ---- exact ---- */

#define EXACT_TILE 64
#define EXACT_STEP 16

struct exact {
    float *y;
    const float *x;
    const void *w;
    enum nbi_dtype dtype;
    float scale;
    int64_t N, K, O;
    bool add;
};

/* Four values from column k (a multiple of 4) of a row. */
__device__ static void four_of_tiles(float out[4], const uint8_t *tiles, int64_t row, int64_t k,
                                     int64_t K)
{
    int64_t tile_cols = (K + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    const uint8_t *t = tiles + (row / 16 * tile_cols + k / 128) * NBI_TILE_BYTES;
    int r = (int)(row % 16), block = (int)(k % 128) / 16, lane = (r & 7) * 4 + block / 2;
    int quarter = (r >> 3) + 2 * (block & 1), half = (int)(k % 16) / 8;
    uint32_t word = ((const uint32_t *)t)[half * 128 + lane * 4 + quarter];
    float scale = load_float(t, 1024 + lane * 4 + quarter, NBI_E4M3) * 16384.0f;
    for (int i = 0; i < 2; i++) {
        uint32_t pair = tile_pair(word, (int)(k % 8) / 2 + i);
        float2 v = __half22float2(*(const __half2 *)&pair);
        out[2 * i] = v.x * scale;
        out[2 * i + 1] = v.y * scale;
    }
}

/* Whole blocks of 64 x 64 results, 4 x 4 for a thread. */
__global__ static void k_linear_exact(struct exact a)
{
    __shared__ float xs[EXACT_STEP][EXACT_TILE + 4], ws[EXACT_STEP][EXACT_TILE + 4];
    int64_t n0 = (int64_t)blockIdx.y * EXACT_TILE, o0 = (int64_t)blockIdx.x * EXACT_TILE;
    int tid = threadIdx.x, tx = tid % 16, ty = tid / 16, row = tid / 4, col = tid % 4 * 4;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < a.K; k0 += EXACT_STEP) {
        float w[4] = {};
        if (o0 + row < a.O && a.dtype == NBI_NVFP4 && k0 + col < a.K)
            four_of_tiles(w, (const uint8_t *)a.w, o0 + row, k0 + col, a.K);
        for (int i = 0; i < 4; i++) {
            int64_t k = k0 + col + i;
            if (a.dtype != NBI_NVFP4 && o0 + row < a.O && k < a.K)
                w[i] = load_float(a.w, (o0 + row) * a.K + k, a.dtype);
            ws[col + i][row] = w[i];
            xs[col + i][row] = n0 + row < a.N && k < a.K ? a.x[(n0 + row) * a.K + k] : 0;
        }
        __syncthreads();
        for (int k = 0; k < EXACT_STEP; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(xs[k][ty * 4 + i], ws[k][tx * 4 + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t n = n0 + ty * 4 + i, o = o0 + tx * 4 + j;
            if (n < a.N && o < a.O) {
                float v = sum[i][j] * a.scale;
                a.y[n * a.O + o] = a.add ? a.y[n * a.O + o] + v : v;
            }
        }
}

static enum nb_status linear_exact(struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    const struct nbi_weight *w = &a->w[i];
    struct exact e = {at<float>(a->y[i]),
                      at<float>(a->x),
                      at<void>(w->data),
                      w->dtype,
                      w->tensor_scale,
                      a->N,
                      a->K,
                      w->rows,
                      a->add};
    dim3 grid((unsigned)ceil_div(w->rows, EXACT_TILE), (unsigned)ceil_div(a->N, EXACT_TILE));
    k_linear_exact<<<grid, 256, 0, s->queue>>>(e);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- a few rows: tensor cores on tiles ---- */

/* x as f16 in the order in which the product takes it: for each tile of columns and each eight rows
 * the operand B of eight mma.m16n8k16, as four times 16 bytes of each lane. */
__global__ static void k_round_x16(__half *out, float *scale, const float *x, int64_t N, int64_t K,
                                   int tile_cols)
{
    __shared__ float part[32];
    int64_t n = blockIdx.x, n_tiles = (N + 7) / 8;
    const float *row = x + n * K;
    float amax = 0;
    bool odd = false;
    for (int64_t k = threadIdx.x; n < N && k < K; k += blockDim.x) {
        amax = fmaxf(amax, fabsf(row[k]));
        odd = odd || !isfinite(row[k]);
    }
    amax = warp_max(odd ? INFINITY : amax);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = amax;
    __syncthreads();
    amax = warp_max(threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0);
    odd = !isfinite(amax);
    int e = odd || amax == 0 ? 0 : max(ilogbf(amax), -100);
    float up = odd ? 0 : ldexpf(1, 13 - e);
    if (threadIdx.x == 0 && n < N)
        scale[n] = odd ? NAN : ldexpf(1, e - 13);
    for (int64_t k = threadIdx.x; k < (int64_t)tile_cols * 128; k += blockDim.x) {
        int in = (int)(k % 128), lane = (int)(n % 8) * 4 + in / 32, chunk = in % 32 / 8;
        float v = n < N && k < K && !odd ? row[k] * up : 0;
        out[((((k / 128) * n_tiles + n / 8) * 4 + chunk) * 32 + lane) * 8 + in % 8] =
            __float2half_rn(v);
    }
}

struct small {
    float *y[NBI_LINEAR_MAX];
    const uint8_t *tiles[NBI_LINEAR_MAX];
    int first[NBI_LINEAR_MAX]; /* block of rows where each matrix begins */
    int rows[NBI_LINEAR_MAX];
    float scale[NBI_LINEAR_MAX];
    int count, tile_cols;
    const uint4 *x;
    const float *x_scale;
    int64_t N;
    bool add;
};

#define SMALL_WARPS 8

/* A warp adds up tiles of one row of tiles: its part of the columns. */
template <int NT>
__device__ static void tiles_product(float acc[NT][4], const uint8_t *tiles, const uint4 *x,
                                     int count, int64_t n_tiles, int valid)
{
    int lane = threadIdx.x % 32;
    const uint4 *codes = (const uint4 *)tiles + lane;
    const uint32_t *scales = (const uint32_t *)(tiles + 1024) + lane;
    uint4 next[2] = {codes[0], codes[32]};
    uint32_t next_scales = scales[0];
    for (int k = 0; k < count; k++) {
        uint4 now[2] = {next[0], next[1]};
        uint32_t s = next_scales;
        if (k + 1 < count) {
            next[0] = codes[(k + 1) * (NBI_TILE_BYTES / 16)];
            next[1] = codes[(k + 1) * (NBI_TILE_BYTES / 16) + 32];
            next_scales = scales[(k + 1) * (NBI_TILE_BYTES / 4)];
        }
        __half2 by[4];
        for (int q = 0; q < 4; q++) { /* the scale times 2^7, so the weight times 2^-7 */
            uint32_t h = (s >> (8 * q) & 0xFF) << 7;
            h |= h << 16;
            by[q] = __hmul2(*(__half2 *)&h, __float2half2_rn(32768.0f));
        }
        const uint4 *xk = x + (int64_t)k * n_tiles * 128 + lane;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t word[4] = {now[half].x, now[half].y, now[half].z, now[half].w};
            uint32_t a[4][4];
#pragma unroll
            for (int p = 0; p < 4; p++)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    uint32_t pair = tile_pair(word[q], p);
                    __half2 v = __hmul2(*(__half2 *)&pair, by[q]);
                    a[p][q] = *(uint32_t *)&v;
                }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                if (t >= valid)
                    break;
                uint4 b0 = __ldg(xk + t * 128 + half * 32),
                      b1 = __ldg(xk + t * 128 + 64 + half * 32);
                mma_f16(acc[t], a[0], b0.x, b1.x);
                mma_f16(acc[t], a[1], b0.y, b1.y);
                mma_f16(acc[t], a[2], b0.z, b1.z);
                mma_f16(acc[t], a[3], b0.w, b1.w);
            }
        }
    }
}

/* RT rows of tiles for a block, each shared by SMALL_WARPS / RT warps. */
template <int NT, int RT>
__global__ static void __launch_bounds__(SMALL_WARPS * 32)
    k_linear_small(const __grid_constant__ struct small a)
{
    const int parts = SMALL_WARPS / RT;
    __shared__ float sums[SMALL_WARPS][16][8 * NT + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % parts;
    int m = 0;
    while (m + 1 < a.count && (int)blockIdx.x >= a.first[m + 1])
        m++;
    int tile_row = ((int)blockIdx.x - a.first[m]) * RT + warp / parts;
    int n0 = (int)blockIdx.y * 8 * NT;
    int64_t n_tiles = (a.N + 7) / 8;
    int valid = (int)min((int64_t)NT, n_tiles - n0 / 8);
    float acc[NT][4] = {};
    if (tile_row * 16 < a.rows[m]) {
        int begin = a.tile_cols * part / parts, end = a.tile_cols * (part + 1) / parts;
        if (begin < end)
            tiles_product<NT>(
                acc, a.tiles[m] + ((int64_t)tile_row * a.tile_cols + begin) * NBI_TILE_BYTES,
                a.x + ((int64_t)begin * n_tiles + n0 / 8) * 128, end - begin, n_tiles, valid);
    }
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < NT; i++)
        for (int j = 0; j < 4; j++)
            sums[warp][g + 8 * (j / 2)][8 * i + 2 * t + (j & 1)] = acc[i][j];
    __syncthreads();
    for (int i = threadIdx.x; i < RT * 16 * 8 * NT; i += SMALL_WARPS * 32) {
        int r = i % 16, c = i / 16 % (8 * NT), of = i / (16 * 8 * NT);
        int row = (((int)blockIdx.x - a.first[m]) * RT + of) * 16 + r, n = n0 + c;
        if (row >= a.rows[m] || n >= a.N)
            continue;
        float v = 0;
        for (int p = 0; p < parts; p++)
            v += sums[of * parts + p][r][c];
        v *= 128.0f * a.scale[m] * a.x_scale[n];
        float *y = a.y[m] + (int64_t)n * a.rows[m] + row;
        *y = a.add ? *y + v : v;
    }
}

template <int RT> static void launch_small(const struct small *a, int blocks, cudaStream_t queue)
{
    int64_t n_tiles = ceil_div(a->N, 8);
    dim3 grid((unsigned)blocks, 1), threads(SMALL_WARPS * 32);
    if (n_tiles <= 1)
        k_linear_small<1, RT><<<grid, threads, 0, queue>>>(*a);
    else if (n_tiles <= 2)
        k_linear_small<2, RT><<<grid, threads, 0, queue>>>(*a);
    else {
        grid.y = (unsigned)ceil_div(n_tiles, 4);
        k_linear_small<4, RT><<<grid, threads, 0, queue>>>(*a);
    }
}

static enum nb_status linear_small(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct small m = {};
    struct tile_shape shape = tiles_of(0, a->K);
    int total = 0, blocks = 0;
    for (int i = 0; i < a->count; i++)
        total += tiles_of(a->w[i].rows, a->K).rows;
    int rt = total >= 4 * s->cuda->sms ? 4 : 1;
    for (int i = 0; i < a->count; i++) {
        m.y[i] = at<float>(a->y[i]);
        m.tiles[i] = at<uint8_t>(a->w[i].data);
        m.rows[i] = (int)a->w[i].rows;
        m.scale[i] = a->w[i].tensor_scale;
        m.first[i] = blocks;
        blocks += (int)ceil_div(tiles_of(a->w[i].rows, a->K).rows, rt);
    }
    m.count = a->count;
    m.tile_cols = shape.cols;
    m.x = (const uint4 *)s->x16;
    m.x_scale = s->x16_scale;
    m.N = a->N;
    m.add = a->add;
    k_round_x16<<<(unsigned)(ceil_div(a->N, 8) * 8), 256, 0, s->queue>>>(
        (__half *)s->x16, s->x16_scale, at<float>(a->x), a->N, a->K, shape.cols);
    CU_LAUNCHED();
    if (rt == 4)
        launch_small<4>(&m, blocks, s->queue);
    else
        launch_small<1>(&m, blocks, s->queue);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- many rows: cuBLASLt ---- */

__global__ static void k_round_bf16(__nv_bfloat16 *out, const float *x, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    for (int j = 0; j < 4; j++)
        if (i + j < n)
            out[i + j] = __float2bfloat16_rn(x[i + j]);
}

/* Rows [first, first + rows) of tiles as bf16 [rows, K]; a thread for each eight values, so that
 * what a warp writes lies together. */
__global__ static void k_widen_tiles(__nv_bfloat16 *out, const uint8_t *tiles, int64_t first,
                                     int64_t rows, int64_t K)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = K / 8;
    if (i >= rows * per_row)
        return;
    int64_t row = first + i / per_row, k = i % per_row * 8;
    float v[8];
    four_of_tiles(v, tiles, row, k, K);
    four_of_tiles(v + 4, tiles, row, k + 4, K);
    __nv_bfloat162 pairs[4];
    for (int j = 0; j < 4; j++)
        pairs[j] = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
    *(uint4 *)(out + (i / per_row) * K + k) = *(const uint4 *)pairs;
}

/* x is in s->x16 as bf16. */
static enum nb_status linear_large(struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    const struct nbi_weight *w = &a->w[i];
    struct nbi_gemm g = {at<float>(a->y[i]),
                         at<void>(w->data),
                         s->x16,
                         a->N,
                         a->K,
                         w->rows,
                         w->rows,
                         w->tensor_scale,
                         a->add};
    if (w->dtype != NBI_NVFP4)
        return nbi_cuda_gemm(s, &g);
    int64_t most = NBI_WIDE_BYTES / (2 * a->K) / 128 * 128;
    NBI_BUG_IF(most == 0);
    for (int64_t first = 0; first < w->rows; first += most) {
        g.rows = w->rows - first < most ? w->rows - first : most;
        g.y = at<float>(a->y[i]) + first;
        g.w = s->wide;
        k_widen_tiles<<<(unsigned)ceil_div(g.rows * (a->K / 8), 256), 256, 0, s->queue>>>(
            (__nv_bfloat16 *)s->wide, at<uint8_t>(w->data), first, g.rows, a->K);
        CU_LAUNCHED();
        NBI_TRY(nbi_cuda_gemm(s, &g));
    }
    return NB_OK;
}

/* ---- which ---- */

enum nb_status nbi_cuda_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    CU_HERE(s);
    bool nvfp4 = true, rounded = false;
    for (int i = 0; i < a->count; i++)
        nvfp4 = nvfp4 && a->w[i].dtype == NBI_NVFP4;
    if (!a->exact && nvfp4 && a->N <= NBI_SMALL_BATCH)
        return linear_small(s, a);
    for (int i = 0; i < a->count; i++) {
        /* cuBLASLt wants rows of whole 16 bytes. */
        bool bf16 =
            a->w[i].dtype == NBI_BF16 || (a->w[i].dtype == NBI_NVFP4 && a->N > NBI_SMALL_BATCH);
        if (a->exact || !bf16 || a->K % 8 != 0) {
            NBI_TRY(linear_exact(s, a, i));
            continue;
        }
        if (!rounded) {
            k_round_bf16<<<(unsigned)ceil_div(a->N * a->K, 1024), 256, 0, s->queue>>>(
                (__nv_bfloat16 *)s->x16, at<float>(a->x), a->N * a->K);
            CU_LAUNCHED();
            rounded = true;
        }
        NBI_TRY(linear_large(s, a, i));
    }
    return NB_OK;
}
