/* internal.cuh - what the files of the CUDA backend share: structs, error macros, prototypes.
 *
 * No file outside this folder includes a CUDA header. Kernels and templates stay in the file that
 * launches them; what other files call is declared at the end.
 *
 * A stream has memory, but no state: what it holds between two calls means nothing. Steps that hand
 * work or data to the next one do so within a call (layers.cu). */
#pragma once

#include <cuda_runtime.h>
#include <pthread.h>

extern "C" {
#include "backend/cuda_memory.h"
#include "backend/decode.h"
#include "backend/devices.h"
#include "backend/layers.h"
#include "backend/ops_train.h"
}

#include "backend/cuda/device_math.cuh"
#include "backend/cuda/nvfp4_tile.cuh"

/* ---- limits; those that memory depends on are in cuda_memory.h ---- */

#define NBI_DOWNLOADS_MAX 64 /* nbi_stream.downloads */
#define NBI_GRAPHS_MAX    16 /* nbi_stream.graphs */

/* ---- the backend ---- */

/* A block of memory that several weights share, because the driver rounds each of its own blocks up
 * to 2 MiB. A host slab holds one weight in pinned memory, which kernels read over the bus at the
 * same address. */
struct slab {
    struct slab *next;
    uint8_t *block;
    int64_t bytes, used;
    int64_t users; /* weights in it; freed with the last one */
    bool host;     /* pinned host memory */
};

struct cuda {
    struct nbi_backend be;
    int index;                 /* of the device */
    int threads;               /* of the host, that read weights */
    int sms;                   /* multiprocessors */
    int cc;                    /* compute capability, 90 for 9.0 */
    int ptx_version;           /* architecture the kernels were compiled for, 90 for 9.0 */
    int smem_per_cta;          /* the most shared memory a CTA can have, in bytes */
    struct cublaslt *cublaslt; /* NULL until it is needed */
    cudaStream_t queue;        /* for work that belongs to no nbi_stream */
    struct slab *slabs;        /* the weights' memory */
    /* Weights are uploaded through two stages in turn, each a pinned block and a device block. */
    uint8_t *host_stage[2], *device_stage[2];
    cudaEvent_t stage_free[2];      /* the stage may be written again */
    struct allocation *allocations; /* device memory, by name (memory.cu) */
    pthread_mutex_t allocations_lock;
    pthread_mutex_t lock;              /* of what sessions share: cuBLASLt plans, the stages */
    pthread_mutex_t fp4_selftest_lock; /* held while FP4 products are tested */
    char name[16];                     /* "cuda:0" */
    char gpu[64];                      /* as its driver calls it */
    char prefill_path[256];            /* be.prefill_path */
};

/* ---- a stream ---- */

/* A recorded list of operations (graph.cu). */
struct cached_graph {
    int64_t key[NBI_GRAPH_KEYS];
    int64_t used;         /* nbi_stream.graph_clock at its last use; 0: the entry is free */
    bool tried;           /* recording was tried */
    cudaGraphExec_t exec; /* NULL: not recorded yet, or cannot be */
};

/* End of a split-K product: y[N, C] += partials[0] + partials[1] + ..., in this order. */
struct splitk_partials {
    float *y;              /* NULL: y is complete */
    const float *partials; /* [split_k, N, C] */
    int split_k;
    int64_t N, C;
};

/* Arguments of qkv_rope: per-head RMSNorm and rotation of q and k; k and v go to the KV cache. */
struct rope_args {
    float *q_out, *rstd_q, *rstd_k;
    void *k_cache, *v_cache;
    const float *q, *k, *v, *cos, *sin;
    const int32_t *kv_rows;
    const void *q_norm, *k_norm;
    enum nbi_dtype q_type, k_type, kv_type;
    float eps;
    int NH, NKV, D;
    int N;
};

/* A small download: the device copies to pinned memory, the next sync copies on to `to`. */
struct download {
    void *to;
    const void *from;
    int64_t bytes;
};

