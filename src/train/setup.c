/* setup.c - opens a training run.
 *
 * The order is by cost, so that mistakes show early: settings, files, the layout of the result,
 * data, memory. Whatever would be refused after the last step is refused here. */
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

/* ---- checks ---- */

static enum nb_status refuse_bf16_gradients(void)
{
    return nbi_fail(NB_EINVAL, "--grad-dtype bf16 is for --compute-dtype bf16 and --grad-accum 1");
}

enum nb_status nbi_run_check_sizes(const struct nb_train_opts *o)
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
    if (o->head_slices && !(o->fused_step && o->loss == NB_LOSS_CE))
        return nbi_fail(NB_EINVAL, "--head-slices is for --fused-step with --loss ce");
    if (o->precision == NB_PRECISION_F32 && o->compute == NB_COMPUTE_BF16)
        return nbi_fail(NB_EINVAL, "--precision f32 computes in f32: leave out --compute-dtype");
    if (o->bf16_gradients && (o->grad_accum > 1 || o->compute == NB_COMPUTE_F32))
        return refuse_bf16_gradients();
    return NB_OK;
}

void nb_train_defaults(struct nb_train_opts *o)
{
    *o = (struct nb_train_opts){.lr = NB_TRAIN_LR,
                                .beta1 = NB_TRAIN_BETA1,
                                .beta2 = NB_TRAIN_BETA2,
                                .eps = NB_TRAIN_EPS,
                                .grad_clip = NB_TRAIN_GRAD_CLIP,
                                .warmup = NB_TRAIN_WARMUP,
                                .save_minutes = NB_TRAIN_SAVE_MINUTES};
}

enum nb_status nb_train_check(const struct nb_train_opts *o)
{
    NBI_TRY(nbi_run_check_sizes(o));
    if (o->steps <= 0 && o->epochs <= 0)
        return nbi_fail(NB_EINVAL, "say how long to train: --steps or --epochs");
    if (nbi_run_random_tokens(o) && o->steps <= 0)
        return nbi_fail(NB_EINVAL, "random tokens have no end: give --steps");
    bool synthetic = o->synthetic || o->config;
    if (synthetic && o->test_prompts)
        return nbi_fail(NB_EINVAL, "a random model has no tokenizer, so no prompts to answer");
    if (synthetic && o->out)
        return nbi_fail(NB_EINVAL, "a random model on random tokens is not worth writing: no -o");
    if (o->resume && !o->checkpoint_dir)
        return nbi_fail(NB_EINVAL, "--resume needs --checkpoint-dir");
    if ((o->warmup < 0 && o->warmup != NB_TRAIN_WARMUP) || !(o->save_minutes >= 0))
        return nbi_fail(NB_EINVAL, "--warmup and --save-minutes are at least 0");
    if (o->save_every > 0 && !o->checkpoint_dir)
        return nbi_fail(NB_EINVAL, "--save-every needs --checkpoint-dir");
    if ((o->eval_every > 0 || o->stop_if_ppl_rises > 0) && !(o->eval_data && o->eval_data[0]))
        return nbi_fail(NB_EINVAL, "--eval-every and --stop-if-ppl-rises need --eval-data");
    if (o->stop_if_ppl_rises > 0 && o->eval_every <= 0)
        return nbi_fail(NB_EINVAL, "--stop-if-ppl-rises needs evaluations: give --eval-every");
    if (nbi_run_random_tokens(o) && ((o->data && o->data[0]) || (o->eval_data && o->eval_data[0])))
        return nbi_fail(NB_EINVAL,
                        "random weights or tokens make their own data: leave out the data");
    if (!nbi_run_random_tokens(o) && (!o->data || !o->data[0]))
        return nbi_fail(NB_EINVAL, "data is missing: -d FILE");
    if (nbi_run_random_tokens(o) && (o->replay || o->kl_base > 0))
        return nbi_fail(NB_EINVAL, "--replay and --kl-base need data, not random tokens");
    if (o->replay && !(o->replay_share > 0 && o->replay_share < 1))
        return nbi_fail(NB_EINVAL, "the share of --replay must be more than 0 and less than 1");
    if (o->kl_base > 0 && o->loss != NB_LOSS_CE)
        return nbi_fail(NB_EINVAL, "--kl-base compares probabilities: use it with --loss ce");
    return NB_OK;
}

/* Whether out is the source model or one of its files. */
static bool is_input(const struct nbi_run *r, const char *out)
{
    const struct nbi_store *store = r->model.store;
    bool same =
        nbi_path_same(out, r->opts->model) || (r->model.dir && nbi_path_same(out, r->model.dir));
    for (int i = 0; store && i < store->file_count && !same; i++)
        same = nbi_path_same(out, nbi_source_path(store->files[i]));
    return same;
}

