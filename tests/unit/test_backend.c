/* test_backend.c - the forward pass against its equations in double on every instruction set and on
 * a GPU; its bits depend neither on threads nor on other rows; the host never touches the backend's
 * memory. */
#include <math.h>
#include <signal.h>
#include <sys/wait.h>

#include "support.h"

#include "guarded_backend.h"
#include "host_model.h"

/* ---- a model and a batch ---- */

static const struct shape shapes[] = {{48, 80, 1, 4, 4, 32, 67, false, true, false},
                                      {64, 96, 3, 4, 2, 80, 50, true, false, false},
                                      {32, 48, 5, 8, 2, 24, 33, true, true, false},
                                      {80, 112, 2, 4, 1, 64, 129, false, true, false},
                                      {16, 16, 7, 2, 1, 2, 5, true, false, false},
                                      {112, 272, 1, 3, 3, 128, 40, true, true, false},
                                      {128, 272, 3, 8, 4, 48, 100, true, true, false},
                                      {48, 203, 2, 4, 2, 32, 31, true, true, false}};

#define SHAPES ((int)(sizeof shapes / sizeof *shapes))

#define MAX_TOKENS 640

struct batch {
    int64_t N, M, kv_row_count;
    int32_t ids[MAX_TOKENS], positions[MAX_TOKENS], kv_rows[MAX_TOKENS];
    int32_t first[MAX_TOKENS], last[MAX_TOKENS], rows[MAX_TOKENS];
};

/* Two sequences of a and b tokens, alternating; the second starts at position 1000. Their rows of
 * the cache are [3, 3 + a) and [a + 5, a + 5 + b). Logits are wanted of all rows, last to first. */
static void batch_new(struct batch *t, int64_t vocab, int a, int b)
{
    int at[2] = {0, 0}, of[2] = {a, b}, start[2] = {3, a + 5};
    *t = (struct batch){.N = a + b, .M = a + b, .kv_row_count = a + b + 7};
    for (int n = 0; n < a + b; n++) {
        int which = (n & 1) ? at[1] < b : at[0] >= a;
        int i = at[which]++;
        assert_true(i < of[which]);
        t->ids[n] = (int32_t)(bits32() % (uint32_t)vocab);
        t->positions[n] = which * 1000 + i;
        t->kv_rows[n] = start[which] + i;
        t->first[n] = start[which];
        t->last[n] = start[which] + i;
        t->rows[n] = a + b - 1 - n;
    }
}

/* ---- the equations, in double ---- */

static void matvec(double *y, const struct host_weight *w, const double *x, bool add)
{
    for (int64_t r = 0; r < w->rows; r++) {
        double sum = 0;
        for (int64_t k = 0; k < w->cols; k++)
            sum += w->values[r * w->cols + k] * x[k];
        y[r] = add ? y[r] + sum : sum;
    }
}

static void norm(double *y, const double *x, const struct host_weight *w, double eps)
{
    double sum = 0;
    for (int64_t i = 0; i < w->rows; i++)
        sum += x[i] * x[i];
    double f = 1 / sqrt(sum / (double)w->rows + eps);
    for (int64_t i = 0; i < w->rows; i++)
        y[i] = x[i] * f * w->values[i];
}

/* Norm of each head, then rotation by the angle, which the contract rounds to f32. */
static void norm_and_rope(double *x, int64_t heads, const struct nbi_config *c, int32_t position,
                          const struct host_weight *w)
{
    int64_t D = c->head_dim;
    for (int64_t h = 0; h < heads; h++) {
        double *v = x + h * D;
        norm(v, v, w, c->rms_eps);
        for (int64_t i = 0; i < D / 2; i++) {
            float frequency = (float)pow(c->rope_theta, -2.0 * (double)i / (double)D);
            double angle = (double)((float)position * frequency);
            double a = v[i], b = v[i + D / 2];
            v[i] = a * cos(angle) - b * sin(angle);
            v[i + D / 2] = b * cos(angle) + a * sin(angle);
        }
    }
}

static void attend(double *y, const double *q, const double *k, const double *v,
                   const struct nbi_config *c, int64_t first, int64_t last)
{
    int64_t D = c->head_dim, row = c->kv_heads * D, group = c->heads / c->kv_heads;
    for (int64_t h = 0; h < c->heads; h++) {
        double weight[MAX_TOKENS], sum = 0;
        for (int64_t i = first; i <= last; i++) {
            double s = 0;
            for (int64_t d = 0; d < D; d++)
                s += q[h * D + d] * k[i * row + h / group * D + d];
            weight[i - first] = exp(s / sqrt((double)D));
            sum += weight[i - first];
        }
        for (int64_t d = 0; d < D; d++) {
            y[h * D + d] = 0;
            for (int64_t i = first; i <= last; i++)
                y[h * D + d] += weight[i - first] / sum * v[i * row + h / group * D + d];
        }
    }
}

