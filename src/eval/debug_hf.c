/* debug_hf.c - writes a model's results on given tokens to a file, for comparison with Hugging
 * Face: logits, loss, gradients, weights after three AdamW updates, greedy tokens. */
#include <string.h>

#include "base/log.h"
#include "eval/perplexity.h"
#include "formats/writer.h"
#include "infer/session.h"
#include "nibble/eval.h"
#include "train/batches.h"
#include "train/optimizer.h"

#define GREEDY_PROMPT 8
#define GREEDY_TOKENS 48

struct results {
    int64_t B, T, V;
    int32_t *ids, *labels;
    float *logits; /* [B, T, V] */
    float loss;
    int32_t greedy[GREEDY_PROMPT + GREEDY_TOKENS];
};

static enum nb_status read_ints(const struct nbi_store *in, const char *name, int64_t shape[2],
                                int32_t **out)
{
    const struct nbi_entry *e = nbi_store_find(in, name);
    if (!e || e->ndim != 2 || e->dtype != NBI_I32 || e->count < 1)
        return nbi_fail(NB_EFORMAT, "'%s' must be there as int32 [B, T]", name);
    memcpy(shape, e->shape, 2 * sizeof *shape);
    *out = malloc((size_t)e->count * sizeof **out);
    if (!*out)
        return nbi_fail_memory(name, (size_t)e->count * sizeof **out);
    return nbi_store_read(in, e, 0, e->count, *out);
}

static enum nb_status read_input(struct results *r, const char *path)
{
    struct nbi_store *in = NULL;
    int64_t shape[2] = {0}, labels[2] = {0};
    NBI_TRY(nbi_store_open(&in, path));
    enum nb_status rc = read_ints(in, "input_ids", shape, &r->ids);
    if (rc == NB_OK)
        rc = read_ints(in, "labels", labels, &r->labels);
    if (rc == NB_OK && (shape[0] != labels[0] || shape[1] != labels[1]))
        rc = nbi_fail(NB_EFORMAT, "'input_ids' and 'labels' have different shapes");
    nbi_store_close(in);
    r->B = shape[0];
    r->T = shape[1];
    return nbi_context(rc, "'%s'", path);
}

/* Mean of -log p(label) over labelled tokens; the logits of a position predict the next one. */
static enum nb_status compute_loss(struct results *r)
{
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < r->B * r->T; i++) {
        int32_t label = (i + 1) % r->T && r->labels ? r->labels[i + 1] : -100;
        if (label == -100)
            continue;
        if (label < 0 || label >= r->V)
            return nbi_fail(NB_EVALUE, "label %d is outside the vocabulary", label);
        sum += nbi_token_nll(r->logits + i * r->V, r->V, label);
        count++;
    }
    r->loss = (float)(count ? sum / (double)count : 0);
    return NB_OK;
}

static enum nb_status compute_logits(const struct nb_engine *e, struct results *r)
{
    const struct nbi_session_opts opts = {
        .context = r->T, .chunk = r->T, .logits = r->T, .kv = NBI_F32, .exact = true};
    struct nb_session *s = NULL;
    NBI_TRY(nbi_session_new(&s, e, &opts));
    enum nb_status rc = NB_OK;
    for (int64_t b = 0; b < r->B && rc == NB_OK; b++) {
        nb_session_truncate(s, 0);
        rc = nbi_session_append(s, r->ids + b * r->T, r->T, r->logits + b * r->T * r->V, r->T);
    }
    nb_session_close(s);
    return rc;
}