struct nbi_stream {
    struct cuda *cuda;
    cudaStream_t queue;
    struct nbi_stream_limits limits;
    uint8_t *block;     /* device memory that the next eight are pieces of */
    uint8_t *x_f16;     /* packed x of a product: 16-bit operands, or two NVFP4 terms */
    float *x_f16_scale; /* [N] */
    uint8_t *act_f16;   /* packed output of SwiGLU, up to NBI_DECODE_LINEAR_ROWS rows */
    float *act_f16_scale;
    uint8_t *weights_bf16;       /* rows of a matrix as bf16, or as NVFP4 for cuBLASLt */
    uint8_t *workspace;          /* of cuBLASLt; partial sums of linear_decode.cu, train_norm.cu */
    float *attention_partials;   /* of attention whose keys are split over CTAs */
    int32_t *attention_counters; /* how many of them have been written (attention.cuh) */
    float2 *attention_stats;     /* of attention_bwd: lse and delta of each row and head */
    uint8_t *pinned;             /* pinned host memory for small copies in both directions */
    int64_t pinned_used;         /* since the last sync */
    struct download downloads[NBI_DOWNLOADS_MAX]; /* to finish at the next sync */
    int download_count;
    struct cached_graph graphs[NBI_GRAPHS_MAX];
    int64_t graph_clock; /* calls of graph_run */
};

/* ---- errors ---- */

enum nb_status nbi_cuda_fail(cudaError_t rc, const char *what);

#define CU_TRY(expr)                                                                               \
    do {                                                                                           \
        cudaError_t cu_try_rc = (expr);                                                            \
        if (cu_try_rc != cudaSuccess)                                                              \
            return nbi_cuda_fail(cu_try_rc, #expr);                                                \
    } while (0)

/* At the start of each operation: selects the device, which CUDA keeps per thread. */
#define CU_HERE(s) CU_TRY(cudaSetDevice((s)->cuda->index))

#define CU_LAUNCHED() CU_TRY(cudaGetLastError()) /* after each launch */

template <typename T> static inline T *at(struct nbi_ptr p)
{
    return (T *)p.at;
}

/* The split-K factor, at most `limit`, for a matrix of rows x cols tiles over `ctas` CTAs: the one
 * that gives the busiest CTA the fewest tiles; among equals the largest or the smallest. */
static inline int choose_split_k(int rows, int cols, int ctas, int limit, bool prefer_large)
{
    int best = 1;
    int64_t fewest = INT64_MAX;
    for (int n = 1; n <= cols && n <= limit && n <= ctas; n++) {
        int64_t tiles = ceil_div(cols, n) * ceil_div(rows, ctas / n);
        if (tiles < fewest || (prefer_large && tiles == fewest)) {
            fewest = tiles;
            best = n;
        }
    }
    return best;
}

/* ---- memory.cu ---- */

/* Device memory that is not cleared, for what is written at once. what: a literal. */
enum nb_status nbi_cuda_alloc(struct cuda *cuda, const char *what, int64_t bytes,
                              struct nbi_ptr *out);
void nbi_cuda_free(struct cuda *cuda, void *block);
enum nb_status nbi_cuda_memory(struct nbi_backend *be, struct nbi_memory *out);

/* ---- weights.cu ---- */

/* The stages through which weights are read and written; no-op if they are open. */
enum nb_status nbi_cuda_stages_open(struct cuda *cuda);
void nbi_cuda_weights_release(struct cuda *cuda);
enum nb_status nbi_cuda_weight_new(struct nbi_backend *be, const struct nbi_weight_source *src,
                                   struct nbi_weight *out);
enum nb_status nbi_cuda_weight_alloc(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                     int64_t cols, enum nb_weight_store store,
                                     const struct nbi_weight_memory *memory,
                                     struct nbi_weight *out);
enum nb_status nbi_cuda_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                    int64_t first, int64_t count, void *data, void *scales);
void nbi_cuda_weight_free(struct nbi_backend *be, struct nbi_weight *w);
struct nbi_weight nbi_cuda_weight_rows(const struct nbi_weight *w, int64_t first, int64_t count);

/* A device address: the largest Euclidean norm of a row of an NVFP4 matrix. */
const float *nbi_cuda_max_row_norm(const struct nbi_weight *w);

/* Measures that norm again, after the tiles have changed. */
enum nb_status nbi_cuda_measure_rows(const struct nbi_weight *w, cudaStream_t queue);

/* Whether the weight lies in host memory. */
bool nbi_cuda_on_host(struct cuda *cuda, const struct nbi_weight *w);

/* Reads a vector of any float type into host memory as f32. */
enum nb_status nbi_cuda_vector_read(struct cuda *cuda, const struct nbi_weight *w, float *out);

/* ---- roofline.cu: NaN where it cannot be measured ---- */

double nbi_cuda_roofline_bandwidth(struct nbi_backend *be);
double nbi_cuda_roofline(struct nbi_backend *be);
double nbi_cuda_roofline_f32(struct nbi_backend *be);

