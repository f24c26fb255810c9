/* test_loss.c - the losses of a small model and their gradients, against the equations in double
 * and against finite differences; reference probabilities, however rows are packed. */
#include <math.h>

#include "base/rng.h"
#include "tensor/half.h"
#include "train/kl_anchor.h"
#include "train/parameters.h"
#include "unit/data_support.h"
#include "unit/guarded_backend.h"
#include "unit/on_devices.h"

enum {
    B = 2,
    T = 24,
    C = 32,
    V = 290,
    M = 7
}; /* M: rows of logits at a time; the last chunk is shorter */

static struct nb_tokenizer *bytes_only;

static int begin(void **state)
{
    bytes_only = new_tokenizer("", 0);
    return make_test_dir(state);
}

static int end(void **state)
{
    nb_tokenizer_close(bytes_only);
    return remove_test_dir(state);
}

/* ---- the device under test ---- */

static const char *device;

static void begin_on(const char *name)
{
    device = name;
    if (strcmp(device, "cuda") == 0)
        need_gpu();
}

static void end_on(void)
{
}

static struct nbi_backend *open_tested(void)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){device, 2, nbi_simd_level()}));
    if (strcmp(device, "cpu") == 0)
        return guarded_open(be);
    need_op(be, xent);
    need_op(be, requantize);
    need_op(be, attention_bwd);
    need_op(be, embed_bwd);
    return be;
}

/* ---- a small model with data ---- */

struct rig {
    struct nbi_config config;
    struct nbi_backend *be;
    struct nbi_stream *s;
    struct nbi_train_params t;
    struct nbi_acts acts;
    struct nbi_train_pass train_pass;
    struct nbi_dataset *data;
    struct nbi_microbatch batch;
};

static struct nbi_dataset *new_set(const char *name)
{
    struct nbi_str s = {0};
    struct nbi_dataset *d;
    for (int i = 0; i < 9; i++)
        nbi_str_printf(&s, "%d?\t%.*s!\n", i, 1 + 3 * i % 7, "abcdefg");
    nbi_str_puts(&s, "this is so long a question that it is cut\tand so is its long answer here\n");
    put(name, nbi_str_text(&s));
    nbi_str_release(&s);
    put("text.txt", "some words<|endoftext|>and others, more than fit into a row");
    const char *const files[] = {test_path(name), test_path("text.txt"), NULL};
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    assert_ok(nbi_dataset_open(&d, &opts));
    return d;
}

struct kind {
    enum nb_precision precision;
    bool bf16, bf16_grads, recompute, untied, reference;
    int64_t slice_rows;
};

static void rig_open_as(struct rig *r, struct kind kind)
{
    const struct nbi_train_params_opts opts = {.precision = kind.precision,
                                               .master = NBI_F32,
                                               .moment_type = NB_MOMENT_F32,
                                               .bf16_grads = kind.bf16_grads,
                                               .update_in_backward = kind.slice_rows > 0,
                                               .slice_rows = kind.slice_rows,
                                               .seed = 4};
    const struct nbi_stream_limits limits = {
        .N = B * T, .K = 64, .D = 16, .heads = 2, .training = true, .bf16 = kind.bf16};
    *r = (struct rig){.be = open_tested()};
    assert_ok(nbi_config_preset(&r->config, "tiny"));
    r->config.hidden_size = C;
    r->config.intermediate_size = 64;
    r->config.layers = r->config.heads = 2;
    r->config.kv_heads = 1;
    r->config.head_dim = 16;
    r->config.vocab_size = V;
    r->config.initializer_range = 0.3;
    r->config.tied = !kind.untied;
    assert_ok(r->be->stream_new(r->be, &limits, &r->s));
    assert_ok(nbi_train_params_init(&r->t, r->s, r->be, &r->config, NULL, &opts));
    const struct nbi_acts_opts acts_opts = {.N = B * T,
                                            .M = M,
                                            .dtype = kind.bf16 ? NBI_BF16 : NBI_F32,
                                            .recompute = kind.recompute,
                                            .slices = kind.slice_rows > 0};
    assert_ok(nbi_acts_init_training(&r->acts, r->be, &r->config, &acts_opts));
    assert_ok(nbi_train_pass_init(&r->train_pass, &r->acts));
    r->train_pass.V = V;
    r->data = new_set("data.tsv");
    assert_ok(nbi_microbatch_init(&r->batch, B, T));
}

