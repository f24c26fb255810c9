/* cublaslt.cu - matrix products through cuBLASLt. The library is loaded when it is first needed: it
 * is large, and decoding does without. Algorithms are chosen once per shape and kept as plans;
 * training measures a few first. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cublaslt.cuh"
#include "backend/cuda/launch.cuh"

/* Toolkits before 12.8 do not declare these, but the library found at run time may know them. */
#if CUDART_VERSION < 12080
#define CUDA_R_4F_E2M1                           ((cudaDataType_t)33)
#define CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 1
#define CUBLASLT_MATMUL_DESC_A_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)31)
#define CUBLASLT_MATMUL_DESC_B_SCALE_MODE        ((cublasLtMatmulDescAttributes_t)32)
#endif

/* Name of the pointer, name of the symbol. */
#define CUBLASLT_LIST(X)                                                                           \
    X(create, cublasLtCreate)                                                                      \
    X(destroy, cublasLtDestroy)                                                                    \
    X(matmul, cublasLtMatmul)                                                                      \
    X(version, cublasLtGetVersion)                                                                 \
    X(check, cublasLtMatmulAlgoCheck)                                                              \
    X(config, cublasLtMatmulAlgoConfigGetAttribute)                                                \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                   \
    X(desc_create, cublasLtMatmulDescCreate)                                                       \
    X(desc_destroy, cublasLtMatmulDescDestroy)                                                     \
    X(desc_set, cublasLtMatmulDescSetAttribute)                                                    \
    X(layout_create, cublasLtMatrixLayoutCreate)                                                   \
    X(layout_destroy, cublasLtMatrixLayoutDestroy)                                                 \
    X(preference_create, cublasLtMatmulPreferenceCreate)                                           \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy)                                         \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute)

struct functions {
#define X(name, symbol) decltype(&symbol) name;
    CUBLASLT_LIST(X)
#undef X
};

/* What a product needs to be run; a and b are the library's B and A, since it counts in columns. */
struct plan {
    struct plan *next;
    struct cublaslt_gemm shape; /* its sizes and types */
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulAlgo_t algo;
};

struct cublaslt {
    void *library;
    struct functions f;
    cublasLtHandle_t handle;
    struct plan *plans; /* newest first */
    int count;
    struct cublaslt_algorithm algorithms[NBI_ALGORITHMS_MAX];
    int algorithm_count;
};

#define PLANS_MAX 256

static enum nb_status cublaslt_fail(cublasStatus_t rc, const char *what)
{
    return nbi_fail(NB_EDEVICE, "cuBLASLt failed with status %d (%s)", (int)rc, what);
}

