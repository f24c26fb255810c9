/* weights.cu - loading parameters to the device.
 *
 * NVFP4 matrices become tiles (nvfp4_tile.cuh), other weights keep their layout. Values go through
 * two stages in turn: while the device copies and packs one, the host reads into the other. An
 * embedding that is not also the LM head stays in pinned host memory, since a token reads only one
 * row of it. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/nvfp4_master.cuh"

extern "C" {
#include "base/parallel.h"
}

/* ---- memory ---- */

#define HUGE_PAGE ((size_t)2 << 20)

/* Ordinary memory, to be pinned once it is filled. The threads that fill it fault its pages in in
 * parallel, which the driver would do one after the other. */
static enum nb_status host_alloc(int64_t bytes, struct nbi_ptr *out)
{
    void *p = NULL;
    if (posix_memalign(&p, HUGE_PAGE, (size_t)bytes) != 0)
        return nbi_fail_memory("embedding", (size_t)bytes);
    madvise(p, (size_t)bytes, MADV_HUGEPAGE); /* faster, if the system has huge pages */
    out->at = (uintptr_t)p;
    return NB_OK;
}

/* Pins a host weight. Returns whether the device can read it at the same address. */
static bool pin(const struct nbi_weight *w, int64_t bytes)
{
    void *host = at<void>(w->data), *device = NULL;
    bool ok = cudaHostRegister(host, (size_t)bytes,
                               cudaHostRegisterMapped | cudaHostRegisterPortable) == cudaSuccess &&
              cudaHostGetDevicePointer(&device, host, 0) == cudaSuccess && device == host;
    cudaGetLastError(); /* or the next launch would report it */
    return ok;
}

static enum nb_status slab_new(struct cuda *cuda, int64_t bytes, bool host, struct slab **out)
{
    struct slab *s = (struct slab *)calloc(1, sizeof *s);
    struct nbi_ptr block;
    if (!s)
        return nbi_fail_memory("slab", sizeof *s);
    enum nb_status rc =
        host ? host_alloc(bytes, &block) : nbi_cuda_alloc(cuda, "weights", bytes, &block);
    if (rc != NB_OK) {
        free(s);
        return rc;
    }
    *s = (struct slab){cuda->slabs, at<uint8_t>(block), bytes, 0, 0, host};
    cuda->slabs = *out = s;
    return NB_OK;
}

static void slab_free(struct cuda *cuda, struct slab *s)
{
    if (!s->host) {
        nbi_cuda_free(cuda, s->block);
    } else {
        if (cudaHostUnregister(s->block) != cudaSuccess)
            cudaGetLastError(); /* it was never pinned */
        free(s->block);
    }
    free(s);
}

/* Takes memory from a slab with enough left. Large weights and host weights get a slab of their
 * own. */
static enum nb_status weight_alloc(struct cuda *cuda, int64_t bytes, bool host, struct nbi_ptr *out)
{
    struct slab *s = host ? NULL : cuda->slabs;
    bytes = ceil_div(bytes, 256) * 256;
    while (s && (s->host || s->bytes - s->used < bytes))
        s = s->next;
    if (!s) {
        bool own = host || bytes > NBI_SLAB_BYTES / 2;
        NBI_TRY(slab_new(cuda, own ? bytes : NBI_SLAB_BYTES, host, &s));
    }
    out->at = (uintptr_t)(s->block + s->used);
    s->used += bytes;
    s->users++;
    return NB_OK;
}

