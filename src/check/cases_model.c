/* cases_model.c - passes of a small random model: what fuses operations (layers.h, decode.h) runs
 * only there. The reference computes the same passes with the operations of the scalar CPU code. */
#include "backend/decode.h"
#include "check/kernel_cases.h"
#include "model/execute.h"

#define LAYERS   2
#define ROWS_MAX 96
#define STEPS    3 /* decode steps after a prompt */
#define SEED     17

struct model {
    struct nbi_backend *be;
    struct nbi_stream *s;
    struct nbi_config config;
    struct nbi_weights weights;
    struct nbi_acts acts;
    struct nbi_kv_view kv[LAYERS];
    uint64_t seed;
};

/* The index arrays of a pass. */
struct indices {
    int32_t ids[ROWS_MAX], positions[ROWS_MAX], kv_rows[ROWS_MAX], first[ROWS_MAX], last[ROWS_MAX],
        end[ROWS_MAX], order[ROWS_MAX], rows[ROWS_MAX], targets[ROWS_MAX], tables[ROWS_MAX];
};

/* ---- the model ---- */

static void model_free(void *model)
{
    struct model *m = model;
    nbi_acts_release(&m->acts);
    nbi_weights_release(&m->weights);
    if (m->s)
        m->be->stream_free(m->s);
    free(m);
}

/* A head size that all fused kernels take, and an untied head, so that it is NVFP4. */
static const struct nbi_config small_config = {.vocab_size = 336,
                                               .hidden_size = 256,
                                               .intermediate_size = 272,
                                               .layers = LAYERS,
                                               .heads = 4,
                                               .kv_heads = 2,
                                               .head_dim = 128,
                                               .max_position = 4096,
                                               .rms_eps = 1e-6,
                                               .rope_theta = 1e4};

/* Weights from the seed, activations for N rows and M rows of logits, and a stream. */
static enum nb_status model_new(struct nbi_kernel_run *r, int64_t N, int64_t M, struct model **out)
{
    struct model *m = *out = calloc(1, sizeof *m);
    if (!m)
        return nbi_fail_memory("checking kernels", sizeof *m);
    r->extra = m;
    r->extra_free = model_free;
    m->be = r->be;
    m->config = small_config;
    m->seed = SEED;
    struct nbi_stream_limits limits = nbi_stream_limits_for(&m->config, N, r->c->training);
    const struct nbi_weight_provider from = nbi_weights_from_seed(&m->seed);
    const struct nbi_acts_opts opts = {
        .N = N, .M = M, .page_count = r->c->paged ? N : 0, .dtype = nbi_run_acts(r)};
    limits.bf16 = nbi_run_acts(r) == NBI_BF16;
    NBI_TRY(m->be->stream_new(m->be, &limits, &m->s));
    NBI_TRY(nbi_weights_load(&m->weights, m->be, &m->config, &from, NULL, NULL));
    return r->c->training ? nbi_acts_init_training(&m->acts, m->be, &m->config, &opts)
                          : nbi_acts_init(&m->acts, m->be, &m->config, &opts);
}

/* A KV cache of `rows` rows in the case's type; the reference has it in f32. */
static enum nb_status cache_new(struct nbi_kernel_run *r, struct model *m, int64_t rows)
{
    int64_t n = rows * m->config.kv_heads * m->config.head_dim;
    for (int i = 0; i < LAYERS; i++)
        m->kv[i] = (struct nbi_kv_view){nbi_run_values(r, n, 1), nbi_run_values(r, n, 1),
                                        nbi_run_dtype(r)};
    NBI_TRY(r->rc);
    return r->be->sync(r->s); /* the model has a stream of its own */
}

/* Runs a pass and keeps its logits as a result. */
static enum nb_status run_pass(struct nbi_kernel_run *r, struct model *m, struct nbi_pass *pass,
                               const char *name)
{
    int64_t n = pass->M * m->config.vocab_size;
    struct nbi_ptr logits = nbi_run_out_floats(r, name, n);
    NBI_TRY(r->rc);
    NBI_TRY(r->be->sync(r->s));
    pass->kv = m->kv;
    pass->matmul = r->reference ? NBI_MATMUL_F32 : r->c->matmul;
    NBI_TRY(nbi_execute(&m->weights, &m->acts, m->s, pass));
    NBI_TRY(m->be->copy(m->s, logits, m->acts.logits, n * (int64_t)sizeof(float)));
    return m->be->sync(m->s);
}