#define CUBLASLT_TRY(expr)                                                                         \
    do {                                                                                           \
        cublasStatus_t cublaslt_rc = (expr);                                                       \
        if (cublaslt_rc != CUBLAS_STATUS_SUCCESS)                                                  \
            return cublaslt_fail(cublaslt_rc, #expr);                                              \
    } while (0)

static enum nb_status load_library(struct cublaslt *lt)
{
    static const char *const names[] = {"libcublasLt.so." NB_CUBLAS_MAJOR, "libcublasLt.so"};
    for (int i = 0; i < 2 && !lt->library; i++)
        lt->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!lt->library)
        return nbi_fail(
            NB_EDEVICE,
            "%s of the CUDA toolkit is needed for prompts and was not found; install it "
            "or put its folder into LD_LIBRARY_PATH",
            names[0]);
#define X(name, symbol)                                                                            \
    lt->f.name = (decltype(&symbol))dlsym(lt->library, #symbol);                                   \
    if (!lt->f.name)                                                                               \
        return nbi_fail(NB_EDEVICE, "%s has no %s", names[0], #symbol);
    CUBLASLT_LIST(X)
#undef X
    CUBLASLT_TRY(lt->f.create(&lt->handle));
    return NB_OK;
}

enum nb_status nbi_cuda_cublaslt_open(struct cuda *cuda)
{
    if (cuda->cublaslt)
        return NB_OK;
    cuda->cublaslt = (struct cublaslt *)calloc(1, sizeof *cuda->cublaslt);
    if (!cuda->cublaslt)
        return nbi_fail_memory("cuBLASLt", sizeof *cuda->cublaslt);
    enum nb_status rc = load_library(cuda->cublaslt);
    if (rc != NB_OK)
        nbi_cuda_cublaslt_close(cuda);
    return rc;
}

static void plan_free(struct cublaslt *lt, struct plan *p)
{
    const cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->c, p->d};
    for (int i = 0; i < 4; i++)
        if (layouts[i])
            lt->f.layout_destroy(layouts[i]);
    if (p->op)
        lt->f.desc_destroy(p->op);
    free(p);
}

static void free_plans(struct cublaslt *lt)
{
    while (lt->plans) {
        struct plan *p = lt->plans;
        lt->plans = p->next;
        plan_free(lt, p);
    }
    lt->count = 0;
}

void nbi_cuda_cublaslt_close(struct cuda *cuda)
{
    struct cublaslt *lt = cuda->cublaslt;
    if (!lt)
        return;
    free_plans(lt);
    if (lt->handle)
        lt->f.destroy(lt->handle);
    if (lt->library)
        dlclose(lt->library);
    free(lt);
    cuda->cublaslt = NULL;
}

/* ---- the choice of an algorithm ---- */

#define CANDIDATES 16 /* algorithms that training compares */
#define TIMED_RUNS 5  /* of each; the fastest counts */

static int64_t workspace_bytes(const struct cublaslt_gemm *g)
{
    return g->training ? NBI_TRAIN_WORKSPACE_BYTES : NBI_WORKSPACE_BYTES;
}

/* Names of attributes with their values. */
struct preference {
    cublasLtMatmulPreferenceAttributes_t name;
    uint64_t value;
    size_t bytes;
};

/* The library's proposals, the most promising first. Training excludes sums whose order is not
 * fixed, or whose terms are rounded to the type of d. */
static enum nb_status propose(struct cublaslt *lt, const struct plan *p, int limit,
                              cublasLtMatmulHeuristicResult_t *found, int *count)
{
    /* Operands of inference have 256 bytes, which is the default, and its y has 64. */
    uint64_t operands = p->shape.training ? 16 : 256, results = p->shape.training ? 16 : 64;
    const struct preference all[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)workspace_bytes(&p->shape), 8},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, operands, 4},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, operands, 4},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, results, 4},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, results, 4},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         p->shape.training ? (uint64_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                           : (uint64_t)CUBLASLT_REDUCTION_SCHEME_MASK,
         4}};
    cublasLtMatmulPreference_t preference = NULL;
    CUBLASLT_TRY(lt->f.preference_create(&preference));
    cublasStatus_t rc = CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof all / sizeof *all && rc == CUBLAS_STATUS_SUCCESS; i++)
        rc = lt->f.preference_set(preference, all[i].name, &all[i].value, all[i].bytes);
    if (rc == CUBLAS_STATUS_SUCCESS)
        rc = lt->f.heuristic(lt->handle, p->op, p->b, p->a, p->c, p->d, preference, limit, found,
                             count);
    lt->f.preference_destroy(preference);
    CUBLASLT_TRY(rc);
    if (*count == 0)
        return nbi_fail(NB_EDEVICE, "cuBLASLt has no product of %lld x %lld x %lld",
                        (long long)p->shape.M, (long long)p->shape.N, (long long)p->shape.K);
    return NB_OK;
}

static cublasStatus_t multiply(struct nbi_stream *s, const struct plan *p,
                               const struct cublaslt_gemm *g, const cublasLtMatmulAlgo_t *algo)
{
    struct cublaslt *lt = s->cuda->cublaslt;
    const float beta = g->c ? 1.0f : 0.0f;
    const float *factors[2] = {g->fp4 ? g->fp4->scale : &g->scale, g->fp4 ? g->fp4->add : &beta};
    return lt->f.matmul(lt->handle, p->op, factors[0], g->b, p->b, g->a, p->a, factors[1],
                        g->c ? g->c : g->d, p->c, g->d, p->d, algo, s->workspace,
                        (size_t)workspace_bytes(g), s->queue);
}

#define PRINT_THREADS 256

