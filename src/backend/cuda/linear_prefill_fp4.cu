/* linear_prefill_fp4.cu - products of NVFP4 weights with many rows on FP4 tensor cores (Blackwell).
 *
 * in : weights as tiles, x as f32
 * out: y as f32
 *
 * Both operands go to cuBLASLt as it wants them: rows of E2M1 codes, and block scales of E4M3 in
 * its own order (tensor/nvfp4.h). Weights are rewritten a slice at a time, as for bf16, and lose
 * nothing. x becomes the sum of two terms, x and what the first term leaves of it, since one is off
 * by a tenth: the bytes that the host's codec gives with method rtn and the tensor scale of the
 * largest value (so what nbi_nvfp4_split_hi_lo says is what is multiplied). That scale is known on
 * the device alone, and so are the factors of the products. Of each slice there are two products,
 * one for each term; the second adds to the first.
 *
 * Rows of both have columns of whole pieces of scales, 64, with zeros behind the last. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cublaslt.cuh"

extern "C" {
#include "base/log.h"
#include "base/rng.h"
#include "tensor/nvfp4.h"
}

#define WIDENED "bf16 tensor cores on widened tiles"

/* In s->x_f16_scale, of the device. */
struct scalars {
    uint32_t largest; /* of x, as bits */
    float add[NBI_FOUR_TERMS];
    float scale[NBI_FOUR_TERMS][NBI_LINEAR_MAX]; /* tensor scales: of the term times the matrix */
};

#define SCALARS_BYTES 256
static_assert(sizeof(struct scalars) <= SCALARS_BYTES, "s->x_f16_scale has as many at least");

/* Columns with those that pad. */
static int64_t padded(int64_t K)
{
    return ceil_div(K, 64) * 64;
}

/* Of a term: its scales, then its codes, in the whole lines that cuBLASLt expects. */
static int64_t term_bytes(int64_t N, int64_t K)
{
    return ceil_div(nbi_nvfp4_swizzled_bytes(N, K) + N * padded(K) / 2, 256) * 256;
}

int64_t nbi_cuda_four_bytes(int64_t N, int64_t K)
{
    return NBI_FOUR_TERMS * term_bytes(N, K);
}

/* ---- x ---- */

__device__ static inline uint32_t finite_bits(float v)
{
    uint32_t magnitude = __float_as_uint(v) & 0x7FFFFFFF;
    return magnitude < 0x7F800000 ? magnitude : 0;
}

/* The largest magnitude of what is finite; bits of such are in the order of the values. */
__global__ static void k_largest(uint32_t *out, const float4 *x, int64_t n)
{
    __shared__ uint32_t largest;
    uint32_t most = 0;
    if (threadIdx.x == 0)
        largest = 0;
    __syncthreads();
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        float4 v = x[i];
        most = max(most, max(max(finite_bits(v.x), finite_bits(v.y)),
                             max(finite_bits(v.z), finite_bits(v.w))));
    }
    most = __reduce_max_sync(0xFFFFFFFF, most);
    if (threadIdx.x % 32 == 0)
        atomicMax(&largest, most);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicMax(out, largest);
}

/* Sixteen values over a tensor scale. */
__device__ static void load_block(float v[16], const float4 *x, float inverse)
{
    for (int i = 0; i < 4; i++) {
        float4 fp4 = x[i];
        v[4 * i] = fp4.x * inverse;
        v[4 * i + 1] = fp4.y * inverse;
        v[4 * i + 2] = fp4.z * inverse;
        v[4 * i + 3] = fp4.w * inverse;
    }
}

/* A term of those, as method rtn of tensor/codec_scalar.c does it; its scale is returned, and v
 * becomes what is left, which f32 holds. What is not finite makes the scale NaN, so that the row's
 * results are, and is left as it is. */
__device__ static uint8_t round_block(uint2 *codes, float v[16])
{
    float most = 0;
    bool odd = false;
    for (int i = 0; i < 16; i++) {
        odd = odd || !isfinite(v[i]);
        most = fmaxf(most, fabsf(v[i]));
    }
    if (odd) {
        *codes = make_uint2(0x77777777, 0x77777777);
        return 0x7F;
    }
    uint8_t code = most == 0 ? 0x38 : nbi_f32_to_e4m3(most / 6.0f);
    code = code < 0x01 ? 0x01 : code;
    float scale = nbi_e4m3_to_f32(code);
    uint32_t half[2] = {0, 0};
    for (int i = 0; i < 16; i++) {
        uint8_t value = nbi_f32_to_e2m1(v[i] / scale);
        half[i / 8] |= (uint32_t)value << 4 * (i % 8);
        v[i] -= nbi_e2m1_to_f32(value) * scale;
    }
    *codes = make_uint2(half[0], half[1]);
    return code;
}

