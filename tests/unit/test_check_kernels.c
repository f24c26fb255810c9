/* test_check_kernels.c - `doctor --kernels`: the CPU's operations agree with the scalar code, and
 * an operation that does nothing, or changes one value, is found. */
#include "check/kernels.h"

#include "backend/ops.h"
#include "backend/ops_train.h"
#include "support.h"
#include "tensor/half.h"

/* ---- checks of a backend ---- */

struct found {
    int count, failed;
    const char *operation; /* whose failures count */
    char first[256];       /* the first failure */
};

static enum nb_status count_check(void *ctx, const struct nb_kernel_check *c)
{
    struct found *f = ctx;
    f->count++;
    if (c->passed || (f->operation && strcmp(f->operation, c->operation) != 0))
        return NB_OK;
    if (f->failed++ == 0)
        snprintf(f->first, sizeof f->first, "%s, %s: %g of %g, %s", c->operation, c->variant,
                 c->error, c->bound, c->problem ? c->problem : c->result);
    return NB_OK;
}

static struct nbi_backend *open_cpu(enum nbi_simd level)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){"cpu", 2, level}));
    return be;
}

static struct found check_on(struct nbi_backend *tested, const char *only)
{
    struct nbi_backend *scalar = open_cpu(NBI_SIMD_SCALAR);
    struct found f = {.operation = only};
    const struct nb_kernel_opts opts = {.only = only};
    assert_ok(nbi_check_kernels_of(tested, scalar, &opts, count_check, &f));
    scalar->close(scalar);
    return f;
}

static void test_check_kernels__levels_agree(void **state)
{
    (void)state;
    struct found f = {0};
    const struct nb_kernel_opts opts = {.device = "cpu", .threads = 2};
    assert_ok(nb_check_kernels(&opts, count_check, &f));
    assert_string_equal(f.first, "");
    assert_in_range(f.count, 100, 1000);
}

static void test_check_kernels__names(void **state)
{
    (void)state;
    struct found f = {0};
    struct nb_kernel_opts opts = {.device = "cpu", .only = "adamw, int8"};
    assert_ok(nb_check_kernels(&opts, count_check, &f));
    assert_int_equal(f.count, 6);
    opts.only = "no such";
    assert_fails(nb_check_kernels(&opts, count_check, &f), NB_ENOTFOUND, "'no such'");
    opts.simd = "mmx";
    assert_int_equal(nb_check_kernels(&opts, count_check, &f), NB_EINVAL);
}

static void test_check_kernels__elements(void **state)
{
    (void)state;
    struct found f = {0};
    const struct nb_kernel_opts opts = {.device = "cpu", .only = "amax", .elements = 300007};
    assert_ok(nb_check_kernels(&opts, count_check, &f));
    assert_string_equal(f.first, "");
    assert_int_equal(f.count, 2);
}

/* ---- mistakes ---- */

#define X(op)                                                                                      \
    static enum nb_status no_##op(struct nbi_stream *s, const struct nbi_op_##op *a)               \
    {                                                                                              \
        (void)s;                                                                                   \
        (void)a;                                                                                   \
        return NB_OK;                                                                              \
    }
NBI_OP_LIST(X)
#undef X

/* Each operation in turn does nothing. */
static void test_check_kernels__missing_operations(void **state)
{
    (void)state;
    struct nbi_backend *be = open_cpu(nbi_simd_level());
#define X(op)                                                                                      \
    {                                                                                              \
        enum nb_status (*real)(struct nbi_stream *, const struct nbi_op_##op *) = be->op;          \
        be->op = no_##op;                                                                          \
        struct found f = check_on(be, #op);                                                        \
        be->op = real;                                                                             \
        if (f.failed == 0)                                                                         \
            fail_msg("%s does nothing, and %d checks agree", #op, f.count);                        \
    }
    NBI_OP_LIST(X)
#undef X
    be->close(be);
}

static enum nb_status (*real_rmsnorm)(struct nbi_stream *s, const struct nbi_op_rmsnorm *a);
static float changed;  /* what is added to one value, relative */
static int64_t beyond; /* a value after the end that is written */

static enum nb_status wrong_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    float *y = (float *)a->y.at;
    NBI_TRY(real_rmsnorm(s, a));
    if (a->bf16)
        return NB_OK;
    y[a->N * a->C / 2] *= 1 + changed;
    if (beyond)
        y[a->N * a->C + beyond - 1] = 1;
    return NB_OK;
}

static void test_check_kernels__wrong_values(void **state)
{
    (void)state;
    struct nbi_backend *be = open_cpu(NBI_SIMD_SCALAR);
    real_rmsnorm = be->rmsnorm;
    be->rmsnorm = wrong_rmsnorm;
    changed = 1e-6f;
    assert_int_equal(check_on(be, "rmsnorm").failed, 0);
    changed = 3e-4f;
    assert_in_range(check_on(be, "rmsnorm").failed, 1, 2);
    changed = NAN;
    assert_in_range(check_on(be, "rmsnorm").failed, 1, 2);
    changed = 0;
    beyond = 1;
    struct found f = check_on(be, "rmsnorm");
    assert_in_range(f.failed, 1, 2);
    assert_non_null(strstr(f.first, "after the end, was written"));
    be->close(be);
}

/* The second run of the same inputs gives other bits. */
static enum nb_status noisy_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    static uint32_t calls;
    uint32_t *y = (uint32_t *)a->y.at;
    (void)s;
    for (int64_t i = 0; i < a->N * a->F; i++)
        ((float *)a->y.at)[i] = 0;
    y[0] = ++calls;
    return NB_OK;
}

static void test_check_kernels__runs_that_differ(void **state)
{
    (void)state;
    struct nbi_backend *be = open_cpu(NBI_SIMD_SCALAR);
    be->swiglu = noisy_swiglu;
    struct found f = check_on(be, "swiglu");
    assert_non_null(strstr(f.first, "two runs of the same inputs differ"));
    be->close(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_kernels__levels_agree),
        cmocka_unit_test(test_check_kernels__names),
        cmocka_unit_test(test_check_kernels__elements),
        cmocka_unit_test(test_check_kernels__missing_operations),
        cmocka_unit_test(test_check_kernels__wrong_values),
        cmocka_unit_test(test_check_kernels__runs_that_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