static enum nb_status compute_greedy(const struct nb_engine *e, struct results *r)
{
    const struct nbi_session_opts opts = {
        .context = GREEDY_PROMPT + GREEDY_TOKENS, .kv = NBI_F32, .exact = true};
    struct nb_session *s = NULL;
    int64_t prompt = r->T < GREEDY_PROMPT ? r->T : GREEDY_PROMPT, n = prompt;
    float *logits = malloc((size_t)r->V * sizeof *logits);
    if (!logits)
        return nbi_fail_memory("logits", (size_t)r->V * sizeof *logits);
    enum nb_status rc = nbi_session_new(&s, e, &opts);
    memcpy(r->greedy, r->ids, (size_t)prompt * sizeof *r->greedy);
    if (rc == NB_OK)
        rc = nbi_session_append(s, r->greedy, prompt, logits, 1);
    while (rc == NB_OK && n < GREEDY_PROMPT + GREEDY_TOKENS) {
        int32_t best = nbi_argmax(logits, r->V);
        r->greedy[n++] = best;
        if (n < GREEDY_PROMPT + GREEDY_TOKENS)
            rc = nbi_session_append(s, &best, 1, logits, 1);
    }
    nb_session_close(s);
    free(logits);
    return rc;
}

/* ---- training ---- */

#define UPDATES     3
#define LOGITS_ROWS 128

static const struct nbi_optimizer_opts adamw = {
    .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f, .decay_all = true};

struct training {
    struct nbi_backend *be;  /* the engine's if it can train, else own */
    struct nbi_backend *own; /* the CPU; NULL: not needed */
    struct nbi_stream *stream;
    struct nbi_train_params t;
    struct nbi_acts acts;
    struct nbi_train_pass pass;
    struct nbi_optimizer optimizer;
    struct nbi_microbatch batch;
    int32_t *positions, *targets;
    float losses[UPDATES];
    bool bf16; /* activations and products */
};

/* Makes the micro-batch. Labels move one position back, to the logits that predict them. */
static enum nb_status make_batch(struct training *x, const struct results *r)
{
    int64_t N = r->B * r->T;
    x->positions = malloc((size_t)N * sizeof *x->positions);
    x->targets = malloc((size_t)N * sizeof *x->targets);
    if (!x->positions || !x->targets)
        return nbi_fail_memory("tokens", (size_t)N * sizeof *x->targets);
    for (int64_t i = 0; i < N; i++) {
        x->positions[i] = (int32_t)(i % r->T);
        x->targets[i] = (i + 1) % r->T ? r->labels[i + 1] : NBI_IGNORE;
    }
    x->batch = (struct nbi_microbatch){
        .B = r->B, .T = r->T, .ids = r->ids, .positions = x->positions, .targets = x->targets};
    return NB_OK;
}

static enum nb_status pick_backend(struct training *x, const struct nb_engine *e)
{
    const struct nbi_backend_opts on = {.device = "cpu", .threads = e->threads, .level = e->level};
    x->be = e->be;
    if (nbi_backend_has(x->be, NBI_CAP_TRAIN))
        return NB_OK;
    nbi_log(NB_LOG_INFO, "%s cannot train: gradients and updates come from the CPU", e->be->name);
    NBI_TRY(nbi_backend_open(&x->own, &on));
    x->be = x->own;
    return NB_OK;
}

static enum nb_status training_begin(struct training *x, const struct nb_engine *e,
                                     const struct results *r)
{
    NBI_TRY(pick_backend(x, e));
    const struct nbi_config *c = &e->config;
    struct nbi_backend *be = x->be;
    int64_t N = r->B * r->T;
    struct nbi_stream_limits limits = nbi_stream_limits_for(c, N, true);
    const struct nbi_train_params_opts opts = {
        .precision = NB_PRECISION_F32, .master = NBI_F32, .moment_type = NB_MOMENT_F32};
    limits.bf16 = x->bf16;
    NBI_TRY(make_batch(x, r));
    NBI_TRY(be->stream_new(be, &limits, &x->stream));
    NBI_TRY(nbi_train_params_init(&x->t, x->stream, be, c, e->files.store, &opts));
    const struct nbi_acts_opts acts_opts = {
        .N = N, .M = N < LOGITS_ROWS ? N : LOGITS_ROWS, .dtype = x->bf16 ? NBI_BF16 : NBI_F32};
    NBI_TRY(nbi_acts_init_training(&x->acts, be, c, &acts_opts));
    NBI_TRY(nbi_train_pass_init(&x->pass, &x->acts));
    NBI_TRY(nbi_optimizer_init(&x->optimizer, &x->t, &adamw));
    return nbi_train_pass_set(&x->pass, &x->batch);
}

