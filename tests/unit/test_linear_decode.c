/* test_linear_decode.c - linear of decoding, up to 64 rows with NVFP4 matrices: batch invariance,
 * and shapes that reach every division of the work. */
#include "ops_lab.h"

#define ROWS 64

/* Up to three matrices that share x. y: what the results are added to. */
struct linear_case {
    int count;
    int64_t K, O[NBI_LINEAR_MAX], outs;
    bool add, batch_invariant;
    struct host_weight w[NBI_LINEAR_MAX];
    float *x, *y;
};

static void case_new(struct linear_case *c)
{
    c->outs = 0;
    for (int i = 0; i < c->count; i++) {
        host_weight_new(&c->w[i], NBI_NVFP4, c->O[i], c->K);
        c->outs += c->O[i];
    }
    c->x = random_floats(ROWS * c->K, 2);
    c->y = random_floats(ROWS * c->outs, 1);
}

static void case_free(struct linear_case *c)
{
    for (int i = 0; i < c->count; i++)
        host_weight_free(&c->w[i]);
    free(c->x);
    free(c->y);
}

static struct nbi_op_linear linear_op(struct lab *l, struct linear_case *c, int64_t N)
{
    struct nbi_op_linear op = {
        .count = c->count, .N = N, .K = c->K, .add = c->add, .batch_invariant = c->batch_invariant};
    for (int i = 0; i < c->count; i++) {
        op.w[i] = weight(l, &c->w[i]);
        op.y[i] = block(l, c->add ? c->y : NULL, N * c->O[i] * 4);
    }
    return op;
}

/* out: [N, outs], a row has the results of all matrices. */
static void fetch_results(struct lab *l, struct linear_case *c, const struct nbi_op_linear *op,
                          float *out)
{
    int64_t at = 0;
    for (int i = 0; i < c->count; i++) {
        float *y = zeros(op->N * c->O[i], 4);
        fetch(l, y, op->y[i], op->N * c->O[i] * 4);
        for (int64_t n = 0; n < op->N; n++)
            memcpy(out + n * c->outs + at, y + n * c->O[i], (size_t)c->O[i] * 4);
        at += c->O[i];
        free(y);
    }
}

static struct nbi_stream_limits limits_of(const struct linear_case *c, int64_t N)
{
    return (struct nbi_stream_limits){.N = N, .K = c->K, .D = 2, .heads = 1};
}

/* Rows [from, from + N) of x, exact on the scalar backend. Runs twice: the first run must not leave
 * anything on the stream that changes the second. */
static void run_linear(struct nbi_backend *be, struct linear_case *c, int64_t from, int64_t N,
                       float *out)
{
    const struct nbi_stream_limits limits = limits_of(c, N);
    struct lab l;
    lab_begin(&l, be, &limits);
    for (int time = 0; time < 2; time++) {
        struct nbi_op_linear op = linear_op(&l, c, N);
        op.matmul = be == scalar ? NBI_MATMUL_F32 : NBI_MATMUL_FAST;
        op.x = block(&l, c->x + from * c->K, N * c->K * 4);
        assert_ok(be->linear(l.s, &op));
        fetch_results(&l, c, &op, out);
        while (l.weight_count > 0)
            be->weight_free(be, &l.weights[--l.weight_count]);
    }
    lab_end(&l);
}

/* Outputs of a matrix that every multiprocessor has a share of. */
#define WIDE(outputs) (EMULATED ? (outputs) / 16 : (outputs))

static const struct linear_case shapes[] = {
    {.count = 1, .K = 16, .O = {1}},
    {.count = 3, .K = 144, .O = {1, 70, 129}},
    {.count = 2, .K = 1008, .O = {203, 64}},
    {.count = 3, .K = EMULATED ? 640 : 2560, .O = {517, 65, 63}},
    {.count = 1, .K = 1280, .O = {WIDE(9001)}},
    {.count = 1, .K = 9728, .O = {80}},
    {.count = 1, .K = 16, .O = {WIDE(30001)}}, /* several row blocks of warpgroups */
    {.count = 2,
     .K = 1648,
     .O = {WIDE(4100), WIDE(900)}}, /* odd numbers of tile rows and tile columns */
};

/* Several row blocks of single warps (mma.sync), on up to 136 multiprocessors. */
static const struct linear_case long_shape = {.count = 1, .K = 400, .O = {WIDE(70001)}};