static void rig_open(struct rig *r)
{
    rig_open_as(r, (struct kind){.precision = NB_PRECISION_F32});
}

static void rig_close(struct rig *r)
{
    nbi_microbatch_release(&r->batch);
    nbi_dataset_close(r->data);
    nbi_train_pass_release(&r->train_pass);
    nbi_acts_release(&r->acts);
    nbi_train_params_release(&r->t);
    r->be->stream_free(r->s);
    r->be->close(r->be);
}

/* Loads the first micro-batch of an order. */
static void next_batch(struct rig *r, uint64_t seed)
{
    struct nbi_loader b;
    bool more;
    const struct nbi_loader_opts opts = {
        .data = r->data, .seed = seed, .shuffle = true, .pack = true, .keep_documents = true};
    assert_ok(nbi_loader_init(&b, &opts));
    assert_ok(nbi_loader_next(&b, &r->batch, &more));
    nbi_loader_release(&b);
    assert_ok(nbi_train_pass_set(&r->train_pass, &r->batch));
    assert_true(r->train_pass.labels.count > M);
    r->train_pass.labels.scale = 1.0f / (float)r->train_pass.labels.count;
}

static void download_bytes(struct rig *r, void *out, struct nbi_ptr from, int64_t bytes)
{
    assert_ok(r->be->download(r->s, out, from, bytes));
    assert_ok(r->be->sync(r->s));
}

static void download(struct rig *r, float *out, struct nbi_ptr from, int64_t n)
{
    download_bytes(r, out, from, n * (int64_t)sizeof *out);
}

static void upload(struct rig *r, struct nbi_ptr to, const float *x, int64_t n)
{
    assert_ok(r->be->upload(r->s, to, x, n * (int64_t)sizeof *x));
}

static void forward(struct rig *r)
{
    assert_ok(nbi_execute(&r->t.weights, &r->acts, r->s, &r->train_pass.pass));
}

/* Gradients are written. */
static struct nbi_loss_sums loss(struct rig *r, bool gradient)
{
    r->t.grads.fresh = true;
    assert_ok(nbi_loss(&r->t.weights, &r->acts, r->s, &r->train_pass.pass, &r->train_pass.labels,
                       gradient ? &r->t.grads : NULL));
    assert_ok(r->be->sync(r->s));
    return nbi_loss_sums(&r->train_pass.labels);
}

static double uniform(uint64_t i)
{
    return 2 * (double)nbi_uniform(nbi_philox(77, i, 0).v[0]) - 1;
}

/* ---- distance to the embeddings ---- */

struct scalar {
    const struct nbi_labels *l;
    double eps;
    float *x, *norm, *embed;
};

/* The mean over labels, in double, for the residual stream x. */
static double scalar_loss(const struct scalar *c, const double *x, const double *norm)
{
    double sum = 0;
    for (int64_t i = 0; i < c->l->count; i++) {
        const double *row = x + c->l->rows[i] * C;
        double squares = 0;
        for (int k = 0; k < C; k++)
            squares += row[k] * row[k];
        for (int k = 0; k < C; k++)
            sum += fabs(row[k] / sqrt(squares / C + c->eps) * norm[k] -
                        (double)c->embed[c->l->targets[i] * C + k]);
    }
    return sum / C / (double)c->l->count;
}