static void reference_layer(const struct model *m, const struct batch *t, int64_t layer, double *x)
{
    const struct nbi_config *c = &m->c;
    int64_t C = c->hidden_size, Q = c->heads * c->head_dim, KV = c->kv_heads * c->head_dim;
    int64_t F = c->intermediate_size;
    double *y = zeros(C, 8), *q = zeros(t->N * Q, 8), *att = zeros(Q, 8);
    double *k = zeros(t->kv_row_count * KV, 8), *v = zeros(t->kv_row_count * KV, 8);
    double *gate = zeros(F, 8), *up = zeros(F, 8);
    for (int64_t n = 0; n < t->N; n++) {
        norm(y, x + n * C, find(m, layer, "input_layernorm.weight"), c->rms_eps);
        matvec(q + n * Q, find(m, layer, "self_attn.q_proj.weight"), y, false);
        matvec(k + t->kv_rows[n] * KV, find(m, layer, "self_attn.k_proj.weight"), y, false);
        matvec(v + t->kv_rows[n] * KV, find(m, layer, "self_attn.v_proj.weight"), y, false);
        norm_and_rope(q + n * Q, c->heads, c, t->positions[n],
                      find(m, layer, "self_attn.q_norm.weight"));
        norm_and_rope(k + t->kv_rows[n] * KV, c->kv_heads, c, t->positions[n],
                      find(m, layer, "self_attn.k_norm.weight"));
    }
    for (int64_t n = 0; n < t->N; n++) {
        attend(att, q + n * Q, k, v, c, t->first[n], t->last[n]);
        matvec(x + n * C, find(m, layer, "self_attn.o_proj.weight"), att, true);
        norm(y, x + n * C, find(m, layer, "post_attention_layernorm.weight"), c->rms_eps);
        matvec(gate, find(m, layer, "mlp.gate_proj.weight"), y, false);
        matvec(up, find(m, layer, "mlp.up_proj.weight"), y, false);
        for (int64_t i = 0; i < F; i++)
            gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        matvec(x + n * C, find(m, layer, "mlp.down_proj.weight"), gate, true);
    }
    double *all[] = {y, q, att, k, v, gate, up};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

/* Logits [M, V]; the caller frees them. */
static double *reference(const struct model *m, const struct batch *t)
{
    const struct nbi_config *c = &m->c;
    int64_t C = c->hidden_size, V = c->vocab_size;
    double *x = zeros(t->N * C, 8), *y = zeros(C, 8), *logits = zeros(t->M * V, 8);
    const struct host_weight *embed = find(m, -1, "model.embed_tokens.weight");
    for (int64_t n = 0; n < t->N; n++)
        memcpy(x + n * C, embed->values + t->ids[n] * C, (size_t)C * 8);
    for (int64_t layer = 0; layer < c->layers; layer++)
        reference_layer(m, t, layer, x);
    for (int64_t i = 0; i < t->M; i++) {
        norm(y, x + t->rows[i] * C, find(m, -1, "model.norm.weight"), c->rms_eps);
        matvec(logits + i * V, m->own_head ? find(m, -1, "lm_head.weight") : embed, y, false);
    }
    free(x);
    free(y);
    return logits;
}

/* ---- the same through a backend ---- */

struct runner {
    struct nbi_backend *be;
    struct nbi_weights w;
    struct nbi_acts acts;
    struct nbi_stream *s;
    struct nbi_kv_view kv[8];
    int64_t layers_seen;
    bool exact;
    bool no_hook; /* no after_layer hook */
};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void runner_begin(struct runner *r, struct nbi_backend *be, const struct nbi_config *c,
                         const struct nbi_weight_provider *from, int64_t N, enum nbi_dtype kv)
{
    *r = (struct runner){.be = be, .exact = true};
    assert_ok(nbi_weights_load(&r->w, be, c, from, NULL, NULL));
    assert_ok(nbi_acts_init(&r->acts, be, c, &(struct nbi_acts_opts){.N = N, .M = N}));
    int64_t K = larger(larger(c->hidden_size, c->intermediate_size), c->heads * c->head_dim);
    assert_ok(be->stream_new(
        be, &(struct nbi_stream_limits){.N = N, .K = K, .D = c->head_dim, .heads = c->heads},
        &r->s));
    int64_t bytes = (int64_t)nbi_dtype_bytes(kv, (MAX_TOKENS + 7) * c->kv_heads * c->head_dim);
    assert_true(c->layers <= 8);
    for (int64_t i = 0; i < c->layers; i++) {
        r->kv[i].dtype = kv;
        assert_ok(be->alloc(be, "keys", bytes, &r->kv[i].k));
        assert_ok(be->alloc(be, "values", bytes, &r->kv[i].v));
        /* Memory that nobody has written must not be read: fill it with NaN. */
        uint8_t *nan = zeros(bytes, 1);
        memset(nan, 0xFF, (size_t)bytes);
        assert_ok(be->upload(r->s, r->kv[i].k, nan, bytes));
        assert_ok(be->upload(r->s, r->kv[i].v, nan, bytes));
        free(nan);
    }
}

static void runner_end(struct runner *r)
{
    for (int64_t i = 0; i < r->w.config->layers; i++) {
        r->be->free(r->be, r->kv[i].k);
        r->be->free(r->be, r->kv[i].v);
    }
    r->be->stream_free(r->s);
    nbi_acts_release(&r->acts);
    nbi_weights_release(&r->w);
    r->be->close(r->be);
}

static enum nb_status count_layer(void *ctx, int64_t layer, struct nbi_ptr x)
{
    struct runner *r = ctx;
    float first = NAN;
    NBI_TRY(r->be->download(r->s, &first, x, sizeof first));
    NBI_TRY(r->be->sync(r->s));
    assert_true(isfinite(first));
    assert_int_equal(layer, r->layers_seen++);
    return NB_OK;
}

/* The topk operation agrees with the logits. */
static void check_topk(const float *logits, int64_t V, const int32_t topk[3])
{
    int32_t best = 0;
    float value;
    for (int32_t i = 1; i < V; i++)
        best = logits[i] > logits[best] ? i : best;
    memcpy(&value, &topk[2], sizeof value);
    assert_int_equal(topk[0], 0);
    assert_int_equal(topk[1], best);
    assert_true(value == logits[best]);
}

/* Tokens [from, from + n) of a batch; logits of all of them, first to last. */
static void forward(struct runner *r, const struct batch *t, int64_t from, int64_t n, float *logits)
{
    int32_t rows[MAX_TOKENS], topk[3];
    int64_t V = r->w.config->vocab_size;
    for (int32_t i = 0; i < n; i++)
        rows[i] = i;
    r->layers_seen = 0;
    const struct nbi_pass pass = {.N = n,
                                  .ids = t->ids + from,
                                  .positions = t->positions + from,
                                  .kv_rows = t->kv_rows + from,
                                  .first = t->first + from,
                                  .last = t->last + from,
                                  .M = n,
                                  .rows = n == t->N ? t->rows : rows,
                                  .kv = r->kv,
                                  .matmul = r->exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST,
                                  .after_layer = r->no_hook ? NULL : count_layer,
                                  .ctx = r};
    assert_ok(nbi_execute(&r->w, &r->acts, r->s, &pass));
    if (n == 1) {
        assert_ok(nbi_execute_topk(&r->w, &r->acts, r->s, 1, 1));
        assert_ok(r->be->download(r->s, topk, r->acts.topk, sizeof topk));
    }
    assert_ok(r->be->download(r->s, logits, r->acts.logits, n * V * (int64_t)sizeof *logits));
    assert_ok(r->be->sync(r->s));
    if (n == 1)
        check_topk(logits, V, topk);
    assert_int_equal(r->layers_seen, r->no_hook ? 0 : r->w.config->layers);
}

/* The whole batch in one pass, in the order of t->rows; the caller frees the result. */
static float *logits_of(struct nbi_backend *be, struct model *m, const struct batch *t, bool exact,
                        enum nbi_dtype kv)
{
    struct runner r;
    float *logits = zeros(t->M * m->c.vocab_size, sizeof *logits);
    runner_begin(&r, be, &m->c, &(struct nbi_weight_provider){take_host, m}, t->N, kv);
    r.exact = exact;
    forward(&r, t, 0, t->N, logits);
    runner_end(&r);
    return logits;
}

static double distance(const float *is, const double *want, int64_t n)
{
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        off += ((double)is[i] - want[i]) * ((double)is[i] - want[i]);
        all += want[i] * want[i];
    }
    return sqrt(off / all);
}