/* Whether the result can be written where it is to go. */
static enum nb_status check_out(const struct nbi_run *r)
{
    const char *out = r->opts->out;
    struct nbi_output target;
    if (!out)
        return NB_OK;
    NBI_TRY(nbi_output_of(out, &target));
    if (!r->opts->overwrite && r->opts->model && is_input(r, out))
        return nbi_fail(NB_EINVAL, "'%s' is the model that is read; --overwrite replaces it", out);
    const struct nbi_train_params_opts opts = nbi_run_params_opts(r->opts);
    return nbi_run_check_export(r, &opts);
}

/* Refuses a directory that has checkpoints unless the run resumes from them: a later --resume
 * could not tell the two runs apart. */
static enum nb_status open_checkpoints(struct nbi_run *r)
{
    const char *dir = r->opts->checkpoint_dir;
    if (!dir)
        return NB_OK;
    NBI_TRY(nbi_dir_make(dir));
    NBI_TRY(nbi_checkpoint_lock(&r->lock, dir));
    if (r->opts->resume || nbi_checkpoint_count(dir) == 0)
        return NB_OK;
    return nbi_fail(
        NB_EINVAL,
        "'%s' has checkpoints: continue from them with --resume, or use another directory", dir);
}

/* ---- files and data ---- */

static enum nb_status read_model(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    if (o->synthetic || o->config)
        return nbi_config_synthetic(&r->config, o->synthetic, o->config);
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
    if (nbi_run_random_tokens(o))
        return NB_OK;
    NBI_TRY(nb_tokenizer_open(&r->tokenizer, o->model, o->model_dir));
    return nb_chat_open(&r->chat, o->model, o->model_dir);
}

/* ---- the model in memory ---- */

/* plan: only its description. */
static enum nb_status open_backend(struct nbi_run *r, bool plan)
{
    struct nbi_backend_opts on = {.device = r->opts->device, .threads = r->opts->threads};
    NBI_TRY(nbi_simd_parse(r->opts->simd, &on.level));
    if (!plan && r->opts->memory_report)
        r->gpu_watch = nb_gpu_watch_open(); /* before the backend takes anything */
    NBI_TRY(plan ? nbi_backend_describe(&r->be, &on) : nbi_backend_open(&r->be, &on));
    if (!nbi_backend_has(r->be, NBI_CAP_TRAIN))
        return nbi_fail(NB_EUNSUPPORTED, "%s cannot train; use --device cpu", r->be->name);
    return r->opts->bf16_gradients && !nbi_run_computes_in_bf16(r) ? refuse_bf16_gradients()
                                                                   : NB_OK;
}

static enum nb_status open_memory(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    const struct nbi_config *c = &r->config;
    const struct nbi_stream_limits limits = nbi_run_stream_limits(r);
    const struct nbi_train_params_opts opts = nbi_run_params_opts(o);
    const struct nbi_optimizer_opts step = {.beta1 = (float)o->beta1,
                                            .beta2 = (float)o->beta2,
                                            .eps = (float)o->eps,
                                            .decay = (float)o->weight_decay,
                                            .clip = (float)o->grad_clip,
                                            .max_update = o->moment_type == NB_MOMENT_NVFP4 ? 5 : 0,
                                            .chunk_rows = o->step_chunk_rows,
                                            .seed = o->seed};
    NBI_TRY(r->be->stream_new(r->be, &limits, &r->stream));
    const struct nbi_acts_opts acts = nbi_run_acts_opts(r);
    NBI_TRY(nbi_acts_init_training(&r->acts, r->be, c, &acts));
    NBI_TRY(r->be->clear(r->stream, r->acts.block,
                         r->acts.bytes)); /* touch every page now, not in the first step */
    NBI_TRY(nbi_train_pass_init(&r->train_pass, &r->acts));
    r->train_pass.V = c->vocab_size;
    r->labels = calloc((size_t)o->grad_accum, sizeof *r->labels);
    r->losses = calloc((size_t)(o->grad_accum * 2 * r->train_pass.N), sizeof *r->losses);
    if (!r->labels || !r->losses)
        return nbi_fail_memory("losses", (size_t)(o->grad_accum * r->train_pass.N));
    struct nbi_store *store = nbi_run_random_weights(o) ? NULL : r->model.store;
    NBI_TRY(nbi_train_params_init(&r->params, r->stream, r->be, c, store, &opts));
    return nbi_optimizer_init(&r->optimizer, &r->params, &step);
}

void nbi_run_stage(const struct nbi_run *r, const char *what)
{
    if (r->opts->stage)
        r->opts->stage(r->opts->ctx, what);
}

