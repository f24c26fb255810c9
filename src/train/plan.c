/* plan.c - the memory that a run takes.
 *
 * A plan covers parameters, activations, scratch and micro-batches. The tokenizer, the index of
 * the data and the program itself come on top. */
#include <string.h>

#include "base/str.h"
#include "base/sys.h"
#include "convert/model_writer.h"
#include "train/run.h"

/* ---- what the options ask for ---- */

enum nbi_format nbi_run_format(const struct nb_train_opts *o)
{
    struct nbi_output target = {.format = NBI_FORMAT_SAFETENSORS};
    if (o->out && nbi_output_of(o->out, &target) != NB_OK)
        target.format = NBI_FORMAT_SAFETENSORS; /* the error is reported by setup.c */
    return target.format;
}

bool nbi_run_computes_in_bf16(const struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    bool gpu = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY | NBI_CAP_BF16);
    bool automatic = gpu && o->precision != NB_PRECISION_F32;
    return o->compute == NB_COMPUTE_AUTO ? automatic : o->compute == NB_COMPUTE_BF16;
}

struct nbi_train_params_opts nbi_run_params_opts(const struct nb_train_opts *o)
{
    return (struct nbi_train_params_opts){.precision = o->precision,
                                          .master = o->bf16_master ? NBI_BF16 : NBI_F32,
                                          .moment_type = o->moment_type,
                                          .weight_store = o->weight_store,
                                          .last_layers = o->train_last_layers,
                                          .update_in_backward = o->fused_step,
                                          .bf16_grads = o->bf16_gradients,
                                          .slice_rows = o->head_slices ? NBI_SLICE_ROWS : 0,
                                          .seed = o->seed,
                                          .draw = o->synthetic || o->config,
                                          .threads = o->threads,
                                          .target = nbi_run_format(o),
                                          .progress = o->stage_progress,
                                          .progress_ctx = o->ctx};
}

/* Rows of logits at a time. A GPU needs some hundreds to be busy, and a quarter of all is little
 * next to the activations of the layers. */
static int64_t logit_rows(const struct nbi_run *r, int64_t N)
{
    int64_t rows = (N + 3) / 4, limit = r->be->logit_rows;
    if (limit == 0)
        return nbi_logits_rows(r->config.vocab_size, 16, N);
    rows = rows < 512 ? 512 : rows;
    rows = rows < limit ? rows : limit;
    return rows < N ? rows : N;
}

struct nbi_acts_opts nbi_run_acts_opts(const struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    int64_t N = o->batch_size * o->seq_len;
    return (struct nbi_acts_opts){.N = N,
                                  .M = logit_rows(r, N),
                                  .dtype = nbi_run_computes_in_bf16(r) ? NBI_BF16 : NBI_F32,
                                  .recompute = o->recompute,
                                  .slices = o->head_slices,
                                  .first_layer = nbi_first_layer(&r->config, o->train_last_layers)};
}

struct nbi_stream_limits nbi_run_stream_limits(const struct nbi_run *r)
{
    struct nbi_stream_limits limits =
        nbi_stream_limits_for(&r->config, r->opts->batch_size * r->opts->seq_len, true);
    limits.bf16 = nbi_run_computes_in_bf16(r);
    return limits;
}

/* ---- the plan of a run ---- */

/* Counts parameters and the operations per token: two per weight in the forward pass and, from
 * the first trained layer on, four in the backward pass. A token attends to half a row on
 * average. */
static void count_work(const struct nbi_run *r, struct nb_train_plan *plan, int64_t first_layer)
{
    const struct nbi_config *c = &r->config;
    double all = 0, layers = (double)c->layers;
    double head = (double)c->vocab_size * (double)c->hidden_size;
    for (int64_t i = 0; i < nbi_param_count(c); i++) {
        struct nbi_param p;
        nbi_param_at(c, i, &p);
        plan->parameters += nbi_param_values(&p);
        if (p.ndim == 2)
            all += (double)nbi_param_values(&p);
    }
    double in_layers = all - head * (c->tied ? 1 : 2);
    in_layers += (double)r->opts->seq_len * (double)(c->heads * c->head_dim) * layers;
    plan->layer_flops_per_token = 2 * in_layers;
    plan->head_flops_per_token = 2 * head;
    plan->flops_per_token =
        2 * (in_layers + head) + 4 * (in_layers * (layers - (double)first_layer) / layers + head);
}

/* The blocks that are allocated besides scratch, activations and those of parameters. */
#define TABLES (2 + NBI_OPTIMIZER_BLOCKS)

static int64_t sum(const int64_t *bytes, int count)
{
    int64_t all = 0;
    for (int i = 0; i < count; i++)
        all += bytes[i];
    return all;
}

static void plan_tables(const struct nbi_config *c, const struct nbi_train_params_plan *params,
                        int64_t bytes[TABLES])
{
    bytes[0] = nbi_frequency_bytes(c);
    bytes[1] = params->amax;
    nbi_optimizer_plan(c->layers, params->tensors, params->slices, bytes + 2);
}

/* What is only on a GPU: the session of the test prompts, tables, what the driver adds to all
 * blocks, and the context. */
