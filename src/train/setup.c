/* setup.c - opens all that a run needs, in an order that fails early: files, data, memory. */
#include <math.h>
#include <string.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/sys.h"
#include "convert/model_writer.h"
#include "infer/engine.h"
#include "tokenizer/chat_template.h"
#include "train/checkpoint.h"
#include "train/run.h"

enum nbi_format nbi_run_format(const struct nb_train_opts *o)
{
    struct nbi_output target = {.format = NBI_FORMAT_SAFETENSORS};
    if (o->out && nbi_output_of(o->out, &target) != NB_OK)
        target.format = NBI_FORMAT_SAFETENSORS; /* check_out says so */
    return target.format;
}

static struct nbi_train_params_opts trainable_opts(const struct nb_train_opts *o)
{
    return (struct nbi_train_params_opts){.precision = o->precision,
                                          .master = o->bf16_master ? NBI_BF16 : NBI_F32,
                                          .moment_type = o->moment_type,
                                          .last_layers = o->train_last_layers,
                                          .update_in_backward = o->fused_step,
                                          .seed = o->seed,
                                          .target = nbi_run_format(o)};
}

static struct nbi_acts_opts acts_opts(const struct nb_train_opts *o, const struct nbi_config *c)
{
    int64_t N = o->batch_size * o->seq_len;
    return (struct nbi_acts_opts){.N = N,
                                  .M = nbi_logits_rows(c->vocab_size, 16, N),
                                  .recompute = o->recompute,
                                  .first_layer = nbi_first_layer(c, o->train_last_layers)};
}

/* ---- checks ---- */

static bool random_tokens(const struct nb_train_opts *o)
{
    return o->synthetic || o->random_tokens;
}

/* What also a plan wants. */
static enum nb_status check_sizes(const struct nb_train_opts *o)
{
    if (o->seq_len < 2 || o->batch_size < 1 || o->grad_accum < 1)
        return nbi_fail(NB_EINVAL, "a batch needs rows of at least 2 tokens");
    if (o->batch_size > NBI_BATCH_TOKENS / o->seq_len)
        return nbi_fail(NB_EINVAL, "--batch-size times --seq-len is over %d tokens",
                        NBI_BATCH_TOKENS);
    if (o->fused_step && o->grad_accum > 1)
        return nbi_fail(NB_EINVAL,
                        "--fused-step updates in each backward pass, so there is nothing "
                        "to accumulate: use --grad-accum 1");
    return NB_OK;
}

void nb_train_defaults(struct nb_train_opts *o)
{
    *o = (struct nb_train_opts){.lr = NB_TRAIN_LR,
                                .beta1 = NB_TRAIN_BETA1,
                                .beta2 = NB_TRAIN_BETA2,
                                .eps = NB_TRAIN_EPS,
                                .grad_clip = NB_TRAIN_GRAD_CLIP};
}

enum nb_status nb_train_check(const struct nb_train_opts *o)
{
    NBI_TRY(check_sizes(o));
    if (o->steps <= 0 && o->epochs <= 0)
        return nbi_fail(NB_EINVAL, "say how long to train: --steps or --epochs");
    if (random_tokens(o) && o->steps <= 0)
        return nbi_fail(NB_EINVAL, "random tokens have no end: say --steps");
    if (o->synthetic && o->test_prompts)
        return nbi_fail(NB_EINVAL, "a random model has no tokenizer, so no prompts to answer");
    if (o->synthetic && o->out)
        return nbi_fail(NB_EINVAL, "a random model on random tokens is not worth writing: no -o");
    if (o->resume && !o->checkpoint_dir)
        return nbi_fail(NB_EINVAL, "--resume needs --checkpoint-dir");
    if (o->save_every > 0 && !o->checkpoint_dir)
        return nbi_fail(NB_EINVAL, "--save-every needs --checkpoint-dir");
    if ((o->eval_every > 0 || o->stop_if_ppl_rises > 0) && !(o->eval_data && o->eval_data[0]))
        return nbi_fail(NB_EINVAL, "--eval-every and --stop-if-ppl-rises need --eval-data");
    if (o->stop_if_ppl_rises > 0 && o->eval_every <= 0)
        return nbi_fail(NB_EINVAL, "--stop-if-ppl-rises goes by evaluations: say --eval-every");
    if (random_tokens(o) && ((o->data && o->data[0]) || (o->eval_data && o->eval_data[0])))
        return nbi_fail(NB_EINVAL, "--synthetic makes its own tokens: leave out the data");
    if (!random_tokens(o) && (!o->data || !o->data[0]))
        return nbi_fail(NB_EINVAL, "there is no data: -d FILE");
    if (random_tokens(o) && (o->replay || o->kl_base > 0))
        return nbi_fail(NB_EINVAL, "--replay and --kl-base need data, not random tokens");
    if (o->replay && !(o->replay_share > 0 && o->replay_share < 1))
        return nbi_fail(NB_EINVAL, "the share of --replay is over 0 and less than 1");
    if (o->kl_base > 0 && o->loss != NB_LOSS_CE)
        return nbi_fail(NB_EINVAL, "--kl-base compares probabilities: use it with --loss ce");
    return NB_OK;
}