/* ---- tests ---- */

/* Exact: f32 rounding only. Otherwise x has 16 bits in blocks of 256, with a step of 2^-15 of the
 * block's amax; half a step is about 1e-4 of an ordinary value, and errors of layers add up. A
 * cache rounds by 2^-12 (f16), 2^-9 (bf16) or 2^-4 (e4m3), of which attention keeps the mean over
 * keys. */
static const struct {
    bool exact;
    enum nbi_dtype kv;
    double bound;
} precisions[] = {{true, NBI_F32, 2e-5},
                  {false, NBI_F32, 1e-3},
                  {true, NBI_F16, 1e-3},
                  {true, NBI_BF16, 1e-2},
                  {true, NBI_E4M3, 1e-1}};

#define PRECISIONS ((int)(sizeof precisions / sizeof *precisions))

/* A model and a batch of a + b tokens, the same for the same shape. */
static void case_new(struct model *m, struct batch *t, int shape, int a, int b)
{
    drawn = (uint64_t)shape << 32;
    model_new(m, &shapes[shape]);
    batch_new(t, m->c.vocab_size, a, b);
}

static void check_against_double(enum nbi_simd level)
{
    struct model m;
    struct batch t;
    if (level > nbi_simd_level())
        skip("this CPU lacks the instruction set");
    for (int i = 0; i < SHAPES; i++) {
        case_new(&m, &t, i, 7, 4);
        double *want = reference(&m, &t);
        for (int precision = 0; precision < PRECISIONS; precision++) {
            float *is = logits_of(cpu(level, 2), &m, &t, precisions[precision].exact,
                                  precisions[precision].kv);
            double off = distance(is, want, t.M * m.c.vocab_size);
            if (getenv("NB_TEST_VERBOSE"))
                print_message("shape %d, precision %d: %.3g\n", i, precision, off);
            if (!(off <= precisions[precision].bound))
                fail_msg("shape %d, precision %d: off by %.3g, %.3g allowed", i, precision, off,
                         precisions[precision].bound);
            free(is);
        }
        free(want);
        model_free(&m);
    }
}

