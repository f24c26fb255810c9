/* kernels.c - every operation of a backend against the scalar CPU code, which defines it: one line
 * for each case of the tables in cases_*.c, over all shapes of the case. */
#include "check/kernels.h"

#include <string.h>

#include "base/clock.h"
#include "check/kernel_cases.h"

static const struct nbi_kernel_cases *const tables[] = {&nbi_cases_rowwise,   &nbi_cases_linear,
                                                        &nbi_cases_attention, &nbi_cases_train,
                                                        &nbi_cases_optimizer, &nbi_cases_model};

/* Of the streams: more than any case has. */
static const struct nbi_stream_limits limits = {.N = 256, .K = 5120, .D = 128, .heads = 32};

struct checker {
    const struct nb_kernel_opts *opts;
    struct nbi_backend *scalar, *tested;
    /* Of the current case. */
    const struct nbi_kernel_case *c;
    struct nbi_stream *streams[2]; /* of scalar and of tested */
    char shapes[160], problem[256];
    struct nbi_difference worst;
};

/* ---- one case ---- */

/* "N K: 1x64 5x336"; zeros at the end of a shape are left out. */
static void write_shapes(struct checker *k)
{
    size_t at = (size_t)snprintf(k->shapes, sizeof k->shapes, "%s:", k->c->letters);
    for (int i = 0; i < k->c->shape_count; i++) {
        const int64_t *shape = k->c->shapes[i];
        int count = NBI_CASE_DIMS;
        while (count > 1 && shape[count - 1] == 0)
            count--;
        for (int j = 0; j < count && at < sizeof k->shapes; j++)
            at += (size_t)snprintf(k->shapes + at, sizeof k->shapes - at, "%s%lld",
                                   j > 0 ? "x" : " ", (long long)shape[j]);
    }
}

static struct nbi_kernel_run new_run(const struct checker *k, const int64_t *shape, bool reference)
{
    return (struct nbi_kernel_run){.be = reference ? k->scalar : k->tested,
                                   .s = k->streams[!reference],
                                   .c = k->c,
                                   .shape = shape,
                                   .elements = k->opts->elements,
                                   .reference = reference};
}

/* Keeps why the case did not end. Interruptions and a lack of memory are not its fault. */
static enum nb_status note_problem(struct checker *k, const char *who, enum nb_status rc)
{
    if (rc == NB_OK || rc == NB_EINTERRUPTED || rc == NB_ENOMEM)
        return rc;
    if (!k->problem[0])
        snprintf(k->problem, sizeof k->problem, "%s: %s", who, nb_last_error());
    return NB_OK;
}

/* The reference once, the backend under test twice: results must not depend on what ran before. */
static enum nb_status check_shape(struct checker *k, const int64_t *shape)
{
    struct nbi_kernel_run runs[3] = {new_run(k, shape, true), new_run(k, shape, false),
                                     new_run(k, shape, false)};
    enum nb_status rc = NB_OK;
    for (int i = 0; i < 3 && rc == NB_OK && !k->problem[0]; i++)
        rc = note_problem(k, i == 0 ? "the scalar code" : k->tested->name, nbi_run_case(&runs[i]));
    if (rc == NB_OK && !k->problem[0]) {
        nbi_run_compare(&runs[1], &runs[0], &k->worst);
        if (!nbi_run_same_bits(&runs[1], &runs[2]))
            snprintf(k->problem, sizeof k->problem, "two runs of the same inputs differ");
    }
    for (int i = 0; i < 3; i++)
        nbi_run_end(&runs[i]);
    return rc;
}

static void close_streams(struct checker *k)
{
    if (k->streams[0])
        k->scalar->stream_free(k->streams[0]);
    if (k->streams[1])
        k->tested->stream_free(k->streams[1]);
    memset(k->streams, 0, sizeof k->streams);
}

