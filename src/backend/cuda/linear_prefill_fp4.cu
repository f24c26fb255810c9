/* linear_prefill_fp4.cu - linear of NVFP4 weights with many rows on FP4 tensor cores (Blackwell).
 *
 * in : weights as tiles, x as f32
 * out: y as f32
 *
 * cuBLASLt takes both operands as rows of E2M1 codes, with E4M3 block scales in a swizzled order
 * (tensor/nvfp4.h). Weights are rewritten in that form, a slice of rows at a time, without loss.
 *
 * One NVFP4 value is off from x by up to a tenth, so x becomes the sum of two: hi, and lo for what
 * hi leaves. They have the bytes that the host's codec gives with method rtn and the tensor scale
 * of amax; nbi_nvfp4_split_hi_lo is the definition. Each slice takes two products, for hi and lo;
 * the second adds to the first. amax is known on the device only, so the factors of the products
 * are there, too.
 *
 * Rows of both operands are padded with zeros to a multiple of 64 columns, the width of a tile of
 * swizzled scales. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/launch.cuh"

extern "C" {
#include "base/log.h"
#include "base/rng.h"
#include "tensor/nvfp4.h"
}

#define PREFILL_BF16 "bf16 tensor cores on widened tiles"

/* Factors of the products, in s->x_f16_scale on the device. */
struct factors {
    uint32_t amax; /* bits of the largest finite |x| */
    float add[NBI_FP4_TERMS];
    float scale[NBI_FP4_TERMS]
               [NBI_LINEAR_MAX]; /* tensor scale of the term times that of the matrix */
};

#define FACTORS_BYTES 256
static_assert(sizeof(struct factors) <= FACTORS_BYTES, "s->x_f16_scale has at least 256 bytes");

static int64_t padded_cols(int64_t K)
{
    return ceil_div(K, 64) * 64;
}

/* A term: its scales, then its codes. cuBLASLt expects an alignment of 256 bytes. */
static int64_t term_bytes(int64_t N, int64_t K)
{
    return ceil_div(nbi_nvfp4_swizzled_bytes(N, K) + N * padded_cols(K) / 2, 256) * 256;
}

int64_t nbi_cuda_fp4_x_bytes(int64_t N, int64_t K)
{
    return NBI_FP4_TERMS * term_bytes(N, K);
}

/* ---- x ---- */

__device__ static inline uint32_t finite_bits(float v)
{
    uint32_t magnitude = __float_as_uint(v) & 0x7FFFFFFF;
    return magnitude < 0x7F800000 ? magnitude : 0;
}

/* Amax of the finite values. Bits of non-negative floats are in the order of their values. */
__global__ static void k_amax_finite(uint32_t *out, const float4 *x, int64_t n)
{
    __shared__ uint32_t cta_amax;
    uint32_t amax = 0;
    if (threadIdx.x == 0)
        cta_amax = 0;
    __syncthreads();
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        float4 v = x[i];
        amax = max(amax, max(max(finite_bits(v.x), finite_bits(v.y)),
                             max(finite_bits(v.z), finite_bits(v.w))));
    }
    amax = __reduce_max_sync(0xFFFFFFFF, amax);
    if (threadIdx.x % 32 == 0)
        atomicMax(&cta_amax, amax);
    __syncthreads();
    if (threadIdx.x == 0)
        atomicMax(out, cta_amax);
}

/* Sixteen values times the inverse of the tensor scale. */
__device__ static void load_block(float v[16], const float4 *x, float inverse)
{
    for (int i = 0; i < 4; i++) {
        float4 f = x[i];
        v[4 * i] = f.x * inverse;
        v[4 * i + 1] = f.y * inverse;
        v[4 * i + 2] = f.z * inverse;
        v[4 * i + 3] = f.w * inverse;
    }
}

/* Quantizes a block as method rtn of tensor/codec_scalar.c does. Returns the block scale; v becomes
 * the remainder, which is exact in f32. A block with a value that is not finite gets a scale of
 * NaN, so that the row's results are NaN, and v stays. */
