/* batches.c - the micro-batches of each step, and the index arrays that make one a pass.
 *
 * Micro-batch i of step s has the number s * grad_accum + i. The number and the loaders' states
 * determine its rows, so a resumed run sees the same data. */
#include "train/batches.h"

#include "base/log.h"
#include "base/rng.h"
#include "train/run.h"

int64_t nbi_train_pass_bytes(const struct nbi_config *c, int64_t N)
{
    return N * (int64_t)(7 * sizeof(int32_t) + 2 * sizeof(float)) +
           c->layers * (int64_t)sizeof(struct nbi_kv_view);
}

enum nb_status nbi_train_pass_init(struct nbi_train_pass *f, const struct nbi_acts *acts)
{
    size_t N = (size_t)acts->N, layers = (size_t)acts->layer_count;
    NBI_BUG_IF(acts->M > acts->N);
    *f = (struct nbi_train_pass){
        .N = acts->N, .matmul = acts->dtype == NBI_F32 ? NBI_MATMUL_F32 : NBI_MATMUL_FAST};
    f->kv_rows = malloc(7 * N * sizeof *f->kv_rows);
    f->kv = malloc(layers * sizeof *f->kv);
    f->losses = malloc(2 * N * sizeof *f->losses);
    if (!f->kv_rows || !f->kv || !f->losses)
        return nbi_fail_memory("batch", 7 * N * sizeof *f->kv_rows);
    int32_t **const arrays[] = {&f->first, &f->last, &f->end, &f->order, &f->rows, &f->targets};
    for (size_t i = 0; i < 6; i++)
        *arrays[i] = f->kv_rows + (i + 1) * N;
    f->kls = f->losses + N;
    for (size_t i = 0; i < layers; i++)
        f->kv[i] = acts->layers[i].kv;
    return NB_OK;
}

void nbi_train_pass_release(struct nbi_train_pass *f)
{
    free(f->kv_rows);
    free(f->kv);
    free(f->losses);
    *f = (struct nbi_train_pass){0};
}

#define DIGIT_BITS 11 /* three digits are more than an id has */

/* One pass of a radix sort, which keeps the order of equal digits. */
static void sort_by_digit(int32_t *out, const int32_t *in, const int32_t *ids, int64_t N, int digit)
{
    int64_t at[1 << DIGIT_BITS] = {0}, sum = 0;
    int shift = digit * DIGIT_BITS;
    const uint32_t mask = (1 << DIGIT_BITS) - 1;
    for (int64_t n = 0; n < N; n++)
        at[(uint32_t)ids[n] >> shift & mask]++;
    for (int64_t i = 0; i < 1 << DIGIT_BITS; i++) {
        int64_t count = at[i];
        at[i] = sum;
        sum += count;
    }
    for (int64_t n = 0; n < N; n++)
        out[at[(uint32_t)ids[in[n]] >> shift & mask]++] = in[n];
}

/* f->end, and f->order for nbi_op_embed_bwd. */
static void set_orders(struct nbi_train_pass *f, const int32_t *ids, int64_t N)
{
    int32_t *other = f->end;
    for (int64_t n = 0; n < N; n++)
        other[n] = (int32_t)n;
    sort_by_digit(f->order, other, ids, N, 0);
    sort_by_digit(other, f->order, ids, N, 1);
    sort_by_digit(f->order, other, ids, N, 2);
    for (int64_t n = N - 1; n >= 0; n--)
        f->end[n] = n + 1 < N && f->first[n + 1] == f->first[n] ? f->end[n + 1] : (int32_t)n;
}