/* ---- a prompt and decode steps of one sequence ---- */

static const char prompt_shapes_letters[] = "N";
static const int64_t prompt_shapes[][NBI_CASE_DIMS] = {{20}, {70}};

static struct nbi_pass sequence_pass(struct nbi_kernel_run *r, struct indices *x, int64_t from,
                                     int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        x->ids[n] = (int32_t)(nbi_run_bits(r) % (uint32_t)small_config.vocab_size);
        x->positions[n] = x->kv_rows[n] = x->last[n] = (int32_t)(from + n);
        x->first[n] = 0;
    }
    x->rows[0] = (int32_t)count - 1;
    return (struct nbi_pass){.N = count,
                             .ids = x->ids,
                             .positions = x->positions,
                             .kv_rows = x->kv_rows,
                             .first = x->first,
                             .last = x->last,
                             .decode_rows = count == 1,
                             .M = 1,
                             .rows = x->rows,
                             .one_row_per_sequence = count == 1};
}

/* With `add` decode steps run in the megakernel, if the backend has one; else as graphs. */
static enum nb_status prompt(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0];
    struct indices x;
    struct model *m;
    struct nbi_pass pass;
    NBI_TRY(model_new(r, N, 1, &m));
    NBI_TRY(cache_new(r, m, N + STEPS));
    if (r->c->add)
        NBI_TRY(nbi_execute_use_megakernel(&m->acts, &m->weights, m->s, m->kv));
    pass = sequence_pass(r, &x, 0, N);
    NBI_TRY(run_pass(r, m, &pass, "logits of a prompt"));
    for (int i = 0; i < STEPS; i++) {
        pass = sequence_pass(r, &x, N + i, 1);
        NBI_TRY(run_pass(r, m, &pass, "logits of a step"));
    }
    return NB_OK;
}

/* The most likely token is found on the device and run at once. The reference takes the largest of
 * its own logits. */
static enum nb_status step_after_argmax(struct nbi_kernel_run *r, struct model *m,
                                        struct nbi_pass *pass, int32_t *id, int64_t k)
{
    struct nbi_run_ahead ahead = {
        .k = k, .draw = {.inv_temperature = 1e3, .unit = 1, .top_p = 1, .log_min_p = -1e30}};
    int32_t best[1 + 2 * NBI_TOPK_MAX];
    struct nbi_ptr logits = nbi_run_out_floats(r, "logits of a drawn token", m->config.vocab_size);
    NBI_TRY(r->rc);
    NBI_TRY(r->be->sync(r->s));
    if (nbi_execute_can_run_ahead(&m->acts, pass)) {
        NBI_TRY(nbi_execute_run_ahead(&m->weights, &m->acts, m->s, pass, &ahead));
        *id = ahead.id;
    } else {
        NBI_TRY(nbi_execute_topk(&m->weights, &m->acts, m->s, 1, 1));
        NBI_TRY(m->be->download(m->s, best, m->acts.topk, nbi_topk_bytes(1, 1)));
        NBI_TRY(m->be->sync(m->s));
        *id = best[1];
        NBI_TRY(nbi_execute(&m->weights, &m->acts, m->s, pass));
    }
    NBI_TRY(
        m->be->copy(m->s, logits, m->acts.logits, m->config.vocab_size * (int64_t)sizeof(float)));
    return m->be->sync(m->s);
}

static enum nb_status run_ahead(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0];
    struct indices x;
    struct model *m;
    struct nbi_pass pass;
    NBI_TRY(model_new(r, N, 1, &m));
    NBI_TRY(cache_new(r, m, N + STEPS));
    NBI_TRY(nbi_execute_use_megakernel(&m->acts, &m->weights, m->s, m->kv));
    pass = sequence_pass(r, &x, 0, N);
    NBI_TRY(run_pass(r, m, &pass, "logits of a prompt"));
    pass = sequence_pass(r, &x, N, 1);
    NBI_TRY(run_pass(r, m, &pass, "logits of a step"));
    pass = sequence_pass(r, &x, N + 1, 1);
    pass.matmul = r->reference ? NBI_MATMUL_F32 : r->c->matmul;
    pass.kv = m->kv;
    NBI_TRY(step_after_argmax(r, m, &pass, &x.ids[0], 1));
    pass = sequence_pass(r, &x, N + 2, 1);
    pass.matmul = r->reference ? NBI_MATMUL_F32 : r->c->matmul;
    pass.kv = m->kv;
    return step_after_argmax(r, m, &pass, &x.ids[0], 8);
}