static void check_scalar(void)
{
    static float x[B * T * C], dx[B * T * C], norm[C], dnorm[C], embed[V * C], head[V * C];
    static double at[B * T * C], side[2];
    double nat[C], slope = 0, h = 1e-6;
    struct rig r;
    rig_open(&r);
    next_batch(&r, 1);
    struct scalar c = {&r.train_pass.labels, r.config.rms_eps, x, norm, embed};
    r.train_pass.labels.kind = NB_LOSS_SCALAR;
    struct nbi_train_param *last = &r.t.tensors[1 + 2 * 11];
    for (int k = 0; k < C; k++) /* norm weights that are not all 1 */
        norm[k] = (float)(1 + 0.5 * uniform((uint64_t)k));
    upload(&r, last->master, norm, C);
    assert_ok(nbi_train_params_requantize(&r.t, NBI_ALL_LAYERS));
    forward(&r);
    download(&r, x, r.acts.x, B * T * C);
    download(&r, embed, r.t.tensors[0].master, V * C);
    struct nbi_loss_sums sums = loss(&r, true);
    download(&r, dx, r.acts.d.x, B * T * C);
    download(&r, dnorm, r.t.grads.norm, C);
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < B * T * C; i++)
            at[i] = (double)x[i] + (s ? h : -h) * uniform((uint64_t)(1000 + i));
        for (int k = 0; k < C; k++)
            nat[k] = (double)norm[k] + (s ? h : -h) * uniform((uint64_t)(900 + k));
        side[s] = scalar_loss(&c, at, nat);
    }
    for (int i = 0; i < B * T * C; i++)
        slope += (double)dx[i] * uniform((uint64_t)(1000 + i));
    for (int k = 0; k < C; k++)
        slope += (double)dnorm[k] * uniform((uint64_t)(900 + k));
    double mean = sums.loss / (double)r.train_pass.labels.count;
    assert_true(fabs(mean - (side[0] + side[1]) / 2) < 1e-6 * mean);
    assert_true(fabs((side[1] - side[0]) / (2 * h) - slope) < 1e-5 * (fabs(slope) + 1));
    download(&r, head, r.t.grads.head,
             V * C); /* tied: the gradient of the embedding, which is still empty */
    for (int i = 0; i < V * C; i++)
        assert_true(head[i] == 0);
    assert_true(loss(&r, false).loss == sums.loss);
    rig_close(&r);
}

/* The loss along the gradient of some weights, through the whole model. */
static double along(struct rig *r, struct nbi_train_param *x, const float *w, const float *g,
                    double h)
{
    float *at = malloc((size_t)x->count * sizeof *at);
    double squares = 0;
    for (int64_t i = 0; i < x->count; i++)
        squares += (double)g[i] * (double)g[i];
    for (int64_t i = 0; i < x->count; i++)
        at[i] = (float)((double)w[i] + h * (double)g[i] / sqrt(squares));
    upload(r, x->master, at, x->count);
    assert_ok(nbi_train_params_requantize(&r->t, NBI_ALL_LAYERS));
    free(at);
    forward(r);
    const struct nbi_labels *l = &r->train_pass.labels;
    const struct nbi_loss_sums sums = loss(r, false);
    return (double)l->scale * sums.loss + (double)l->kl_scale * sums.kl;
}

static void check_weights(struct rig *r, int64_t tensor, double h)
{
    struct nbi_train_param *x = &r->t.tensors[tensor];
    float *w = malloc((size_t)x->count * sizeof *w), *g = malloc((size_t)x->count * sizeof *g);
    double norm = 0;
    forward(r);
    loss(r, true);
    assert_ok(nbi_backward(&r->t.weights, &r->acts, r->s, &r->train_pass.pass, &r->t.grads, NULL));
    download(r, w, x->master, x->count);
    download(r, g, x->grad, x->count);
    for (int64_t i = 0; i < x->count; i++)
        norm += (double)g[i] * (double)g[i];
    double is = (along(r, x, w, g, h) - along(r, x, w, g, -h)) / (2 * h);
    if (!(fabs(is - sqrt(norm)) < 0.02 * sqrt(norm)))
        fail_msg("tensor %d: slope %.6g, gradient %.6g", (int)tensor, is, sqrt(norm));
    upload(r, x->master, w, x->count);
    assert_ok(nbi_train_params_requantize(&r->t, NBI_ALL_LAYERS));
    free(w);
    free(g);
}