static void test_backend__forward_follows_the_equations_scalar(void **state)
{
    (void)state;
    check_against_double(NBI_SIMD_SCALAR);
}

static void test_backend__forward_follows_the_equations_avx2(void **state)
{
    (void)state;
    check_against_double(NBI_SIMD_AVX2);
}

static void test_backend__forward_follows_the_equations_avx512(void **state)
{
    (void)state;
    check_against_double(NBI_SIMD_AVX512);
}

static void check_threads(struct model *m, const struct batch *t, enum nbi_simd level, bool exact)
{
    int64_t bytes = t->M * m->c.vocab_size * (int64_t)sizeof(float);
    float *one = logits_of(cpu(level, 1), m, t, exact, NBI_F32);
    for (int threads = 2; threads <= 3; threads++) {
        float *more = logits_of(cpu(level, threads), m, t, exact, NBI_F32);
        assert_memory_equal(more, one, bytes);
        free(more);
    }
    free(one);
}

static void test_backend__bits_do_not_depend_on_threads(void **state)
{
    struct model m;
    struct batch t;
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        case_new(&m, &t, i, 20, 9);
        for (int level = 0; level <= (int)nbi_simd_level(); level++) {
            check_threads(&m, &t, (enum nbi_simd)level, true);
            check_threads(&m, &t, (enum nbi_simd)level, false);
        }
        model_free(&m);
    }
}

/* One pass over the batch, and passes of `step` tokens, give every token the same logits. */
static void check_steps(struct model *m, const struct batch *t, enum nbi_simd level, int precision,
                        int64_t step)
{
    struct runner r;
    int64_t V = m->c.vocab_size;
    float *whole =
        logits_of(cpu(level, 2), m, t, precisions[precision].exact, precisions[precision].kv);
    float *part = zeros(t->N * V, sizeof *part);
    runner_begin(&r, cpu(level, 1), &m->c, &(struct nbi_weight_provider){take_host, m}, step,
                 precisions[precision].kv);
    r.exact = precisions[precision].exact;
    for (int64_t n = 0; n < t->N; n += step)
        forward(&r, t, n, t->N - n < step ? t->N - n : step, part + n * V);
    for (int64_t row = 0; row < t->M; row++)
        assert_memory_equal(whole + row * V, part + t->rows[row] * V, V * 4);
    runner_end(&r);
    free(whole);
    free(part);
}

static void test_backend__batch_invariant_rows_keep_their_bits(void **state)
{
    static const int64_t steps[] = {1, 3, 9, 16};
    struct model m;
    struct batch t;
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        case_new(&m, &t, i, 15, 7);
        for (int level = 0; level <= (int)nbi_simd_level(); level++)
            for (int precision = 0; precision < PRECISIONS; precision++)
                check_steps(&m, &t, (enum nbi_simd)level, precision, steps[(i + precision) % 4]);
        model_free(&m);
    }
}