/* ---- decode steps of several sequences over pages ---- */

static const char batch_shapes_letters[] = "N";
static const int64_t batch_shapes[][NBI_CASE_DIMS] = {{3}, {17}, {66}};

/* Sequence n has a page of its own, of which some rows are filled, and gets one token; twice, so
 * that a recorded graph is launched again. */
static enum nb_status batch(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0];
    struct indices x;
    struct model *m;
    int32_t pages[ROWS_MAX];
    NBI_TRY(model_new(r, N, N, &m));
    NBI_TRY(cache_new(r, m, N * NBI_PAGE));
    struct nbi_pass pass = {.N = N,
                            .ids = x.ids,
                            .positions = x.positions,
                            .kv_rows = x.kv_rows,
                            .first = x.first,
                            .last = x.last,
                            .pages = pages,
                            .tables = x.tables,
                            .page_count = N,
                            .decode_rows = N,
                            .M = N,
                            .rows = x.rows,
                            .batch_invariant = r->c->invariant,
                            .one_row_per_sequence = true};
    for (int step = 0; step < 2; step++) {
        for (int64_t n = 0; n < N; n++) {
            pages[n] = (int32_t)(N - 1 - n);
            x.tables[n] = x.rows[n] = (int32_t)n;
            x.first[n] = 0;
            x.last[n] = x.positions[n] = (int32_t)(n * 7 % 40 + step);
            x.kv_rows[n] = pages[n] * NBI_PAGE + x.last[n];
            x.ids[n] = (int32_t)(nbi_run_bits(r) % (uint32_t)small_config.vocab_size);
        }
        NBI_TRY(run_pass(r, m, &pass, "logits of a batch"));
    }
    return NB_OK;
}

/* ---- a training step's gradients ---- */

static const char train_shapes_letters[] = "N";
static const int64_t train_shapes[][NBI_CASE_DIMS] = {{37}};

/* An array for each parameter's gradient. */
static enum nb_status new_gradients(struct nbi_kernel_run *r, const struct nbi_config *c,
                                    struct nbi_grads *g)
{
    for (int64_t i = 0; i < nbi_param_count(c); i++) {
        struct nbi_param p;
        nbi_param_at(c, i, &p);
        int64_t n = nbi_param_values(&p);
        struct nbi_ptr at = nbi_run_zeros(r, n * (int64_t)sizeof(float));
        nbi_run_result(r, nbi_param_defs[p.def - nbi_param_defs].name, at, NBI_F32, 1, n, 0);
        *nbi_param_grad(g, &p) = at;
    }
    NBI_TRY(r->rc);
    return r->be->sync(r->s);
}

/* A document of one token, one of four, and one of all others; all but the last token of each
 * predict the next. Returns the number of labels. */
static int64_t documents(struct nbi_kernel_run *r, struct indices *x, int64_t N)
{
    int64_t labels = 0, begin = 0;
    for (int64_t n = 0; n < N; n++) {
        begin = n == 1 || n == 5 ? n : begin;
        int64_t end = n < 1 ? 0 : n < 5 ? 4 : N - 1;
        x->ids[n] = (int32_t)(nbi_run_bits(r) % (uint32_t)small_config.vocab_size);
        x->positions[n] = (int32_t)(n - begin);
        x->kv_rows[n] = x->last[n] = (int32_t)n;
        x->first[n] = (int32_t)begin;
        x->end[n] = (int32_t)end;
        if (n < end) {
            x->rows[labels] = (int32_t)n;
            x->targets[labels++] = (int32_t)(nbi_run_bits(r) % (uint32_t)small_config.vocab_size);
        }
    }
    int64_t at = 0;
    for (int32_t id = 0; id < small_config.vocab_size; id++)
        for (int64_t n = 0; n < N; n++)
            if (x->ids[n] == id)
                x->order[at++] = (int32_t)n;
    return labels;
}