/* ---- megakernel.cu ---- */

enum nb_status nbi_cuda_megakernel_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                       struct nbi_megakernel **out);
enum nb_status nbi_cuda_megakernel_run(struct nbi_megakernel *t,
                                       const struct nbi_megakernel_step *step);
enum nb_status nbi_cuda_megakernel_run_ahead(struct nbi_megakernel *t,
                                             const struct nbi_megakernel_step *step,
                                             struct nbi_run_ahead *f);
void nbi_cuda_megakernel_free(struct nbi_megakernel *t);

/* ---- graph.cu ---- */

enum nb_status nbi_cuda_graph_run(struct nbi_stream *s, const struct nbi_graph *r);
void nbi_cuda_graphs_release(struct nbi_stream *s);

/* ---- rowwise.cu ---- */

enum nb_status nbi_cuda_embed(struct nbi_stream *s, const struct nbi_op_embed *a);
enum nb_status nbi_cuda_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a);
enum nb_status nbi_cuda_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a);
enum nb_status nbi_cuda_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a);
struct rope_args nbi_cuda_rope_args(const struct nbi_op_qkv_rope *a);
enum nb_status nbi_cuda_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a);
enum nb_status nbi_cuda_gather(struct nbi_stream *s, const struct nbi_op_gather *a);
enum nb_status nbi_cuda_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a);

/* ---- sampling.cu ---- */

enum nb_status nbi_cuda_topk(struct nbi_stream *s, const struct nbi_op_topk *a);

/* ---- linear.cu ---- */

enum nb_status nbi_cuda_linear(struct nbi_stream *s, const struct nbi_op_linear *a);

/* Whether a product goes through cuBLASLt; the two below are for those that do. */
bool nbi_cuda_is_cublaslt_linear(const struct nbi_stream *s, const struct nbi_op_linear *a);
enum nb_status nbi_cuda_norm_linear_cublaslt(struct nbi_stream *s,
                                             const struct nbi_op_rmsnorm *norm,
                                             const struct nbi_op_linear *a);
enum nb_status nbi_cuda_swiglu_linear_cublaslt(struct nbi_stream *s,
                                               const struct nbi_op_swiglu *act,
                                               const struct nbi_op_linear *a);

/* ---- pack_activations.cu ---- */

/* Adds the partial sums to y, if there are any. */
enum nb_status nbi_cuda_splitk_reduce(struct nbi_stream *s, const struct splitk_partials *p);
enum nb_status nbi_cuda_ptx_version(int *out);

/* ---- linear_decode.cu: N up to NBI_DECODE_LINEAR_ROWS, all matrices NVFP4 ---- */

bool nbi_cuda_is_decode_linear(const struct nbi_op_linear *a);
enum nb_status nbi_cuda_linear_decode(struct nbi_stream *s, const struct nbi_op_linear *a);

/* ---- attention.cu ---- */

enum nb_status nbi_cuda_attention(struct nbi_stream *s, const struct nbi_op_attention *a);

/* Whether the decode kernels compute it. */
bool nbi_cuda_is_decode_attention(const struct nbi_op_attention *a);

/* attention; *packed: y is in s->x_f16 as well, packed as x of a product. If rope is not NULL, it
 * is applied first, and q_out stays unwritten. That takes decode attention with one row per
 * sequence. */
enum nb_status nbi_cuda_attention_packed(struct nbi_stream *s, const struct nbi_op_attention *a,
                                         const struct nbi_op_qkv_rope *rope, bool *packed);

/* ---- train_optimizer.cu ---- */

enum nb_status nbi_cuda_grad_stats(struct nbi_stream *s, const struct nbi_op_grad_stats *a);
enum nb_status nbi_cuda_update_plan(struct nbi_stream *s, const struct nbi_op_update_plan *a);
enum nb_status nbi_cuda_adamw(struct nbi_stream *s, const struct nbi_op_adamw *a);
enum nb_status nbi_cuda_requantize(struct nbi_stream *s, const struct nbi_op_requantize *a);
enum nb_status nbi_cuda_amax(struct nbi_stream *s, const struct nbi_op_amax *a);
enum nb_status nbi_cuda_draw(struct nbi_stream *s, const struct nbi_op_draw *a);

/* ---- layers.cu ---- */

enum nb_status nbi_cuda_layers(struct nbi_stream *s, const struct nbi_op_layers *a);
