/* backend.h - the contract between the model and what computes it: memory, weights, streams and
 * the table of operations.
 *
 * A backend is a table of functions over memory of its own. Host code holds addresses in that
 * memory (struct nbi_ptr) and never dereferences them; bytes move by explicit copies.
 *
 * Work is queued on a stream and runs in the order in which it was queued. A call may return
 * before its work has run; results are defined after nbi_backend.sync. Each struct of arguments,
 * and whatever a comment calls "host", is read before the call returns.
 *
 * No call owes anything to a later one: its outputs are complete as soon as its work has run, and
 * what is fused is an operation of its own. ops.h and ops_train.h have the arguments of the
 * operations, layers.h and decode.h what is optional (enum nbi_cap). The scalar CPU code
 * (cpu/microkernels_scalar.c) defines every operation. Faster versions are compared with it
 * (tests/unit/test_ops.c), and it is compared with Hugging Face. */
#pragma once

#include "backend/weight.h"
#include "base/sys.h"

struct nbi_backend;
struct nbi_stream; /* an in-order queue of work, with scratch memory of its own */

/* ---- memory ---- */

/* The memory of a device, and what a backend has allocated of it, by the names given to alloc. */
#define NBI_MEMORY_PARTS 16

struct nbi_memory {
    int64_t total, unused;
    int64_t allocated; /* the sum of the parts */
    struct {
        const char *what;
        int64_t bytes;
    } parts[NBI_MEMORY_PARTS];
    int count;
};

/* ---- keys and values ---- */

/* Keys and values of one layer: a KV cache or, in training, what the projections have just
 * written. Row r of head h starts at element (r * NKV + h) * D of k and of v. */
struct nbi_kv_view {
    struct nbi_ptr k, v;
    enum nbi_dtype dtype; /* f32, f16, bf16 or e4m3 */
};

#define NBI_PAGE       64   /* rows of a page of a paged KV cache */
#define NBI_SHARED_MAX 64   /* query heads that share a key head: limit of every backend */
#define NBI_HEAD_MAX   1024 /* head size: limit of every backend */

/* ---- streams ---- */

/* Upper bounds of what will be queued on a stream. stream_new allocates for them, so that no
 * operation allocates. */
struct nbi_stream_limits {
    int64_t N;     /* rows of an operation */
    int64_t K;     /* inputs of a product; in training also columns of any row but logits */
    int64_t D;     /* head size */
    int64_t heads; /* query heads */
    bool training; /* backward operations too */
    bool bf16;     /* operations on activations in bf16 too */
};

/* ---- capabilities ---- */

/* What a backend offers beyond the operations of ops.h, with the word for it in `doctor`. A slot of
 * the table that needs a capability is called only where the backend has it. */
#define NBI_CAP_LIST(X)                                                                            \
    X(TRAIN, "train")                     /* the operations of ops_train.h */                      \
    X(BF16, "bf16")                       /* activations in bf16 */                                \
    X(BATCH_INVARIANT, "batch-invariant") /* a row's bits never depend on the other rows */        \
    X(LAYERS, "layers")                   /* layers (layers.h) */                                  \
    X(GRAPHS, "graphs")                   /* graph_run */                                          \
    X(MEGAKERNEL, "megakernel")           /* megakernel_new, _run and _free */                     \
    X(RUN_AHEAD, "run-ahead")             /* megakernel_run_ahead */                               \
    X(FP4, "fp4")               /* NBI_MATMUL_FAST uses FP4 tensor cores for many rows */          \
    X(OWN_MEMORY, "own-memory") /* not the host's; roofline_bandwidth measures it */               \
    X(TUNING, "tuning")         /* tuning_save, tuning_load */

enum {
#define X(cap, word) NBI_CAP_BIT_##cap,
    NBI_CAP_LIST(X)
#undef X
};

enum nbi_cap {
#define X(cap, word) NBI_CAP_##cap = 1 << NBI_CAP_BIT_##cap,
    NBI_CAP_LIST(X)
#undef X
};

#define NBI_TUNING_MAX ((int64_t)32 << 10) /* bytes of tuning_save */
#define NBI_TUNING_WHY 256                 /* of the reason that tuning_load gives */

/* ---- precision ---- */

/* What a product rounds its inputs to. Sums are f32 in any case. */
enum nbi_matmul {
    NBI_MATMUL_FAST, /* whatever suits the device; each operation says to what */
    NBI_MATMUL_F32   /* nothing: activations stay f32 */
};

/* ---- operations ---- */