static void check_batch_invariant_rows_keep_their_bits(void)
{
    static const int64_t froms[] = {0, 0, 0, 0, 0, 7, 31, 3},
                         counts[] = {1, 3, 8, 9, 16, 17, 33, 40};
    for (int64_t i = 0; i < COUNT(shapes); i++) {
        struct linear_case c = shapes[i];
        c.batch_invariant = true;
        case_new(&c);
        float *all = zeros(ROWS * c.outs, 4), *is = zeros(ROWS * c.outs, 4);
        run_linear(tested, &c, 0, ROWS, all);
        for (int64_t j = 0; j < COUNT(counts); j += EMULATED ? 3 : 1) {
            run_linear(tested, &c, froms[j], counts[j], is);
            snprintf(where, sizeof where, "shape %lld, rows %lld to %lld", (long long)i,
                     (long long)froms[j], (long long)(froms[j] + counts[j]));
            same_bytes("y", is, all + froms[j] * c.outs, counts[j] * c.outs * 4);
        }
        case_free(&c);
        free(all);
        free(is);
    }
}

/* x is rounded to at least 11 bits. The errors are independent, so they add up as squares do. Sums
 * are f32, in any order. */
static void bounds_of(const struct linear_case *c, int64_t N, double *bound)
{
    for (int64_t n = 0; n < N; n++)
        for (int i = 0; i < c->count; i++)
            for (int64_t o = 0; o < c->O[i]; o++) {
                const float *x = c->x + n * c->K;
                const double *w = c->w[i].values + o * c->K;
                *bound++ = dot_bound(x, w, c->K, 6 * 0x1p-11) + 1e-6;
            }
}

/* Against the scalar code. `variant` decides about add and batch_invariant. */
static void compare_with_scalar(const struct linear_case *shape, int64_t variant)
{
    static const int64_t counts[] = {1, 9, 20, 64};
    const int64_t step = EMULATED ? 2 : SANITIZED ? 4 : 1;
    for (int64_t i = variant % step; i < COUNT(counts); i += step) {
        struct linear_case c = *shape;
        int64_t N = c.K * c.O[0] > 4000000 && i > 1 ? 11 : counts[i];
        c.add = (variant + i) % 3 == 1;
        c.batch_invariant = variant % 2;
        case_new(&c);
        float *want = zeros(N * c.outs, 4), *is = zeros(N * c.outs, 4);
        double *bound = zeros(N * c.outs, 8);
        run_linear(scalar, &c, 0, N, want);
        run_linear(tested, &c, 0, N, is);
        bounds_of(&c, N, bound);
        snprintf(where, sizeof where, "%lld to %lld, N %lld", (long long)c.K, (long long)c.outs,
                 (long long)N);
        within("y", is, want, bound, N * c.outs);
        case_free(&c);
        free(want);
        free(is);
        free(bound);
    }
}

static void check_results_match_the_scalar_code(void)
{
    for (int64_t i = 0; i < COUNT(shapes); i++)
        compare_with_scalar(&shapes[i], i);
}

/* Row blocks exist on the GPU only. */
static void check_several_row_blocks_match_the_scalar_code(void)
{
    compare_with_scalar(&long_shape, 0);
    compare_with_scalar(&long_shape, 1); /* batch-invariant */
    compare_with_scalar(&shapes[5], 2);  /* more tile columns of x than shared memory holds */
}

/* ---- all checks, on both backends where both can ---- */

/* A little of everything, for compute-sanitizer, which slows kernels a thousandfold. */
static void check_short_selection(void)
{
    compare_with_scalar(&shapes[1], 1);
    compare_with_scalar(&shapes[2], 2);
}

#define CHECKS(X)                                                                                  \
    X(batch_invariant_rows_keep_their_bits)                                                        \
    X(results_match_the_scalar_code)                                                               \
    X(short_selection)

#define X(check) TEST_ON_BOTH(linear_decode, check)
CHECKS(X)
#undef X
TEST_ON_CUDA(linear_decode, several_row_blocks_match_the_scalar_code)

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(check) ON_BOTH(linear_decode, check)
        CHECKS(X)
#undef X
            ON_CUDA(linear_decode, several_row_blocks_match_the_scalar_code)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