/* Adds a hash of the values of d [M, N], with their places. A sum of integers has no order. */
__global__ static void k_fingerprint(unsigned long long *sum, const void *d, bool bf16, int64_t M,
                                     int64_t N, int64_t ld)
{
    unsigned long long mine = 0;
    for (int64_t i = (int64_t)blockIdx.x * PRINT_THREADS + threadIdx.x; i < M * N;
         i += (int64_t)gridDim.x * PRINT_THREADS) {
        int64_t at = i / N * ld + i % N;
        uint64_t v = bf16 ? ((const uint16_t *)d)[at] : ((const uint32_t *)d)[at];
        uint64_t h = ((uint64_t)i * 0x9E3779B97F4A7C15 ^ v) * 0xBF58476D1CE4E5B9;
        mine += (h ^ h >> 31) * 0x94D049BB133111EB;
    }
    for (int o = 16; o > 0; o >>= 1)
        mine += __shfl_xor_sync(0xFFFFFFFF, mine, o);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sum, mine);
}

/* A fingerprint of d, which the product has just written. The workspace is free again. */
static enum nb_status fingerprint(struct nbi_stream *s, const struct cublaslt_gemm *g,
                                  uint64_t *out)
{
    unsigned long long *sum = (unsigned long long *)s->workspace;
    int64_t ctas = ceil_div(g->M * g->N, 16 * PRINT_THREADS), limit = 8 * s->cuda->sms;
    CU_TRY(cudaMemsetAsync(sum, 0, sizeof *sum, s->queue));
    CU_LAUNCH(k_fingerprint, (unsigned)(ctas < limit ? ctas : limit), PRINT_THREADS, 0, s->queue,
              sum, g->d, g->d_bf16, g->M, g->N, g->ldd);
    CU_LAUNCHED();
    CU_TRY(cudaMemcpyAsync(out, sum, sizeof *out, cudaMemcpyDeviceToHost, s->queue));
    CU_TRY(cudaStreamSynchronize(s->queue));
    return NB_OK;
}

/* Milliseconds of the fastest of a few runs; infinity if it does not run. */
static float time_algorithm(struct nbi_stream *s, const struct plan *p,
                            const struct cublaslt_gemm *g, const cublasLtMatmulAlgo_t *algo,
                            const cudaEvent_t events[2])
{
    float best = INFINITY;
    for (int i = 0; i <= TIMED_RUNS; i++) { /* the first is for warming up */
        float ms;
        if (cudaEventRecord(events[0], s->queue) != cudaSuccess ||
            multiply(s, p, g, algo) != CUBLAS_STATUS_SUCCESS ||
            cudaEventRecord(events[1], s->queue) != cudaSuccess ||
            cudaEventSynchronize(events[1]) != cudaSuccess ||
            cudaEventElapsedTime(&ms, events[0], events[1]) != cudaSuccess)
            return INFINITY;
        if (i > 0 && ms < best)
            best = ms;
    }
    return best;
}

/* Whether the product may be run several times. While a graph is recorded nothing runs. */
static bool can_measure(struct nbi_stream *s, const struct cublaslt_gemm *g)
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return g->c != g->d && cudaStreamIsCapturing(s->queue, &status) == cudaSuccess &&
           status == cudaStreamCaptureStatusNone;
}

static enum nb_status make_events(cudaEvent_t events[2])
{
    CU_TRY(cudaEventCreate(&events[0]));
    cudaError_t rc = cudaEventCreate(&events[1]);
    if (rc != cudaSuccess)
        cudaEventDestroy(events[0]);
    CU_TRY(rc);
    return NB_OK;
}

/* What the order in which a product adds depends on, as far as it can be known: the algorithm's
 * kind, and the bits that it gives. In small results rounding may hide another order; in large
 * ones kernels of one kind may have several. */
struct sum_order {
    int32_t id, split_k;
    uint32_t reduction;
    uint16_t inner_shape;
    uint64_t bits;
};

static bool same_kind(const struct sum_order *a, const struct sum_order *b)
{
    return a->id == b->id && a->split_k == b->split_k && a->reduction == b->reduction &&
           a->inner_shape == b->inner_shape;
}

