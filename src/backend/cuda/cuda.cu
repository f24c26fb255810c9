/* cuda.cu - a CUDA device as a backend: memory, streams, copies, the table of operations.
 *
 * A stream gets all its memory when it is opened. Its operations allocate nothing, but for CUDA
 * graphs (graph.cu). Every call selects the device first, since CUDA keeps it per thread. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/attention_backward.cuh"
#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/train.cuh"

enum nb_status nbi_cuda_fail(cudaError_t rc, const char *what)
{
    cudaGetLastError(); /* or the next launch would report it again */
    if (rc == cudaErrorMemoryAllocation)
        return nbi_fail(NB_ENOMEM, "the GPU is out of memory (%s)", what);
    return nbi_fail(NB_EDEVICE, "the GPU failed: %s (%s)", cudaGetErrorString(rc), what);
}

static struct cuda *cuda_of(struct nbi_backend *be)
{
    return (struct cuda *)be;
}

/* ---- memory ---- */

static enum nb_status cuda_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                 struct nbi_ptr *out)
{
    struct cuda *cuda = cuda_of(be);
    NBI_TRY(nbi_cuda_alloc(cuda, what, bytes, out));
    cudaError_t rc =
        cudaMemsetAsync(at<void>(*out), 0, (size_t)(bytes > 0 ? bytes : 0), cuda->queue);
    if (rc == cudaSuccess)
        rc = cudaStreamSynchronize(cuda->queue);
    if (rc != cudaSuccess) {
        nbi_cuda_free(cuda, at<void>(*out));
        out->at = 0;
    }
    CU_TRY(rc);
    return NB_OK;
}

static void cuda_free(struct nbi_backend *be, struct nbi_ptr p)
{
    if (p.at)
        nbi_cuda_free(cuda_of(be), at<void>(p));
}

/* ---- streams ---- */

static void cuda_stream_free(struct nbi_stream *s)
{
    if (!s)
        return;
    if (s->queue)
        cudaStreamSynchronize(s->queue);
    nbi_cuda_graphs_release(s);
    if (s->block)
        nbi_cuda_free(s->cuda, s->block);
    cudaFreeHost(s->pinned);
    if (s->queue)
        cudaStreamDestroy(s->queue);
    free(s);
}

static enum nb_status fill_stream(struct nbi_stream *s)
{
    struct nbi_cuda_scratch p = nbi_cuda_scratch_for(&s->limits);
    struct nbi_ptr block;
    CU_TRY(cudaSetDevice(s->cuda->index));
    bool prefill = nbi_cuda_has_prefill(&s->limits);
    NBI_BUG_IF(prefill && nbi_cuda_fp4_x_bytes(s->limits.N, s->limits.K) > p.x_f16);
    if (prefill || s->limits.bf16) {
        pthread_mutex_lock(&s->cuda->lock);
        enum nb_status rc = nbi_cuda_cublaslt_open(s->cuda);
        pthread_mutex_unlock(&s->cuda->lock);
        NBI_TRY(rc);
    }
    CU_TRY(cudaStreamCreateWithFlags(&s->queue, cudaStreamNonBlocking));
    CU_TRY(cudaMallocHost(&s->pinned, NBI_PINNED_BYTES));
    if (s->limits.training)
        NBI_TRY(nbi_cuda_stages_open(s->cuda));
    NBI_TRY(cuda_alloc(&s->cuda->be, "scratch", p.total, &block));
    s->block = at<uint8_t>(block);
    s->x_f16 = s->block;
    s->x_f16_scale = (float *)(s->x_f16 + p.x_f16);
    s->act_f16 = (uint8_t *)s->x_f16_scale + p.x_scale;
    s->act_f16_scale = (float *)(s->act_f16 + p.act_f16);
    s->attention_partials = (float *)((uint8_t *)s->act_f16_scale + p.act_scale);
    s->attention_counters = (int32_t *)((uint8_t *)s->attention_partials + p.attention);
    s->attention_stats = (float2 *)((uint8_t *)s->attention_counters + p.counters);
    s->weights_bf16 = (uint8_t *)s->attention_stats + p.stats;
    s->workspace = s->weights_bf16 + p.weights_bf16;
    if (prefill)
        nbi_cuda_fp4_selftest(s);
    return NB_OK;
}

