/* cublaslt.cpp - the functions of cuBLASLt that the backend loads, with a plain product.
 *
 * Columns are consecutive, as in BLAS: element (i, j) of a matrix is at i + j ld. Operands are f32,
 * f16 or bf16, the result is one of them as well; sums are f32. FP4 is not emulated. */
#include "emulator.h"

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

namespace emulated
{
void enqueue(cudaStream_t stream, std::function<void()> work);
void *open_library(const char *name, int mode);
void *find_symbol(void *library, const char *name);
int close_library(void *library);
} // namespace emulated

struct matmul_desc {
    cublasOperation_t transpose[2];
    int32_t pointer_mode;
};

struct matrix_layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};

static cublasStatus_t create(cublasLtHandle_t *out)
{
    *out = (cublasLtHandle_t)out; /* never used */
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t destroy(cublasLtHandle_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t desc_create(cublasLtMatmulDesc_t *out, cublasComputeType_t, cudaDataType_t)
{
    *out = (cublasLtMatmulDesc_t) new matmul_desc{{CUBLAS_OP_N, CUBLAS_OP_N}, 0};
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t desc_destroy(cublasLtMatmulDesc_t d)
{
    delete (matmul_desc *)d;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t desc_set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                               const void *value, size_t bytes)
{
    matmul_desc *to = (matmul_desc *)d;
    if (what == CUBLASLT_MATMUL_DESC_TRANSA && bytes == sizeof to->transpose[0])
        memcpy(&to->transpose[0], value, bytes);
    else if (what == CUBLASLT_MATMUL_DESC_TRANSB && bytes == sizeof to->transpose[1])
        memcpy(&to->transpose[1], value, bytes);
    else if (what == CUBLASLT_MATMUL_DESC_POINTER_MODE && bytes == sizeof to->pointer_mode)
        memcpy(&to->pointer_mode, value, bytes);
    else
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t layout_create(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows,
                                    uint64_t cols, int64_t ld)
{
    if (type != CUDA_R_32F && type != CUDA_R_16F && type != CUDA_R_16BF)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    *out = (cublasLtMatrixLayout_t) new matrix_layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t layout_destroy(cublasLtMatrixLayout_t m)
{
    delete (matrix_layout *)m;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t preference_create(cublasLtMatmulPreference_t *out)
{
    *out = (cublasLtMatmulPreference_t)out;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t preference_destroy(cublasLtMatmulPreference_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t preference_set(cublasLtMatmulPreference_t,
                                     cublasLtMatmulPreferenceAttributes_t, const void *, size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

/* Algorithms, in data[0]; data[1]: whether both orders of a sum count as one kind, as is so for
 * large results, which show the order by their bits. With NB_EMULATED_FASTEST=backwards FORWARDS is the slow one, else BACKWARDS. */
enum { DOES_NOT_RUN, FORWARDS, BACKWARDS, ALGORITHMS };

static bool is_slow(uint64_t algorithm)
{
    const char *fastest = getenv("NB_EMULATED_FASTEST");
    return algorithm == (fastest && strcmp(fastest, "backwards") == 0 ? FORWARDS : BACKWARDS);
}

/* Of several proposals the first does not run; callers that want one get one that does. With
 * NB_EMULATED_BACKWARDS the other two change places. */
static cublasStatus_t heuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int wanted,
                                cublasLtMatmulHeuristicResult_t found[], int *count)
{
    bool other = getenv("NB_EMULATED_BACKWARDS");
    const matrix_layout *result = (const matrix_layout *)d;
    *count = wanted < ALGORITHMS ? 1 : ALGORITHMS;
    for (int i = 0; i < *count; i++) {
        found[i] = {};
        found[i].algo.data[0] = *count == 1 ? FORWARDS : (uint64_t)i;
        if (other && found[i].algo.data[0] != DOES_NOT_RUN)
            found[i].algo.data[0] = FORWARDS + BACKWARDS - found[i].algo.data[0];
        found[i].algo.data[1] = result->rows * result->cols >= 4096;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t config(const cublasLtMatmulAlgo_t *algo,
                             cublasLtMatmulAlgoConfigAttributes_t what, void *value, size_t bytes,
                             size_t *written)
{
    int32_t id = (int32_t)(algo->data[1] ? ALGORITHMS : algo->data[0]);
    if (what != CUBLASLT_ALGO_CONFIG_ID || bytes != sizeof id)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    memcpy(value, &id, sizeof id);
    *written = sizeof id;
    return CUBLAS_STATUS_SUCCESS;
}

static size_t version(void)
{
    const char *other = getenv("NB_EMULATED_CUBLASLT");
    return other ? (size_t)atoi(other) : 1;
}

static cublasStatus_t check(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                            cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                            const cublasLtMatmulAlgo_t *algo,
                            cublasLtMatmulHeuristicResult_t *result)
{
    *result = {};
    return algo->data[0] == FORWARDS || algo->data[0] == BACKWARDS ? CUBLAS_STATUS_SUCCESS
                                                                   : CUBLAS_STATUS_INVALID_VALUE;
}

static float load(const void *p, cudaDataType type, int64_t at)
{
    switch (type) {
    case CUDA_R_32F:
        return ((const float *)p)[at];
    case CUDA_R_16F:
        return __half2float(((const __half *)p)[at]);
    default:
        return __bfloat162float(((const __nv_bfloat16 *)p)[at]);
    }
}

static void store(void *p, cudaDataType type, int64_t at, float v)
{
    switch (type) {
    case CUDA_R_32F:
        ((float *)p)[at] = v;
        break;
    case CUDA_R_16F:
        ((__half *)p)[at] = __float2half_rn(v);
        break;
    default:
        ((__nv_bfloat16 *)p)[at] = __float2bfloat16_rn(v);
    }
}

/* An operand as f32, K consecutive values for each of the others. `k_first` says that K is the
 * first dimension in memory. */
static std::vector<float> widen(const void *p, const matrix_layout &m, bool k_first)
{
    int64_t rows = (int64_t)m.rows, cols = (int64_t)m.cols;
    std::vector<float> out((size_t)(rows * cols));
    for (int64_t j = 0; j < cols; j++)
        for (int64_t i = 0; i < rows; i++)
            out[(size_t)(k_first ? i + j * rows : j + i * cols)] = load(p, m.type, i + j * m.ld);
    return out;
}

static float dot(const float *a, const float *b, int64_t n)
{
    float sum[16] = {}, all = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++)
            sum[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        all += a[i] * b[i];
    for (int j = 0; j < 16; j++)
        all += sum[j];
    return all;
}

struct product {
    matmul_desc op;
    matrix_layout a, b, c, d;
    const void *a_at, *b_at, *c_at;
    void *d_at;
    float alpha, beta;
    bool backwards; /* sums begin at the end of K */
};

static void multiply(const product &p)
{
    bool a_k_first = p.op.transpose[0] == CUBLAS_OP_T, b_k_first = p.op.transpose[1] == CUBLAS_OP_N;
    std::vector<float> a = widen(p.a_at, p.a, a_k_first), b = widen(p.b_at, p.b, b_k_first);
    if (p.backwards) { /* all of a, and all of b: the rows end up in the other order, too */
        std::reverse(a.begin(), a.end());
        std::reverse(b.begin(), b.end());
    }
    int64_t M = (int64_t)p.d.rows, N = (int64_t)p.d.cols;
    int64_t K = (int64_t)(a_k_first ? p.a.rows : p.a.cols);
    if (M * K != (int64_t)a.size() || N * K != (int64_t)b.size())
        emulated::fail("shapes of a product do not match");
    for (int64_t j = 0; j < N; j++)
        for (int64_t i = 0; i < M; i++) {
            int64_t row = p.backwards ? M - 1 - i : i, column = p.backwards ? N - 1 - j : j;
            float v = p.alpha * dot(&a[(size_t)(row * K)], &b[(size_t)(column * K)], K);
            if (p.beta != 0)
                v += p.beta * load(p.c_at, p.c.type, i + j * p.c.ld);
            store(p.d_at, p.d.type, i + j * p.d.ld, v);
        }
}

/* Products so far, for tests that count them. */
extern "C" int64_t nb_emulated_products;
int64_t nb_emulated_products;

static cublasStatus_t matmul(cublasLtHandle_t, cublasLtMatmulDesc_t op, const void *alpha,
                             const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                             cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                             cublasLtMatrixLayout_t c_layout, void *d,
                             cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                             void *, size_t, cudaStream_t stream)
{
    if (algo->data[0] == DOES_NOT_RUN)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (algo->data[0] >= ALGORITHMS)
        emulated::fail("an algorithm that was not checked");
    nb_emulated_products++;
    const matmul_desc *desc = (const matmul_desc *)op;
    bool on_device = desc->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    product p = {*desc,
                 *(const matrix_layout *)a_layout,
                 *(const matrix_layout *)b_layout,
                 *(const matrix_layout *)c_layout,
                 *(const matrix_layout *)d_layout,
                 a,
                 b,
                 c,
                 d,
                 on_device ? 0 : *(const float *)alpha,
                 on_device ? 0 : *(const float *)beta,
                 algo->data[0] == BACKWARDS};
    bool slow = is_slow(algo->data[0]);
    emulated::enqueue(stream, [=] {
        product now = p;
        if (slow)
            usleep(100);
        if (on_device) { /* read when the product runs */
            now.alpha = *(const float *)alpha;
            now.beta = *(const float *)beta;
        }
        multiply(now);
    });
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the library ---- */

static const struct {
    const char *name;
    void *function;
} functions[] = {
    {"cublasLtCreate", (void *)create},
    {"cublasLtDestroy", (void *)destroy},
    {"cublasLtMatmul", (void *)matmul},
    {"cublasLtGetVersion", (void *)version},
    {"cublasLtMatmulAlgoCheck", (void *)check},
    {"cublasLtMatmulAlgoConfigGetAttribute", (void *)config},
    {"cublasLtMatmulAlgoGetHeuristic", (void *)heuristic},
    {"cublasLtMatmulDescCreate", (void *)desc_create},
    {"cublasLtMatmulDescDestroy", (void *)desc_destroy},
    {"cublasLtMatmulDescSetAttribute", (void *)desc_set},
    {"cublasLtMatrixLayoutCreate", (void *)layout_create},
    {"cublasLtMatrixLayoutDestroy", (void *)layout_destroy},
    {"cublasLtMatmulPreferenceCreate", (void *)preference_create},
    {"cublasLtMatmulPreferenceDestroy", (void *)preference_destroy},
    {"cublasLtMatmulPreferenceSetAttribute", (void *)preference_set},
};

static char library; /* its address is the handle */

void *emulated::open_library(const char *name, int mode)
{
    return strstr(name, "cublasLt") ? &library : dlopen(name, mode);
}

void *emulated::find_symbol(void *handle, const char *name)
{
    if (handle != &library)
        return dlsym(handle, name);
    for (auto &f : functions)
        if (strcmp(f.name, name) == 0)
            return f.function;
    return nullptr;
}

int emulated::close_library(void *handle)
{
    return handle == &library ? 0 : dlclose(handle);
}