/* Whether out is the model that is read, or a file of it. */
static bool is_input(const struct nbi_run *r, const char *out)
{
    const struct nbi_store *store = r->model.store;
    bool same =
        nbi_path_same(out, r->opts->model) || (r->model.dir && nbi_path_same(out, r->model.dir));
    for (int i = 0; store && i < store->file_count && !same; i++)
        same = nbi_path_same(out, nbi_source_path(store->files[i]));
    return same;
}

/* What would fail after the last step fails before the first. */
static enum nb_status check_out(const struct nbi_run *r)
{
    const char *out = r->opts->out;
    struct nbi_output target;
    if (!out)
        return NB_OK;
    NBI_TRY(nbi_output_of(out, &target));
    if (!r->opts->overwrite && r->opts->model && is_input(r, out))
        return nbi_fail(NB_EINVAL, "'%s' is the model that is read; --overwrite replaces it", out);
    const struct nbi_train_params_opts opts = trainable_opts(r->opts);
    return nbi_run_check_export(r, &opts);
}

/* Checkpoints of another run would be taken for this one's. */
static enum nb_status open_checkpoints(struct nbi_run *r)
{
    const char *dir = r->opts->checkpoint_dir;
    if (!dir)
        return NB_OK;
    NBI_TRY(nbi_dir_make(dir));
    NBI_TRY(nbi_checkpoint_lock(&r->lock, dir));
    if (r->opts->resume || nbi_checkpoint_count(dir) == 0)
        return NB_OK;
    return nbi_fail(NB_EINVAL,
                    "'%s' has checkpoints: go on from them with --resume, or take another "
                    "directory",
                    dir);
}

/* ---- files and data ---- */

static enum nb_status read_model(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    if (o->synthetic)
        return nbi_config_preset(&r->config, o->synthetic);
    const char *dir = o->model_dir ? o->model_dir : o->model;
    if (o->from_scratch && nbi_path_is_dir(dir))
        NBI_TRY(nbi_model_open_config(&r->model, dir));
    else
        NBI_TRY(nbi_model_open(&r->model, o->model, o->model_dir));
    NBI_TRY(nbi_model_need_config(&r->model));
    r->config = r->model.config;
    return NB_OK;
}

static enum nb_status open_model(struct nbi_run *r)
{
    NBI_TRY(read_model(r));
    if (r->opts->seq_len > r->config.max_position)
        return nbi_fail(NB_EINVAL,
                        "--seq-len %lld is more than the %lld positions that the model has "
                        "(max_position_embeddings)",
                        (long long)r->opts->seq_len, (long long)r->config.max_position);
    return NB_OK;
}

static enum nb_status open_tokenizer(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    if (random_tokens(o))
        return NB_OK;
    NBI_TRY(nb_tokenizer_open(&r->tokenizer, o->model, o->model_dir));
    return nb_chat_open(&r->chat, o->model, o->model_dir);
}

static enum nb_status open_set(struct nbi_run *r, const char *const *files,
                               struct nbi_dataset **out)
{
    const struct nbi_dataset_opts opts = {
        .files = files, .tokenizer = r->tokenizer, .chat = nbi_chat_kind(r->chat)};
    NBI_TRY(nbi_dataset_open(out, &opts));
    if (nbi_dataset_stats(*out)->trained == 0)
        return nbi_fail(NB_EVALUE, "'%s' has nothing to train on", files[0]);
    return NB_OK;
}

