/* tools.h - this machine: its devices, checks of them, speed; and what training fits into their
 * memory.
 *
 * The rules on failures, ownership and threads are in core.h. */
#pragma once

#include "nibble/core.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- settings that fit ----------------------------------------------------------------------- */

/* How long a run would take on this machine, measured with a few steps of a small model of the same
 * sizes. Evaluations, checkpoints, prompts, the reference of kl_base and the result come on top. */
struct nb_train_estimate {
    int64_t steps;                              /* of the run */
    double seconds, step_seconds, tokens_per_s; /* NaN: no memory for measuring */
    char device[NB_DEVICE_NAME];
};

/* Takes some seconds and, of a large model, the memory of one layer. Reads the data if the run goes
 * by epochs. */
NB_MUST_CHECK enum nb_status nb_train_estimate(const struct nb_train_opts *opts,
                                               struct nb_train_estimate *estimate);

/* Settings that a search for what fits can vary, with their options. */
#define NB_FIT_LIST(X)                                                                             \
    X(NB_FIT_RECOMPUTE, "recompute")                                                               \
    X(NB_FIT_MOMENTS, "optimizer-state-mode")                                                      \
    X(NB_FIT_MASTER, "master-dtype")                                                               \
    X(NB_FIT_FUSED_STEP, "fused-step")                                                             \
    X(NB_FIT_GRADIENTS, "grad-dtype")                                                              \
    X(NB_FIT_WEIGHT_STORE, "weight-store")                                                         \
    X(NB_FIT_HEAD_SLICES, "head-slices")                                                           \
    X(NB_FIT_BATCH, "batch-size")

enum nb_fit_setting { NB_FIT_LIST(NB_ENUMERATOR) };

/* Settings of a run, and what it would allocate with them. */
struct nb_train_fit {
    int64_t batch_size, grad_accum, total;
    bool recompute, fused_step, head_slices, bf16_master, bf16_gradients;
    enum nb_weight_store weight_store;
    enum nb_moment_type moment_type;
};

/* Lists settings that fit, fastest first, then most precise, leaving out those that another equals
 * or beats in every respect. gib: memory on the CPU; on a GPU the size by which it is sold, of
 * which half a GiB is left, and more settings are tried. keep: a set of bits 1 << nb_fit_setting,
 * for which the value in opts stays. Batch sizes are opts' halved repeatedly. *count is the
 * capacity of fits, then the number of results. smallest: the smallest setting, fitting or not.
 * That nothing fits is no failure: *count is 0. */
NB_MUST_CHECK enum nb_status nb_train_fit(const struct nb_train_opts *opts, double gib,
                                          unsigned keep, struct nb_train_fit *fits, int *count,
                                          struct nb_train_fit *smallest);

/* Takes these settings into opts. */
void nb_train_fit_use(struct nb_train_opts *opts, const struct nb_train_fit *fit);

/* ---- the CPU --------------------------------------------------------------------------------- */

/* The code paths of this CPU; the strings are constants. */
struct nb_cpu_info {
    const char *codec;    /* of the NVFP4 codec: "scalar", "avx2" or "avx512" */
    const char *products; /* with NVFP4 weights, in words; they need more than the codec */
};

void nb_cpu_info(struct nb_cpu_info *info);

/* Compares every codec path this CPU can run with the scalar one, on random blocks. NB_EDEVICE: one
 * differs. */
NB_MUST_CHECK enum nb_status nb_codec_selftest(void);

/* ---- GPUs ------------------------------------------------------------------------------------ */

struct nb_gpu_info {
    char name[96];
    char driver[32];
    int cc_major, cc_minor;
    uint64_t memory_bytes, memory_free;
};

/* The GPUs that the NVIDIA driver reports, at most max of them; 0 without driver or GPU. */
int nb_gpu_list(struct nb_gpu_info *gpus, int max);

/* Watches the memory of processes on all GPUs together, through the driver's management library.
 * Where the driver cannot tell processes apart (in a container, or with memory shared by CPU and
 * GPU) it counts what all processes have taken since the watch began. */
struct nb_gpu_watch;
struct nb_gpu_watch *nb_gpu_watch_open(void); /* NULL: there is no such library, or no memory */
uint64_t nb_gpu_watch_bytes(struct nb_gpu_watch *watch, const int *pids, size_t count);
void nb_gpu_watch_close(struct nb_gpu_watch *watch);

/* The CUDA architectures this build has code for, for example "90"; NULL: built without CUDA. */
const char *nb_cuda_archs(void);

/* Runs a small kernel on a GPU and checks its result. NB_EDEVICE: the message says what is missing,
 * CUDA in this build, the driver, or code for that GPU. */
NB_MUST_CHECK enum nb_status nb_gpu_check(int index);

/* How a GPU computes products of NVFP4 weights in prefill. */
struct nb_gpu_products {
    bool native;     /* on FP4 tensor cores: they passed their self-test */
    bool failed;     /* the GPU has them, but they failed it and are not used */
    char words[256]; /* the path taken; if it failed, why */
};

/* Opens the GPU as a session would, which loads cuBLASLt and runs the self-test, and closes it. */
NB_MUST_CHECK enum nb_status nb_gpu_products(int index, struct nb_gpu_products *out);

/* The GPU that "cuda" (0) or "cuda:N" names, -1 for "cpu", whether or not it exists. Any other
 * name: NB_EUNSUPPORTED. */