static void check_scalar_through_layers(void)
{
    struct rig r;
    rig_open(&r);
    next_batch(&r, 2);
    r.train_pass.labels.kind = NB_LOSS_SCALAR;
    for (int64_t i = 1; i < 1 + 2 * 11; i += 3)
        check_weights(&r, i, 1e-3);
    rig_close(&r);
}

/* ---- the base model ---- */

static void reference_open(struct rig *r, struct nbi_kl_anchor *b, int64_t memory, int64_t before)
{
    const struct nbi_kl_anchor_opts opts = {.data = r->data,
                                            .first_example = before,
                                            .memory_limit = memory,
                                            .spill_next_to = test_path(before ? "ckpt/" : "ckpt")};
    const struct nbi_kl_anchor_pass pass = {&r->t.weights, &r->acts, r->s, &r->train_pass,
                                            &r->batch};
    assert_ok(nbi_kl_anchor_init(b, &opts, &pass));
    assert_int_equal(b->fd >= 0, memory == 0);
}

/* Against the softmax of the same batch's logits. */
static void compare_reference(struct rig *r, const struct nbi_kl_anchor *b)
{
    static float logits[V];
    int64_t known = 0, count;
    struct nbi_labels *l = &r->train_pass.labels;
    assert_ok(nbi_kl_anchor_set(b, &r->batch, l, &count));
    forward(r);
    for (int64_t i = 0; i < l->count; i++) {
        struct nbi_pass pass = r->train_pass.pass;
        int64_t sample = r->batch.example_of[l->rows[i]] - b->opts.first_example;
        bool cut =
            nbi_dataset_is_document(r->data, sample) && nbi_dataset_tokens(r->data, sample) > T + 1;
        assert_int_equal(l->ref_ids[i * l->ref_k] < 0, cut);
        if (cut)
            continue;
        pass.M = 1;
        pass.rows = l->rows + i;
        assert_ok(nbi_execute_head(&r->t.weights, &r->acts, r->s, &pass));
        download(r, logits, r->acts.logits, V);
        double sum = 0, last = INFINITY, listed = 0;
        for (int v = 0; v < V; v++)
            sum += exp((double)logits[v]);
        for (int64_t j = 0; j < l->ref_k; j++) {
            double p = exp((double)logits[l->ref_ids[i * l->ref_k + j]]) / sum;
            assert_true(fabs(p - (double)l->ref_p[i * l->ref_k + j]) < 1e-6 && p <= last);
            last = p;
            listed += p;
        }
        for (int v = 0, more = 0; v < V; v++) { /* no likelier id was left out */
            more += exp((double)logits[v]) / sum > last;
            assert_true(more < l->ref_k);
        }
        assert_true(listed < 1.000001);
        known++;
    }
    assert_int_equal(count, known);
}

static void check_reference_is_the_softmax(void)
{
    struct rig r;
    rig_open(&r);
    for (int on_disk = 0; on_disk < 2; on_disk++) {
        struct nbi_kl_anchor b;
        int64_t before = on_disk ? 5 : 0;
        reference_open(&r, &b, on_disk ? 0 : INT64_MAX, before);
        assert_int_equal(b.ref_k, 64);
        for (uint64_t seed = 0; seed < 12; seed++) {
            next_batch(&r, seed);
            for (int i = 0; i < B * T; i++)
                r.batch.example_of[i] += r.batch.example_of[i] >= 0 ? before : 0;
            compare_reference(&r, &b);
            assert_true(fabs(loss(&r, false).kl) < 1e-6 * (double)r.train_pass.labels.count);
        }
        for (int i = 0; i < B * T && on_disk;
             i++) /* examples of the other data set have no reference */
            r.batch.example_of[i] = r.batch.example_of[i] < 0 ? -1 : i % 5;
        int64_t count;
        assert_ok(nbi_kl_anchor_set(&b, &r.batch, &r.train_pass.labels, &count));
        assert_true(on_disk ? count == 0 : count > 0);
        nbi_kl_anchor_release(&b);
    }
    rig_close(&r);
}