/* The link to the slab that contains the address; to NULL if none does. */
static struct slab **find_slab(struct cuda *cuda, const uint8_t *p)
{
    struct slab **link = &cuda->slabs;
    while (*link && (p < (*link)->block || p >= (*link)->block + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

static void weight_release(struct cuda *cuda, const uint8_t *p)
{
    struct slab **link = find_slab(cuda, p), *s = *link;
    if (s && --s->users == 0) {
        *link = s->next;
        slab_free(cuda, s);
    }
}

bool nbi_cuda_on_host(struct cuda *cuda, const struct nbi_weight *w)
{
    pthread_mutex_lock(&cuda->lock);
    const struct slab *s = *find_slab(cuda, at<uint8_t>(w->data));
    bool host = s && s->host;
    pthread_mutex_unlock(&cuda->lock);
    return host;
}

/* ---- stages ---- */

enum nb_status nbi_cuda_stages_open(struct cuda *cuda)
{
    for (int i = 0; i < 2; i++) {
        if (!cuda->host_stage[i])
            CU_TRY(cudaMallocHost(&cuda->host_stage[i], NBI_STAGE_BYTES));
        struct nbi_ptr stage = {(uintptr_t)cuda->device_stage[i]};
        if (!stage.at)
            NBI_TRY(nbi_cuda_alloc(cuda, "stages", NBI_STAGE_BYTES, &stage));
        cuda->device_stage[i] = at<uint8_t>(stage);
        if (!cuda->stage_free[i])
            CU_TRY(cudaEventCreateWithFlags(&cuda->stage_free[i], cudaEventDisableTiming));
    }
    return NB_OK;
}

void nbi_cuda_weights_release(struct cuda *cuda)
{
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(cuda->host_stage[i]);
        if (cuda->device_stage[i])
            nbi_cuda_free(cuda, cuda->device_stage[i]);
        if (cuda->stage_free[i])
            cudaEventDestroy(cuda->stage_free[i]);
    }
    while (cuda->slabs) {
        struct slab *s = cuda->slabs;
        cuda->slabs = s->next;
        slab_free(cuda, s);
    }
}

/* ---- tiles ---- */

/* The inverse of e2m1_pair: a byte of two codes as pair p of a word, the first code in the low
 * half. */
__device__ static uint32_t pack_pair(uint32_t byte, int p)
{
    const int sign[4] = {15, 12, 14, 13};
    uint32_t low = (byte >> 3 & 1) << sign[p] | (byte & 7) << (9 - 3 * p);
    uint32_t high = (byte >> 7 & 1) << sign[p] | (byte >> 4 & 7) << (9 - 3 * p);
    return low | high << 16;
}

/* Packs rows of codes and scales. A thread makes one word of codes; the threads of a lane's first
 * four words also copy its scales. */
__global__ static void k_pack_tiles(uint8_t *tiles, const uint8_t *codes, const uint8_t *scales,
                                    int rows, int64_t cols, int tile_cols)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int w = (int)(i & 7), lane = (int)(i >> 3 & 31);
    int64_t tile = i >> 8;
    int tile_row = (int)(tile / tile_cols);
    if (tile_row >= (rows + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS)
        return;
    int half = w >> 2, quarter = w & 3;
    int row = tile_row * CUDA_TILE_ROWS + (lane >> 2) + 8 * (quarter & 1);
    int64_t block = (tile % tile_cols) * 8 + 2 * (lane & 3) + (quarter >> 1);
    bool inside = row < rows && block * 16 < cols;
    uint32_t word = 0;
    if (inside) {
        const uint8_t *c = codes + row * (cols / 2) + block * 8 + half * 4;
        for (int p = 0; p < 4; p++)
            word |= pack_pair(c[p], p);
    }
    uint8_t *t = tiles + tile * CUDA_TILE_BYTES;
    ((uint32_t *)t)[half * 128 + lane * 4 + quarter] = word;
    if (half == 0)
        t[1024 + lane * 4 + quarter] = inside ? scales[row * (cols / 16) + block] : 0;
}

/* A lane's codes and scales of a tile; zeros beyond the last one. */
struct lane_of_tile {
    uint32_t words[8], scales;
};

__device__ static inline struct lane_of_tile load_lane(const uint8_t *tiles, int col, int tile_cols)
{
    const uint8_t *t = tiles + (int64_t)col * CUDA_TILE_BYTES;
    const int lane = threadIdx.x % 32;
    if (col >= tile_cols)
        return {};
    const uint4 low = ((const uint4 *)t)[lane], high = ((const uint4 *)t)[32 + lane];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w},
            ((const uint32_t *)t)[256 + lane]};
}

/* The largest Euclidean norm of a row, one warp for each tile row. *out holds the bits of a
 * non-negative float, whose order is that of unsigned integers. */