/* What is cut off is not learnt, and should not come as a surprise. */
static void warn_of_cuts(const struct nbi_dataset *d, int64_t seq_len, const char *option)
{
    int64_t count = nbi_dataset_longer(d, seq_len);
    if (count > 0)
        nbi_log(NB_LOG_WARN, "%lld of %lld samples of %s are longer than --seq-len and are cut",
                (long long)count, (long long)nbi_dataset_stats(d)->samples, option);
}

static struct nbi_mix mix_of(struct nbi_run *r)
{
    return (struct nbi_mix){.main = &r->loader,
                            .other = r->replay_data ? &r->replay_loader : NULL,
                            .share = r->opts->replay_share};
}

/* Steps until the epochs are over. The last one may have fewer passes than the others. */
static enum nb_status count_steps(struct nbi_run *r, int64_t *steps)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_mix mix = mix_of(r);
    int64_t limit = INT64_MAX, batches;
    if (o->steps > 0 && __builtin_mul_overflow(o->steps, o->grad_accum, &limit))
        limit = INT64_MAX;
    NBI_TRY(nbi_mix_count(&mix, o->batch_size, o->seq_len, limit, &batches));
    *steps = (batches - 1) / o->grad_accum + 1;
    return NB_OK;
}

/* Its order is another than that of the data, also of the same file. */
static enum nb_status open_replay(struct nbi_run *r)
{
    const char *const files[] = {r->opts->replay, NULL};
    struct nbi_loader_opts opts = r->loader.opts;
    NBI_TRY(open_set(r, files, &r->replay_data));
    warn_of_cuts(r->replay_data, r->opts->seq_len, "--replay");
    opts.data = r->replay_data;
    opts.seed += 0x9E3779B97F4A7C15;
    opts.epochs = 0;
    return nbi_loader_init(&r->replay_loader, &opts);
}

static enum nb_status open_batches(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    r->microbatches = calloc((size_t)o->grad_accum, sizeof *r->microbatches);
    if (!r->microbatches)
        return nbi_fail_memory("batches", (size_t)o->grad_accum * sizeof *r->microbatches);
    for (int64_t i = 0; i < o->grad_accum; i++)
        NBI_TRY(nbi_microbatch_init(&r->microbatches[i], o->batch_size, o->seq_len));
    r->steps = o->steps;
    if (random_tokens(o))
        return NB_OK;
    NBI_TRY(open_set(r, o->data, &r->data));
    warn_of_cuts(r->data, o->seq_len, "--data");
    NBI_TRY(nbi_eval_open(r));
    const struct nbi_loader_opts opts = {.data = r->data,
                                         .seed = o->seed,
                                         .shuffle = !o->sequential,
                                         .pack = true,
                                         .keep_documents = o->kl_base > 0,
                                         .epochs = o->epochs,
                                         .padding =
                                             r->config.pad >= 0 ? (int32_t)r->config.pad : 0};
    NBI_TRY(nbi_loader_init(&r->loader, &opts));
    if (o->replay)
        NBI_TRY(open_replay(r));
    return o->epochs > 0 ? count_steps(r, &r->steps) : NB_OK;
}

/* ---- the model in memory ---- */

static enum nb_status open_backend(struct nbi_run *r)
{
    struct nbi_backend_opts on = {.device = "cpu", .threads = r->opts->threads};
    NBI_TRY(nbi_simd_parse(r->opts->simd, &on.level));
    return nbi_backend_open(&r->be, &on);
}

static enum nb_status open_memory(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_config *c = &r->config;
    int64_t N = o->batch_size * o->seq_len;
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, N, true);
    const struct nbi_train_params_opts opts = trainable_opts(o);
    const struct nbi_optimizer_opts step = {.beta1 = (float)o->beta1,
                                            .beta2 = (float)o->beta2,
                                            .eps = (float)o->eps,
                                            .decay = (float)o->weight_decay,
                                            .clip = (float)o->grad_clip,
                                            .max_update = o->moment_type == NB_MOMENT_NVFP4 ? 5 : 0,
                                            .chunk_rows = o->step_chunk_rows,
                                            .seed = o->seed};
    NBI_TRY(r->be->stream_new(r->be, &limits, &r->stream));
    const struct nbi_acts_opts room = acts_opts(o, c);
    NBI_TRY(nbi_acts_init_training(&r->acts, r->be, c, &room));
    NBI_TRY(r->be->clear(r->stream, r->acts.block, r->acts.bytes)); /* now, not in the first step */
    NBI_TRY(nbi_train_pass_init(&r->train_pass, &r->acts));
    r->train_pass.V = c->vocab_size;
    struct nbi_store *store = o->synthetic || o->from_scratch ? NULL : r->model.store;
    NBI_TRY(nbi_train_params_init(&r->params, r->stream, r->be, c, store, &opts));
    return nbi_optimizer_init(&r->optimizer, &r->params, &step);
}