/* The same reference in memory and in a file has one fingerprint; other models have others. */
static void check_reference_has_a_fingerprint(void)
{
    struct rig r;
    struct nbi_kl_anchor a, b;
    rig_open(&r);
    reference_open(&r, &a, INT64_MAX, 0);
    reference_open(&r, &b, 0, 0);
    assert_true(a.mean_top_logp == b.mean_top_logp && a.mean_top_logp < 0);
    nbi_kl_anchor_release(&b);
    float x = 7;
    upload(&r, r.t.tensors[5].master, &x, 1);
    assert_ok(nbi_train_params_requantize(&r.t, NBI_ALL_LAYERS));
    reference_open(&r, &b, INT64_MAX, 0);
    assert_true(fabs(a.mean_top_logp - b.mean_top_logp) > 1e-4);
    nbi_kl_anchor_release(&a);
    nbi_kl_anchor_release(&b);
    x = NAN;
    upload(&r, r.t.tensors[0].master, &x, 1);
    upload(&r, r.t.tensors[5].master, &x, 1);
    assert_ok(nbi_train_params_requantize(&r.t, NBI_ALL_LAYERS));
    const struct nbi_kl_anchor_opts opts = {.data = r.data, .memory_limit = 1 << 30};
    const struct nbi_kl_anchor_pass pass = {&r.t.weights, &r.acts, r.s, &r.train_pass, &r.batch};
    assert_fails(nbi_kl_anchor_init(&a, &opts, &pass), NB_EVALUE, "not finite");
    nbi_kl_anchor_release(&a);
    const struct nbi_kl_anchor_opts nowhere = {.data = r.data,
                                               .spill_next_to = test_path("no/where")};
    assert_fails(nbi_kl_anchor_init(&a, &nowhere, &pass), NB_EIO, "base probabilities");
    nbi_kl_anchor_release(&a);
    rig_close(&r);
}

static void check_reference_needs_whole_examples(void)
{
    struct rig r;
    struct nbi_kl_anchor b;
    rig_open(&r);
    put("only.txt", "some words that are more than a row<|endoftext|>and others, more than that");
    const char *const files[] = {test_path("only.txt"), NULL};
    const struct nbi_dataset_opts set = {
        .files = files, .tokenizer = bytes_only, .chat = NBI_CHAT_CHATML};
    nbi_dataset_close(r.data);
    assert_ok(nbi_dataset_open(&r.data, &set));
    const struct nbi_kl_anchor_opts opts = {.data = r.data, .memory_limit = 1 << 30};
    const struct nbi_kl_anchor_pass pass = {&r.t.weights, &r.acts, r.s, &r.train_pass, &r.batch};
    assert_fails(nbi_kl_anchor_init(&b, &opts, &pass), NB_EINVAL, "a label within 24");
    nbi_kl_anchor_release(&b);
    rig_close(&r);
}

/* Reference probabilities of another model; then the gradient of CE and KL together, and of KL
 * alone. */
static void check_kl_gradient(void)
{
    static float x[B * T * C], at[B * T * C], dx[B * T * C];
    struct rig r;
    struct nbi_kl_anchor b;
    int64_t count;
    rig_open(&r);
    reference_open(&r, &b, INT64_MAX, 0);
    struct nbi_train_param *moved = &r.t.tensors[3];
    float *w = malloc((size_t)moved->count * sizeof *w);
    download(&r, w, moved->master, moved->count);
    for (int64_t i = 0; i < moved->count; i++)
        w[i] *= -1;
    upload(&r, moved->master, w, moved->count);
    free(w);
    assert_ok(nbi_train_params_requantize(&r.t, NBI_ALL_LAYERS));
    for (int kl_only = 0; kl_only < 2; kl_only++) {
        const double h = 3e-3;
        double side[2], slope = 0;
        next_batch(&r, 6);
        struct nbi_labels *l = &r.train_pass.labels;
        l->kl_scale = 0.7f * l->scale;
        l->scale = kl_only ? 0 : l->scale;
        assert_ok(nbi_kl_anchor_set(&b, &r.batch, l, &count));
        forward(&r);
        download(&r, x, r.acts.x, B * T * C);
        assert_true(loss(&r, true).kl > 1e-3 * (double)count);
        download(&r, dx, r.acts.d.x, B * T * C);
        for (int s = 0; s < 2; s++) {
            for (int i = 0; i < B * T * C; i++)
                at[i] = (float)((double)x[i] + (s ? h : -h) * uniform((uint64_t)i));
            upload(&r, r.acts.x, at, B * T * C);
            const struct nbi_loss_sums sums = loss(&r, false);
            side[s] = (double)l->scale * sums.loss + (double)l->kl_scale * sums.kl;
        }
        for (int i = 0; i < B * T * C; i++)
            slope += (double)dx[i] * uniform((uint64_t)i);
        double is = (side[1] - side[0]) / (2 * h);
        if (!(fabs(is - slope) < 1e-3 * (fabs(slope) + 0.1)))
            fail_msg("slope %.6g, gradient %.6g", is, slope);
        check_weights(&r, 1 + 6, 1e-3);
        check_weights(&r, 1 + 11, 1e-3);
    }
    nbi_kl_anchor_release(&b);
    rig_close(&r);
}

