/* test_attention_train.c - attention in training, documents one after another: the forward pass in
 * bf16, and the gradients in f32 and bf16, against the equations in double.
 *
 * In bf16 an error may be twice that of the equations in double with what tensor cores take rounded
 * to bf16: probabilities, ds and the result. In f32 it may be 1e-5. Errors are root mean
 * squares over a tensor, and relative to that of the result; where terms cancel, 3e-7 of the same
 * sums of magnitudes. */
#include "ops_lab.h"

#include "backend/ops_train.h"
#include "tensor/half.h"

/* ---- cases ---- */

enum documents { ONE, SEVERAL, SINGLE_ROWS, WINDOW };
static const char *const document_names[] = {"one document", "several documents",
                                             "documents of one row", "a sliding window"};

struct train_case {
    int64_t N, NH, NKV, D;
    int64_t ld; /* row stride of dq, dk and dv; 0: contiguous */
    bool bf16;
    enum documents documents;
    /* Values that the type of the activations represents. */
    float *q, *k, *v, *dy, *y, *lse;
    int32_t *first, *last, *end;
};

static float as_bf16(double x)
{
    return nbi_bf16_to_f32(nbi_f32_to_bf16((float)x));
}

static float *random_values(int64_t n, float scale, bool bf16)
{
    float *x = random_floats(n, scale);
    for (int64_t i = 0; bf16 && i < n; i++)
        x[i] = as_bf16((double)x[i]);
    return x;
}

static void fill_ranges(struct train_case *c)
{
    int32_t start = 0, N = (int32_t)c->N;
    for (int32_t n = 0; n < N; n++) {
        if (c->documents == SINGLE_ROWS || (c->documents == SEVERAL && bits32() % 40 == 0))
            start = n;
        c->first[n] = c->documents == WINDOW && n > 50 ? n - 50 : start;
        c->last[n] = n;
    }
    for (int32_t j = 0; j < N; j++)
        for (int32_t n = j; n < N && c->first[n] <= j; n++)
            c->end[j] = n;
}

/* The sum of x y over a head. */
static double dot(const struct train_case *c, const float *x, const float *y)
{
    double sum = 0;
    for (int64_t d = 0; d < c->D; d++)
        sum += (double)x[d] * (double)y[d];
    return sum;
}

static int64_t query_at(const struct train_case *c, int64_t n, int64_t h)
{
    return (n * c->NH + h) * c->D;
}

/* Of the key head that query head h uses. */
static int64_t key_at(const struct train_case *c, int64_t n, int64_t h)
{
    return (n * c->NKV + h / (c->NH / c->NKV)) * c->D;
}

static double score(const struct train_case *c, int64_t n, int64_t h, int64_t j)
{
    return dot(c, c->q + query_at(c, n, h), c->k + key_at(c, j, h)) / sqrt((double)c->D);
}

/* y and lse of the forward pass, in double; `rounded` as the tensor cores would. */
static void forward(const struct train_case *c, bool rounded, double *y, double *lse)
{
    memset(y, 0, (size_t)(c->N * c->NH * c->D) * sizeof *y);
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t h = 0; h < c->NH; h++) {
            double *row = y + query_at(c, n, h), top = -INFINITY, sum = 0;
            for (int64_t j = c->first[n]; j <= n; j++)
                top = fmax(top, score(c, n, h, j));
            for (int64_t j = c->first[n]; j <= n; j++) {
                double p = exp(score(c, n, h, j) - top);
                sum += p;
                p = rounded ? (double)as_bf16(p) : p;
                for (int64_t d = 0; d < c->D; d++)
                    row[d] += p * (double)c->v[key_at(c, j, h) + d];
            }
            for (int64_t d = 0; d < c->D; d++)
                row[d] = rounded ? (double)as_bf16(row[d] / sum) : row[d] / sum;
            lse[n * c->NH + h] = top + log(sum);
        }
}

static void case_new(struct train_case *c)
{
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D, heads = c->N * c->NH;
    c->q = random_values(q, 3, c->bf16);
    c->k = random_values(k, 2, c->bf16);
    c->v = random_values(k, 1, c->bf16);
    c->dy = random_values(q, 1, c->bf16);
    c->y = zeros(q, sizeof *c->y);
    c->lse = zeros(heads, sizeof *c->lse);
    c->first = zeros(c->N, 4);
    c->last = zeros(c->N, 4);
    c->end = zeros(c->N, 4);
    fill_ranges(c);
    double *y = zeros(q, sizeof *y), *lse = zeros(heads, sizeof *lse);
    forward(c, false, y, lse);
    for (int64_t i = 0; i < q; i++)
        c->y[i] = c->bf16 ? as_bf16(y[i]) : (float)y[i];
    for (int64_t i = 0; i < heads; i++)
        c->lse[i] = (float)lse[i];
    free(y);
    free(lse);
    snprintf(where, sizeof where, "%s, N %lld, %s, D %lld, %lld and %lld heads, ld %lld",
             c->bf16 ? "bf16" : "f32", (long long)c->N, document_names[c->documents],
             (long long)c->D, (long long)c->NH, (long long)c->NKV, (long long)c->ld);
}