enum nb_status nbi_train_pass_set(struct nbi_train_pass *f, const struct nbi_microbatch *b)
{
    int64_t N = b->B * b->T;
    NBI_BUG_IF(N > f->N);
    for (int64_t n = 0; n < N && f->V > 0; n++)
        if (b->ids[n] < 0 || b->ids[n] >= f->V || b->targets[n] >= f->V)
            return nbi_fail(NB_EVALUE, "token id %d is outside the model's vocabulary of %lld",
                            b->targets[n] >= f->V ? b->targets[n] : b->ids[n], (long long)f->V);
    f->labels = (struct nbi_labels){
        .rows = f->rows, .targets = f->targets, .losses = f->losses, .kls = f->kls};
    for (int64_t n = 0; n < N; n++) {
        f->kv_rows[n] = f->last[n] = (int32_t)n;
        f->first[n] = (int32_t)n - b->positions[n];
        if (b->targets[n] < 0)
            continue;
        f->rows[f->labels.count] = (int32_t)n;
        f->targets[f->labels.count++] = b->targets[n];
    }
    set_orders(f, b->ids, N);
    f->pass = (struct nbi_pass){.N = N,
                                .ids = b->ids,
                                .positions = b->positions,
                                .kv_rows = f->kv_rows,
                                .first = f->first,
                                .last = f->last,
                                .rows = f->rows,
                                .kv = f->kv,
                                .matmul = f->matmul,
                                .training = true,
                                .end = f->end,
                                .order = f->order};
    return NB_OK;
}

/* ---- the data of a run ---- */

bool nbi_run_random_weights(const struct nb_train_opts *o)
{
    return o->synthetic || o->config || o->from_scratch;
}

bool nbi_run_random_tokens(const struct nb_train_opts *o)
{
    return o->synthetic || o->config || o->random_tokens;
}

static enum nb_status open_set(struct nbi_run *r, const char *const *files,
                               struct nbi_dataset **out)
{
    const struct nbi_dataset_opts opts = {.files = files,
                                          .tokenizer = r->tokenizer,
                                          .chat = nbi_chat_kind(r->chat),
                                          .progress = r->opts->stage_progress,
                                          .progress_ctx = r->opts->ctx};
    NBI_TRY(nbi_dataset_open(out, &opts));
    if (nbi_dataset_stats(*out)->trained == 0)
        return nbi_fail(NB_EVALUE, "'%s' has nothing to train on", files[0]);
    return NB_OK;
}

/* Tokens that are cut off are not trained on, so the user is told. */
static void warn_of_cuts(const struct nbi_dataset *d, int64_t seq_len, const char *option)
{
    int64_t count = nbi_dataset_longer(d, seq_len);
    if (count > 0)
        nbi_log(NB_LOG_WARN, "%lld of %lld samples of %s are longer than --seq-len and are cut",
                (long long)count, (long long)nbi_dataset_stats(d)->examples, option);
}

static struct nbi_mix mix_of(struct nbi_run *r)
{
    return (struct nbi_mix){.main = &r->loader,
                            .replay = r->replay_data ? &r->replay_loader : NULL,
                            .share = r->opts->replay_share};
}

/* Steps until all epochs have ended. The last step may have fewer micro-batches with data. */
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

/* Shuffled with another seed, so that its order differs even if both are the same file. */
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

enum nb_status nbi_run_open_batches(struct nbi_run *r)
{
    const struct nb_train_opts *o = r->opts;
    r->microbatches = calloc((size_t)o->grad_accum, sizeof *r->microbatches);
    if (!r->microbatches)
        return nbi_fail_memory("batches", (size_t)o->grad_accum * sizeof *r->microbatches);
    for (int64_t i = 0; i < o->grad_accum; i++)
        NBI_TRY(nbi_microbatch_init(&r->microbatches[i], o->batch_size, o->seq_len));
    r->steps = o->steps;
    if (nbi_run_random_tokens(o))
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

void nbi_run_close_batches(struct nbi_run *r)
{
    for (int64_t i = 0; r->microbatches && i < r->opts->grad_accum; i++)
        nbi_microbatch_release(&r->microbatches[i]);
    free(r->microbatches);
    nbi_loader_release(&r->loader);
    nbi_loader_release(&r->replay_loader);
    nbi_dataset_close(r->replay_data);
    nbi_dataset_close(r->data);
}

/* ---- the micro-batches of a step ---- */

/* Fills a micro-batch with random tokens, for a run without data. Each row is one sequence. */
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

enum nb_status nbi_run_next_batches(struct nbi_run *r, bool *more)
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