struct rounding {
    uint8_t *codes, *scales; /* of the first term */
    const float *x;
    struct scalars *known;
    int64_t N, K, wide, term; /* wide: K padded; term: from one to the next, in bytes */
    float add, tensor_scale[NBI_LINEAR_MAX];
};

/* A thread for each block, of the rows that pad the scales too. */
__global__ static void k_round_four(struct rounding a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, blocks = a.wide / 16;
    int64_t row = i / blocks, block = i % blocks;
    if (row >= (a.N + 127) / 128 * 128)
        return;
    float t = nbi_nvfp4_tensor_scale(__uint_as_float(a.known->largest));
    if (i == 0) {
        a.known->add[0] = a.add;
        a.known->add[1] = 1.0f;
        for (int j = 0; j < NBI_LINEAR_MAX; j++) {
            a.known->scale[0][j] = t * a.tensor_scale[j];
            a.known->scale[1][j] = NBI_NVFP4_LO_SCALE * t * a.tensor_scale[j];
        }
    }
    bool pads = row >= a.N || block * 16 >= a.K;
    float v[16] = {};
    if (!pads)
        load_block(v, (const float4 *)(a.x + row * a.K + block * 16), 1.0f / t);
    for (int term = 0; term < NBI_FOUR_TERMS; term++) {
        uint2 codes = make_uint2(0, 0);
        uint8_t scale = pads ? 0 : round_block(&codes, v);
        a.scales[term * a.term + nbi_nvfp4_swizzled_at(row, block, a.K)] = scale;
        if (row < a.N)
            ((uint2 *)(a.codes + term * a.term + row * (a.wide / 2)))[block] = codes;
        for (int j = 0; j < 16; j++)
            v[j] *= 1.0f / NBI_NVFP4_LO_SCALE;
    }
}