static void case_free(struct train_case *c)
{
    void *all[] = {c->q, c->k, c->v, c->dy, c->y, c->lse, c->first, c->last, c->end};
    for (int64_t i = 0; i < COUNT(all); i++)
        free(all[i]);
}

/* ---- blocks of activations ---- */

static int64_t element_bytes(const struct train_case *c)
{
    return c->bf16 ? 2 : 4;
}

static struct nbi_ptr put_values(struct lab *l, const struct train_case *c, const float *x,
                                 int64_t n)
{
    uint16_t *half = zeros(n, sizeof *half);
    for (int64_t i = 0; i < n; i++)
        half[i] = nbi_f32_to_bf16(x[i]);
    struct nbi_ptr p = block(l, c->bf16 ? (const void *)half : x, n * element_bytes(c));
    free(half);
    return p;
}

static void take_values(struct lab *l, const struct train_case *c, float *x, struct nbi_ptr p,
                        int64_t n)
{
    fetch(l, x, p, n * element_bytes(c));
    for (int64_t i = n - 1; c->bf16 && i >= 0; i--) /* in place, so the last one first */
        x[i] = nbi_bf16_to_f32(((const uint16_t *)(const void *)x)[i]);
}

static struct nbi_stream_limits limits_of(const struct train_case *c)
{
    return (struct nbi_stream_limits){
        .N = c->N, .K = c->NH * c->D, .D = c->D, .heads = c->NH, .training = true, .bf16 = c->bf16};
}

/* ---- errors ---- */

/* The root mean square of x - y; y may be NULL. */
static double rms(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (x[i] - (y ? y[i] : 0)) * (x[i] - (y ? y[i] : 0));
    return sqrt(sum / (double)n);
}