/* ---- the same on a GPU ---- */

/* The largest error relative to the largest value. */
static double largest_off(const float *is, const double *want, int64_t n)
{
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)is[i] - want[i]);
        off = isnan(d) || d > off ? d : off;
        all = fabs(want[i]) > all ? fabs(want[i]) : all;
    }
    return off / all;
}

/* Exact: f32 sums in another order. Otherwise activations become f16 in small batches and bf16 in
 * large ones, 2^-9 of a value in every layer. Caches round as on the CPU; the error of 64 tokens is
 * twice that of 11, and e4m3 changes single logits by a tenth of the largest. */
static const struct {
    bool exact;
    enum nbi_dtype kv;
    double bound;
} cuda_precisions[] = {{true, NBI_F32, 2e-5},   {true, NBI_F16, 2e-3},  {true, NBI_BF16, 2e-2},
                       {true, NBI_E4M3, 2e-1},  {false, NBI_F32, 2e-2}, {false, NBI_F16, 2e-2},
                       {false, NBI_BF16, 3e-2}, {false, NBI_E4M3, 2e-1}};

#define CUDA_PRECISIONS ((int)(sizeof cuda_precisions / sizeof *cuda_precisions))

/* In passes of `step` tokens; the rows of want are in the order of t->rows. */
static void check_cuda(struct model *m, const struct batch *t, int precision, int64_t step,
                       const double *want)
{
    struct runner r;
    int64_t V = m->c.vocab_size;
    float *part = zeros(t->N * V, sizeof *part), *is = zeros(t->N * V, sizeof *is);
    runner_begin(&r, cuda(), &m->c, &(struct nbi_weight_provider){take_host, m}, step,
                 cuda_precisions[precision].kv);
    r.exact = cuda_precisions[precision].exact;
    for (int64_t n = 0; n < t->N; n += step)
        forward(&r, t, n, t->N - n < step ? t->N - n : step, part + n * V);
    for (int64_t row = 0; row < t->M; row++)
        memcpy(is + row * V, part + (step < t->N ? t->rows[row] : row) * V, (size_t)V * 4);
    runner_end(&r);
    double off = r.exact ? distance(is, want, t->M * V) : largest_off(is, want, t->M * V);
    if (getenv("NB_TEST_VERBOSE"))
        print_message("C %d, precision %d, %d tokens by %d: %.3g\n", (int)m->c.hidden_size,
                      precision, (int)t->N, (int)step, off);
    if (!(off <= cuda_precisions[precision].bound))
        fail_msg("C %d, precision %d, %d tokens by %d: off by %.3g, %.3g allowed",
                 (int)m->c.hidden_size, precision, (int)t->N, (int)step, off,
                 cuda_precisions[precision].bound);
    free(part);
    free(is);
}

/* Memory is zeroed even if it was used and freed before. */
static void check_cleared(struct nbi_backend *be)
{
    enum { BYTES = 1 << 20 };
    uint8_t *used = zeros(BYTES, 1), *is = zeros(BYTES, 1);
    struct nbi_stream *s;
    struct nbi_ptr p;
    memset(used, 0xA5, BYTES);
    assert_ok(
        be->stream_new(be, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 16, .heads = 1}, &s));
    for (int time = 0; time < 3; time++) {
        assert_ok(be->alloc(be, "something", BYTES, &p));
        assert_ok(be->download(s, is, p, BYTES));
        assert_ok(be->sync(s));
        for (int i = 0; i < BYTES; i++)
            assert_int_equal(is[i], 0);
        assert_ok(be->upload(s, p, used, BYTES));
        assert_ok(be->sync(s));
        be->free(be, p);
    }
    be->stream_free(s);
    be->close(be);
    free(used);
    free(is);
}

static void test_backend__new_memory_is_zeroed(void **state)
{
    (void)state;
    check_cleared(cpu(NBI_SIMD_SCALAR, 1));
}

static void test_backend__new_memory_of_a_gpu_is_zeroed(void **state)
{
    (void)state;
    need_gpu();
    check_cleared(cuda());
}