static void training_end(struct training *x)
{
    nbi_optimizer_release(&x->optimizer);
    nbi_train_pass_release(&x->pass);
    nbi_acts_release(&x->acts);
    if (x->t.be)
        nbi_train_params_release(&x->t);
    if (x->be)
        x->be->stream_free(x->stream);
    if (x->own)
        x->own->close(x->own);
    free(x->positions);
    free(x->targets);
}

static enum nb_status gradients(struct training *x, float *loss)
{
    struct nbi_train_pass *f = &x->pass;
    struct nbi_grads grads = x->t.grads;
    grads.fresh = true;
    NBI_TRY(nbi_execute(&x->t.weights, &x->acts, x->stream, &f->pass));
    f->labels.scale = f->labels.count ? 1.0f / (float)f->labels.count : 0;
    NBI_TRY(nbi_loss(&x->t.weights, &x->acts, x->stream, &f->pass, &f->labels, &grads));
    NBI_TRY(nbi_backward(&x->t.weights, &x->acts, x->stream, &f->pass, &grads, NULL));
    NBI_TRY(x->be->sync(x->stream));
    double sum = nbi_loss_sums(&f->labels).loss;
    *loss = (float)(f->labels.count ? sum / (double)f->labels.count : 0);
    return NB_OK;
}

/* ---- the file ---- */

enum { LOGITS, LOSS, GREEDY, LOSSES, PARAMETERS };

/* The gradient of parameter i is tensor PARAMETERS + 2 i of the file, its updated weight the next
 * one. A separate head is the last parameter, even if the config ties it to the embedding. */
static enum nb_status begin_output(struct nbi_writer **w, const struct results *r,
                                   const struct nb_engine *e, const char *path)
{
    const struct nbi_config *c = &e->config;
    int64_t n = nbi_param_count(c) + (c->tied && e->weights.own_head);
    int64_t count = PARAMETERS + 2 * n;
    struct nbi_tensor_spec *out = calloc((size_t)count, sizeof *out);
    char(*names)[120] = calloc((size_t)(2 * n), sizeof *names);
    const struct nbi_writer_opts opts = {.format = NBI_FORMAT_SAFETENSORS, .path = path};
    enum nb_status rc = out && names ? NB_OK : nbi_fail_memory("names", (size_t)n * 120);
    for (int64_t i = 0; i < 2 * n && rc == NB_OK; i++) {
        struct nbi_param p;
        nbi_param_at(c, i / 2, &p);
        snprintf(names[i], sizeof names[i], "%s.%s", i % 2 ? "adamw3" : "grad", p.name);
        out[PARAMETERS + i] = (struct nbi_tensor_spec){
            .name = names[i], .dtype = NBI_F32, .ndim = p.ndim, .shape = {p.shape[0], p.shape[1]}};
    }
    if (rc == NB_OK) {
        out[LOGITS] = (struct nbi_tensor_spec){
            .name = "logits", .dtype = NBI_F32, .ndim = 3, .shape = {r->B, r->T, r->V}};
        out[LOSS] =
            (struct nbi_tensor_spec){.name = "loss", .dtype = NBI_F32, .ndim = 1, .shape = {1}};
        out[GREEDY] = (struct nbi_tensor_spec){.name = "greedy.ids",
                                               .dtype = NBI_I32,
                                               .ndim = 1,
                                               .shape = {GREEDY_PROMPT + GREEDY_TOKENS}};
        out[LOSSES] = (struct nbi_tensor_spec){
            .name = "adamw3.losses", .dtype = NBI_F32, .ndim = 1, .shape = {UPDATES}};
        rc = nbi_writer_begin(w, &opts, out, count);
    }
    free(out);
    free(names);
    return rc;
}

