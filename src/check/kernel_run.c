/* kernel_run.c - inputs, results and comparison of an operation's runs. */
#include "check/kernel_run.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"

/* Bytes after each block, and between rows, that must keep their values. */
#define GUARD      64
#define GUARD_BYTE 0xA5

/* ---- random numbers ---- */

uint32_t nbi_run_bits(struct nbi_kernel_run *r)
{
    return nbi_philox(60, r->drawn++, 0).v[0];
}

float nbi_run_uniform(struct nbi_kernel_run *r)
{
    return 2 * nbi_uniform(nbi_run_bits(r)) - 1;
}

/* ---- types ---- */

void nbi_run_store(void *array, enum nbi_dtype dtype, int64_t i, float x)
{
    if (dtype == NBI_F32)
        ((float *)array)[i] = x;
    else if (dtype == NBI_E4M3)
        ((uint8_t *)array)[i] = nbi_f32_to_e4m3(x);
    else
        ((uint16_t *)array)[i] = dtype == NBI_BF16 ? nbi_f32_to_bf16(x) : nbi_f32_to_f16(x);
}

float nbi_run_load(const void *array, enum nbi_dtype dtype, int64_t i)
{
    if (dtype == NBI_F32)
        return ((const float *)array)[i];
    if (dtype == NBI_E4M3)
        return nbi_e4m3_to_f32(((const uint8_t *)array)[i]);
    uint16_t half = ((const uint16_t *)array)[i];
    return dtype == NBI_BF16 ? nbi_bf16_to_f32(half) : nbi_f16_to_f32(half);
}

/* The nearest value of a type. */
static float rounded_to(enum nbi_dtype dtype, float x)
{
    uint32_t room;
    nbi_run_store(&room, dtype, 0, x);
    return nbi_run_load(&room, dtype, 0);
}

/* ---- memory ---- */

static void *host_alloc(struct nbi_kernel_run *r, int64_t bytes)
{
    void *p = r->rc == NB_OK ? malloc((size_t)bytes) : NULL;
    if (!p && r->rc == NB_OK)
        r->rc = nbi_fail_memory("checking kernels", (size_t)bytes);
    return p;
}

/* Allocates a block for `bytes` and uploads them with the guard after them. */
static struct nbi_ptr new_block(struct nbi_kernel_run *r, const uint8_t *with_guard, int64_t bytes)
{
    struct nbi_ptr p = {0};
    if (r->rc != NB_OK)
        return p;
    NBI_BUG_IF(r->block_count == NBI_RUN_BLOCKS);
    r->rc = r->be->alloc(r->be, "checking kernels", bytes + GUARD, &p);
    if (r->rc == NB_OK) {
        r->blocks[r->block_count++] = p;
        r->rc = r->be->upload(r->s, p, with_guard, bytes + GUARD);
    }
    return p;
}

struct nbi_ptr nbi_run_bytes(struct nbi_kernel_run *r, const void *bytes, int64_t n)
{
    uint8_t *p = host_alloc(r, n + GUARD);
    if (p) {
        memcpy(p, bytes, (size_t)n);
        memset(p + n, GUARD_BYTE, GUARD);
    }
    struct nbi_ptr at = new_block(r, p, n);
    free(p);
    return at;
}

static struct nbi_ptr filled(struct nbi_kernel_run *r, int64_t bytes, int value)
{
    uint8_t *p = host_alloc(r, bytes + GUARD);
    if (p) {
        memset(p, value, (size_t)bytes);
        memset(p + bytes, GUARD_BYTE, GUARD);
    }
    struct nbi_ptr at = new_block(r, p, bytes);
    free(p);
    return at;
}

struct nbi_ptr nbi_run_zeros(struct nbi_kernel_run *r, int64_t bytes)
{
    return filled(r, bytes, 0);
}

struct nbi_ptr nbi_run_ints(struct nbi_kernel_run *r, const int32_t *x, int64_t n)
{
    return nbi_run_bytes(r, x, n * (int64_t)sizeof *x);
}

/* Rows of random values of type `values`, stored as `dtype`; scale 0: NaN. */
static struct nbi_ptr new_rows(struct nbi_kernel_run *r, int64_t rows, int64_t cols, int64_t ld,
                               enum nbi_dtype values, enum nbi_dtype dtype, float scale)
{
    int64_t step = ld > 0 ? ld : cols, bytes = (int64_t)nbi_dtype_bytes(dtype, rows * step);
    uint8_t *p = host_alloc(r, bytes + GUARD);
    if (p)
        memset(p, GUARD_BYTE, (size_t)(bytes + GUARD));
    for (int64_t n = 0; p && n < rows; n++)
        for (int64_t i = 0; i < cols; i++)
            nbi_run_store(p, dtype, n * step + i,
                          scale > 0 ? rounded_to(values, scale * nbi_run_uniform(r)) : NAN);
    struct nbi_ptr at = new_block(r, p, bytes);
    free(p);
    return at;
}