/* An attribute that the algorithm does not have stays 0. */
static struct sum_order kind_of_sum(const struct cublaslt *lt, const cublasLtMatmulAlgo_t *algo)
{
    struct sum_order k = {};
    size_t written;
    lt->f.config(algo, CUBLASLT_ALGO_CONFIG_ID, &k.id, sizeof k.id, &written);
    lt->f.config(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &k.split_k, sizeof k.split_k, &written);
    lt->f.config(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &k.reduction, sizeof k.reduction,
                 &written);
    lt->f.config(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, &k.inner_shape, sizeof k.inner_shape,
                 &written);
    return k;
}

struct search {
    cudaEvent_t events[2];
    struct sum_order first; /* of the first proposal that ran */
    float fastest;          /* ms; infinite before that */
    int best;               /* proposal */
};

/* Times a proposal, and takes it if it is the fastest so far and adds in the order of the first. */
static enum nb_status try_proposal(struct nbi_stream *s, const struct plan *p,
                                   const struct cublaslt_gemm *g,
                                   const cublasLtMatmulHeuristicResult_t *found, int i,
                                   struct search *best)
{
    struct sum_order order = kind_of_sum(s->cuda->cublaslt, &found[i].algo);
    bool is_first = best->fastest == INFINITY;
    if (!is_first && !same_kind(&order, &best->first))
        return NB_OK;
    float ms = time_algorithm(s, p, g, &found[i].algo, best->events);
    if (!(ms < best->fastest))
        return NB_OK;
    NBI_TRY(fingerprint(s, g, &order.bits));
    if (!is_first && order.bits != best->first.bits)
        return NB_OK;
    if (is_first)
        best->first = order;
    best->fastest = ms;
    best->best = i;
    return NB_OK;
}

/* The fastest of the proposals that add as the first one that runs does. So the bits depend on
 * library and device alone, and not on how fast something happened to be. */
static enum nb_status measure(struct nbi_stream *s, const struct plan *p,
                              const struct cublaslt_gemm *g,
                              const cublasLtMatmulHeuristicResult_t *found, int count, int *best)
{
    struct search search = {};
    enum nb_status rc = NB_OK;
    search.fastest = INFINITY;
    NBI_TRY(make_events(search.events));
    for (int i = 0; i < count && rc == NB_OK; i++)
        rc = try_proposal(s, p, g, found, i, &search);
    for (int i = 0; i < 2; i++)
        cudaEventDestroy(search.events[i]);
    cudaGetLastError(); /* of proposals that do not run */
    *best = search.best;
    return rc;
}