/* which: 0 writes the gradients, 1 the master weights. */
static enum nb_status put_parameters(struct nbi_writer *w, struct training *x, int which)
{
    struct nbi_backend *be = x->t.be;
    for (int64_t i = 0; i < x->t.count; i++) {
        const struct nbi_train_param *t = &x->t.tensors[i];
        int64_t bytes = t->count * (int64_t)sizeof(float);
        float *values = malloc((size_t)bytes);
        enum nb_status rc =
            values ? be->download(x->stream, values, which ? t->master : t->grad, bytes)
                   : nbi_fail_memory(t->param.name, (size_t)bytes);
        if (rc == NB_OK)
            rc = be->sync(x->stream);
        if (rc == NB_OK)
            rc = nbi_writer_put(w, PARAMETERS + 2 * t->index + which, 0, t->count, values);
        free(values);
        NBI_TRY(rc);
    }
    return NB_OK;
}

static enum nb_status train(struct nbi_writer *w, struct training *x)
{
    for (int i = 0; i < UPDATES; i++) {
        NBI_TRY(gradients(x, &x->losses[i]));
        if (i == 0)
            NBI_TRY(put_parameters(w, x, 0));
        NBI_TRY(nbi_optimizer_step(&x->optimizer, NBI_ALL_LAYERS, 1e-3f, (uint32_t)i + 1));
    }
    return put_parameters(w, x, 1);
}

static enum nb_status write_output(const struct results *r, const struct nb_engine *e, bool bf16,
                                   const char *path)
{
    struct training x = {.bf16 = bf16};
    struct nbi_writer *w = NULL;
    NBI_TRY(begin_output(&w, r, e, path));
    enum nb_status rc = nbi_writer_put(w, LOGITS, 0, r->B * r->T * r->V, r->logits);
    if (rc == NB_OK)
        rc = nbi_writer_put(w, LOSS, 0, 1, &r->loss);
    if (rc == NB_OK)
        rc = nbi_writer_put(w, GREEDY, 0, GREEDY_PROMPT + GREEDY_TOKENS, r->greedy);
    if (rc == NB_OK)
        rc = training_begin(&x, e, r);
    if (rc == NB_OK)
        rc = train(w, &x);
    if (rc == NB_OK)
        rc = nbi_writer_put(w, LOSSES, 0, UPDATES, x.losses);
    training_end(&x);
    if (rc == NB_OK)
        return nbi_writer_commit(w);
    nbi_writer_abort(w);
    return rc;
}

enum nb_status nb_eval_hf(const struct nb_engine *e, const char *in, bool bf16, const char *out,
                          struct nb_cancel *cancel)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(cancel);
    struct results r = {.V = e->config.vocab_size};
    enum nb_status rc = read_input(&r, in);
    if (rc == NB_OK && r.B * r.T > INT64_MAX / (64 * r.V))
        rc = nbi_fail(NB_EVALUE, "too many tokens");
    if (rc == NB_OK) {
        r.logits = malloc((size_t)(r.B * r.T * r.V) * sizeof *r.logits + 1);
        if (!r.logits)
            rc = nbi_fail_memory("logits", (size_t)(r.B * r.T * r.V) * sizeof *r.logits);
    }
    if (rc == NB_OK)
        rc = compute_logits(e, &r);
    if (rc == NB_OK)
        rc = compute_loss(&r);
    if (rc == NB_OK)
        rc = compute_greedy(e, &r);
    if (rc == NB_OK)
        rc = write_output(&r, e, bf16, out);
    free(r.ids);
    free(r.labels);
    free(r.logits);
    return rc;
}