struct nbi_ptr nbi_run_floats(struct nbi_kernel_run *r, int64_t n, float scale)
{
    return new_rows(r, 1, n, 0, NBI_F32, NBI_F32, scale);
}

struct nbi_ptr nbi_run_rows(struct nbi_kernel_run *r, int64_t rows, int64_t cols, int64_t ld,
                            float scale)
{
    return new_rows(r, rows, cols, ld, r->c->bf16 ? NBI_BF16 : NBI_F32, nbi_run_acts(r), scale);
}

struct nbi_ptr nbi_run_values(struct nbi_kernel_run *r, int64_t n, float scale)
{
    return new_rows(r, 1, n, 0, r->c->dtype, nbi_run_dtype(r), scale);
}

/* ---- weights ---- */

struct host_weight {
    const struct nbi_weight_source *src;
    uint8_t *data, *scales;
};

static enum nb_status read_host(void *ctx, int64_t first, int64_t count, void *data, void *scales)
{
    const struct host_weight *w = ctx;
    int64_t cols = w->src->cols > 0 ? w->src->cols : 1;
    size_t row = nbi_dtype_bytes(w->src->dtype, cols);
    if (w->src->dtype == NBI_NVFP4) {
        row = (size_t)cols / 2;
        memcpy(scales, w->scales + first * cols / 16, (size_t)(count * cols / 16));
    }
    memcpy(data, w->data + (size_t)first * row, (size_t)count * row);
    return NB_OK;
}

/* Codes of all kinds, and scales that differ by up to four. */
static void fill_nvfp4(struct nbi_kernel_run *r, struct host_weight *w, int64_t n)
{
    for (int64_t i = 0; i < n / 2; i++)
        w->data[i] = (uint8_t)nbi_run_bits(r);
    for (int64_t i = 0; i < n / 16; i++)
        w->scales[i] = (uint8_t)(0x68 + nbi_run_bits(r) % 16);
}

static void fill_floats(struct nbi_kernel_run *r, struct host_weight *w, int64_t n)
{
    float scale = w->src->cols > 0 ? 1.7f / sqrtf((float)w->src->cols) : 0.5f;
    for (int64_t i = 0; i < n; i++)
        nbi_run_store(w->data, w->src->dtype, i,
                      (w->src->cols > 0 ? 0 : 1) + scale * nbi_run_uniform(r));
}

struct nbi_weight nbi_run_weight(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t rows,
                                 int64_t cols)
{
    struct nbi_weight out = {0};
    struct nbi_weight_source src = {.dtype = dtype,
                                    .rows = rows,
                                    .cols = cols,
                                    .tensor_scale =
                                        dtype == NBI_NVFP4 ? 0.01f / sqrtf((float)cols) : 1,
                                    .read = read_host};
    int64_t n = rows * (cols > 0 ? cols : 1);
    struct host_weight w = {&src, host_alloc(r, n * 4), host_alloc(r, n)};
    src.ctx = &w;
    if (r->rc == NB_OK && dtype == NBI_NVFP4)
        fill_nvfp4(r, &w, n);
    else if (r->rc == NB_OK)
        fill_floats(r, &w, n);
    if (r->rc == NB_OK) {
        NBI_BUG_IF(r->weight_count == NBI_RUN_WEIGHTS);
        r->rc = r->be->weight_new(r->be, &src, &out);
        if (r->rc == NB_OK)
            r->weights[r->weight_count++] = out;
    }
    free(w.data);
    free(w.scales);
    return out;
}

struct nbi_weight nbi_run_weight_alloc(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t rows,
                                       int64_t cols)
{
    struct nbi_weight out = {0};
    if (r->rc != NB_OK)
        return out;
    NBI_BUG_IF(r->weight_count == NBI_RUN_WEIGHTS);
    r->rc = r->be->weight_alloc(r->be, dtype, rows, cols, r->c->store, NULL, &out);
    if (r->rc == NB_OK)
        r->weights[r->weight_count++] = out;
    return out;
}

/* ---- results ---- */