static int64_t next_power_of_two(int64_t n)
{
    int64_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

/* What an algorithm of training is kept for. A sum over rows has their number in K. */
static struct cublaslt_algorithm kind_of(const struct cublaslt_gemm *g)
{
    struct cublaslt_algorithm k = {g->M, g->N, g->K, 0, {}};
    k.kind = (uint32_t)g->a_transposed << 2 | (uint32_t)g->b_transposed << 1 | (uint32_t)g->d_bf16;
    if (g->a_transposed)
        k.K = next_power_of_two(g->K);
    else
        k.M = next_power_of_two(g->M);
    return k;
}

static struct cublaslt_algorithm *find_algorithm(struct cublaslt *lt,
                                                 const struct cublaslt_algorithm *k)
{
    for (int i = 0; i < lt->algorithm_count; i++) {
        struct cublaslt_algorithm *e = &lt->algorithms[i];
        if (e->M == k->M && e->N == k->N && e->K == k->K && e->kind == k->kind)
            return e;
    }
    return NULL;
}

static void keep_algorithm(struct cublaslt *lt, struct cublaslt_algorithm k,
                           const cublasLtMatmulAlgo_t *algo)
{
    static_assert(sizeof k.algo == sizeof *algo, "an algorithm takes 64 bytes");
    struct cublaslt_algorithm *e = find_algorithm(lt, &k);
    if (!e && lt->algorithm_count == NBI_ALGORITHMS_MAX)
        return;
    memcpy(k.algo, algo, sizeof k.algo);
    *(e ? e : &lt->algorithms[lt->algorithm_count++]) = k;
}

/* Whether a kept algorithm is one for this product. It was measured with another number of rows, or
 * comes from a checkpoint. */
static bool suits(struct cublaslt *lt, const struct plan *p, const struct cublaslt_algorithm *kept)
{
    cublasLtMatmulHeuristicResult_t result = {};
    cublasLtMatmulAlgo_t algo;
    memcpy(&algo, kept->algo, sizeof algo);
    return lt->f.check(lt->handle, p->op, p->b, p->a, p->c, p->d, &algo, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= (size_t)workspace_bytes(&p->shape);
}

/* In training the algorithm is the one that is kept for such products; else the fastest proposal,
 * which is then kept, or the first, if nothing can be measured. */
static enum nb_status choose_algorithm(struct nbi_stream *s, struct plan *p,
                                       const struct cublaslt_gemm *g, bool keep)
{
    struct cublaslt *lt = s->cuda->cublaslt;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    const struct cublaslt_algorithm k = kind_of(g), *kept = find_algorithm(lt, &k);
    bool search = g->training && keep && can_measure(s, g);
    int count = 0, best = 0;
    if (g->training && keep && kept && suits(lt, p, kept)) {
        memcpy(&p->algo, kept->algo, sizeof p->algo);
        return NB_OK;
    }
    NBI_TRY(propose(lt, p, search ? CANDIDATES : 1, found, &count));
    if (count > 1)
        NBI_TRY(measure(s, p, g, found, count, &best));
    p->algo = found[best].algo;
    if (search && !kept)
        keep_algorithm(lt, k, &p->algo);
    return NB_OK;
}

int nbi_cuda_cublaslt_algorithms(struct cuda *cuda, struct cublaslt_algorithm *out, int limit)
{
    pthread_mutex_lock(&cuda->lock);
    const struct cublaslt *lt = cuda->cublaslt;
    int count = lt ? lt->algorithm_count : 0;
    for (int i = 0; i < count && i < limit; i++)
        out[i] = lt->algorithms[i];
    pthread_mutex_unlock(&cuda->lock);
    return count;
}

void nbi_cuda_cublaslt_set_algorithms(struct cuda *cuda, const struct cublaslt_algorithm *in,
                                      int count)
{
    pthread_mutex_lock(&cuda->lock);
    for (int i = 0; i < count; i++)
        keep_algorithm(cuda->cublaslt, in[i], (const cublasLtMatmulAlgo_t *)in[i].algo);
    free_plans(cuda->cublaslt); /* they have others */
    pthread_mutex_unlock(&cuda->lock);
}

enum nb_status nbi_cuda_cublaslt_load(struct cuda *cuda)
{
    pthread_mutex_lock(&cuda->lock);
    enum nb_status rc = nbi_cuda_cublaslt_open(cuda);
    pthread_mutex_unlock(&cuda->lock);
    return rc;
}

uint64_t nbi_cuda_cublaslt_version(struct cuda *cuda)
{
    pthread_mutex_lock(&cuda->lock);
    uint64_t version = cuda->cublaslt ? cuda->cublaslt->f.version() : 0;
    pthread_mutex_unlock(&cuda->lock);
    return version;
}

/* ---- plans ---- */

/* Streams share plans, so these pointers are set before each product. */
static enum nb_status set_scale_pointers(struct cublaslt *lt, cublasLtMatmulDesc_t op,
                                         const struct cublaslt_fp4 *fp4)
{
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &fp4->b_scales,
                                sizeof fp4->b_scales));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &fp4->a_scales,
                                sizeof fp4->a_scales));
    return NB_OK;
}

/* Blocks of 16 with an E4M3 scale each. The heuristic needs the pointers, too. */
static enum nb_status set_fp4(struct cublaslt *lt, cublasLtMatmulDesc_t op,
                              const struct cublaslt_fp4 *fp4)
{
    int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    int32_t pointers = CUBLASLT_POINTER_MODE_DEVICE;
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
    CUBLASLT_TRY(lt->f.desc_set(op, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers, sizeof pointers));
    return set_scale_pointers(lt, op, fp4);
}

/* A row-major matrix [rows, ld] of which `columns` count. */
static cublasStatus_t row_major(struct cublaslt *lt, cublasLtMatrixLayout_t *out,
                                cudaDataType_t type, int64_t rows, int64_t columns, int64_t ld)
{
    return lt->f.layout_create(out, type, (uint64_t)columns, (uint64_t)rows, ld);
}