static enum nb_status train_step(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0];
    struct indices x;
    struct model *m;
    struct nbi_layer_grads layer_grads[LAYERS] = {0};
    struct nbi_grads grads = {.layers = layer_grads};
    float losses[ROWS_MAX], kls[ROWS_MAX];
    NBI_TRY(model_new(r, N, N, &m));
    NBI_TRY(new_gradients(r, &m->config, &grads));
    int64_t labels = documents(r, &x, N);
    struct nbi_kv_view kv[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        kv[i] = m->acts.layers[i].kv;
    const struct nbi_pass pass = {.N = N,
                                  .ids = x.ids,
                                  .positions = x.positions,
                                  .kv_rows = x.kv_rows,
                                  .first = x.first,
                                  .last = x.last,
                                  .kv = kv,
                                  .matmul = nbi_run_acts(r) == NBI_BF16 ? NBI_MATMUL_FAST
                                                                        : NBI_MATMUL_F32,
                                  .training = true,
                                  .end = x.end,
                                  .order = x.order};
    const struct nbi_labels targets = {.kind = NB_LOSS_CE,
                                       .count = labels,
                                       .rows = x.rows,
                                       .targets = x.targets,
                                       .scale = 1.0f / (float)labels,
                                       .losses = losses,
                                       .kls = kls};
    NBI_TRY(nbi_execute(&m->weights, &m->acts, m->s, &pass));
    NBI_TRY(nbi_loss(&m->weights, &m->acts, m->s, &pass, &targets, &grads));
    NBI_TRY(nbi_backward(&m->weights, &m->acts, m->s, &pass, &grads, NULL));
    return m->be->sync(m->s);
}

/* ---- the table ---- */

/* Two layers of rounded products; a cache in f8 rounds keys and values by up to 2^-4. Gradients in
 * bf16 with a cosine of 0.999 are this far from the exact ones. */
#define FAST     .matmul = NBI_MATMUL_FAST, .by_norm = true, .bound = 2e-2, .fp4_bound = 5e-2
#define FAST_F8  .matmul = NBI_MATMUL_FAST, .by_norm = true, .bound = 0x1p-4
#define EXACT    .matmul = NBI_MATMUL_F32, .by_norm = true
#define TRAINING .training = true, .by_norm = true

static const struct nbi_kernel_case cases[] = {
    {"prompt and steps", "kv f32, f32", prompt, NBI_SHAPES(prompt_shapes), .dtype = NBI_F32, EXACT},
    {"prompt and steps", "kv f16, graph", prompt, NBI_SHAPES(prompt_shapes), .dtype = NBI_F16,
     FAST},
    {"prompt and steps", "kv f16, megakernel", prompt, NBI_SHAPES(prompt_shapes), .dtype = NBI_F16,
     FAST, .add = true, .caps = NBI_CAP_MEGAKERNEL},
    {"prompt and steps", "kv bf16, megakernel", prompt, NBI_SHAPES(prompt_shapes),
     .dtype = NBI_BF16, FAST, .add = true, .caps = NBI_CAP_MEGAKERNEL},
    {"prompt and steps", "kv f8, megakernel", prompt, NBI_SHAPES(prompt_shapes), .dtype = NBI_E4M3,
     FAST_F8, .add = true, .caps = NBI_CAP_MEGAKERNEL},
    {"run ahead", "kv f16", run_ahead, NBI_SHAPES(prompt_shapes), .dtype = NBI_F16, FAST,
     .caps = NBI_CAP_MEGAKERNEL | NBI_CAP_RUN_AHEAD},
    {"batch", "kv f32, f32", batch, NBI_SHAPES(batch_shapes), .dtype = NBI_F32, EXACT,
     .paged = true},
    {"batch", "kv f16", batch, NBI_SHAPES(batch_shapes), .dtype = NBI_F16, FAST, .paged = true},
    {"batch", "kv f16, batch-invariant", batch, NBI_SHAPES(batch_shapes), .dtype = NBI_F16, FAST,
     .paged = true, .invariant = true},
    {"batch", "kv f8", batch, NBI_SHAPES(batch_shapes), .dtype = NBI_E4M3, FAST_F8, .paged = true},
    {"training step", "f32", train_step, NBI_SHAPES(train_shapes), TRAINING, .bound = 1e-4,
     .caps = NBI_CAP_TRAIN},
    {"training step", "bf16", train_step, NBI_SHAPES(train_shapes), TRAINING, .bound = 4.47e-2,
     .bf16 = true, .caps = NBI_CAP_TRAIN | NBI_CAP_BF16},
};

const struct nbi_kernel_cases nbi_cases_model = {cases, NBI_COUNT_OF(cases)};