__global__ static void k_max_row_norm(uint32_t *out, const uint8_t *tiles, int tile_rows,
                                      int tile_cols, float scale)
{
    constexpr int BATCH = 4; /* tiles whose loads are in flight together */
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    float sum[2] = {}; /* of rows g and g + 8 */
    if (row >= tile_rows)
        return;
    tiles += (int64_t)row * tile_cols * CUDA_TILE_BYTES;
    for (int col = 0; col < tile_cols; col += BATCH) {
        struct lane_of_tile t[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            t[b] = load_lane(tiles, col + b, tile_cols);
#pragma unroll
        for (int q = 0; q < 4 * BATCH; q++) {
            const uint8_t code = (uint8_t)(t[q / 4].scales >> 8 * (q % 4));
            float by = load_f32(&code, 0, NBI_E4M3), squares = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t pair = e2m1_pair(t[q / 4].words[i / 4 * 4 + q % 4], i % 4);
                float2 v = __half22float2(*(__half2 *)&pair);
                squares += v.x * v.x + v.y * v.y;
            }
            sum[q % 2] += squares * by * by;
        }
    }
    for (int o = 1; o < 4; o *= 2)
        for (int i = 0; i < 2; i++)
            sum[i] += __shfl_xor_sync(0xFFFFFFFF, sum[i], o);
    float amax = warp_max(fmaxf(sum[0], sum[1]));
    if (lane == 0)
        atomicMax(out, __float_as_uint(sqrtf(amax) * E2M1_PAIR_SCALE * scale));
}

/* The address after the tiles, where the norm is. */
static uint8_t *tiles_end(const struct nbi_weight *w)
{
    struct tile_shape t = tiles_of(w->rows, w->cols);
    return at<uint8_t>(w->data) + (int64_t)t.rows * t.cols * CUDA_TILE_BYTES;
}

const float *nbi_cuda_max_row_norm(const struct nbi_weight *w)
{
    return (const float *)tiles_end(w);
}

enum nb_status nbi_cuda_measure_rows(const struct nbi_weight *w, cudaStream_t queue)
{
    struct tile_shape tiles = tiles_of(w->rows, w->cols);
    uint32_t *norm = (uint32_t *)tiles_end(w);
    CU_TRY(cudaMemsetAsync(norm, 0, sizeof *norm, queue));
    CU_LAUNCH(k_max_row_norm, (unsigned)ceil_div(tiles.rows, 4), 128, 0, queue, norm,
              at<uint8_t>(w->data), tiles.rows, tiles.cols, w->tensor_scale);
    CU_LAUNCHED();
    return NB_OK;
}

/* Unpacks rows [first, first + rows); a thread for each word of codes. */
__global__ static void k_unpack_tiles(uint8_t *codes, uint8_t *scales, const uint8_t *tiles,
                                      int64_t first, int64_t rows, int64_t cols, int tile_cols)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = cols / 8;
    if (i >= rows * per_row)
        return;
    int64_t row = first + i / per_row, word_index = i % per_row, block = word_index / 2;
    int half = (int)(word_index & 1), r = (int)(row % 16), b = (int)(block % 8);
    int lane = (r & 7) * 4 + b / 2, quarter = (r >> 3) + 2 * (b & 1);
    const uint8_t *t = tiles + (row / 16 * tile_cols + block / 8) * CUDA_TILE_BYTES;
    uint32_t word = ((const uint32_t *)t)[half * 128 + lane * 4 + quarter];
    ((uint32_t *)codes)[i] = stored_codes(word);
    if (half == 0)
        scales[i / 2] = t[1024 + lane * 4 + quarter];
}

/* Makes codes of rows [first, first + rows) of a matrix without codes, and copies its scales; a
 * thread for each word of codes. */
__global__ static void k_make_codes(uint8_t *codes, uint8_t *scales, struct coded_master m,
                                    int64_t first, int64_t rows)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = m.cols / 8;
    if (i >= rows * per_row)
        return;
    float values[8];
    uint32_t code[8], word = 0;
    load_coded<8>(values, code, m, first + i / per_row, i % per_row * 8);
    for (int j = 0; j < 8; j++)
        word |= code[j] << 4 * j;
    ((uint32_t *)codes)[i] = word;
    if (i % 2 == 0)
        scales[i / 2] = m.scales[first * (m.cols / 16) + i / 2];
}

/* ---- loading ---- */

struct transfer {
    struct cuda *cuda;
    const struct nbi_weight_source *src;
    const struct nbi_weight *w;
    int64_t row_data, row_scales; /* bytes of a row */
};