static enum nb_status plan_fill(struct nbi_stream *s, struct plan *p, const struct cublaslt_gemm *g)
{
    struct cublaslt *lt = s->cuda->cublaslt;
    cublasOperation_t of_a = g->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t of_b = g->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType_t type = g->fp4 ? CUDA_R_4F_E2M1 : CUDA_R_16BF;
    cudaDataType_t out = g->d_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    p->shape = *g;
    CUBLASLT_TRY(lt->f.desc_create(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLASLT_TRY(lt->f.desc_set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b));
    CUBLASLT_TRY(lt->f.desc_set(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a));
    if (g->fp4)
        NBI_TRY(set_fp4(lt, p->op, g->fp4));
    CUBLASLT_TRY(row_major(lt, &p->b, type, g->b_transposed ? g->N : g->K,
                           g->b_transposed ? g->K : g->N, g->ldb));
    CUBLASLT_TRY(row_major(lt, &p->a, type, g->a_transposed ? g->K : g->M,
                           g->a_transposed ? g->M : g->K, g->lda));
    CUBLASLT_TRY(row_major(lt, &p->c, out, g->M, g->N, g->c ? g->ldc : g->ldd));
    CUBLASLT_TRY(row_major(lt, &p->d, out, g->M, g->N, g->ldd));
    return choose_algorithm(s, p, g, true);
}

/* Whether the plan of p serves g; only its pointers and factors may differ. */
static bool same_shape(const struct cublaslt_gemm *p, const struct cublaslt_gemm *g)
{
    return p->M == g->M && p->N == g->N && p->K == g->K && p->lda == g->lda && p->ldb == g->ldb &&
           p->ldd == g->ldd && p->a_transposed == g->a_transposed &&
           p->b_transposed == g->b_transposed && p->d_bf16 == g->d_bf16 &&
           p->training == g->training && (p->fp4 != NULL) == (g->fp4 != NULL) &&
           (p->c != NULL) == (g->c != NULL) && (!g->c || p->ldc == g->ldc);
}

/* Finds or makes the plan of a shape. When there are PLANS_MAX, all are dropped. */
static enum nb_status plan_for(struct nbi_stream *s, const struct cublaslt_gemm *g,
                               struct plan **out)
{
    struct cublaslt *lt = s->cuda->cublaslt;
    struct plan *p = lt->plans;
    while (p && !same_shape(&p->shape, g))
        p = p->next;
    if (!p) {
        if (lt->count == PLANS_MAX)
            free_plans(lt);
        p = (struct plan *)calloc(1, sizeof *p);
        if (!p)
            return nbi_fail_memory("product", sizeof *p);
        enum nb_status rc = plan_fill(s, p, g);
        if (rc != NB_OK) {
            plan_free(lt, p);
            return rc;
        }
        p->next = lt->plans;
        lt->plans = p;
        lt->count++;
    }
    *out = p;
    return NB_OK;
}

static enum nb_status run_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g)
{
    struct plan *p = NULL;
    NBI_TRY(nbi_cuda_cublaslt_open(s->cuda));
    NBI_TRY(plan_for(s, g, &p));
    if (g->fp4)
        NBI_TRY(set_scale_pointers(s->cuda->cublaslt, p->op, g->fp4));
    cublasStatus_t rc = multiply(s, p, g, &p->algo);
    if (rc != CUBLAS_STATUS_SUCCESS && g->training) {
        /* The algorithm was kept for another number of rows, or comes from a checkpoint. */
        NBI_TRY(choose_algorithm(s, p, g, false));
        rc = multiply(s, p, g, &p->algo);
    }
    CUBLASLT_TRY(rc);
    return NB_OK;
}

enum nb_status nbi_cuda_cublaslt_gemm(struct nbi_stream *s, const struct cublaslt_gemm *g)
{
    pthread_mutex_lock(&s->cuda->lock);
    enum nb_status rc = run_gemm(s, g);
    pthread_mutex_unlock(&s->cuda->lock);
    return rc;
}
