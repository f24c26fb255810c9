/* test_linear_decode.c - linear of decoding, up to 64 rows with NVFP4 matrices: batch invariance,
 * shapes that reach every division of the work, and fusion with norms and SwiGLU. */
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

static const struct linear_case shapes[] = {
    {.count = 1, .K = 16, .O = {1}},           {.count = 3, .K = 144, .O = {1, 70, 129}},
    {.count = 2, .K = 1008, .O = {203, 64}},   {.count = 3, .K = 2560, .O = {517, 65, 63}},
    {.count = 1, .K = 1280, .O = {9001}},      {.count = 1, .K = 9728, .O = {80}},
    {.count = 1, .K = 16, .O = {30001}},       /* several row blocks of warpgroups */
    {.count = 2, .K = 1648, .O = {4100, 900}}, /* odd numbers of tile rows and tile columns */
};

/* Several row blocks of single warps (mma.sync), on up to 136 multiprocessors. */
static const struct linear_case long_shape = {.count = 1, .K = 400, .O = {70001}};

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
        for (int64_t j = 0; j < COUNT(counts); j++) {
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
    for (int64_t i = 0; i < COUNT(counts); i++) {
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

/* Skips the test on a backend without fused operations. */
static void need_fused(void)
{
    if (tested->norm_linear && tested->swiglu_linear)
        return;
    end_on();
    skip("this backend fuses no operations with a product");
}

static void check_results_match_the_scalar_code(void)
{
    for (int64_t i = 0; i < COUNT(shapes); i++)
        compare_with_scalar(&shapes[i], i);
}

/* Row blocks exist on the GPU only, which is the backend that fuses. */
static void check_several_row_blocks_match_the_scalar_code(void)
{
    need_fused();
    compare_with_scalar(&long_shape, 0);
    compare_with_scalar(&long_shape, 1); /* batch-invariant */
    compare_with_scalar(&shapes[5], 2);  /* more tile columns of x than shared memory holds */
}

/* ---- fused with the previous operation ---- */

/* linear of swiglu or, with a norm's weight, of rmsnorm: as one operation or as two. */
static void run_fused(struct linear_case *c, int64_t N, struct host_weight *norm, bool fused,
                      float *out)
{
    const struct nbi_stream_limits limits = limits_of(c, N);
    struct nbi_backend *be = tested;
    struct lab l;
    int64_t bytes = N * c->K * 4;
    lab_begin(&l, be, &limits);
    struct nbi_op_linear op = linear_op(&l, c, N);
    struct nbi_ptr x = block(&l, c->x, bytes), up = block(&l, c->x + c->K, bytes);
    op.x = block(&l, NULL, bytes);
    if (norm) {
        const struct nbi_op_rmsnorm a = {op.x, {0}, x, weight(&l, norm), 1e-6f, N, c->K, false};
        assert_ok(fused ? be->norm_linear(l.s, &a, &op) : be->rmsnorm(l.s, &a));
    } else {
        const struct nbi_op_swiglu a = {op.x, x, up, N, c->K, 0, false};
        assert_ok(fused ? be->swiglu_linear(l.s, &a, &op) : be->swiglu(l.s, &a));
    }
    if (!fused)
        assert_ok(be->linear(l.s, &op));
    fetch_results(&l, c, &op, out);
    lab_end(&l);
}

static void check_fused_operations_keep_the_bits_of_two(void)
{
    static const int64_t counts[] = {1, 8, 11, 63};
    need_fused();
    for (int64_t i = 0; i < COUNT(shapes) * 8; i++) {
        struct linear_case c = shapes[i / 8];
        int64_t N = counts[i % 4];
        struct host_weight norm;
        c.add = i % 3 == 1;
        case_new(&c);
        host_weight_new(&norm, i % 5 ? NBI_BF16 : NBI_F32, c.K, 0);
        float *two = zeros(N * c.outs, 4), *one = zeros(N * c.outs, 4);
        run_fused(&c, N, i / 4 % 2 ? &norm : NULL, false, two);
        run_fused(&c, N, i / 4 % 2 ? &norm : NULL, true, one);
        snprintf(where, sizeof where, "shape %lld, N %lld, %s", (long long)(i / 8), (long long)N,
                 i / 4 % 2 ? "norm" : "swiglu");
        same_bytes("y", one, two, N * c.outs * 4);
        host_weight_free(&norm);
        case_free(&c);
        free(two);
        free(one);
    }
}

/* ---- the MLP block ---- */

/* c has gate and up: y = y + swiglu(gate, up) down^T. As four operations, with SwiGLU's result to
 * `out_act`, or as two fused ones that hand it over packed. */
static void run_mlp(struct linear_case *c, int64_t N, struct host_weight *norm,
                    struct host_weight *down, float *out_act, float *out)
{
    const int64_t F = c->O[0], C = down->rows;
    const struct nbi_stream_limits limits = {.N = N, .K = F > c->K ? F : c->K, .D = 2, .heads = 1};
    struct nbi_backend *be = tested;
    struct lab l;
    lab_begin(&l, be, &limits);
    struct nbi_op_linear op = linear_op(&l, c, N);
    struct nbi_ptr x = block(&l, c->x, N * c->K * 4), act = block(&l, NULL, N * F * 4);
    struct nbi_ptr y = block(&l, c->y, N * C * 4);
    op.x = block(&l, NULL, N * c->K * 4);
    const struct nbi_op_rmsnorm first = {op.x, {0}, x, weight(&l, norm), 1e-6f, N, c->K, false};
    const struct nbi_op_swiglu second = {act, op.y[0], op.y[1], N, F, 0, false};
    const struct nbi_op_linear third = {.count = 1,
                                        .y = {y},
                                        .w = {weight(&l, down)},
                                        .x = act,
                                        .N = N,
                                        .K = F,
                                        .add = true,
                                        .batch_invariant = c->batch_invariant};
    if (out_act) {
        assert_ok(be->rmsnorm(l.s, &first));
        assert_ok(be->linear(l.s, &op));
        assert_ok(be->swiglu(l.s, &second));
        fetch(&l, out_act, act, N * F * 4);
        assert_ok(be->linear(l.s, &third));
    } else {
        op.act = act;
        assert_ok(be->norm_linear(l.s, &first, &op));
        assert_ok(be->swiglu_linear(l.s, &second, &third));
    }
    fetch(&l, out, y, N * C * 4);
    lab_end(&l);
}

/* Two fused operations against four; and batch-invariant rows must keep their bits. */
static void check_mlp_size(const int64_t size[3])
{
    static const int64_t counts[] = {1, 8, 9, 16, 17, 40, ROWS};
    const int64_t F = size[1], C = size[2];
    struct linear_case c = {.count = 2, .K = size[0], .O = {F, F}};
    struct host_weight norm, down;
    float *act = zeros(ROWS * F, 4), *want = zeros(ROWS * C, 4), *is = zeros(ROWS * C, 4),
          *all = zeros(ROWS * C, 4);
    double *bound = zeros(ROWS * C, 8);
    case_new(&c);
    free(c.y);
    c.y = random_floats(ROWS * C, 1);
    host_weight_new(&norm, NBI_BF16, c.K, 0);
    host_weight_new(&down, NBI_NVFP4, C, F);
    c.batch_invariant = true;
    run_mlp(&c, ROWS, &norm, &down, NULL, all);
    for (int64_t i = 0; i < COUNT(counts); i++) {
        int64_t N = counts[i];
        snprintf(where, sizeof where, "%lld to %lld to %lld, N %lld", (long long)c.K, (long long)F,
                 (long long)C, (long long)N);
        c.batch_invariant = true;
        run_mlp(&c, N, &norm, &down, NULL, is);
        same_bytes("y", is, all, N * C * 4);
        c.batch_invariant = false;
        run_mlp(&c, N, &norm, &down, act, want);
        run_mlp(&c, N, &norm, &down, NULL, is);
        for (int64_t j = 0; j < N * C; j++)
            bound[j] = dot_bound(act + j / C * F, down.values + j % C * F, F, 6 * 0x1p-11) + 1e-6;
        within("y", is, want, bound, N * C);
    }
    host_weight_free(&norm);
    host_weight_free(&down);
    case_free(&c);
    void *used[] = {act, want, is, all, bound};
    for (int64_t i = 0; i < COUNT(used); i++)
        free(used[i]);
}

static void check_fused_mlp_matches_four_operations(void)
{
    static const int64_t sizes[][3] = {{16, 16, 1},     {144, 80, 129}, {1008, 1072, 333},
                                       {640, 9728, 80}, {16, 17408, 3}, {272, 34000, 3}};
    need_fused();
    for (int64_t i = 0; i < COUNT(sizes); i++)
        check_mlp_size(sizes[i]);
}

/* ---- all checks, on both backends where both can ---- */

/* A little of everything, for compute-sanitizer, which slows kernels a thousandfold. */
static void check_short_selection(void)
{
    compare_with_scalar(&shapes[1], 1);
    compare_with_scalar(&shapes[2], 2);
    if (tested->norm_linear && tested->swiglu_linear)
        check_mlp_size((const int64_t[]){144, 80, 129});
}

#define CHECKS(X)                                                                                  \
    X(batch_invariant_rows_keep_their_bits)                                                        \
    X(results_match_the_scalar_code)                                                               \
    X(short_selection)

#define FUSED_CHECKS(X)                                                                            \
    X(several_row_blocks_match_the_scalar_code)                                                    \
    X(fused_operations_keep_the_bits_of_two)                                                       \
    X(fused_mlp_matches_four_operations)

#define X(check) TEST_ON_BOTH(linear_decode, check)
CHECKS(X)
#undef X
#define X(check) TEST_ON_CUDA(linear_decode, check)
FUSED_CHECKS(X)
#undef X

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(check) ON_BOTH(linear_decode, check)
        CHECKS(X)
#undef X
#define X(check) ON_CUDA(linear_decode, check)
            FUSED_CHECKS(X)
#undef X
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