static void tell(const struct nbi_run *r, const char *what)
{
    if (r->opts->stage)
        r->opts->stage(r->opts->ctx, what);
}

enum nb_status nbi_run_open(struct nbi_run *r, const struct nb_train_opts *o)
{
    bool stops = o->stop_if_ppl_rises > 0; /* then the model as it is read is measured, too */
    *r = (struct nbi_run){
        .opts = o,
        .state = {.best_loss = INFINITY, .evaluated = stops ? -1 : 0, .accepted = -1},
    };
    NBI_TRY(nb_train_check(o));
    NBI_TRY(open_model(r));
    NBI_TRY(check_out(r));
    NBI_TRY(nbi_run_check_reports(r));
    NBI_TRY(open_tokenizer(r));
    tell(r, "reading the data");
    NBI_TRY(open_batches(r));
    NBI_TRY(open_checkpoints(r));
    r->lr_schedule = (struct nbi_lr_schedule_opts){.kind = o->schedule,
                                                   .lr = o->lr,
                                                   .final_frac = o->final_lr_frac,
                                                   .warmup = o->warmup,
                                                   .steps = r->steps};
    if (o->test_prompts)
        NBI_TRY(nbi_test_prompts_open(&r->test_prompts, o->test_prompts));
    NBI_TRY(open_backend(r));
    tell(r, "loading the model");
    nbi_run_phase(r, "start");
    NBI_TRY(open_memory(r));
    nbi_run_phase(r, "model_loaded");
    return NB_OK;
}

enum nb_status nbi_run_kl_anchor(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    bool replay = r->replay_data != NULL;
    const struct nbi_kl_anchor_opts opts = {.data = replay ? r->replay_data : r->data,
                                            .first_example =
                                                replay ? nbi_dataset_stats(r->data)->samples : 0,
                                            .memory_limit = NBI_KL_ANCHOR_MEMORY,
                                            .spill_next_to = o->checkpoint_dir ? o->checkpoint_dir
                                                             : o->out          ? o->out
                                                                               : "base"};
    struct nbi_weights masters; /* not rounded to what the forward pass sees */
    const struct nbi_kl_anchor_pass pass = {.weights = &masters,
                                            .acts = &r->acts,
                                            .stream = r->stream,
                                            .pass = &r->train_pass,
                                            .batch = &r->microbatches[0]};
    if (!(o->kl_base > 0))
        return NB_OK;
    NBI_TRY(nbi_train_params_masters(&r->params, &masters));
    enum nb_status rc = nbi_kl_anchor_init(&r->kl_anchor, &opts, &pass);
    free(masters.layers);
    return rc;
}

void nbi_run_close(struct nbi_run *r)
{
    nbi_train_log_close(r->log);
    nbi_checkpoint_unlock(r->lock);
    nbi_history_release(&r->history);
    nbi_test_prompts_close(&r->test_prompts);
    nbi_kl_anchor_release(&r->kl_anchor);
    nbi_optimizer_release(&r->optimizer);
    if (r->params.be)
        nbi_train_params_release(&r->params);
    nbi_train_pass_release(&r->train_pass);
    nbi_acts_release(&r->acts);
    if (r->stream)
        r->be->stream_free(r->stream);
    if (r->be)
        r->be->close(r->be);
    for (int64_t i = 0; r->microbatches && i < r->opts->grad_accum; i++)
        nbi_microbatch_release(&r->microbatches[i]);
    free(r->microbatches);
    nbi_loader_release(&r->loader);
    nbi_loader_release(&r->replay_loader);
    nbi_dataset_close(r->replay_data);
    nbi_dataset_close(r->data);
    nbi_eval_close(&r->eval);
    nb_chat_close(r->chat);
    nb_tokenizer_close(r->tokenizer);
    nbi_model_close(&r->model);
    *r = (struct nbi_run){0};
}

/* ---- batches ---- */