#define NBI_OP_LIST(X)                                                                             \
    X(embed)                                                                                       \
    X(rope_table)                                                                                  \
    X(rmsnorm)                                                                                     \
    X(linear)                                                                                      \
    X(qkv_rope)                                                                                    \
    X(attention)                                                                                   \
    X(swiglu)                                                                                      \
    X(gather)                                                                                      \
    X(scatter)                                                                                     \
    X(topk)                                                                                        \
    X(xent)                                                                                        \
    X(xent_slice)                                                                                  \
    X(l1)                                                                                          \
    X(embed_bwd)                                                                                   \
    X(rmsnorm_bwd)                                                                                 \
    X(linear_bwd)                                                                                  \
    X(qkv_rope_bwd)                                                                                \
    X(attention_bwd)                                                                               \
    X(swiglu_bwd)                                                                                  \
    X(grad_stats)                                                                                  \
    X(update_plan)                                                                                 \
    X(adamw)                                                                                       \
    X(amax)                                                                                        \
    X(draw)                                                                                        \
    X(requantize)

#define X(op) struct nbi_op_##op;
NBI_OP_LIST(X)
#undef X

struct nbi_op_layers; /* layers.h */

/* Of decode.h; a nbi_megakernel is a model prepared for decode steps in one kernel. */
struct nbi_megakernel;
struct nbi_megakernel_model;
struct nbi_megakernel_step;
struct nbi_run_ahead;
struct nbi_graph;

/* ---- the table ---- */

struct nbi_backend {
    const char *name; /* "cpu", "cuda:0" */

    unsigned caps; /* a set of nbi_cap; ask nbi_backend_has() */
    int64_t chunk; /* rows per pass that suit the backend for long inputs */
    /* Without NBI_CAP_BATCH_INVARIANT: calls of up to N rows that ask for batch_invariant, with
     * NVFP4 matrices, are free of the other rows. */
    int64_t batch_invariant_rows;
    int64_t graph_rows; /* graph_run pays off for passes of up to N rows */
    int64_t logit_rows; /* the most rows of logits that training computes at a time; 0: 32 MB */
    /* How products of NVFP4 matrices with many rows are computed, in words; NULL: nothing to say.
     * This, the flag and NBI_CAP_FP4 are set once a stream for many rows has been opened. */
    const char *prefill_path;
    bool fp4_selftest_failed; /* FP4 tensor cores exist but failed their test, and are not used */
    /* With NBI_CAP_OWN_MEMORY: what the process takes of it besides what is allocated, that is
     * context, kernels and libraries; and the host memory that a stream of training pins. */
    int64_t context_bytes, pinned_bytes;

    void (*close)(struct nbi_backend *be);

    /* Memory, 64-byte aligned and zeroed. `what`, a literal, names it in reports. */
    enum nb_status (*alloc)(struct nbi_backend *be, const char *what, int64_t bytes,
                            struct nbi_ptr *out);
    void (*free)(struct nbi_backend *be, struct nbi_ptr p);

    /* With NBI_CAP_OWN_MEMORY: its state, and what blocks of these sizes would take of it. */
    enum nb_status (*memory)(struct nbi_backend *be, struct nbi_memory *out);
    int64_t (*reserved_bytes)(const int64_t *blocks, int count);

    /* Bytes of a weight as this backend keeps it, without a copy in bf16; cols 0: of a vector. */
    int64_t (*weight_bytes)(const struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                            int64_t cols);
    /* Loads a weight. Synchronous. */
    enum nb_status (*weight_new)(struct nbi_backend *be, const struct nbi_weight_source *src,
                                 struct nbi_weight *out);
    /* Makes a weight for requantize to fill: NVFP4 (cols a multiple of 16) or floats; with
     * cols 0 a vector of f32. The tensor scale is 1 until the caller sets it. What an NVFP4 matrix
     * keeps: codes, also a copy of its values in bf16, or scales only, and then the caller sets the
     * master. memory: zeroed; NULL: allocates. Where the type is that of the master, the caller may
     * instead alias the master: layout ROWS, the master's data, borrowed. */
    enum nb_status (*weight_alloc)(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                   int64_t cols, enum nb_weight_store store,
                                   const struct nbi_weight_memory *memory, struct nbi_weight *out);
    /* Copies rows [first, first + count) to the host, in the form of nbi_weight_source.read; scales
     * may be NULL for floats. Synchronous and not ordered with any stream: sync first. */
    enum nb_status (*weight_read)(struct nbi_backend *be, const struct nbi_weight *w, int64_t first,
                                  int64_t count, void *data, void *scales);
    void (*weight_free)(struct nbi_backend *be, struct nbi_weight *w);
    /* Rows [first, first + count) of a matrix, borrowed: for products of training. */
    struct nbi_weight (*weight_rows)(const struct nbi_weight *w, int64_t first, int64_t count);