/* Compares what a backend computed with what the equations give: exactly, and rounded. */
static void compare(const struct train_case *c, const char *what, const float *is,
                    const double *exact, const double *rounded, const double *magnitude, int64_t n)
{
    double *x = zeros(n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (double)is[i];
    double off = rms(x, exact, n), size = rms(exact, NULL, n),
           slack = 3e-7 * rms(magnitude, NULL, n);
    double reference = c->bf16 ? rms(rounded, exact, n) : 0.5e-5 * size;
    if (!(off <= 2 * reference + slack))
        fail_msg("%s: %s is off by %.3g; %.3g is allowed, the result is %.3g", where, what, off,
                 2 * reference + slack, size);
    if (getenv("NB_TEST_VERBOSE"))
        print_message("%s: %s: error %.3g of the result, %.3f of the reference's\n", where, what,
                      off / size, off / reference);
    free(x);
}

/* ---- forward ---- */

static void run_forward(const struct train_case *c, float *y, float *lse)
{
    struct lab l;
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D;
    const struct nbi_stream_limits limits = limits_of(c);
    lab_begin(&l, tested, &limits);
    const struct nbi_op_attention op = {.y = block(&l, NULL, q * element_bytes(c)),
                                        .lse = block(&l, NULL, c->N * c->NH * 4),
                                        .q = put_values(&l, c, c->q, q),
                                        .kv = {put_values(&l, c, c->k, k),
                                               put_values(&l, c, c->v, k),
                                               c->bf16 ? NBI_BF16 : NBI_F32},
                                        .first = block(&l, c->first, c->N * 4),
                                        .last = block(&l, c->last, c->N * 4),
                                        .max_keys = c->N,
                                        .N = c->N,
                                        .NH = c->NH,
                                        .NKV = c->NKV,
                                        .D = c->D,
                                        .matmul = c->bf16 ? NBI_MATMUL_FAST : NBI_MATMUL_F32,
                                        .bf16 = c->bf16};
    assert_ok(tested->attention(l.s, &op));
    take_values(&l, c, y, op.y, q);
    fetch(&l, lse, op.lse, c->N * c->NH * 4);
    lab_end(&l);
}

static void check_forward_case(struct train_case *c)
{
    int64_t n = c->N * c->NH * c->D, heads = c->N * c->NH;
    case_new(c);
    float *y = zeros(n, sizeof *y), *lse = zeros(heads, sizeof *lse);
    double *exact = zeros(n, sizeof *exact), *rounded = zeros(n, sizeof *rounded),
           *sums = zeros(heads, sizeof *sums);
    run_forward(c, y, lse);
    forward(c, false, exact, sums);
    for (int64_t i = 0; i < heads; i++)
        if (!(fabs((double)lse[i] - sums[i]) <= 2e-6 * (fabs(sums[i]) + 4)))
            fail_msg("%s: lse %lld is %.9g, not %.9g", where, (long long)i, (double)lse[i],
                     sums[i]);
    forward(c, true, rounded, sums);
    compare(c, "y", y, exact, rounded, exact, n);
    free(y);
    free(lse);
    free(exact);
    free(rounded);
    free(sums);
    case_free(c);
}

/* ---- backward ---- */

/* dq, dk and dv, one after another. */
static int64_t gradient_count(const struct train_case *c)
{
    return c->N * (c->NH + 2 * c->NKV) * c->D;
}

/* The gradients in double, `rounded` as the tensor cores would, or else the sums of magnitudes. */
enum arithmetic { EXACT, ROUNDED, MAGNITUDES };

static void backward_pair(const struct train_case *c, enum arithmetic how, double *g, int64_t n,
                          int64_t h, int64_t j)
{
    int64_t query = query_at(c, n, h), key = key_at(c, j, h);
    double *dq = g + query, *dk = g + c->N * c->NH * c->D + key, *dv = dk + c->N * c->NKV * c->D;
    double p = exp(score(c, n, h, j) - (double)c->lse[n * c->NH + h]), s = sqrt((double)c->D);
    double dp = dot(c, c->dy + query, c->v + key), delta = dot(c, c->dy + query, c->y + query);
    double ds = p * (dp - delta);
    if (how == MAGNITUDES) {
        ds = 0;
        for (int64_t d = 0; d < c->D; d++)
            ds += p * fabs((double)c->dy[query + d]) *
                  (fabs((double)c->v[key + d]) + fabs((double)c->y[query + d]));
    }
    if (how == ROUNDED) {
        p = (double)as_bf16(p);
        ds = (double)as_bf16(ds);
    }
    for (int64_t d = 0; d < c->D; d++) {
        double to_dq = ds * (double)c->k[key + d] / s, to_dk = ds * (double)c->q[query + d] / s,
               to_dv = p * (double)c->dy[query + d];
        dq[d] += how == MAGNITUDES ? fabs(to_dq) : to_dq;
        dk[d] += how == MAGNITUDES ? fabs(to_dk) : to_dk;
        dv[d] += how == MAGNITUDES ? fabs(to_dv) : to_dv;
    }
}

static double *backward(const struct train_case *c, enum arithmetic how)
{
    int64_t count = gradient_count(c);
    double *g = zeros(count, sizeof *g);
    for (int64_t n = 0; n < c->N; n++)
        for (int64_t h = 0; h < c->NH; h++)
            for (int64_t j = c->first[n]; j <= n; j++)
                backward_pair(c, how, g, n, h, j);
    for (int64_t i = 0; how == ROUNDED && i < count; i++)
        g[i] = (double)as_bf16(g[i]);
    return g;
}

/* Where head i of dq, dk and dv of row n, counted together, is in the array of the gradients. */
static int64_t gradient_at(const struct train_case *c, int64_t n, int64_t i)
{
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D;
    if (i < c->NH)
        return query_at(c, n, i);
    i -= c->NH;
    return q + (i < c->NKV ? 0 : k) + (n * c->NKV + i % c->NKV) * c->D;
}

/* With ld the three are neighbouring columns of one matrix; columns after them are not written. */
static void take_gradients(struct lab *l, const struct train_case *c, float *g,
                           const struct nbi_op_attention_bwd *op)
{
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D, heads = c->NH + 2 * c->NKV;
    if (c->ld == 0) {
        take_values(l, c, g, op->dq, q);
        take_values(l, c, g + q, op->dk, k);
        take_values(l, c, g + q + k, op->dv, k);
        return;
    }
    float *all = zeros(c->N * c->ld, sizeof *all);
    take_values(l, c, all, op->dq, c->N * c->ld);
    for (int64_t n = 0; n < c->N; n++) {
        const float *row = all + n * c->ld;
        for (int64_t i = 0; i < heads; i++)
            memcpy(g + gradient_at(c, n, i), row + i * c->D, (size_t)c->D * sizeof *g);
        for (int64_t i = heads * c->D; i < c->ld; i++)
            if (!isnan(row[i]))
                fail_msg("%s: column %lld after the gradients was written", where, (long long)i);
    }
    free(all);
}

static void run_backward(struct nbi_backend *be, const struct train_case *c, float *g)
{
    struct lab l;
    int64_t q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D, bytes = element_bytes(c);
    const struct nbi_stream_limits limits = limits_of(c);
    lab_begin(&l, be, &limits);
    struct nbi_op_attention_bwd op = {.dy = put_values(&l, c, c->dy, q),
                                      .y = put_values(&l, c, c->y, q),
                                      .lse = block(&l, c->lse, c->N * c->NH * 4),
                                      .q = put_values(&l, c, c->q, q),
                                      .kv = {put_values(&l, c, c->k, k), put_values(&l, c, c->v, k),
                                             c->bf16 ? NBI_BF16 : NBI_F32},
                                      .first = block(&l, c->first, c->N * 4),
                                      .end = block(&l, c->end, c->N * 4),
                                      .N = c->N,
                                      .NH = c->NH,
                                      .NKV = c->NKV,
                                      .D = c->D,
                                      .ld = c->ld,
                                      .bf16 = c->bf16};
    if (c->ld) {
        op.dq = block(&l, NULL, c->N * c->ld * bytes);
        op.dk = nbi_ptr_add(op.dq, c->NH * c->D * bytes);
        op.dv = nbi_ptr_add(op.dk, c->NKV * c->D * bytes);
    } else {
        op.dq = block(&l, NULL, q * bytes);
        op.dk = block(&l, NULL, k * bytes);
        op.dv = block(&l, NULL, k * bytes);
    }
    assert_ok(be->attention_bwd(l.s, &op));
    take_gradients(&l, c, g, &op);
    lab_end(&l);
}

/* Twice, with the same bits; and in f32 against the scalar code. */
static void check_backward_case(struct train_case *c)
{
    case_new(c);
    int64_t n = gradient_count(c), q = c->N * c->NH * c->D, k = c->N * c->NKV * c->D;
    float *is = zeros(n, sizeof *is), *again = zeros(n, sizeof *again);
    double *exact = backward(c, EXACT), *rounded = backward(c, ROUNDED),
           *magnitude = backward(c, MAGNITUDES);
    run_backward(tested, c, is);
    run_backward(tested, c, again);
    same_bytes("the second result", again, is, n * 4);
    compare(c, "dq", is, exact, rounded, magnitude, q);
    compare(c, "dk", is + q, exact + q, rounded + q, magnitude + q, k);
    compare(c, "dv", is + q + k, exact + q + k, rounded + q + k, magnitude + q + k, k);
    if (!c->bf16) {
        run_backward(scalar, c, again);
        for (int64_t i = 0; i < n; i++)
            exact[i] = (double)again[i];
        compare(c, "dq by the definition", is, exact, NULL, magnitude, q);
        compare(c, "dk by the definition", is + q, exact + q, NULL, magnitude + q, k);
        compare(c, "dv by the definition", is + q + k, exact + q + k, NULL, magnitude + q + k, k);
    }
    void *all[] = {is, again, exact, rounded, magnitude};
    for (int64_t i = 0; i < COUNT(all); i++)
        free(all[i]);
    case_free(c);
}

/* ---- all cases ---- */

/* Numbers of rows with kinds of documents and head sizes: all of them, but for many rows, which
 * take long, only several documents with every size. The sizes of groups take turns. */
static void for_each_case(bool bf16, void (*check)(struct train_case *c))
{
    static const int64_t rows[] = {1, 2, 63, 64, 65, 127, 300}, groups[] = {1, 2, 4, 8},
                         sizes[] = {64, 128, 80};
    for (int64_t i = 0; i < COUNT(rows) * 4 * COUNT(sizes); i += SANITIZED || EMULATED ? 5 : 1) {
        int64_t row = i % 7, kind = i / 7 % 4, size = i / 28;
        if (rows[row] > 65 && kind != SEVERAL && size != (kind + row + 1) % 3)
            continue;
        struct train_case c = {
            .N = rows[row], .documents = (enum documents)kind, .D = sizes[size], .bf16 = bf16};
        c.NKV = c.N > 127 ? 1 : 1 + i % 3;
        c.NH = c.NKV * groups[c.N > 127 ? (kind + size) % 3 : (i + kind) % 4];
        c.ld = i % 2 ? (c.NH + 2 * c.NKV) * c.D + 8 : 0;
        check(&c);
    }
}

static void check_forward_bf16(void)
{
    for_each_case(true, check_forward_case);
}

static void check_backward_f32(void)
{
    need_op(tested, attention_bwd);
    for_each_case(false, check_backward_case);
}

static void check_backward_bf16(void)
{
    need_op(tested, attention_bwd);
    for_each_case(true, check_backward_case);
}

#define CHECKS(X)                                                                                  \
    X(forward_bf16)                                                                                \
    X(backward_f32)                                                                                \
    X(backward_bf16)

#define X(check) TEST_ON_BOTH(attention_train, check)
CHECKS(X)
#undef X

int main(void)
{
    const struct CMUnitTest tests[] = {
#define X(check) ON_BOTH(attention_train, check)
        CHECKS(X)
#undef X
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