void nbi_run_stage_progress(const struct nbi_run *r, int64_t done, int64_t total)
{
    if (r->opts->stage_progress)
        r->opts->stage_progress(r->opts->ctx, (uint64_t)done, (uint64_t)total);
}

enum nb_status nbi_run_open(struct nbi_run *r, const struct nb_train_opts *o)
{
    bool evaluates = o->eval_data && o->eval_data[0]; /* from step 0 on */
    *r = (struct nbi_run){
        .opts = o,
        .state = {.best_loss = INFINITY, .evaluated = evaluates ? -1 : 0, .accepted = -1},
    };
    NBI_TRY(nb_train_check(o));
    NBI_TRY(open_model(r));
    NBI_TRY(check_out(r));
    NBI_TRY(nbi_run_check_reports(r));
    NBI_TRY(open_tokenizer(r));
    nbi_run_stage(r, "reading the data");
    NBI_TRY(nbi_run_open_batches(r));
    NBI_TRY(open_checkpoints(r));
    r->lr_schedule = (struct nbi_lr_schedule_opts){
        .kind = o->schedule,
        .lr = o->lr,
        .final_frac = o->final_lr_frac,
        .warmup =
            o->warmup != NB_TRAIN_WARMUP ? o->warmup : nbi_default_warmup(o->schedule, r->steps),
        .steps = r->steps};
    if (o->test_prompts)
        NBI_TRY(nbi_test_prompts_open(&r->test_prompts, o->test_prompts));
    NBI_TRY(open_backend(r, false));
    NBI_TRY(nbi_run_check_gpu_memory(r));
    nbi_run_stage(r, "loading the model");
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
                                                replay ? nbi_dataset_stats(r->data)->examples : 0,
                                            .memory_limit = NBI_KL_ANCHOR_MEMORY,
                                            .spill_next_to = o->checkpoint_dir ? o->checkpoint_dir
                                                             : o->out          ? o->out
                                                                               : "base",
                                            .progress = o->stage_progress,
                                            .progress_ctx = o->ctx};
    struct nbi_weights masters; /* the reference is the model before quantization */
    const struct nbi_kl_anchor_pass pass = {.weights = &masters,
                                            .acts = &r->acts,
                                            .stream = r->stream,
                                            .pass = &r->train_pass,
                                            .batch = &r->microbatches[0]};
    if (!(o->kl_base > 0))
        return NB_OK;
    nbi_run_stage(r, "computing the reference probabilities");
    NBI_TRY(nbi_train_params_masters(&r->params, &masters));
    enum nb_status rc = nbi_kl_anchor_init(&r->kl_anchor, &opts, &pass);
    free(masters.layers);
    return rc;
}

void nbi_run_close(struct nbi_run *r)
{
    nbi_train_log_close(r->log);
    nb_gpu_watch_close(r->gpu_watch);
    nbi_checkpoint_close(r->resumed_from);
    nbi_checkpoint_unlock(r->lock);
    nbi_history_release(&r->history);
    nbi_test_prompts_close(&r->test_prompts);
    nbi_kl_anchor_release(&r->kl_anchor);
    nbi_optimizer_release(&r->optimizer);
    if (r->params.be)
        nbi_train_params_release(&r->params);
    nbi_train_pass_release(&r->train_pass);
    free(r->labels);
    free(r->losses);
    nbi_acts_release(&r->acts);
    if (r->stream)
        r->be->stream_free(r->stream);
    if (r->be)
        r->be->close(r->be);
    nbi_run_close_batches(r);
    nbi_eval_close(&r->eval);
    nb_chat_close(r->chat);
    nb_tokenizer_close(r->tokenizer);
    nbi_model_close(&r->model);
    *r = (struct nbi_run){0};
}

enum nb_status nbi_run_open_plan(struct nbi_run *r, const struct nb_train_opts *o)
{
    *r = (struct nbi_run){.opts = o};
    NBI_TRY(nbi_run_check_sizes(o));
    NBI_TRY(open_model(r));
    return open_backend(r, true);
}

enum nb_status nbi_run_open_data(struct nbi_run *r)
{
    NBI_TRY(open_tokenizer(r));
    return nbi_run_open_batches(r);
}

enum nb_status nbi_run_open_random(struct nbi_run *r, const struct nb_train_opts *o,
                                   const struct nbi_config *config)
{
    *r = (struct nbi_run){.opts = o, .config = *config};
    NBI_TRY(nbi_run_open_batches(r));
    NBI_TRY(open_backend(r, false));
    r->lr_schedule = (struct nbi_lr_schedule_opts){.kind = o->schedule, .lr = o->lr};
    return open_memory(r);
}