/* Reads rows [first, first + count) and queues their copy through stage `which`. */
static enum nb_status send_rows(const struct transfer *t, int which, int64_t first, int64_t count)
{
    struct cuda *cuda = t->cuda;
    uint8_t *host = cuda->host_stage[which], *dev = cuda->device_stage[which];
    int64_t data = count * t->row_data, scales = count * t->row_scales;
    int64_t scales_at = ceil_div(data, 16) * 16;
    CU_TRY(cudaEventSynchronize(cuda->stage_free[which]));
    NBI_TRY(t->src->read(t->src->ctx, first, count, host, host + scales_at));
    if (t->w->dtype != NBI_NVFP4) {
        CU_TRY(cudaMemcpyAsync(at<uint8_t>(t->w->data) + first * t->row_data, host, (size_t)data,
                               cudaMemcpyHostToDevice, cuda->queue));
    } else {
        struct tile_shape tiles = tiles_of(count, t->w->cols);
        int64_t words = (int64_t)tiles.rows * tiles.cols * 256;
        CU_TRY(cudaMemcpyAsync(dev, host, (size_t)(scales_at + scales), cudaMemcpyHostToDevice,
                               cuda->queue));
        CU_LAUNCH(k_pack_tiles, (unsigned)ceil_div(words, 256), 256, 0, cuda->queue,
                  at<uint8_t>(t->w->data) + first / CUDA_TILE_ROWS * tiles.cols * CUDA_TILE_BYTES,
                  dev, dev + scales_at, (int)count, t->w->cols, tiles.cols);
        CU_LAUNCHED();
    }
    CU_TRY(cudaEventRecord(cuda->stage_free[which], cuda->queue));
    return NB_OK;
}

/* Rows that fit into a stage, a multiple of the rows of a tile. */
static int64_t rows_per_stage(const struct transfer *t)
{
    int64_t per_row = t->row_data + t->row_scales;
    return (NBI_STAGE_BYTES - 64) / per_row / CUDA_TILE_ROWS * CUDA_TILE_ROWS;
}

static enum nb_status send_all(const struct transfer *t)
{
    int64_t step = rows_per_stage(t);
    int which = 0;
    if (step == 0)
        return nbi_fail(NB_EUNSUPPORTED, "rows of %lld columns", (long long)t->w->cols);
    for (int64_t first = 0; first < t->w->rows; first += step, which ^= 1) {
        int64_t left = t->w->rows - first;
        NBI_TRY(send_rows(t, which, first, left < step ? left : step));
    }
    if (t->w->dtype == NBI_NVFP4)
        NBI_TRY(nbi_cuda_measure_rows(t->w, t->cuda->queue));
    CU_TRY(cudaStreamSynchronize(t->cuda->queue));
    return NB_OK;
}

/* For nbi_for_chunks: reads rows of a host weight to their final place. */
static enum nb_status read_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    const struct transfer *t = (const struct transfer *)ctx;
    return t->src->read(t->src->ctx, first, count, at<uint8_t>(t->w->data) + first * t->row_data,
                        NULL);
}

static enum nb_status read_all(struct transfer *t)
{
    int64_t step = rows_per_stage(t);
    return nbi_for_chunks(t->w->rows, step > 0 ? step : 1, t->cuda->threads, read_chunk, t);
}

/* A weight in the caller's memory, or without memory. */
static struct nbi_weight describe(enum nbi_dtype dtype, int64_t rows, int64_t cols,
                                  const struct nbi_weight_memory *memory)
{
    struct nbi_weight w = {};
    w.dtype = dtype;
    w.layout = dtype == NBI_NVFP4 ? NBI_WEIGHT_TILES : NBI_WEIGHT_ROWS;
    w.rows = rows;
    w.cols = cols;
    w.tensor_scale = 1;
    if (memory)
        w.data = memory->data;
    w.borrowed = memory != NULL;
    return w;
}

static int64_t weight_bytes(const struct cuda *cuda, const struct nbi_weight *w)
{
    return cuda->be.weight_bytes(&cuda->be, w->dtype, w->rows, w->cols);
}

/* Memory of a weight that is not loaded, zeroed on the backend's queue. */
static enum nb_status alloc_zeroed(struct cuda *cuda, int64_t bytes, struct nbi_ptr *out)
{
    NBI_TRY(weight_alloc(cuda, bytes, false, out));
    CU_TRY(cudaMemsetAsync(at<void>(*out), 0, (size_t)bytes, cuda->queue));
    return NB_OK;
}

