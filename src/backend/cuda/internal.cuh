/* internal.cuh - what the files of the CUDA backend share: the backend, a stream, errors, numbers.
 *
 * Nothing outside this folder includes a CUDA header. Functions of other files are declared here;
 * kernels and templates stay in the file that launches them. */
#pragma once

#include <cuda_runtime.h>
#include <pthread.h>

extern "C" {
#include "backend/decode.h"
#include "backend/devices.h"
#include "backend/ops.h"
}

#include "backend/cuda/nvfp4_tile.cuh"
#include "backend/cuda/stream.cuh"

struct cuda {
    struct nbi_backend be;
    int index;          /* of the device */
    int threads;        /* of the host, that read weights */
    int sms;            /* multiprocessors */
    int cc;             /* compute capability, 90 for 9.0 */
    int ptx_version;    /* that the kernels were made for, 90 for 9.0 */
    int smem_per_cta;   /* bytes of shared memory of a CTA at most */
    struct blas *blas;  /* NULL: not needed so far */
    cudaStream_t queue; /* for what is not queued by anyone */
    struct slab *slabs; /* that hold weights */
    uint8_t *host_stage[2],
        *device_stage[2];              /* weights on their way, on the host and on the device */
    cudaEvent_t stage_free[2];         /* that part of the way is free again */
    pthread_mutex_t lock;              /* of what sessions share: products' plans, the stages */
    pthread_mutex_t fp4_selftest_lock; /* held while FP4 products are tried */
    char name[16];                     /* "cuda:0" */
    char prefill_path[256];            /* be.products */
};

/* Memory that weights share, since each block of the driver's own is rounded up to 2 MiB. One of
 * the host has a single weight; kernels read it over the bus, at the same address. */
struct slab {
    struct slab *next;
    uint8_t *block;
    int64_t bytes, used;
    int64_t users; /* weights in it */
    bool host;     /* of the host, pinned */
};

#define NBI_SLAB_BYTES  ((int64_t)64 << 20)
#define NBI_STAGE_BYTES ((int64_t)4 << 20)

/* Rows that go through the kernel on tiles; more go through cuBLASLt. */
#define NBI_DECODE_LINEAR_ROWS 64

/* Rows up to which a call of attention counts as decoding. */
#define NBI_DECODE_ATTENTION_ROWS 64

#define NBI_WEIGHTS_BF16_BYTES ((int64_t)32 << 20)
#define NBI_WORKSPACE_BYTES    ((int64_t)8 << 20)
#define NBI_UPLOAD_BYTES       ((int64_t)1 << 20)

/* ---- errors ---- */

enum nb_status nbi_cuda_fail(cudaError_t rc, const char *what);

#define CU_TRY(expr)                                                                               \
    do {                                                                                           \
        cudaError_t cu_try_rc = (expr);                                                            \
        if (cu_try_rc != cudaSuccess)                                                              \
            return nbi_cuda_fail(cu_try_rc, #expr);                                                \
    } while (0)

/* What is known from the operation right before. */
static inline void clear_handoff(struct nbi_stream *s)
{
    s->ready = {};
    s->acted = {};
    s->best = {};
}

/* Before each operation: which device is meant is a matter of the thread. What is pending is done,
 * what was ready may soon not be. */
#define CU_HERE(s)                                                                                 \
    do {                                                                                           \
        CU_TRY(cudaSetDevice((s)->cuda->index));                                                   \
        clear_handoff(s);                                                                          \
        NBI_TRY(nbi_cuda_finish_pending(s));                                                       \
    } while (0)

/* After each launch. */
#define CU_LAUNCHED() CU_TRY(cudaGetLastError())

/* ---- addresses ---- */

template <typename T> static inline T *at(struct nbi_ptr p)
{
    return (T *)p.at;
}

/* ---- who has what ---- */

/* Into how many slices, `most` at most, the columns of a matrix of so many tiles are cut, so that
 * of some CTAs nobody has many; of what is equally good the most or the fewest. */
static inline int choose_split_k(int rows, int cols, int ctas, int most, bool many)
{
    int best = 1;
    int64_t least = INT64_MAX;
    for (int n = 1; n <= cols && n <= most && n <= ctas; n++) {
        int64_t tiles = ceil_div(cols, n) * ceil_div(rows, ctas / n);
        if (tiles < least || (many && tiles == least)) {
            least = tiles;
            best = n;
        }
    }
    return best;
}

/* ---- operations, by file ---- */

/* cuda.cu: memory that is not cleared, for what will be written at once */
enum nb_status nbi_cuda_alloc(struct cuda *cuda, const char *what, int64_t bytes,
                              struct nbi_ptr *out);

/* weights.cu */
void nbi_cuda_weights_release(struct cuda *cuda);
enum nb_status nbi_cuda_weight_new(struct nbi_backend *be, const struct nbi_weight_source *src,
                                   struct nbi_weight *out);
enum nb_status nbi_cuda_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                    int64_t first, int64_t count, void *data, void *scales);
void nbi_cuda_weight_free(struct nbi_backend *be, struct nbi_weight *w);