static void test_backend__cuda_follows_the_equations(void **state)
{
    static const int batches[][2] = {{1, 0}, {1, 1}, {5, 4}, {40, 24}};
    struct model m;
    struct batch t;
    (void)state;
    need_gpu();
    for (int i = 0; i < SHAPES; i++)
        for (int b = EMULATED ? i % 4 : 0; b < 4; b += EMULATED ? 4 : 1) {
            case_new(&m, &t, i, batches[b][0], batches[b][1]);
            double *want = reference(&m, &t);
            for (int precision = EMULATED ? i % 2 : 0; precision < CUDA_PRECISIONS;
                 precision += EMULATED ? 2 : 1) {
                check_cuda(&m, &t, precision, t.N, want);
                if (b == 2)
                    check_cuda(&m, &t, precision, 1 + precision % 4, want);
            }
            free(want);
            model_free(&m);
        }
}

/* Single tokens of two sequences, alternating, through the megakernel if there is one. */
static bool check_single_tokens(struct model *m, const struct batch *t, enum nbi_dtype kv,
                                double bound, const double *want)
{
    struct runner r;
    int64_t V = m->c.vocab_size;
    float *part = zeros(t->N * V, sizeof *part), *is = zeros(t->N * V, sizeof *is);
    runner_begin(&r, cuda(), &m->c, &(struct nbi_weight_provider){take_host, m}, 1, kv);
    r.exact = false;
    r.no_hook = true;
    assert_ok(nbi_execute_use_megakernel(&r.acts, &r.w, r.s, r.kv));
    bool one_kernel = r.acts.megakernel;
    for (int64_t n = 0; n < t->N; n++)
        forward(&r, t, n, 1, part + n * V);
    for (int64_t row = 0; row < t->M; row++)
        memcpy(is + row * V, part + t->rows[row] * V, (size_t)V * 4);
    runner_end(&r);
    double off = largest_off(is, want, t->M * V);
    if (getenv("NB_TEST_VERBOSE"))
        print_message("C %d, %s%s: %.3g\n", (int)m->c.hidden_size, nbi_dtypes[kv].name,
                      one_kernel ? ", one kernel" : "", off);
    if (!(off <= bound))
        fail_msg("C %d, %s%s: off by %.3g, %.3g allowed", (int)m->c.hidden_size,
                 nbi_dtypes[kv].name, one_kernel ? ", one kernel" : "", off, bound);
    free(part);
    free(is);
    return one_kernel;
}

static void test_backend__cuda_megakernel_follows_the_equations(void **state)
{
    static const struct shape fp4_shapes[] = {
        {112, 272, 3, 4, 2, 128, 40, true, true, true},
        {256, 528, 2, 8, 2, 128, 1000, false, true, true},
        {1024, 3072, 2, 16, 8, 128, 2000, false, true, true},
        {2048, 6144, 1, 16, 8, 128, 1000, false, true, true},
        /* many heads, so that each CTA of an H200 has many rows */
        {64, 80, 2, 96, 96, 128, 40, true, true, true},
        {64, 80, 1, 128, 32, 128, 40, true, true, true},
    };
    static const struct {
        enum nbi_dtype kv;
        double bound;
    } kinds[] = {{NBI_F32, 2e-2}, {NBI_F16, 2e-2}, {NBI_BF16, 2e-2}, {NBI_E4M3, 2e-1}};
    static const int tokens[][2] = {{200, 110}, {200, 110}, {30, 20}, {7, 5}, {400, 20}, {600, 20}};
    struct model m;
    struct batch t;
    int megakernel_runs = 0;
    (void)state;
    need_gpu();
    for (int i = 0; i < (EMULATED ? 1 : 6); i++) {
        drawn = (uint64_t)i << 32;
        model_new(&m, &fp4_shapes[i]);
        batch_new(&t, m.c.vocab_size, tokens[i][0] / (EMULATED ? 16 : 1),
                  tokens[i][1] / (EMULATED ? 16 : 1));
        double *want = reference(&m, &t);
        for (int k = 0; k < 4; k += EMULATED ? 3 : 1)
            megakernel_runs +=
                check_single_tokens(&m, &t, kinds[k].kv, kinds[k].bound, want) && i < 4;
        free(want);
        model_free(&m);
    }
    struct nb_gpu_info gpu;
    if (nb_gpu_list(&gpu, 1) == 1 && gpu.cc_major >= 9) /* all except f32 caches and many heads */
        assert_int_equal(megakernel_runs, 12);
}

/* Decodes `step` tokens at a time: by the megakernel for one, as a CUDA graph for more. */
static float *decoded(struct model *m, const struct batch *t, int64_t step)
{
    struct runner r;
    float *logits = zeros(t->N * m->c.vocab_size, sizeof *logits);
    runner_begin(&r, cuda(), &m->c, &(struct nbi_weight_provider){take_host, m}, step, NBI_F16);
    r.exact = false;
    r.no_hook = true;
    assert_ok(nbi_execute_use_megakernel(&r.acts, &r.w, r.s, r.kv));
    for (int64_t n = 0; n + step <= t->N; n += step)
        forward(&r, t, n, step, logits + n * m->c.vocab_size);
    runner_end(&r);
    return logits;
}