static enum nb_status alloc_parts(struct cuda *cuda, struct nbi_weight *w,
                                  enum nb_weight_store store)
{
    int64_t n = w->rows * w->cols;
    if (w->layout == NBI_WEIGHT_SCALES)
        NBI_TRY(alloc_zeroed(cuda, n / 16, &w->scales));
    else
        NBI_TRY(alloc_zeroed(cuda, weight_bytes(cuda, w), &w->data));
    if (w->dtype == NBI_NVFP4 && store == NB_WEIGHT_STORE_BF16)
        NBI_TRY(alloc_zeroed(cuda, n * (int64_t)sizeof(uint16_t), &w->bf16));
    CU_TRY(cudaStreamSynchronize(cuda->queue));
    return NB_OK;
}

enum nb_status nbi_cuda_weight_alloc(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                     int64_t cols, enum nb_weight_store store,
                                     const struct nbi_weight_memory *memory, struct nbi_weight *out)
{
    struct cuda *cuda = (struct cuda *)be;
    NBI_BUG_IF(cols == 0 ? dtype != NBI_F32 : dtype == NBI_NVFP4 && cols % 16 != 0);
    *out = describe(dtype, rows, cols, memory);
    if (dtype == NBI_NVFP4 && store == NB_WEIGHT_STORE_SCALES) {
        out->layout = NBI_WEIGHT_SCALES;
        out->scales = out->data;
        out->data.at = 0;
    }
    if (memory && dtype == NBI_NVFP4 && store == NB_WEIGHT_STORE_BF16)
        out->bf16 = memory->bf16;
    if (memory)
        return NB_OK;
    CU_TRY(cudaSetDevice(cuda->index));
    enum nb_status rc = alloc_parts(cuda, out, store);
    if (rc != NB_OK)
        nbi_cuda_weight_free(be, out);
    return rc;
}

enum nb_status nbi_cuda_weight_new(struct nbi_backend *be, const struct nbi_weight_source *src,
                                   struct nbi_weight *out)
{
    struct cuda *cuda = (struct cuda *)be;
    bool nvfp4 = src->dtype == NBI_NVFP4;
    int64_t cols = src->cols > 0 ? src->cols : 1;
    struct nbi_weight w = describe(src->dtype, src->rows, src->cols, src->memory);
    int64_t bytes = weight_bytes(cuda, &w);
    w.tensor_scale = src->tensor_scale;
    struct transfer t = {cuda, src, &w,
                         nvfp4 ? cols / 2 : (int64_t)nbi_dtype_bytes(src->dtype, cols),
                         nvfp4 ? cols / 16 : 0};
    CU_TRY(cudaSetDevice(cuda->index));
    NBI_TRY(nbi_cuda_stages_open(cuda));
    /* Without host memory that can be pinned the weight goes to the device. */
    bool host =
        src->lookup && !src->memory && !nvfp4 && weight_alloc(cuda, bytes, true, &w.data) == NB_OK;
    enum nb_status rc = host ? read_all(&t) : NB_OK;
    if (host && rc == NB_OK && !pin(&w, bytes)) {
        weight_release(cuda, at<uint8_t>(w.data));
        host = false;
    }
    if (!host) {
        if (!w.borrowed)
            NBI_TRY(weight_alloc(cuda, bytes, false, &w.data));
        rc = send_all(&t);
    }
    if (rc == NB_OK)
        *out = w;
    else if (!w.borrowed)
        weight_release(cuda, at<uint8_t>(w.data));
    return rc;
}

/* ---- reading back ---- */

static enum nb_status unpack(struct cuda *cuda, const struct nbi_weight *w, int64_t first,
                             int64_t count, uint8_t *codes, uint8_t *scales)
{
    int64_t row = w->cols / 2 + w->cols / 16, step = NBI_STAGE_BYTES / row;
    NBI_TRY(nbi_cuda_stages_open(cuda)); /* weight_alloc does not */
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < step ? count - done : step;
        uint8_t *c = cuda->device_stage[0], *s = c + n * (w->cols / 2);
        int64_t words = n * w->cols / 8;
        unsigned ctas = (unsigned)ceil_div(words, 256);
        if (w->layout == NBI_WEIGHT_SCALES)
            CU_LAUNCH(k_make_codes, ctas, 256, 0, cuda->queue, c, s, coded_master_of(w),
                      first + done, n);
        else
            CU_LAUNCH(k_unpack_tiles, ctas, 256, 0, cuda->queue, c, s, at<uint8_t>(w->data),
                      first + done, n, w->cols, tiles_of(1, w->cols).cols);
        CU_LAUNCHED();
        CU_TRY(cudaMemcpyAsync(codes + done * (w->cols / 2), c, (size_t)(n * (w->cols / 2)),
                               cudaMemcpyDeviceToHost, cuda->queue));
        CU_TRY(cudaMemcpyAsync(scales + done * (w->cols / 16), s, (size_t)(n * (w->cols / 16)),
                               cudaMemcpyDeviceToHost, cuda->queue));
        CU_TRY(cudaStreamSynchronize(cuda->queue));
    }
    return NB_OK;
}