static void test_loss__topk(void **state)
{
    float logits[100], p[64];
    int32_t ids[64];
    (void)state;
    for (int round = 0; round < 200; round++) {
        int64_t n = 1 + round % 100, k = n < 64 ? n : 64;
        double sum = 0;
        for (int i = 0; i < n; i++) { /* with ties */
            logits[i] = (float)floor(20 * uniform((uint64_t)(round * 100 + i)));
            sum += exp((double)logits[i]);
        }
        assert_ok(nbi_kl_anchor_topk(logits, n, k, ids, p));
        for (int64_t j = 0; j < k; j++) {
            int64_t likelier = 0;
            for (int i = 0; i < n; i++)
                likelier += logits[i] > logits[ids[j]];
            assert_true(likelier <= j && (j == 0 || logits[ids[j]] <= logits[ids[j - 1]]));
            for (int64_t i = 0; i < j; i++)
                assert_true(ids[i] != ids[j]);
            assert_true(fabs((double)p[j] - exp((double)logits[ids[j]]) / sum) < 1e-6);
        }
    }
    for (int i = 0; i < 100; i++)
        logits[i] = i == 99 ? NAN : 0;
    assert_fails(nbi_kl_anchor_topk(logits, 100, 64, ids, p), NB_EVALUE, "not finite");
    logits[99] = INFINITY;
    assert_fails(nbi_kl_anchor_topk(logits, 100, 64, ids, p), NB_EVALUE, "not finite");
}

/* ---- activations in bf16 ---- */

/* The gradients of all parameters, one after another, as f32. */
struct gradients {
    struct rig *r;
    float *values;
    int64_t at[64]; /* where each parameter's begin */
    double loss;
};

/* Gradients of rows [first, ...) of parameter i, as many as its array has. */
static void keep_gradients(struct gradients *g, int64_t i, int64_t first)
{
    static uint16_t half[V * C];
    const struct nbi_train_param *x = &g->r->t.tensors[i];
    int64_t row = x->count / x->param.shape[0], n = x->count - first * row;
    float *to = g->values + g->at[i] + first * row;
    if (x->slice_rows > 0 && n > x->slice_rows * row)
        n = x->slice_rows * row;
    download_bytes(g->r, x->grad_bf16 ? (void *)half : to, x->grad, n * (x->grad_bf16 ? 2 : 4));
    for (int64_t k = 0; k < n && x->grad_bf16; k++)
        to[k] = nbi_bf16_to_f32(half[k]);
}

static enum nb_status keep_layer(void *ctx, int64_t layer)
{
    struct gradients *g = ctx;
    for (int64_t i = 0; i < g->r->t.count; i++)
        if (g->r->t.tensors[i].layer == layer)
            keep_gradients(g, i, 0);
    return NB_OK;
}

static enum nb_status keep_slice(void *ctx, int64_t slice)
{
    struct gradients *g = ctx;
    for (int64_t i = 0; i < g->r->t.count; i++)
        if (g->r->t.tensors[i].slice_rows > 0)
            keep_gradients(g, i, slice * g->r->t.tensors[i].slice_rows);
    return NB_OK;
}