NB_MUST_CHECK enum nb_status nb_device_parse(const char *name, int *gpu);

#define NB_DEVICE_CAPS 128

/* What the backend of a device offers beyond what every model needs, as words between blanks, such
 * as "train batch-invariant". Opens the device as nb_gpu_products does. */
NB_MUST_CHECK enum nb_status nb_device_caps(const char *device, char words[NB_DEVICE_CAPS]);

/* The device that "auto" stands for: the first GPU that nb_gpu_check finds usable, else "cpu". */
void nb_device_auto(char name[NB_DEVICE_NAME]);

/* ---- checks ---------------------------------------------------------------------------------- */

/* How the results of a kernel are measured: x against the reference y. */
enum nb_kernel_measure {
    NB_KERNEL_RELATIVE, /* |x - y| / (|y| + rms(y)), the largest */
    NB_KERNEL_ROUNDING, /* rms(x - y), as a multiple of what rounding y to bf16 makes */
    NB_KERNEL_NORM,     /* norm(x - y) / norm(y) */
    NB_KERNEL_BITS      /* the number of bytes that differ */
};

/* An operation of a backend, over some shapes, against the scalar CPU code. */
struct nb_kernel_check {
    const char *operation, *variant, *shapes;
    const char *result; /* the one of its results that is nearest to its bound, or beyond */
    enum nb_kernel_measure measure;
    double error, bound;
    const char *problem; /* why there is nothing to measure; NULL */
    bool passed;
    double seconds;
};

struct nb_kernel_opts {
    const char *device; /* "cpu", "cuda", "cuda:N" or "auto" */
    const char *simd;   /* of the CPU: "scalar", "avx2", ...; NULL: the best */
    int threads;
    const char *only; /* part of the "operation, variant" to check; NULL: all */
    /* Of the tensors that the optimizer's operations get, about; 0: small ones. */
    int64_t elements;
    struct nb_cancel *cancel;
};

/* What check points to is valid during the call. */
typedef enum nb_status (*nb_kernel_fn)(void *ctx, const struct nb_kernel_check *check);

/* Every operation of a device, on small and odd shapes: fn is called for each. A check that fails
 * is no failure of the call. */
NB_MUST_CHECK enum nb_status nb_check_kernels(const struct nb_kernel_opts *opts, nb_kernel_fn fn,
                                              void *ctx);

/* ---- speed ----------------------------------------------------------------------------------- */

/* One measured operation of the codec. GB/s counts bf16 source bytes for quantise rows and NVFP4
 * bytes for dequantise rows. */
struct nb_bench_row {
    char op[48];
    char path[16];
    double gb_per_s_per_core;
    double gvalues_per_s_per_core;
};

struct nb_bench_ops {
    int threads;
    double read_gb_per_s; /* all threads, measured in the same run */
    int rows;
    struct nb_bench_row row[32];
};

/* Speed of a model: decoding after `context` tokens, or prefill of whole prompts. */
struct nb_bench_run_opts {
    bool prefill;
    int64_t context;  /* decode: tokens in the cache before */
    int64_t tokens;   /* decode: of a round; prefill: of the prompt */
    int64_t parallel; /* decode: sequences of a batch; 0: one sequence, in a session */
    enum nb_kv_dtype kv;
    bool exact;
    bool deterministic; /* with parallel, as in nb_batch_opts */
    struct nb_cancel *cancel;
};

struct nb_bench_run {
    char device[NB_DEVICE_NAME];
    int threads;
    int cores;                      /* multiply peak_gmac_per_s by it: threads; 1 for a GPU */
    double tokens_per_s;            /* of all sequences */
    int64_t bytes_per_token;        /* weights read for a token, or for one of each sequence */
    int64_t kv_bytes_per_token;     /* decode: keys and values, in the middle of a round */
    double gb_per_s, read_gb_per_s; /* of weights, with parallel of keys and values too; the read
                                       bandwidth of the device, measured between rounds */
    double gmac_per_s;              /* prefill: multiplications in the layers' matrices */
    double peak_gmac_per_s; /* of a core, or a GPU, in NVFP4 products from cache; NaN: unknown */
};

/* NB_EINVAL: nothing to measure; NB_EVALUE: the model was made for shorter contexts. */
NB_MUST_CHECK enum nb_status nb_bench_run(const struct nb_engine *engine,
                                          const struct nb_bench_run_opts *opts,
                                          struct nb_bench_run *out);

/* Speed of training: some steps over random tokens with the settings of opts, whose data, files and
 * callbacks are not used. */
struct nb_bench_train {
    char device[NB_DEVICE_NAME];
    int threads;
    double step_seconds, tokens_per_s; /* of the median step, the first excluded */
    double flops_per_s;                /* as nb_train_plan counts them */
    double peak_flops_per_s;           /* f32 products from cache, all threads; on a GPU large
                                          products in bf16 */
    uint64_t peak_bytes;               /* resident, of the process */
    struct nb_train_plan plan;
};

/* NB_EINVAL: no steps, or settings that do not fit together. */
NB_MUST_CHECK enum nb_status nb_bench_train(const struct nb_train_opts *opts, int64_t steps,
                                            struct nb_bench_train *out);

/* All code paths of this CPU, on `threads` threads (0: what this process may use). cancel may be
 * NULL. */
NB_MUST_CHECK enum nb_status nb_bench_codec(struct nb_bench_ops *out, int threads,
                                            struct nb_cancel *cancel);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