/* Streams of the case's kind. They are kept while the kind stays the same. */
static enum nb_status open_streams(struct checker *k, const struct nbi_kernel_case *c)
{
    struct nbi_stream_limits l = limits;
    if (k->streams[1] && k->c->training == c->training && k->c->bf16 == c->bf16)
        return NB_OK;
    close_streams(k);
    l.training = c->training;
    l.bf16 = c->bf16;
    NBI_TRY(k->scalar->stream_new(k->scalar, &l, &k->streams[0]));
    return k->tested->stream_new(k->tested, &l, &k->streams[1]);
}

static enum nb_status check_case(struct checker *k, const struct nbi_kernel_case *c,
                                 struct nb_kernel_check *out)
{
    double begin = nbi_now();
    k->problem[0] = 0;
    enum nb_status rc = note_problem(k, "streams", open_streams(k, c));
    k->c = c;
    k->worst = (struct nbi_difference){0};
    write_shapes(k);
    for (int i = 0; i < c->shape_count && rc == NB_OK && !k->problem[0]; i++) {
        rc = nbi_check_interrupt();
        if (rc == NB_OK)
            rc = check_shape(k, c->shapes[i]);
    }
    *out = (struct nb_kernel_check){.operation = c->operation,
                                    .variant = c->variant,
                                    .shapes = k->shapes,
                                    .result = k->worst.result,
                                    .measure = k->worst.measure,
                                    .error = k->worst.error,
                                    .bound = k->worst.bound,
                                    .problem = k->problem[0] ? k->problem : NULL,
                                    .seconds = nbi_now() - begin};
    out->passed = !out->problem && k->worst.result && k->worst.error <= k->worst.bound;
    return rc;
}

/* ---- all of them ---- */

/* Whether a case is asked for: `only` is part of its "operation, variant". */
static bool is_wanted(const struct checker *k, const struct nbi_kernel_case *c)
{
    char name[160];
    snprintf(name, sizeof name, "%s, %s", c->operation, c->variant);
    return nbi_backend_has(k->tested, c->caps) &&
           nbi_backend_has(k->scalar, c->caps & NBI_CAP_TRAIN) &&
           (!k->opts->only || strstr(name, k->opts->only));
}

static enum nb_status check_all(struct checker *k, nb_kernel_fn fn, void *ctx, int *count)
{
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (int i = 0; i < tables[t]->count; i++) {
            const struct nbi_kernel_case *c = &tables[t]->cases[i];
            struct nb_kernel_check check;
            if (!is_wanted(k, c))
                continue;
            NBI_TRY(check_case(k, c, &check));
            NBI_TRY(fn(ctx, &check));
            ++*count;
        }
    return NB_OK;
}

enum nb_status nbi_check_kernels_of(struct nbi_backend *tested, struct nbi_backend *scalar,
                                    const struct nb_kernel_opts *opts, nb_kernel_fn fn, void *ctx)
{
    struct checker k = {.opts = opts, .scalar = scalar, .tested = tested};
    int count = 0;
    enum nb_status rc = check_all(&k, fn, ctx, &count);
    close_streams(&k);
    if (rc == NB_OK && count == 0)
        return nbi_fail(NB_ENOTFOUND, "no operation of this device is called '%s'",
                        opts->only ? opts->only : "");
    return rc;
}

enum nb_status nb_check_kernels(const struct nb_kernel_opts *opts, nb_kernel_fn fn, void *ctx)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    const struct nbi_backend_opts scalar = {
        .device = "cpu", .threads = opts->threads, .level = NBI_SIMD_SCALAR};
    struct nbi_backend_opts tested = {.device = opts->device, .threads = opts->threads};
    struct nbi_backend *be, *reference;
    NBI_TRY(nbi_simd_parse(opts->simd, &tested.level));
    NBI_TRY(nbi_backend_open(&be, &tested));
    enum nb_status rc = nbi_backend_open(&reference, &scalar);
    if (rc == NB_OK) {
        rc = nbi_check_kernels_of(be, reference, opts, fn, ctx);
        reference->close(reference);
    }
    be->close(be);
    return rc;
}