    enum nb_status (*stream_new)(struct nbi_backend *be, const struct nbi_stream_limits *limits,
                                 struct nbi_stream **out);
    /* Bytes that stream_new will allocate. */
    int64_t (*stream_bytes)(struct nbi_backend *be, const struct nbi_stream_limits *limits);
    void (*stream_free)(struct nbi_stream *s); /* waits for queued work */
    enum nb_status (*sync)(struct nbi_stream *s);

    /* Copies, in stream order. upload has read src when it returns; dst of download is defined
     * after sync. */
    enum nb_status (*upload)(struct nbi_stream *s, struct nbi_ptr dst, const void *src,
                             int64_t bytes);
    enum nb_status (*download)(struct nbi_stream *s, void *dst, struct nbi_ptr src, int64_t bytes);
    enum nb_status (*copy)(struct nbi_stream *s, struct nbi_ptr dst, struct nbi_ptr src,
                           int64_t bytes);
    enum nb_status (*clear)(struct nbi_stream *s, struct nbi_ptr dst, int64_t bytes);

    /* Operations (ops.h; with NBI_CAP_TRAIN, ops_train.h). */
#define X(op) enum nb_status (*op)(struct nbi_stream * s, const struct nbi_op_##op *a);
    NBI_OP_LIST(X)
#undef X

    /* Layers and head of a pass in one call (layers.h). */
    enum nb_status (*layers)(struct nbi_stream *s, const struct nbi_op_layers *a);

    /* For decoding (decode.h). */
    enum nb_status (*megakernel_new)(struct nbi_stream *s, const struct nbi_megakernel_model *m,
                                     struct nbi_megakernel **out);
    enum nb_status (*megakernel_run)(struct nbi_megakernel *t,
                                     const struct nbi_megakernel_step *step);
    enum nb_status (*megakernel_run_ahead)(struct nbi_megakernel *t,
                                           const struct nbi_megakernel_step *step,
                                           struct nbi_run_ahead *f);
    void (*megakernel_free)(struct nbi_megakernel *t);
    enum nb_status (*graph_run)(struct nbi_stream *s, const struct nbi_graph *r);

    /* What has been measured to choose algorithms, on which bits of results may depend: writes it
     * and returns its bytes. A process that loads them computes the same bits on the same device.
     */
    int64_t (*tuning_save)(struct nbi_backend *be, uint8_t out[NBI_TUNING_MAX]);
    /* Uses them, which may be damaged: NB_EFORMAT. why: empty, or for the user why bits may differ
     * from those of the process that saved them, in words that follow "because". */
    enum nb_status (*tuning_load)(struct nbi_backend *be, const void *bytes, int64_t n,
                                  char why[NBI_TUNING_WHY]);

    /* Measured limits, for benches: multiply-adds per second of one core, or of the device, in
     * NVFP4 products whose operands are as close as possible (L1, shared memory), and the same for
     * what training computes in: f32 with all threads busy, on a GPU bf16. */
    double (*roofline)(struct nbi_backend *be);
    double (*roofline_f32)(struct nbi_backend *be);
    /* Bytes per second read from memory, with NBI_CAP_OWN_MEMORY; benches measure the host's. */
    double (*roofline_bandwidth)(struct nbi_backend *be);
};

/* Of a set of capabilities, whether all are there. NBI_CAP_FP4 may be lost while streams work. */
static inline bool nbi_backend_has(const struct nbi_backend *be, unsigned caps)
{
    return (__atomic_load_n(&be->caps, __ATOMIC_ACQUIRE) & caps) == caps;
}

struct nbi_backend_opts {
    const char *device;  /* "auto", "cpu", "cuda" or "cuda:N"; NULL: the CPU */
    int threads;         /* CPU threads; 0: as many as this process may use */
    enum nbi_simd level; /* CPU: the widest instruction set to use */
};

/* The backend is closed with (*out)->close. */
enum nb_status nbi_backend_open(struct nbi_backend **out, const struct nbi_backend_opts *opts);

/* The same to plan with: a GPU need not be there, and is not opened. It has capabilities and sizes,
 * but no operations. */
enum nb_status nbi_backend_describe(struct nbi_backend **out, const struct nbi_backend_opts *opts);