enum nb_status nbi_cuda_four_round(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct rounding r = {};
    int64_t rows = ceil_div(a->N, 128) * 128, values = a->N * a->K / 4;
    int64_t ctas = ceil_div(values, 256 * 8), most = (int64_t)s->cuda->sms * 8;
    r.scales = s->x_f16;
    r.codes = s->x_f16 + nbi_nvfp4_swizzled_bytes(a->N, a->K);
    r.x = at<float>(a->x);
    r.known = (struct scalars *)s->x_f16_scale;
    r.N = a->N;
    r.K = a->K;
    r.wide = padded(a->K);
    r.term = term_bytes(a->N, a->K);
    r.add = a->add ? 1.0f : 0.0f;
    for (int i = 0; i < a->count; i++)
        r.tensor_scale[i] = a->w[i].tensor_scale;
    CU_TRY(cudaMemsetAsync(&r.known->largest, 0, sizeof r.known->largest, s->queue));
    k_largest<<<(unsigned)(ctas < most ? ctas : most), 256, 0, s->queue>>>(
        &r.known->largest, (const float4 *)r.x, values);
    CU_LAUNCHED();
    k_round_four<<<(unsigned)ceil_div(rows * (r.wide / 16), 256), 256, 0, s->queue>>>(r);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- weights ---- */

struct rewriting {
    uint8_t *codes, *scales;
    const uint8_t *tiles; /* from the first tile of the rows */
    int tile_rows, tile_cols;
    int64_t rows, K, wide; /* rows: padded to 128 */
};

/* A warp for a tile, and a lane for what it holds of two rows: two blocks each. */
__global__ static void k_rows_of_tiles(struct rewriting a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, tile = i >> 5;
    int lane = (int)(i & 31), tile_row = (int)(tile / a.tile_cols);
    int64_t row = (int64_t)tile_row * CUDA_TILE_ROWS + (lane >> 2);
    int64_t block = tile % a.tile_cols * 8 + 2 * (lane & 3);
    if (row >= a.rows || block * 16 >= a.wide)
        return;
    uint4 half[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    uint32_t scales = 0;
    if (tile_row < a.tile_rows) {
        const uint8_t *t = a.tiles + tile * CUDA_TILE_BYTES;
        half[0] = ((const uint4 *)t)[lane];
        half[1] = ((const uint4 *)t)[32 + lane];
        scales = ((const uint32_t *)t)[256 + lane];
    }
    uint4 *to = (uint4 *)(a.codes + row * (a.wide / 2) + block * 8);
    *to = make_uint4(stored_codes(half[0].x), stored_codes(half[1].x), stored_codes(half[0].z),
                     stored_codes(half[1].z));
    to = (uint4 *)((uint8_t *)to + 8 * (a.wide / 2));
    *to = make_uint4(stored_codes(half[0].y), stored_codes(half[1].y), stored_codes(half[0].w),
                     stored_codes(half[1].w));
    *(uint16_t *)(a.scales + nbi_nvfp4_swizzled_at(row, block, a.K)) =
        (uint16_t)((scales & 0xFF) | (scales >> 8 & 0xFF00));
    *(uint16_t *)(a.scales + nbi_nvfp4_swizzled_at(row + 8, block, a.K)) =
        (uint16_t)((scales >> 8 & 0xFF) | (scales >> 16 & 0xFF00));
}

/* Rows [first, first + rows) to s->weights_bf16, scales before codes; first is a multiple of 128.
 */
static enum nb_status rewrite(struct nbi_stream *s, const struct nbi_weight *w, int64_t first,
                              int64_t rows)
{
    struct rewriting r = {};
    struct tile_shape tiles = tiles_of(w->rows - first, w->cols);
    r.scales = s->weights_bf16;
    r.codes = s->weights_bf16 + nbi_nvfp4_swizzled_bytes(rows, w->cols);
    r.tiles = at<uint8_t>(w->data) + first / CUDA_TILE_ROWS * tiles.cols * CUDA_TILE_BYTES;
    r.tile_rows = tiles.rows;
    r.tile_cols = tiles.cols;
    r.rows = ceil_div(rows, 128) * 128;
    r.K = w->cols;
    r.wide = padded(w->cols);
    int64_t threads = r.rows / CUDA_TILE_ROWS * tiles.cols * 32;
    k_rows_of_tiles<<<(unsigned)ceil_div(threads, 256), 256, 0, s->queue>>>(r);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- the product ---- */

/* Of rows [first, first + rows), which are in s->weights_bf16. If the second product fails, then
 * without add y is as good as before, for it is to be overwritten; with add both have one plan, so
 * that what refuses the second has refused the first. */
static enum nb_status multiply_slice(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                     int64_t first, int64_t rows)
{
    const struct scalars *known = (const struct scalars *)s->x_f16_scale;
    for (int term = 0; term < NBI_FOUR_TERMS; term++) {
        const uint8_t *x = s->x_f16 + term * term_bytes(a->N, a->K);
        const struct nbi_gemm_four fp4 = {s->weights_bf16, x, &known->scale[term][i],
                                          &known->add[term]};
        const struct nbi_gemm g = {at<float>(a->y[i]) + first,
                                   s->weights_bf16 + nbi_nvfp4_swizzled_bytes(rows, a->K),
                                   x + nbi_nvfp4_swizzled_bytes(a->N, a->K),
                                   a->N,
                                   padded(a->K),
                                   rows,
                                   a->w[i].rows,
                                   1,
                                   term > 0 || a->add,
                                   &fp4};
        NBI_TRY(nbi_cuda_gemm(s, &g));
    }
    return NB_OK;
}

/* x was rounded. */
static enum nb_status multiply(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                               int64_t *done)
{
    const struct nbi_weight *w = &a->w[i];
    int64_t wide = padded(a->K), most = NBI_WEIGHTS_BF16_BYTES / (wide / 2 + wide / 16) / 128 * 128;
    *done = 0;
    NBI_BUG_IF(most == 0);
    while (*done < w->rows) {
        int64_t rows = w->rows - *done < most ? w->rows - *done : most;
        NBI_TRY(rewrite(s, w, *done, rows));
        NBI_TRY(multiply_slice(s, a, i, *done, rows));
        *done += rows;
    }
    return NB_OK;
}

/* ---- whether ---- */

void nbi_cuda_four_begin(struct cuda *cuda)
{
    snprintf(cuda->prefill_path, sizeof cuda->prefill_path, "%s",
             cuda->cc < NBI_FOUR_CAPABILITY ? WIDENED : "native FP4 (cuBLASLt), not tried yet");
    cuda->be.prefill_path = cuda->prefill_path;
}

/* Says why, the first time. */
static void refuse(struct cuda *cuda, const char *what)
{
    pthread_mutex_lock(&cuda->lock);
    bool news = !cuda->be.fp4_selftest_failed;
    if (news)
        snprintf(cuda->prefill_path, sizeof cuda->prefill_path, "native FP4 %s (%.150s): " WIDENED,
                 what, nb_last_error());
    cuda->be.fp4_selftest_failed = true;
    __atomic_store_n(&cuda->be.fp4, false, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&cuda->lock);
    if (news)
        nbi_log(NB_LOG_WARN, "NVFP4 products on %s: %s", cuda->name, cuda->prefill_path);
}

/* cuBLASLt wants 16 bytes of y too. */
bool nbi_cuda_four_fits(const struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    return __atomic_load_n(&s->cuda->be.fp4, __ATOMIC_ACQUIRE) && !a->exact &&
           a->N > NBI_DECODE_LINEAR_ROWS && a->w[i].dtype == NBI_NVFP4 && a->w[i].rows % 4 == 0 &&
           a->x.at % 16 == 0;
}

enum nb_status nbi_cuda_four_linear(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                    int64_t *done)
{
    if (multiply(s, a, i, done) != NB_OK)
        refuse(s->cuda, "failed");
    return NB_OK;
}

/* ---- the self-test ---- */

/* More than a piece of scales in every direction, and none that ends with one. */
#define TEST_N     160
#define TEST_K     336
#define TEST_ROWS  300
#define TEST_BOUND 1e-3 /* of the root mean square of the results; the second term is a tenth */

struct probe {
    uint8_t codes[TEST_ROWS * TEST_K / 2], scales[TEST_ROWS * TEST_K / 16];
    float w[TEST_ROWS * TEST_K]; /* their values */
    float x[TEST_N * TEST_K];
    float rounded[TEST_N * TEST_K];
    float y[TEST_N * TEST_ROWS];
    double want[TEST_N * TEST_ROWS];
};

/* Blocks differ in size, so that the wrong scale shows. */
static void draw(struct probe *p)
{
    const float tensor_scale = 0.25f;
    float largest = 0;
    for (int i = 0; i < TEST_ROWS * TEST_K / 2; i++)
        p->codes[i] = (uint8_t)nbi_philox(1, (uint64_t)i, 0).v[0];
    for (int i = 0; i < TEST_ROWS * TEST_K / 16; i++)
        p->scales[i] = (uint8_t)(0x28 + nbi_philox(1, (uint64_t)i, 1).v[0] % 32);
    for (int i = 0; i < TEST_N * TEST_K; i += 4)
        nbi_philox_normal4(p->x + i, 1, (uint64_t)i, 2);
    for (int i = 0; i < TEST_N * TEST_K; i++) {
        p->x[i] *= (float)(1 << nbi_philox(1, (uint64_t)(i / 16), 3).v[0] % 4);
        largest = fmaxf(largest, fabsf(p->x[i]));
    }
    nbi_nvfp4_dequantize_f32(p->w, p->codes, p->scales, TEST_ROWS * TEST_K / 16, tensor_scale);
    nbi_nvfp4_split_hi_lo(p->rounded, p->x, TEST_N * TEST_K / 16, nbi_nvfp4_tensor_scale(largest));
}

/* What is wanted, and its root mean square. */
static double multiply_on_the_host(struct probe *p)
{
    double squares = 0;
    for (int n = 0; n < TEST_N; n++)
        for (int o = 0; o < TEST_ROWS; o++) {
            double sum = 0;
            for (int k = 0; k < TEST_K; k++)
                sum += (double)p->rounded[n * TEST_K + k] * (double)p->w[o * TEST_K + k];
            p->want[n * TEST_ROWS + o] = sum;
            squares += sum * sum;
        }
    return sqrt(squares / (TEST_N * TEST_ROWS));
}

static enum nb_status read_probe(void *ctx, int64_t first, int64_t count, void *data, void *scales)
{
    const struct probe *p = (const struct probe *)ctx;
    memcpy(data, p->codes + first * (TEST_K / 2), (size_t)(count * (TEST_K / 2)));
    memcpy(scales, p->scales + first * (TEST_K / 16), (size_t)(count * (TEST_K / 16)));
    return NB_OK;
}

/* Once over what is no number, once added to that: twice the product. `s` is a stream whose x16 and
 * x_f16_scale suffice, `block` has room for x and y. */
static enum nb_status multiply_on_the_device(struct nbi_stream *s, const struct nbi_weight *w,
                                             struct probe *p, uint8_t *block)
{
    struct nbi_op_linear op = {};
    int64_t done;
    op.count = 1;
    op.x.at = (uintptr_t)block;
    op.y[0].at = (uintptr_t)(block + sizeof p->x);
    op.w[0] = *w;
    op.N = TEST_N;
    op.K = TEST_K;
    CU_TRY(cudaMemcpyAsync(block, p->x, sizeof p->x, cudaMemcpyHostToDevice, s->queue));
    CU_TRY(cudaMemsetAsync(block + sizeof p->x, 0xFF, sizeof p->y, s->queue));
    for (int add = 0; add < 2; add++) {
        op.add = add == 1;
        NBI_TRY(nbi_cuda_four_round(s, &op));
        NBI_TRY(multiply(s, &op, 0, &done));
    }
    CU_TRY(
        cudaMemcpyAsync(p->y, block + sizeof p->x, sizeof p->y, cudaMemcpyDeviceToHost, s->queue));
    CU_TRY(cudaStreamSynchronize(s->queue));
    return NB_OK;
}

static enum nb_status compare(struct probe *p)
{
    double bound = 2 * TEST_BOUND * multiply_on_the_host(p);
    for (int i = 0; i < TEST_N * TEST_ROWS; i++)
        if (!(fabs((double)p->y[i] - 2 * p->want[i]) <= bound))
            return nbi_fail(NB_EDEVICE, "result %d is %.6g, not %.6g", i, (double)p->y[i] / 2,
                            p->want[i]);
    return NB_OK;
}

static enum nb_status run_test(struct nbi_stream *s, struct probe *p)
{
    struct cuda *cuda = s->cuda;
    struct nbi_stream own = *s; /* that one's x16 may be too small */
    struct nbi_weight_source src = {};
    struct nbi_weight w = {};
    uint8_t *block = NULL;
    int64_t rounded = nbi_cuda_four_bytes(TEST_N, TEST_K);
    src.dtype = NBI_NVFP4;
    src.rows = TEST_ROWS;
    src.cols = TEST_K;
    src.tensor_scale = 0.25f;
    src.read = read_probe;
    src.ctx = p;
    draw(p);
    CU_TRY(cudaMalloc(&block, (size_t)rounded + SCALARS_BYTES + sizeof p->x + sizeof p->y));
    own.x_f16 = block;
    own.x_f16_scale = (float *)(block + rounded);
    pthread_mutex_lock(&cuda->lock);
    enum nb_status rc = cuda->be.weight_new(&cuda->be, &src, &w);
    pthread_mutex_unlock(&cuda->lock);
    if (rc == NB_OK)
        rc = multiply_on_the_device(&own, &w, p, block + rounded + SCALARS_BYTES);
    if (rc == NB_OK)
        rc = compare(p);
    cudaFree(block);
    pthread_mutex_lock(&cuda->lock);
    cuda->be.weight_free(&cuda->be, &w);
    pthread_mutex_unlock(&cuda->lock);
    return rc;
}

static enum nb_status self_test(struct nbi_stream *s)
{
    struct probe *p = (struct probe *)malloc(sizeof *p);
    if (!p)
        return nbi_fail_memory("self-test", sizeof *p);
    enum nb_status rc = run_test(s, p);
    free(p);
    return rc;
}

void nbi_cuda_four_try(struct nbi_stream *s)
{
    struct cuda *cuda = s->cuda;
    if (cuda->cc < NBI_FOUR_CAPABILITY)
        return;
    pthread_mutex_lock(&cuda->fp4_selftest_lock);
    if (!cuda->be.fp4 && !cuda->be.fp4_selftest_failed) {
        if (self_test(s) == NB_OK) {
            snprintf(cuda->prefill_path, sizeof cuda->prefill_path,
                     "native FP4 (cuBLASLt), activations in two terms, self-test passed");
            __atomic_store_n(&cuda->be.fp4, true, __ATOMIC_RELEASE);
        } else {
            refuse(cuda, "failed its self-test");
        }
    }
    pthread_mutex_unlock(&cuda->fp4_selftest_lock);
}