static enum nb_status plan_gpu(const struct nbi_run *r, struct nb_train_plan *plan,
                               const int64_t params[NBI_PARAM_BLOCKS], const int64_t tables[TABLES])
{
    struct nbi_memory_plan session = {0};
    if (r->opts->test_prompts)
        NBI_TRY(nbi_test_prompts_plan(r, &session));
    int64_t blocks[5 + NBI_PARAM_BLOCKS + TABLES] = {plan->scratch, plan->activations, session.kv,
                                                     session.activations, session.scratch};
    const int count = (int)(sizeof blocks / sizeof *blocks);
    memcpy(blocks + 5, params, NBI_PARAM_BLOCKS * sizeof *blocks);
    memcpy(blocks + 5 + NBI_PARAM_BLOCKS, tables, TABLES * sizeof *blocks);
    plan->prompts = session.kv + session.activations + session.scratch;
    plan->tables = sum(tables, TABLES);
    plan->rounding = r->be->reserved_bytes(blocks, count) - sum(blocks, count);
    plan->context = r->be->context_bytes;
    return NB_OK;
}

/* Batches, losses and references. */
static int64_t plan_host(const struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    int64_t N = o->batch_size * o->seq_len, accum = o->grad_accum;
    return nbi_train_pass_bytes(&r->config, N) + 5 * accum * N * (int64_t)sizeof(int32_t) +
           accum * nbi_run_losses_bytes(N) + (o->kl_base > 0 ? nbi_kl_anchor_bytes(N) : 0);
}

static void add_up(struct nb_train_plan *p)
{
    const int64_t parts[] = {p->masters,     p->moments, p->gradients, p->weights,
                             p->activations, p->scratch, p->prompts,   p->tables,
                             p->rounding,    p->context, p->host};
    p->total = sum(parts, sizeof parts / sizeof *parts - (p->gpu ? 1 : 0));
}

enum nb_status nbi_run_plan(const struct nbi_run *r, struct nb_train_plan *plan)
{
    const struct nbi_train_params_opts opts = nbi_run_params_opts(r->opts);
    const struct nbi_stream_limits limits = nbi_run_stream_limits(r);
    const struct nbi_acts_opts acts = nbi_run_acts_opts(r);
    struct nbi_store *store = nbi_run_random_weights(r->opts) ? NULL : r->model.store;
    struct nbi_train_params_plan t;
    int64_t tables[TABLES];
    nbi_train_params_plan(r->be, &r->config, store, &opts, &t);
    plan_tables(&r->config, &t, tables);
    *plan =
        (struct nb_train_plan){.masters = t.blocks[NBI_BLOCK_MASTERS],
                               .moments = t.blocks[NBI_BLOCK_MOMENTS],
                               .gradients = t.blocks[NBI_BLOCK_GRADIENTS],
                               .weights = t.blocks[NBI_BLOCK_WEIGHTS] + t.blocks[NBI_BLOCK_COPIES],
                               .activations = nbi_acts_training_bytes(&r->config, &acts),
                               .scratch = r->be->stream_bytes(r->be, &limits),
                               .host = plan_host(r) + t.host + r->be->pinned_bytes,
                               .compute = acts.dtype == NBI_BF16 ? NB_COMPUTE_BF16 : NB_COMPUTE_F32,
                               .gpu = nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY)};
    if (plan->gpu)
        NBI_TRY(plan_gpu(r, plan, t.blocks, tables));
    else
        plan->host += sum(tables, TABLES);
    add_up(plan);
    count_work(r, plan, acts.first_layer);
    return NB_OK;
}

/* ---- is it there? ---- */

enum nb_status nbi_run_check_memory(const struct nb_train_plan *plan)
{
    struct nbi_sys_info sys;
    char planned[32], unused[32];
    nbi_sys_info(&sys);
    uint64_t available = sys.memory_available,
             wanted = (uint64_t)(plan->gpu ? plan->host : plan->total);
    if (sys.cgroup_memory > 0 && sys.cgroup_memory < available)
        available = sys.cgroup_memory;
    if (available == 0 || wanted <= available)
        return NB_OK;
    return nbi_fail(NB_ENOMEM,
                    "training takes %s, but only %s of memory is free: 'nibble plan' with the same "
                    "options and --fit %.1f lists settings that fit",
                    nbi_format_bytes(planned, (double)wanted),
                    nbi_format_bytes(unused, (double)available), (double)available / (1 << 30));
}

enum nb_status nbi_run_check_gpu_memory(const struct nbi_run *r)
{
    struct nb_train_plan plan;
    char planned[32], unused[32];
    struct nbi_memory memory;
    if (!nbi_backend_has(r->be, NBI_CAP_OWN_MEMORY))
        return NB_OK;
    NBI_TRY(nbi_run_plan(r, &plan));
    NBI_TRY(r->be->memory(r->be, &memory));
    int64_t available = memory.unused + plan.context; /* which is there already */
    if (plan.total <= available)
        return NB_OK;
    return nbi_fail(NB_ENOMEM,
                    "training takes %s of GPU memory, but only %s is free: 'nibble plan' with the "
                    "same options, --device cuda and --fit %.1f lists settings that fit",
                    nbi_format_bytes(planned, (double)plan.total),
                    nbi_format_bytes(unused, (double)available), nbi_run_fit_size(r, available));
}

enum nb_status nb_train_plan(const struct nb_train_opts *o, struct nb_train_plan *plan)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct nbi_run r;
    struct nb_train_plan made;
    enum nb_status rc = nbi_run_open_plan(&r, o);
    if (rc == NB_OK)
        rc = nbi_run_plan(&r, &made);
    nbi_run_close(&r);
    if (rc == NB_OK)
        *plan = made;
    return rc;
}