/* An embedding in host memory must give the same bits. */
static void test_backend__cuda_looks_up_embeddings_on_the_host(void **state)
{
    static const struct shape shape = {112, 272, 3, 4, 2, 128, 40, true, true, true};
    struct model m;
    struct batch t;
    (void)state;
    need_gpu();
    drawn = 0;
    model_new(&m, &shape);
    batch_new(&t, m.c.vocab_size, EMULATED ? 4 : 20, EMULATED ? 2 : 16);
    for (int64_t step = 1; step <= 3; step += 2) {
        m.no_lookup = true;
        float *want = decoded(&m, &t, step);
        m.no_lookup = false;
        float *is = decoded(&m, &t, step);
        assert_memory_equal(is, want, (size_t)(t.N * m.c.vocab_size) * sizeof *is);
        free(want);
        free(is);
    }
    model_free(&m);
}

static void random_logits(struct nbi_backend *be, const struct nbi_config *c, bool exact,
                          enum nbi_dtype kv, float *logits)
{
    struct batch t;
    struct runner r;
    uint64_t seed = 11;
    struct nbi_weight_provider from = nbi_weights_from_seed(&seed);
    drawn = 0;
    batch_new(&t, c->vocab_size, 10, 3);
    runner_begin(&r, be, c, &from, t.N, kv);
    r.exact = exact;
    forward(&r, &t, 0, t.N, logits);
    runner_end(&r);
}

static void test_backend__host_never_touches_device_memory(void **state)
{
    struct nbi_config c;
    (void)state;
    assert_ok(nbi_config_preset(&c, "tiny"));
    int64_t n = 13 * c.vocab_size;
    float *plain = zeros(n, sizeof *plain), *guarded_logits = zeros(n, sizeof *guarded_logits);
    for (int precision = 0; precision < PRECISIONS; precision++) {
        enum nbi_simd level = nbi_simd_level();
        random_logits(cpu(level, 2), &c, precisions[precision].exact, precisions[precision].kv,
                      plain);
        random_logits(guarded_open(cpu(level, 2)), &c, precisions[precision].exact,
                      precisions[precision].kv, guarded_logits);
        assert_memory_equal(plain, guarded_logits, n * 4);
        assert_int_equal(guarded.count, 0); /* all freed */
        assert_true(guarded.calls > c.layers * 8);
    }
    free(plain);
    free(guarded_logits);
}

/* The guard itself works: dereferencing a device address kills the process. */
static void test_backend__guarded_memory_faults(void **state)
{
    struct nbi_backend *be = guarded_open(cpu(NBI_SIMD_SCALAR, 1));
    struct nbi_ptr p;
    int status;
    (void)state;
    assert_ok(be->alloc(be, "bait", 100, &p));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*(volatile const char *)p.at & 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    be->free(be, p);
    be->close(be);
}

static void test_backend__copies_bytes(void **state)
{
    struct nbi_backend *be = guarded_open(cpu(nbi_simd_level(), 1));
    struct nbi_stream *s;
    struct nbi_ptr a, b, none = {0};
    float in[6] = {1, 5, 5, -3, -2, -9}, out[6];
    (void)state;
    assert_ok(be->stream_new(be, &(struct nbi_stream_limits){.N = 2, .K = 32, .D = 32}, &s));
    assert_ok(be->alloc(be, "a", sizeof in, &a));
    assert_ok(be->alloc(be, "b", sizeof in, &b));
    assert_int_equal(a.at % 64, 0);
    assert_ok(be->upload(s, a, in, sizeof in));
    assert_ok(be->copy(s, b, a, sizeof in));
    assert_ok(be->clear(s, nbi_ptr_add(b, 4), 8));
    assert_ok(be->copy(s, nbi_ptr_add(b, 16), nbi_ptr_add(a, 4), 4));
    assert_ok(be->copy(s, b, a, 0));
    assert_ok(be->download(s, out, b, sizeof out));
    assert_ok(be->sync(s));
    assert_memory_equal(out, ((float[6]){1, 0, 0, -3, 5, -9}), sizeof out);
    be->free(be, a);
    be->free(be, b);
    be->free(be, none);
    be->stream_free(s);
    be->stream_free(NULL);
    be->close(be);
}

/* ---- failures ---- */