void nbi_run_result(struct nbi_kernel_run *r, const char *name, struct nbi_ptr at,
                    enum nbi_dtype dtype, int64_t rows, int64_t cols, int64_t ld)
{
    if (r->rc != NB_OK)
        return;
    NBI_BUG_IF(r->result_count == NBI_RUN_RESULTS);
    r->results[r->result_count++] =
        (struct nbi_kernel_result){name, at, dtype, rows, cols, ld, NULL};
}

struct nbi_ptr nbi_run_out_rows(struct nbi_kernel_run *r, const char *name, int64_t rows,
                                int64_t cols, int64_t ld)
{
    struct nbi_ptr p = nbi_run_rows(r, rows, cols, ld, 0);
    nbi_run_result(r, name, p, nbi_run_acts(r), rows, cols, ld);
    return p;
}

struct nbi_ptr nbi_run_out_floats(struct nbi_kernel_run *r, const char *name, int64_t n)
{
    struct nbi_ptr p = nbi_run_floats(r, n, 0);
    nbi_run_result(r, name, p, NBI_F32, 1, n, 0);
    return p;
}

struct nbi_ptr nbi_run_out_bytes(struct nbi_kernel_run *r, const char *name, int64_t n)
{
    struct nbi_ptr p = filled(r, n, 0xFF);
    nbi_run_result(r, name, p, NBI_U8, 1, n, 0);
    return p;
}

void nbi_run_host_result(struct nbi_kernel_run *r, const char *name, void *bytes, int64_t n)
{
    struct nbi_ptr none = {0};
    nbi_run_result(r, name, none, NBI_U8, 1, n, 0);
    if (r->rc == NB_OK)
        r->results[r->result_count - 1].host = bytes;
    else
        free(bytes);
}

static int64_t result_bytes(const struct nbi_kernel_result *x)
{
    return (int64_t)nbi_dtype_bytes(x->dtype, x->rows * (x->ld > 0 ? x->ld : x->cols));
}

/* Whether nothing was written between the rows or after them. */
static enum nb_status check_guards(const struct nbi_kernel_result *x)
{
    int64_t size = nbi_dtypes[x->dtype].bytes, step = x->ld > 0 ? x->ld : x->cols,
            end = result_bytes(x);
    const uint8_t *p = x->host;
    for (int64_t i = 0; i < end + GUARD; i++) {
        bool inside = i < end && i / size % step < x->cols;
        if (!inside && p[i] != GUARD_BYTE)
            return nbi_fail(NB_EDEVICE, "%s: byte %lld, which is %s, was written", x->name,
                            (long long)i, i < end ? "between two rows" : "after the end");
    }
    return NB_OK;
}

static enum nb_status fetch(struct nbi_kernel_run *r)
{
    for (int i = 0; i < r->result_count; i++) {
        struct nbi_kernel_result *x = &r->results[i];
        if (x->host)
            continue;
        x->host = host_alloc(r, result_bytes(x) + GUARD);
        NBI_TRY(r->rc);
        NBI_TRY(r->be->download(r->s, x->host, x->at, result_bytes(x) + GUARD));
    }
    NBI_TRY(r->be->sync(r->s));
    for (int i = 0; i < r->result_count; i++)
        if (r->results[i].at.at)
            NBI_TRY(check_guards(&r->results[i]));
    return NB_OK;
}

/* ---- runs ---- */

enum nb_status nbi_run_case(struct nbi_kernel_run *r)
{
    NBI_TRY(r->c->queue(r));
    NBI_TRY(r->rc);
    return fetch(r);
}

void nbi_run_end(struct nbi_kernel_run *r)
{
    if (r->s)
        (void)r->be->sync(r->s);
    if (r->extra)
        r->extra_free(r->extra);
    for (int i = 0; i < r->block_count; i++)
        r->be->free(r->be, r->blocks[i]);
    for (int i = 0; i < r->weight_count; i++)
        r->be->weight_free(r->be, &r->weights[i]);
    for (int i = 0; i < r->result_count; i++)
        free(r->results[i].host);
}

/* ---- comparison ---- */

/* Value i of a result, without what stands between its rows. */
static double value_at(const struct nbi_kernel_result *x, int64_t i)
{
    int64_t step = x->ld > 0 ? x->ld : x->cols;
    return (double)nbi_run_load(x->host, x->dtype, i / x->cols * step + i % x->cols);
}