/* Of tiles, on the device: the largest norm of a row. */
const float *nbi_cuda_max_row_norm(const struct nbi_weight *w);

/* Whether the weight lies in memory of the host. */
bool nbi_cuda_on_host(struct cuda *cuda, const struct nbi_weight *w);

/* Any vector as f32, to the host. */
enum nb_status nbi_cuda_vector_read(struct cuda *cuda, const struct nbi_weight *w, float *out);

/* ceilings.cu: NaN where it cannot be measured */
double nbi_cuda_roofline_bandwidth(struct nbi_backend *be);
double nbi_cuda_roofline(struct nbi_backend *be);
double nbi_cuda_roofline_f32(struct nbi_backend *be);

/* token.cu */
enum nb_status nbi_cuda_megakernel_new(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                       struct nbi_megakernel **out);
enum nb_status nbi_cuda_megakernel_run(struct nbi_megakernel *t,
                                       const struct nbi_megakernel_step *step);
enum nb_status nbi_cuda_megakernel_run_ahead(struct nbi_megakernel *t,
                                             const struct nbi_megakernel_step *step,
                                             struct nbi_run_ahead *f);
void nbi_cuda_megakernel_free(struct nbi_megakernel *t);

/* graph.cu */
enum nb_status nbi_cuda_graph_run(struct nbi_stream *s, const struct nbi_graph *r);
void nbi_cuda_graphs_release(struct nbi_stream *s);

/* rows.cu */
enum nb_status nbi_cuda_embed(struct nbi_stream *s, const struct nbi_op_embed *a);
enum nb_status nbi_cuda_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a);
enum nb_status nbi_cuda_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a);
enum nb_status nbi_cuda_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a);
enum nb_status nbi_cuda_rope_apply(struct nbi_stream *s, const struct rope_args *h);
enum nb_status nbi_cuda_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a);
enum nb_status nbi_cuda_gather(struct nbi_stream *s, const struct nbi_op_gather *a);
enum nb_status nbi_cuda_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a);

/* select.cu */
enum nb_status nbi_cuda_topk(struct nbi_stream *s, const struct nbi_op_topk *a);

/* linear.cu */
enum nb_status nbi_cuda_linear(struct nbi_stream *s, const struct nbi_op_linear *a);

/* Those that go through cuBLASLt, with x of a norm or of SwiGLU. */
bool nbi_cuda_is_cublaslt_linear(const struct nbi_stream *s, const struct nbi_op_linear *a);
enum nb_status nbi_cuda_norm_linear_cublaslt(struct nbi_stream *s,
                                             const struct nbi_op_rmsnorm *norm,
                                             const struct nbi_op_linear *a);
enum nb_status nbi_cuda_swiglu_linear_cublaslt(struct nbi_stream *s,
                                               const struct nbi_op_swiglu *act,
                                               const struct nbi_op_linear *a);

/* linear_few.cu: those that are few, N up to NBI_DECODE_LINEAR_ROWS and all of NVFP4. */
enum nb_status nbi_cuda_finish_pending(struct nbi_stream *s);
enum nb_status nbi_cuda_ptx_version(int *out);
bool nbi_cuda_is_decode_linear(const struct nbi_op_linear *a);
enum nb_status nbi_cuda_linear_decode(struct nbi_stream *s, const struct nbi_op_linear *a,
                                      bool ready);
enum nb_status nbi_cuda_norm_linear(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                    const struct nbi_op_linear *a);
enum nb_status nbi_cuda_swiglu_linear(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                      const struct nbi_op_linear *a);

/* attention.cu */
int64_t nbi_cuda_attention_bytes(const struct cuda *cuda, const struct nbi_stream_limits *limits);
enum nb_status nbi_cuda_attention(struct nbi_stream *s, const struct nbi_op_attention *a);