/* Tokens that are no text, of a run without data. */
static void random_batch(const struct nbi_run *r, struct nbi_microbatch *b, int64_t number)
{
    int64_t N = b->B * b->T;
    uint32_t V = (uint32_t)r->config.vocab_size;
    for (int64_t i = 0; i < N; i++) {
        struct nbi_philox p = nbi_philox(r->opts->seed, (uint64_t)i, (uint64_t)number);
        b->ids[i] = (int32_t)(p.v[0] % V);
        b->positions[i] = (int32_t)(i % b->T);
        if (i > 0)
            b->targets[i - 1] = i % b->T ? b->ids[i] : NBI_IGNORE;
    }
    b->targets[N - 1] = NBI_IGNORE;
    b->tokens = N;
    b->trained = N - b->B;
}

enum nb_status nbi_run_next(struct nbi_run *r, bool *more)
{
    int64_t n = r->opts->grad_accum;
    *more = true;
    for (int64_t i = 0; i < n; i++) {
        struct nbi_microbatch *b = &r->microbatches[i];
        if (!r->data) {
            random_batch(r, b, r->state.step * n + i);
            continue;
        }
        bool some;
        struct nbi_mix mix = mix_of(r);
        NBI_TRY(nbi_mix_next(&mix, r->state.step * n + i, b, &some));
        if (i == 0)
            *more = some;
    }
    r->state.loader = r->loader.state;
    r->state.replay_loader = r->replay_loader.state;
    return NB_OK;
}

/* ---- the plan ---- */

/* Parameters, and what a token takes: two operations for each in the forward pass and, from the
 * first trained layer on, four in the backward pass. Attention sees half of a row on average. */
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
    plan->flops_per_token =
        2 * (in_layers + head) + 4 * (in_layers * (layers - (double)first_layer) / layers + head);
}

enum nb_status nbi_run_plan(const struct nbi_run *r, struct nb_train_plan *plan)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_config *c = &r->config;
    int64_t N = o->batch_size * o->seq_len, accum = o->grad_accum;
    const struct nbi_train_params_opts opts = trainable_opts(o);
    const struct nbi_stream_limits limits = nbi_stream_limits_for(c, N, true);
    const struct nbi_acts_opts room = acts_opts(o, c);
    struct nbi_store *store = o->synthetic || o->from_scratch ? NULL : r->model.store;
    struct nbi_train_params_plan t;
    nbi_train_params_plan(c, store, &opts, &t);
    *plan = (struct nb_train_plan){.masters = t.masters,
                                   .moments = t.moments,
                                   .gradients = t.gradients,
                                   .weights = t.weights,
                                   .activations = nbi_acts_training_bytes(c, &room),
                                   .scratch = r->be->stream_bytes(r->be, &limits),
                                   .host = nbi_train_pass_bytes(c, N) +
                                           5 * accum * N * (int64_t)sizeof(int32_t) +
                                           (o->kl_base > 0 ? nbi_kl_anchor_bytes(N) : 0)};
    plan->total = plan->masters + plan->moments + plan->gradients + plan->weights +
                  plan->activations + plan->scratch + plan->host;
    count_work(r, plan, room.first_layer);
    return NB_OK;
}

enum nb_status nbi_run_open_plan(struct nbi_run *r, const struct nb_train_opts *o)
{
    *r = (struct nbi_run){.opts = o};
    NBI_TRY(check_sizes(o));
    NBI_TRY(open_model(r));
    return open_backend(r);
}

enum nb_status nbi_run_check_memory(const struct nb_train_plan *plan)
{
    struct nbi_sys_info sys;
    char wanted[32], there[32];
    nbi_sys_info(&sys);
    uint64_t room = sys.memory_available;
    if (sys.cgroup_memory > 0 && sys.cgroup_memory < room)
        room = sys.cgroup_memory;
    if (room == 0 || (uint64_t)plan->total <= room)
        return NB_OK;
    return nbi_fail(NB_ENOMEM,
                    "training takes %s, but only %s of memory is free: 'nibble plan' with the same "
                    "options and --fit %.1f lists settings that fit",
                    nbi_format_bytes(wanted, (double)plan->total),
                    nbi_format_bytes(there, (double)room), (double)room / (1 << 30));
}

enum nb_status nb_train_plan(const struct nb_train_opts *o, struct nb_train_plan *plan)
{
    struct nbi_run r;
    enum nb_status rc = nbi_run_open_plan(&r, o);
    if (rc == NB_OK)
        rc = nbi_run_plan(&r, plan);
    nbi_run_close(&r);
    return rc;
}