static enum nb_status cuda_stream_new(struct nbi_backend *be,
                                      const struct nbi_stream_limits *limits,
                                      struct nbi_stream **out)
{
    struct nbi_stream *s = (struct nbi_stream *)calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("stream", sizeof *s);
    s->cuda = cuda_of(be);
    s->limits = *limits;
    enum nb_status rc = fill_stream(s);
    if (rc == NB_OK)
        *out = s;
    else
        cuda_stream_free(s);
    return rc;
}

static enum nb_status cuda_sync(struct nbi_stream *s)
{
    int count = s->download_count;
    s->download_count = 0; /* if this fails, the callers may be gone at the next sync */
    CU_HERE(s);
    CU_TRY(cudaStreamSynchronize(s->queue));
    s->pinned_used = 0;
    for (int i = 0; i < count; i++)
        memcpy(s->downloads[i].to, s->downloads[i].from, (size_t)s->downloads[i].bytes);
    return NB_OK;
}

/* Pinned memory for a small copy, valid until the next sync; NULL if it is used up. */
static uint8_t *pinned_alloc(struct nbi_stream *s, int64_t bytes)
{
    int64_t size = ceil_div(bytes, 64) * 64;
    if (s->pinned_used + size > NBI_PINNED_BYTES)
        return NULL;
    s->pinned_used += size;
    return s->pinned + s->pinned_used - size;
}

/* Small copies go through pinned memory, so that the host does not wait for the device. */
static enum nb_status cuda_upload(struct nbi_stream *s, struct nbi_ptr dst, const void *src,
                                  int64_t bytes)
{
    CU_HERE(s);
    if (bytes == 0)
        return NB_OK;
    if (bytes > NBI_PINNED_BYTES) {
        CU_TRY(
            cudaMemcpyAsync(at<void>(dst), src, (size_t)bytes, cudaMemcpyHostToDevice, s->queue));
        return cuda_sync(s);
    }
    uint8_t *via = pinned_alloc(s, bytes);
    if (!via) {
        NBI_TRY(cuda_sync(s));
        via = pinned_alloc(s, bytes);
    }
    memcpy(via, src, (size_t)bytes);
    CU_TRY(cudaMemcpyAsync(at<void>(dst), via, (size_t)bytes, cudaMemcpyHostToDevice, s->queue));
    return NB_OK;
}

static enum nb_status queue_download(struct nbi_stream *s, void *dst, struct nbi_ptr src,
                                     int64_t bytes)
{
    CU_HERE(s);
    uint8_t *via = bytes <= NBI_PINNED_BYTES / 4 && s->download_count < NBI_DOWNLOADS_MAX
                       ? pinned_alloc(s, bytes)
                       : NULL;
    CU_TRY(cudaMemcpyAsync(via ? via : dst, at<void>(src), (size_t)bytes, cudaMemcpyDeviceToHost,
                           s->queue));
    if (via)
        s->downloads[s->download_count++] = {dst, via, bytes};
    return NB_OK;
}

static enum nb_status cuda_download(struct nbi_stream *s, void *dst, struct nbi_ptr src,
                                    int64_t bytes)
{
    enum nb_status rc = queue_download(s, dst, src, bytes);
    if (rc != NB_OK)
        s->download_count = 0; /* the caller gives up: sync must not write there */
    return rc;
}

static enum nb_status cuda_copy(struct nbi_stream *s, struct nbi_ptr dst, struct nbi_ptr src,
                                int64_t bytes)
{
    CU_HERE(s);
    CU_TRY(cudaMemcpyAsync(at<void>(dst), at<void>(src), (size_t)bytes, cudaMemcpyDeviceToDevice,
                           s->queue));
    return NB_OK;
}

static enum nb_status cuda_clear(struct nbi_stream *s, struct nbi_ptr dst, int64_t bytes)
{
    CU_HERE(s);
    CU_TRY(cudaMemsetAsync(at<void>(dst), 0, (size_t)bytes, s->queue));
    return NB_OK;
}

/* ---- the table ---- */