/* Invented probabilities of another model, for two rows of three. */
static void add_reference(struct rig *r, struct kind kind)
{
    enum { IDS = 5 };
    static int32_t ids[B * T * IDS];
    static float p[B * T * IDS];
    struct nbi_labels *l = &r->train_pass.labels;
    if (!kind.reference)
        return;
    for (int64_t i = 0; i < l->count * IDS; i++) {
        ids[i] = (int32_t)((i % IDS) * (V / IDS) + i % 50);
        p[i] = 0.15f + 0.04f * (float)uniform((uint64_t)i);
    }
    for (int64_t i = 0; i < l->count; i += 3)
        ids[i * IDS] = -1;
    ids[IDS] = l->targets[1] < V / IDS ? l->targets[1] : ids[IDS];
    l->ref_k = IDS;
    l->ref_ids = ids;
    l->ref_p = p;
    l->kl_scale = 0.7f * l->scale;
}

static void gradients_of(struct kind kind, struct gradients *g)
{
    struct rig r;
    rig_open_as(&r, kind);
    next_batch(&r, 6);
    *g = (struct gradients){.r = &r, .values = malloc((size_t)(V * C * 9) * sizeof *g->values)};
    assert_non_null(g->values);
    for (int64_t i = 0; i < r.t.count; i++) {
        const struct nbi_train_param *x = &r.t.tensors[i];
        assert_int_equal(x->grad_bf16, kind.bf16_grads && x->layer >= 0 && x->param.ndim == 2);
        g->at[i + 1] = g->at[i] + x->count;
    }
    assert_true(g->at[r.t.count] <= V * C * 9);
    add_reference(&r, kind);
    forward(&r);
    r.t.grads.fresh = true;
    const struct nbi_backward_hook hook = {keep_layer, g};
    const struct nbi_slice_hook of_slices = {keep_slice, g};
    const struct nbi_labels *l = &r.train_pass.labels;
    assert_ok(nbi_loss(&r.t.weights, &r.acts, r.s, &r.train_pass.pass, l, &r.t.grads));
    assert_ok(nbi_backward(&r.t.weights, &r.acts, r.s, &r.train_pass.pass, &r.t.grads, &hook));
    if (kind.slice_rows > 0)
        assert_ok(nbi_backward_slices(&r.t.weights, &r.acts, r.s, &r.train_pass.pass, l, &r.t.grads,
                                      &of_slices));
    for (int64_t i = 0; i < r.t.count; i++)
        if (r.t.tensors[i].layer < 0 && r.t.tensors[i].slice_rows == 0)
            keep_gradients(g, i, 0);
    g->loss = nbi_loss_sums(l).loss;
    rig_close(&r);
}

/* Each parameter's gradient has the direction and the length of that in f32. */
static void assert_follows(const struct gradients *is, const struct gradients *want)
{
    assert_true(fabs(is->loss / want->loss - 1) < 5e-3);
    for (int i = 0; i == 0 || want->at[i + 1] > 0; i++) {
        double dot = 0, a = 0, b = 0;
        for (int64_t k = want->at[i]; k < want->at[i + 1]; k++) {
            dot += (double)is->values[k] * (double)want->values[k];
            a += (double)is->values[k] * (double)is->values[k];
            b += (double)want->values[k] * (double)want->values[k];
        }
        if (!(dot >= 0.999 * sqrt(a * b) && fabs(sqrt(a / b) - 1) < 0.02))
            fail_msg("parameter %d: cosine %.6f, length %.6f", i, dot / sqrt(a * b), sqrt(a / b));
    }
}