static enum nb_status read_nothing(void *ctx, int64_t first, int64_t count, void *data,
                                   void *scales)
{
    (void)ctx, (void)count, (void)data, (void)scales;
    return first >= 0 ? nbi_fail(NB_EIO, "no such row") : NB_OK;
}

static void test_backend__a_weight_that_cannot_be_read_is_not_kept(void **state)
{
    static const enum nbi_dtype types[] = {NBI_NVFP4, NBI_BF16, NBI_F32, NBI_F32};
    struct nbi_backend *be = cpu(NBI_SIMD_SCALAR, 2);
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct nbi_weight w;
        const struct nbi_weight_source src = {
            .dtype = types[i], .rows = 100, .cols = i == 3 ? 0 : 64, .read = read_nothing};
        assert_fails(be->weight_new(be, &src, &w), NB_EIO, "no such row");
        assert_int_equal(w.data.at, 0);
        be->weight_free(be, &w);
    }
    be->close(be);
}

static void test_backend__refuses_what_it_cannot_do(void **state)
{
    struct nbi_backend *be;
    struct nbi_ptr p;
    (void)state;
    assert_fails(nbi_backend_open(&be, &(struct nbi_backend_opts){.device = "abacus"}),
                 NB_EUNSUPPORTED, "'abacus'");
    assert_null(be);
    if (nbi_simd_level() < NBI_SIMD_AVX512)
        assert_fails(nbi_backend_open(&be, &(struct nbi_backend_opts){"cpu", 1, NBI_SIMD_AVX512}),
                     NB_EUNSUPPORTED, "this CPU has no");
    be = cpu(NBI_SIMD_SCALAR, 1);
    assert_fails(be->alloc(be, "everything", INT64_MAX, &p), NB_ENOMEM, "everything");
    assert_int_equal(p.at, 0);
    be->close(be);
}

static void test_backend__devices_have_names(void **state)
{
    static const char *const wrong[] = {
        "",        "auto",      "gpu",     "cpu0",
        "CUDA",    "cuda:",     "cuda:x",  "cuda:-1",
        "cuda: 1", "cuda:+1",   "cuda:1x", "cuda0",
        "cuda::1", "cuda:1024", "cuda:1 ", "cuda:99999999999999999999"};
    char name[NB_DEVICE_NAME];
    struct nbi_backend *be;
    int gpu;
    (void)state;
    assert_ok(nb_device_parse("cpu", &gpu));
    assert_int_equal(gpu, -1);
    assert_ok(nb_device_parse("cuda", &gpu));
    assert_int_equal(gpu, 0);
    assert_ok(nb_device_parse("cuda:0", &gpu));
    assert_int_equal(gpu, 0);
    assert_ok(nb_device_parse("cuda:1023", &gpu));
    assert_int_equal(gpu, 1023);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_fails(nb_device_parse(wrong[i], &gpu), NB_EUNSUPPORTED, wrong[i]);
    nb_device_auto(name);
    assert_ok(nb_device_parse(name, &gpu));
    assert_true(gpu < 0 || nb_gpu_check(gpu) == NB_OK);
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){name, 1, NBI_SIMD_SCALAR}));
    assert_string_equal(be->name, name);
    be->close(be);
    /* No machine has this many. */
    assert_int_equal(nbi_backend_open(&be, &(struct nbi_backend_opts){.device = "cuda:1023"}),
                     NB_EDEVICE);
    assert_null(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backend__forward_follows_the_equations_scalar),
        cmocka_unit_test(test_backend__forward_follows_the_equations_avx2),
        cmocka_unit_test(test_backend__forward_follows_the_equations_avx512),
        cmocka_unit_test(test_backend__bits_do_not_depend_on_threads),
        cmocka_unit_test(test_backend__batch_invariant_rows_keep_their_bits),
        cmocka_unit_test(test_backend__new_memory_is_zeroed),
        cmocka_unit_test(test_backend__new_memory_of_a_gpu_is_zeroed),
        cmocka_unit_test(test_backend__cuda_follows_the_equations),
        cmocka_unit_test(test_backend__cuda_megakernel_follows_the_equations),
        cmocka_unit_test(test_backend__cuda_looks_up_embeddings_on_the_host),
        cmocka_unit_test(test_backend__host_never_touches_device_memory),
        cmocka_unit_test(test_backend__guarded_memory_faults),
        cmocka_unit_test(test_backend__copies_bytes),
        cmocka_unit_test(test_backend__a_weight_that_cannot_be_read_is_not_kept),
        cmocka_unit_test(test_backend__refuses_what_it_cannot_do),
        cmocka_unit_test(test_backend__devices_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