__device__ static uint8_t quantize_block(uint2 *codes, float v[16])
{
    float amax = 0;
    bool nonfinite = false;
    for (int i = 0; i < 16; i++) {
        nonfinite = nonfinite || !isfinite(v[i]);
        amax = fmaxf(amax, fabsf(v[i]));
    }
    if (nonfinite) {
        *codes = make_uint2(0x77777777, 0x77777777);
        return 0x7F;
    }
    uint8_t code = amax == 0 ? 0x38 : nbi_f32_to_e4m3(amax / 6.0f);
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

struct quantize_args {
    uint8_t *codes, *scales; /* of the first term */
    const float *x;
    struct factors *factors;
    int64_t N, K, padded_K, term_bytes;
    float add, tensor_scale[NBI_LINEAR_MAX];
};

/* Includes the rows that pad the scales to 128. */
__global__ static void k_quantize_block_per_thread(struct quantize_args a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, blocks = a.padded_K / 16;
    int64_t row = i / blocks, block = i % blocks;
    if (row >= (a.N + 127) / 128 * 128)
        return;
    float t = nbi_nvfp4_tensor_scale(__uint_as_float(a.factors->amax));
    if (i == 0) {
        a.factors->add[0] = a.add;
        a.factors->add[1] = 1.0f;
        for (int j = 0; j < NBI_LINEAR_MAX; j++) {
            a.factors->scale[0][j] = t * a.tensor_scale[j];
            a.factors->scale[1][j] = NBI_NVFP4_LO_SCALE * t * a.tensor_scale[j];
        }
    }
    bool padding = row >= a.N || block * 16 >= a.K;
    float v[16] = {};
    if (!padding)
        load_block(v, (const float4 *)(a.x + row * a.K + block * 16), 1.0f / t);
    for (int term = 0; term < NBI_FP4_TERMS; term++) {
        uint2 codes = make_uint2(0, 0);
        uint8_t scale = padding ? 0 : quantize_block(&codes, v);
        a.scales[term * a.term_bytes + nbi_nvfp4_swizzled_at(row, block, a.K)] = scale;
        if (row < a.N)
            ((uint2 *)(a.codes + term * a.term_bytes + row * (a.padded_K / 2)))[block] = codes;
        for (int j = 0; j < 16; j++)
            v[j] *= 1.0f / NBI_NVFP4_LO_SCALE;
    }
}

enum nb_status nbi_cuda_fp4_quantize_x(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct quantize_args r = {};
    int64_t rows = ceil_div(a->N, 128) * 128, values = a->N * a->K / 4;
    int64_t ctas = ceil_div(values, 256 * 8), limit = (int64_t)s->cuda->sms * 8;
    r.scales = s->x_f16;
    r.codes = s->x_f16 + nbi_nvfp4_swizzled_bytes(a->N, a->K);
    r.x = at<float>(a->x);
    r.factors = (struct factors *)s->x_f16_scale;
    r.N = a->N;
    r.K = a->K;
    r.padded_K = padded_cols(a->K);
    r.term_bytes = term_bytes(a->N, a->K);
    r.add = a->add ? 1.0f : 0.0f;
    for (int i = 0; i < a->count; i++)
        r.tensor_scale[i] = a->w[i].tensor_scale;
    CU_TRY(cudaMemsetAsync(&r.factors->amax, 0, sizeof r.factors->amax, s->queue));
    CU_LAUNCH(k_amax_finite, (unsigned)(ctas < limit ? ctas : limit), 256, 0, s->queue,
              &r.factors->amax, (const float4 *)r.x, values);
    CU_LAUNCHED();
    CU_LAUNCH(k_quantize_block_per_thread, (unsigned)ceil_div(rows * (r.padded_K / 16), 256), 256,
              0, s->queue, r);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- weights ---- */

struct rewrite_args {
    uint8_t *codes, *scales;
    const uint8_t *tiles; /* from the first tile of the rows */
    int tile_rows, tile_cols;
    int64_t rows, K, padded_K; /* rows: padded to 128 */
};

/* A warp takes a tile; a lane has two blocks of each of two rows (nvfp4_tile.cuh). */
__global__ static void k_tiles_to_fp4_rows(struct rewrite_args a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, tile = i >> 5;
    int lane = (int)(i & 31), tile_row = (int)(tile / a.tile_cols);
    int64_t row = (int64_t)tile_row * CUDA_TILE_ROWS + (lane >> 2);
    int64_t block = tile % a.tile_cols * 8 + 2 * (lane & 3);
    if (row >= a.rows || block * 16 >= a.padded_K)
        return;
    uint4 half[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    uint32_t scales = 0;
    if (tile_row < a.tile_rows) {
        const uint8_t *t = a.tiles + tile * CUDA_TILE_BYTES;
        half[0] = ((const uint4 *)t)[lane];
        half[1] = ((const uint4 *)t)[32 + lane];
        scales = ((const uint32_t *)t)[256 + lane];
    }
    uint4 *to = (uint4 *)(a.codes + row * (a.padded_K / 2) + block * 8);
    *to = make_uint4(stored_codes(half[0].x), stored_codes(half[1].x), stored_codes(half[0].z),
                     stored_codes(half[1].z));
    to = (uint4 *)((uint8_t *)to + 8 * (a.padded_K / 2));
    *to = make_uint4(stored_codes(half[0].y), stored_codes(half[1].y), stored_codes(half[0].w),
                     stored_codes(half[1].w));
    *(uint16_t *)(a.scales + nbi_nvfp4_swizzled_at(row, block, a.K)) =
        (uint16_t)((scales & 0xFF) | (scales >> 8 & 0xFF00));
    *(uint16_t *)(a.scales + nbi_nvfp4_swizzled_at(row + 8, block, a.K)) =
        (uint16_t)((scales >> 8 & 0xFF) | (scales >> 16 & 0xFF00));
}

/* Rows [first, first + rows) to s->weights_bf16, scales before codes. first is a multiple of
 * 128. */
static enum nb_status rewrite_weights(struct nbi_stream *s, const struct nbi_weight *w,
                                      int64_t first, int64_t rows)
{
    struct rewrite_args r = {};
    struct tile_shape tiles = tiles_of(w->rows - first, w->cols);
    r.scales = s->weights_bf16;
    r.codes = s->weights_bf16 + nbi_nvfp4_swizzled_bytes(rows, w->cols);
    r.tiles = at<uint8_t>(w->data) + first / CUDA_TILE_ROWS * tiles.cols * CUDA_TILE_BYTES;
    r.tile_rows = tiles.rows;
    r.tile_cols = tiles.cols;
    r.rows = ceil_div(rows, 128) * 128;
    r.K = w->cols;
    r.padded_K = padded_cols(w->cols);
    int64_t threads = r.rows / CUDA_TILE_ROWS * tiles.cols * 32;
    CU_LAUNCH(k_tiles_to_fp4_rows, (unsigned)ceil_div(threads, 256), 256, 0, s->queue, r);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- the product ---- */

/* Rows [first, first + rows), which are in s->weights_bf16.
 *
 * A failure of the second product must leave a y that can be computed again. Without add y will be
 * overwritten. With add both products have the same plan, so whatever refuses the second has
 * refused the first. */
static enum nb_status multiply_slice(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                     int64_t first, int64_t rows)
{
    const struct factors *factors = (const struct factors *)s->x_f16_scale;
    for (int term = 0; term < NBI_FP4_TERMS; term++) {
        const uint8_t *x = s->x_f16 + term * term_bytes(a->N, a->K);
        const struct cublaslt_fp4 fp4 = {x, s->weights_bf16, &factors->scale[term][i],
                                         &factors->add[term]};
        struct cublaslt_gemm g = {};
        g.d = at<float>(a->y[i]) + first;
        g.c = term > 0 || a->add ? g.d : NULL;
        g.a = x + nbi_nvfp4_swizzled_bytes(a->N, a->K);
        g.b = s->weights_bf16 + nbi_nvfp4_swizzled_bytes(rows, a->K);
        g.M = a->N;
        g.N = rows;
        g.K = g.lda = g.ldb = padded_cols(a->K);
        g.ldc = g.ldd = a->w[i].rows;
        g.b_transposed = true;
        g.fp4 = &fp4;
        NBI_TRY(nbi_cuda_cublaslt_gemm(s, &g));
    }
    return NB_OK;
}

/* All rows of matrix i, up to *done. x is quantized. */
static enum nb_status multiply(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                               int64_t *done)
{
    const struct nbi_weight *w = &a->w[i];
    int64_t cols = padded_cols(a->K),
            limit = NBI_WEIGHTS_BF16_BYTES / (cols / 2 + cols / 16) / 128 * 128;
    *done = 0;
    NBI_BUG_IF(limit == 0);
    while (*done < w->rows) {
        int64_t rows = w->rows - *done < limit ? w->rows - *done : limit;
        NBI_TRY(rewrite_weights(s, w, *done, rows));
        NBI_TRY(multiply_slice(s, a, i, *done, rows));
        *done += rows;
    }
    return NB_OK;
}

/* ---- the choice ---- */

void nbi_cuda_fp4_init(struct cuda *cuda)
{
    snprintf(cuda->prefill_path, sizeof cuda->prefill_path, "%s",
             cuda->cc < NBI_FP4_MIN_CC ? PREFILL_BF16 : "native FP4 (cuBLASLt), not tried yet");
    cuda->be.prefill_path = cuda->prefill_path;
}

/* Switches to bf16, and logs why the first time. */
static void disable_fp4(struct cuda *cuda, const char *what)
{
    pthread_mutex_lock(&cuda->lock);
    bool first = !cuda->be.fp4_selftest_failed;
    if (first)
        snprintf(cuda->prefill_path, sizeof cuda->prefill_path,
                 "native FP4 %s (%.150s): " PREFILL_BF16, what, nb_last_error());
    cuda->be.fp4_selftest_failed = true;
    __atomic_fetch_and(&cuda->be.caps, ~(unsigned)NBI_CAP_FP4, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&cuda->lock);
    if (first)
        nbi_log(NB_LOG_WARN, "NVFP4 products on %s: %s", cuda->name, cuda->prefill_path);
}

/* cuBLASLt requires 16-byte aligned rows of y as well. */
bool nbi_cuda_fp4_can_run(const struct nbi_stream *s, const struct nbi_op_linear *a, int i)
{
    return nbi_backend_has(&s->cuda->be, NBI_CAP_FP4) && a->matmul == NBI_MATMUL_FAST &&
           a->N > NBI_DECODE_LINEAR_ROWS && a->w[i].layout == NBI_WEIGHT_TILES &&
           a->w[i].rows % 4 == 0 && a->x.at % 16 == 0;
}

enum nb_status nbi_cuda_fp4_linear(struct nbi_stream *s, const struct nbi_op_linear *a, int i,
                                   int64_t *done)
{
    if (multiply(s, a, i, done) != NB_OK)
        disable_fp4(s->cuda, "failed");
    return NB_OK;
}

/* ---- the self-test ---- */

/* More than one tile of swizzled scales (128 x 4) in each direction, and no multiple of it. */
#define TEST_N     160
#define TEST_K     336
#define TEST_ROWS  300
#define TEST_BOUND 1e-3 /* relative to the RMS of the results; the second term is a tenth of x */

struct probe {
    uint8_t codes[TEST_ROWS * TEST_K / 2], scales[TEST_ROWS * TEST_K / 16];
    float w[TEST_ROWS * TEST_K]; /* their values */
    float x[TEST_N * TEST_K];
    float x_hi_lo[TEST_N * TEST_K];
    float y[TEST_N * TEST_ROWS];
    double want[TEST_N * TEST_ROWS];
};

/* Blocks differ in magnitude, so that a misplaced scale shows. */
static void fill_probe(struct probe *p)
{
    const float tensor_scale = 0.25f;
    float amax = 0;
    for (int i = 0; i < TEST_ROWS * TEST_K / 2; i++)
        p->codes[i] = (uint8_t)nbi_philox(1, (uint64_t)i, 0).v[0];
    for (int i = 0; i < TEST_ROWS * TEST_K / 16; i++)
        p->scales[i] = (uint8_t)(0x28 + nbi_philox(1, (uint64_t)i, 1).v[0] % 32);
    for (int i = 0; i < TEST_N * TEST_K; i += 4)
        nbi_philox_normal4(p->x + i, 1, (uint64_t)i, 2);
    for (int i = 0; i < TEST_N * TEST_K; i++) {
        p->x[i] *= (float)(1 << nbi_philox(1, (uint64_t)(i / 16), 3).v[0] % 4);
        amax = fmaxf(amax, fabsf(p->x[i]));
    }
    nbi_nvfp4_dequantize_f32(p->w, p->codes, p->scales, TEST_ROWS * TEST_K / 16, tensor_scale);
    nbi_nvfp4_split_hi_lo(p->x_hi_lo, p->x, TEST_N * TEST_K / 16, nbi_nvfp4_tensor_scale(amax));
}

/* Fills p->want and returns its RMS. */
static double multiply_on_host(struct probe *p)
{
    double squares = 0;
    for (int n = 0; n < TEST_N; n++)
        for (int o = 0; o < TEST_ROWS; o++) {
            double sum = 0;
            for (int k = 0; k < TEST_K; k++)
                sum += (double)p->x_hi_lo[n * TEST_K + k] * (double)p->w[o * TEST_K + k];
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

/* The product, first over a y of NaN, then added to the result: p->y is twice the product. x_packed
 * and x_scale of `s` suffice for x; `block` has room for x and y. */
static enum nb_status multiply_on_device(struct nbi_stream *s, const struct nbi_weight *w,
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
        NBI_TRY(nbi_cuda_fp4_quantize_x(s, &op));
        NBI_TRY(multiply(s, &op, 0, &done));
    }
    CU_TRY(
        cudaMemcpyAsync(p->y, block + sizeof p->x, sizeof p->y, cudaMemcpyDeviceToHost, s->queue));
    CU_TRY(cudaStreamSynchronize(s->queue));
    return NB_OK;
}

static enum nb_status compare(struct probe *p)
{
    double bound = 2 * TEST_BOUND * multiply_on_host(p);
    for (int i = 0; i < TEST_N * TEST_ROWS; i++)
        if (!(fabs((double)p->y[i] - 2 * p->want[i]) <= bound))
            return nbi_fail(NB_EDEVICE, "result %d is %.6g, not %.6g", i, (double)p->y[i] / 2,
                            p->want[i]);
    return NB_OK;
}

static enum nb_status run_probe(struct nbi_stream *s, struct probe *p)
{
    struct cuda *cuda = s->cuda;
    struct nbi_stream own = *s; /* its x_packed may be too small */
    struct nbi_weight_source src = {};
    struct nbi_weight w = {};
    uint8_t *block = NULL;
    int64_t x_bytes = nbi_cuda_fp4_x_bytes(TEST_N, TEST_K);
    src.dtype = NBI_NVFP4;
    src.rows = TEST_ROWS;
    src.cols = TEST_K;
    src.tensor_scale = 0.25f;
    src.read = read_probe;
    src.ctx = p;
    fill_probe(p);
    CU_TRY(cudaMalloc(&block, (size_t)x_bytes + FACTORS_BYTES + sizeof p->x + sizeof p->y));
    own.x_f16 = block;
    own.x_f16_scale = (float *)(block + x_bytes);
    pthread_mutex_lock(&cuda->lock);
    enum nb_status rc = cuda->be.weight_new(&cuda->be, &src, &w);
    pthread_mutex_unlock(&cuda->lock);
    if (rc == NB_OK)
        rc = multiply_on_device(&own, &w, p, block + x_bytes + FACTORS_BYTES);
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
    enum nb_status rc = run_probe(s, p);
    free(p);
    return rc;
}

void nbi_cuda_fp4_selftest(struct nbi_stream *s)
{
    struct cuda *cuda = s->cuda;
    if (cuda->cc < NBI_FP4_MIN_CC)
        return;
    pthread_mutex_lock(&cuda->fp4_selftest_lock);
    if (!nbi_backend_has(&cuda->be, NBI_CAP_FP4) && !cuda->be.fp4_selftest_failed) {
        if (self_test(s) == NB_OK) {
            snprintf(cuda->prefill_path, sizeof cuda->prefill_path,
                     "native FP4 (cuBLASLt), activations in two terms, self-test passed");
            __atomic_fetch_or(&cuda->be.caps, (unsigned)NBI_CAP_FP4, __ATOMIC_RELEASE);
        } else {
            disable_fp4(cuda, "failed its self-test");
        }
    }
    pthread_mutex_unlock(&cuda->fp4_selftest_lock);
}