static void cuda_close(struct nbi_backend *be)
{
    struct cuda *cuda = cuda_of(be);
    cudaSetDevice(cuda->index);
    if (cuda->queue)
        cudaStreamSynchronize(cuda->queue);
    nbi_cuda_weights_release(cuda);
    nbi_cuda_cublaslt_close(cuda);
    if (cuda->queue)
        cudaStreamDestroy(cuda->queue);
    pthread_mutex_destroy(&cuda->lock);
    pthread_mutex_destroy(&cuda->allocations_lock);
    pthread_mutex_destroy(&cuda->fp4_selftest_lock);
    free(cuda);
}

static enum nb_status start(struct cuda *cuda, int device)
{
    cudaDeviceProp properties;
    int major = 0, minor = 0;
    CU_TRY(cudaSetDevice(device));
    CU_TRY(cudaGetDeviceProperties(&properties, device));
    snprintf(cuda->gpu, sizeof cuda->gpu, "%.*s", (int)sizeof cuda->gpu - 1, properties.name);
    CU_TRY(cudaDeviceGetAttribute(&cuda->sms, cudaDevAttrMultiProcessorCount, device));
    CU_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CU_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CU_TRY(cudaDeviceGetAttribute(&cuda->smem_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                  device));
    CU_TRY(cudaStreamCreateWithFlags(&cuda->queue, cudaStreamNonBlocking));
    cuda->cc = 10 * major + minor;
    NBI_TRY(nbi_cuda_ptx_version(&cuda->ptx_version));
    if (cuda->ptx_version >= 90)
        cuda->be.caps |= NBI_CAP_MEGAKERNEL | NBI_CAP_RUN_AHEAD;
    snprintf(cuda->name, sizeof cuda->name, "cuda:%d", device);
    nbi_cuda_fp4_init(cuda);
    return NB_OK;
}

static void fill_table(struct cuda *cuda)
{
    struct nbi_backend *be = &cuda->be;
    be->name = cuda->name;
    nbi_cuda_describe(be);
    be->close = cuda_close;
    be->alloc = cuda_alloc;
    be->free = cuda_free;
    be->memory = nbi_cuda_memory;
    be->weight_new = nbi_cuda_weight_new;
    be->weight_alloc = nbi_cuda_weight_alloc;
    be->weight_read = nbi_cuda_weight_read;
    be->weight_free = nbi_cuda_weight_free;
    be->weight_rows = nbi_cuda_weight_rows;
    be->stream_new = cuda_stream_new;
    be->stream_free = cuda_stream_free;
    be->sync = cuda_sync;
    be->upload = cuda_upload;
    be->download = cuda_download;
    be->copy = cuda_copy;
    be->clear = cuda_clear;
#define X(op) be->op = nbi_cuda_##op;
    NBI_OP_LIST(X)
#undef X
    be->tuning_save = nbi_cuda_tuning_save;
    be->tuning_load = nbi_cuda_tuning_load;
    be->layers = nbi_cuda_layers;
    be->graph_run = nbi_cuda_graph_run;
    be->megakernel_new = nbi_cuda_megakernel_new;
    be->megakernel_run = nbi_cuda_megakernel_run;
    be->megakernel_run_ahead = nbi_cuda_megakernel_run_ahead;
    be->megakernel_free = nbi_cuda_megakernel_free;
    be->roofline_bandwidth = nbi_cuda_roofline_bandwidth;
    be->roofline = nbi_cuda_roofline;
    be->roofline_f32 = nbi_cuda_roofline_f32;
}

enum nb_status nbi_cuda_open(struct nbi_backend **out, int device, int threads)
{
    struct cuda *cuda = (struct cuda *)calloc(1, sizeof *cuda);
    *out = NULL;
    if (!cuda)
        return nbi_fail_memory("backend", sizeof *cuda);
    fill_table(cuda);
    cuda->index = device;
    cuda->threads = threads > 0 ? threads : nbi_cpu_count();
    pthread_mutex_init(&cuda->lock, NULL);
    pthread_mutex_init(&cuda->allocations_lock, NULL);
    pthread_mutex_init(&cuda->fp4_selftest_lock, NULL);
    enum nb_status rc = start(cuda, device);
    if (rc == NB_OK)
        *out = &cuda->be;
    else
        cuda_close(&cuda->be);
    return rc;
}