enum nb_status nbi_cuda_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                    int64_t first, int64_t count, void *data, void *scales)
{
    struct cuda *cuda = (struct cuda *)be;
    CU_TRY(cudaSetDevice(cuda->index));
    if (w->dtype == NBI_NVFP4)
        return unpack(cuda, w, first, count, (uint8_t *)data, (uint8_t *)scales);
    int64_t row = (int64_t)nbi_dtype_bytes(w->dtype, w->cols > 0 ? w->cols : 1);
    const uint8_t *from = at<uint8_t>(w->data) + first * row;
    if (nbi_cuda_on_host(cuda, w))
        memcpy(data, from, (size_t)(count * row));
    else
        CU_TRY(cudaMemcpy(data, from, (size_t)(count * row), cudaMemcpyDeviceToHost));
    return NB_OK;
}

void nbi_cuda_weight_free(struct nbi_backend *be, struct nbi_weight *w)
{
    if (w->data.at && !w->borrowed)
        weight_release((struct cuda *)be, at<uint8_t>(w->data));
    if (w->scales.at && !w->borrowed)
        weight_release((struct cuda *)be, at<uint8_t>(w->scales));
    if (w->bf16.at && !w->borrowed)
        weight_release((struct cuda *)be, at<uint8_t>(w->bf16));
    *w = (struct nbi_weight){};
}

struct nbi_weight nbi_cuda_weight_rows(const struct nbi_weight *w, int64_t first, int64_t count)
{
    struct nbi_weight out = *w;
    int64_t value = first * w->cols;
    NBI_BUG_IF(first % NBI_ROWS_AT != 0 || w->cols == 0);
    out.rows = count;
    out.borrowed = true;
    if (w->layout == NBI_WEIGHT_TILES)
        out.data = nbi_ptr_add(w->data, (int64_t)(first / CUDA_TILE_ROWS) *
                                            tiles_of(1, w->cols).cols * CUDA_TILE_BYTES);
    else if (w->data.at)
        out.data = nbi_ptr_add(w->data, (int64_t)nbi_dtype_bytes(w->dtype, value));
    if (w->layout == NBI_WEIGHT_SCALES) {
        out.scales = nbi_ptr_add(w->scales, value / 16);
        out.master = nbi_ptr_add(w->master, (int64_t)nbi_dtype_bytes(w->master_dtype, value));
    }
    if (w->bf16.at)
        out.bf16 = nbi_ptr_add(w->bf16, value * (int64_t)sizeof(uint16_t));
    return out;
}

__global__ static void k_to_f32(float *out, const void *x, enum nbi_dtype dtype, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = load_f32(x, i, dtype);
}

static enum nb_status read_vector(struct cuda *cuda, const struct nbi_weight *w, float *out)
{
    CU_TRY(cudaSetDevice(cuda->index));
    NBI_TRY(nbi_cuda_stages_open(cuda));
    NBI_BUG_IF(w->rows * (int64_t)sizeof(float) > NBI_STAGE_BYTES);
    CU_LAUNCH(k_to_f32, (unsigned)ceil_div(w->rows, 256), 256, 0, cuda->queue,
              (float *)cuda->device_stage[0], at<void>(w->data), w->dtype, w->rows);
    CU_LAUNCHED();
    CU_TRY(cudaMemcpyAsync(out, cuda->device_stage[0], (size_t)w->rows * sizeof(float),
                           cudaMemcpyDeviceToHost, cuda->queue));
    CU_TRY(cudaStreamSynchronize(cuda->queue));
    return NB_OK;
}

enum nb_status nbi_cuda_vector_read(struct cuda *cuda, const struct nbi_weight *w, float *out)
{
    pthread_mutex_lock(&cuda->lock);
    enum nb_status rc = read_vector(cuda, w, out);
    pthread_mutex_unlock(&cuda->lock);
    return rc;
}