/* Gradients in bf16 and f32 are sums of the same products; recomputing changes no bit. */
static void check_bf16(void)
{
    for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
        struct kind kind = {.precision = nvfp4 ? NB_PRECISION_NVFP4 : NB_PRECISION_BF16};
        struct gradients f32, bf16, again, rounded;
        gradients_of(kind, &f32);
        kind.bf16 = true;
        gradients_of(kind, &bf16);
        kind.recompute = true;
        gradients_of(kind, &again);
        kind.bf16_grads = true;
        gradients_of(kind, &rounded);
        assert_follows(&bf16, &f32);
        assert_follows(&rounded, &f32);
        assert_true(again.loss == bf16.loss && rounded.loss == bf16.loss);
        int64_t n = 0;
        for (int i = 0; f32.at[i + 1] > n; i++)
            n = f32.at[i + 1];
        assert_memory_equal(again.values, bf16.values, (size_t)n * sizeof *again.values);
        struct gradients *all[] = {&f32, &bf16, &again, &rounded};
        for (int i = 0; i < 4; i++)
            free(all[i]->values);
    }
}

/* Gradients of embedding and head made some rows of the vocabulary at a time: on the CPU the same
 * bits. Slices that end with the vocabulary, before it, and after it. */
static void check_slices(void)
{
    static const int64_t rows[] = {64, 32, 96, 320};
    for (unsigned way = 0; way < 16; way++) {
        struct kind kind = {.precision = way & 1 ? NB_PRECISION_NVFP4 : NB_PRECISION_BF16,
                            .bf16 = way & 2,
                            .bf16_grads = way & 2,
                            .recompute = way & 1,
                            .untied = way & 4,
                            .reference = way & 8};
        struct gradients whole, slices;
        gradients_of(kind, &whole);
        kind.slice_rows = rows[way / 2 % 4];
        gradients_of(kind, &slices);
        int64_t n = 0;
        for (int i = 0; whole.at[i + 1] > n; i++)
            n = whole.at[i + 1];
        assert_true(n > V * C);
        assert_follows(&slices, &whole);
        if (strcmp(device, "cpu") == 0) {
            assert_true(slices.loss == whole.loss);
            assert_memory_equal(slices.values, whole.values, (size_t)n * sizeof *whole.values);
        }
        free(whole.values);
        free(slices.values);
    }
}

/* ---- passes ---- */

/* The last token that attends to each one, and the tokens sorted by their ids. */
static void check_orders(void)
{
    struct rig r;
    rig_open(&r);
    for (uint64_t seed = 0; seed < 5; seed++) {
        next_batch(&r, seed);
        const struct nbi_pass *p = &r.train_pass.pass;
        r.batch.ids[5] = V - 1;
        assert_ok(nbi_train_pass_set(&r.train_pass, &r.batch));
        for (int32_t n = 0; n < p->N; n++) {
            int32_t last = n;
            for (int32_t m = n; m < p->N; m++)
                last = p->first[m] <= n ? m : last;
            assert_int_equal(p->end[n], last);
            if (n == 0)
                continue;
            int32_t a = p->order[n - 1], b = p->order[n];
            assert_true(p->ids[a] < p->ids[b] || (p->ids[a] == p->ids[b] && a < b));
        }
    }
    rig_close(&r);
}

static void check_ids_outside(void)
{
    struct rig r;
    rig_open(&r);
    next_batch(&r, 1);
    r.batch.targets[3] = V;
    assert_fails(nbi_train_pass_set(&r.train_pass, &r.batch), NB_EVALUE, "vocabulary of 290");
    r.batch.targets[3] = NBI_IGNORE;
    r.batch.ids[3] = V;
    assert_fails(nbi_train_pass_set(&r.train_pass, &r.batch), NB_EVALUE, "token id 290 is outside");
    rig_close(&r);
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(scalar)                                                                                      \
    X(scalar_through_layers)                                                                       \
    X(reference_is_the_softmax)                                                                    \
    X(reference_has_a_fingerprint)                                                                 \
    X(reference_needs_whole_examples)                                                              \
    X(kl_gradient)                                                                                 \
    X(bf16)                                                                                        \
    X(slices)                                                                                      \
    X(orders)                                                                                      \
    X(ids_outside)

#define X(check) TEST_ON_BOTH(loss, check)
CHECKS(X)
#undef X

int main(void)
{
#define X(check) ON_BOTH(loss, check)
    const struct CMUnitTest tests[] = {CHECKS(X) cmocka_unit_test(test_loss__topk)};
#undef X
    return cmocka_run_group_tests_name("loss", tests, begin, end);
}