/* The root mean square of the finite values, or of what rounding them to bf16 loses. */
static double rms_of(const struct nbi_kernel_result *x, bool rounding)
{
    double sum = 0;
    int64_t n = x->rows * x->cols;
    for (int64_t i = 0; i < n; i++) {
        double v = value_at(x, i);
        if (rounding)
            v -= (double)rounded_to(NBI_BF16, (float)v);
        sum += isfinite(v) ? v * v : 0;
    }
    return sqrt(sum / (double)n);
}

/* The largest relative error; where a NaN is expected there must be one. */
static double relative_error(const struct nbi_kernel_result *is,
                             const struct nbi_kernel_result *want)
{
    double worst = 0, rms = rms_of(want, false);
    for (int64_t i = 0; i < want->rows * want->cols; i++) {
        double x = value_at(is, i), y = value_at(want, i), off = fabs(x - y);
        if (isnan(y) && isnan(x))
            continue;
        if (x == y)
            continue;
        if (!isfinite(off))
            return INFINITY;
        if (off > worst * (fabs(y) + rms))
            worst = off / (fabs(y) + rms);
    }
    return worst;
}

/* The root mean square of the error; infinity where only one of the two is finite. */
static double rms_error(const struct nbi_kernel_result *is, const struct nbi_kernel_result *want)
{
    double sum = 0;
    int64_t n = want->rows * want->cols;
    for (int64_t i = 0; i < n; i++) {
        double x = value_at(is, i), y = value_at(want, i);
        if (isfinite(x) != isfinite(y))
            return INFINITY;
        sum += isfinite(y) ? (x - y) * (x - y) : 0;
    }
    return sqrt(sum / (double)n);
}

static int64_t bytes_that_differ(const struct nbi_kernel_result *a,
                                 const struct nbi_kernel_result *b)
{
    const uint8_t *p = a->host, *q = b->host;
    int64_t count = 0;
    for (int64_t i = 0; i < result_bytes(a); i++)
        count += p[i] != q[i];
    return count;
}

/* Half a unit in the last place of a type, relative to the value. */
static double rounding_bound(enum nbi_dtype dtype)
{
    double half = dtype == NBI_E4M3 ? 0x1p-4 : dtype == NBI_BF16 ? 0x1p-8 : 0x1p-11;
    return dtype == NBI_F32 ? 0 : half;
}

static struct nbi_difference difference_of(const struct nbi_kernel_run *run,
                                           const struct nbi_kernel_result *is,
                                           const struct nbi_kernel_result *want)
{
    const struct nbi_kernel_case *c = run->c;
    bool fp4 = c->fp4_bound > 0 && nbi_backend_has(run->be, NBI_CAP_FP4);
    double bound = fp4 ? c->fp4_bound : c->bound > 0 ? c->bound : 1e-5;
    struct nbi_difference d = {.result = is->name};
    if (c->exact || is->dtype == NBI_U8) {
        d.measure = NB_KERNEL_BITS;
        d.error = (double)bytes_that_differ(is, want);
    } else if (c->bf16 && is->dtype == NBI_BF16) {
        d.measure = NB_KERNEL_ROUNDING;
        /* Where bf16 has the exact result, as it has zeros, errors of f32 are allowed. */
        d.error = rms_error(is, want) / (rms_of(want, true) + 1e-6 * rms_of(want, false) + 1e-30);
        d.bound = c->roundings > 0 ? c->roundings : 2;
    } else if (c->by_norm) {
        d.measure = NB_KERNEL_NORM;
        d.error = rms_error(is, want) / (rms_of(want, false) + 1e-30);
        d.bound = bound;
    } else {
        d.measure = NB_KERNEL_RELATIVE;
        d.error = relative_error(is, want);
        d.bound = bound + rounding_bound(is->dtype);
    }
    return d;
}

/* An error as a share of what is allowed. */
static double share_of(const struct nbi_difference *d)
{
    return d->bound > 0 ? d->error / d->bound : d->error > 0 ? INFINITY : 0;
}

void nbi_run_compare(const struct nbi_kernel_run *is, const struct nbi_kernel_run *want,
                     struct nbi_difference *worst)
{
    for (int i = 0; i < want->result_count; i++) {
        struct nbi_difference d = difference_of(is, &is->results[i], &want->results[i]);
        if (!worst->result || share_of(&d) > share_of(worst))
            *worst = d;
    }
}

bool nbi_run_same_bits(const struct nbi_kernel_run *a, const struct nbi_kernel_run *b)
{
    for (int i = 0; i < a->result_count; i++)
        if (bytes_that_differ(&a->results[i], &b->results[i]) > 0)
            return false;
    return true;
}
