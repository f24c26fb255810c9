/* scheduler.c - the loop of all generation. Continuous batching: when a request ends, the next one
 * takes its slot.
 *
 * Several slots run over a batch. Each step has a token for every running answer; the rest of the
 * chunk goes to prompts. So a long prompt takes several steps, during which the answers of others
 * go on. A request reserves the pages of its prompt and of its longest answer before it begins. The
 * batch takes pages as sequences grow and so never has fewer than are reserved.
 *
 * A single slot runs over a session: on a GPU it decodes faster than a batch of one, and what a
 * prompt has in common with the one before is not computed again.
 *
 * The lock guards the queue, the slots' pointers and the counters. What a slot points to belongs to
 * the thread in nb_scheduler_run(), but for `cancelled`. */
#include "infer/scheduler.h"

#include <pthread.h>
#include <string.h>

#include "base/clock.h"
#include "infer/batch.h"
#include "infer/response.h"

/* A request with its answer. */
struct slot {
    struct slot *next; /* in the queue */
    int64_t id;
    int32_t *prompt;
    size_t count;
    struct nb_generate_opts opts; /* stop and bias are copies */
    void (*done)(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result);
    void *ctx;
    bool cancelled;
    int64_t pages; /* that it needs at most */
    struct nb_generate_result result;
    struct nbi_response answer;
    /* Once it runs: */
    int64_t sequence; /* of the batch */
    size_t prefilled; /* tokens of the prompt that are in the batch or the session */
    int32_t last_id;  /* of the answer */
    double began;     /* when the prompt, and then the rest of the answer, began */
};

struct nb_scheduler {
    const struct nb_engine *engine;
    struct nb_cancel *cancel;
    struct nb_batch *batch;     /* NULL: the slot runs over the session */
    struct nb_session *session; /* NULL: slots run over the batch */
    bool owns_session;
    bool deterministic;
    struct nb_batch_info info;     /* as it was opened; over a session it has one sequence */
    struct slot **running;         /* [sequences]; NULL: free */
    struct nb_batch_input *inputs; /* [sequences] of a step, in the order of their slots */
    pthread_mutex_t lock;
    struct slot *first, **end; /* the queue */
    int64_t waiting, reserved, last_id;
};

/* ---- a request and what it owns ---- */

static void slot_free(struct slot *r)
{
    if (!r)
        return;
    for (size_t i = 0; r->opts.stop && r->opts.stop[i]; i++)
        free((char *)r->opts.stop[i]);
    free((void *)r->opts.stop);
    free((void *)r->opts.sampling.bias);
    free(r->prompt);
    nb_generate_result_release(&r->result);
    free(r);
}

static enum nb_status copy_stop_texts(struct slot *r, const char *const *stop)
{
    size_t n = 0;
    while (stop && stop[n])
        n++;
    const char **copy = calloc(n + 1, sizeof *copy);
    r->opts.stop = copy;
    for (size_t i = 0; copy && i < n; i++)
        if (!(copy[i] = strdup(stop[i])))
            return nbi_fail_memory("request", strlen(stop[i]));
    return copy ? NB_OK : nbi_fail_memory("request", n * sizeof *copy);
}

/* Copies what the caller need not keep. */
static enum nb_status slot_copy(struct slot *r, const struct nb_request *from)
{
    size_t biases = (size_t)from->opts.sampling.bias_count * sizeof(struct nb_bias);
    struct nb_bias *bias = NULL;
    r->count = from->count;
    r->opts = from->opts;
    r->done = from->done;
    r->ctx = from->ctx;
    r->opts.sampling.bias = NULL;
    NBI_TRY(copy_stop_texts(r, from->opts.stop));
    r->prompt = malloc(from->count * sizeof *r->prompt);
    if (biases > 0)
        bias = malloc(biases);
    r->opts.sampling.bias = bias;
    if (!r->prompt || (biases > 0 && !bias))
        return nbi_fail_memory("request", from->count * sizeof *r->prompt + biases);
    memcpy(r->prompt, from->ids, from->count * sizeof *r->prompt);
    if (bias)
        memcpy(bias, from->opts.sampling.bias, biases);
    return NB_OK;
}

/* Ends the answer, tells the caller, and frees the request. */
static void finish(struct slot *r, enum nb_status rc)
{
    rc = nbi_response_end(&r->answer, rc);
    if (r->done)
        r->done(r->ctx, r->id, rc, &r->result);
    slot_free(r);
}

/* ---- submitting and cancelling ---- */

/* Tokens that the sequence of a request has at most. */
static int64_t longest(const struct nb_scheduler *s, const struct nb_request *r)
{
    int64_t left = s->info.context - (int64_t)r->count, max = r->opts.max_tokens;
    return (int64_t)r->count + (max > 0 && max < left ? max : left);
}

static enum nb_status check_request(const struct nb_scheduler *s, const struct nb_request *r)
{
    if (r->count == 0)
        return nbi_fail(NB_EINVAL, "the prompt is empty");
    if ((int64_t)r->count > s->info.context)
        return nbi_fail(NB_EVALUE,
                        "%zu tokens do not fit the context of %lld; a longer one can be requested",
                        r->count, (long long)s->info.context);
    if (nbi_kv_pages(longest(s, r)) > s->info.pages)
        return nbi_fail(NB_EVALUE,
                        "prompt and answer may have %lld tokens, and the pool has room for %lld",
                        (long long)longest(s, r), (long long)(s->info.pages * NBI_PAGE));
    NBI_TRY(nbi_engine_check_ids(s->engine, r->ids, (int64_t)r->count));
    return nbi_sampler_check(&r->opts.sampling, s->engine->config.vocab_size);
}

enum nb_status nb_scheduler_submit(struct nb_scheduler *s, const struct nb_request *request,
                                   int64_t *id)
{
    NBI_TRY(check_request(s, request));
    struct slot *r = calloc(1, sizeof *r);
    enum nb_status rc = r ? slot_copy(r, request) : nbi_fail_memory("request", sizeof *r);
    if (rc != NB_OK) {
        slot_free(r);
        return rc;
    }
    r->pages = nbi_kv_pages(longest(s, request));
    r->answer = (struct nbi_response){.engine = s->engine, .opts = &r->opts, .result = &r->result};
    r->result.prompt_tokens = (int64_t)r->count;
    pthread_mutex_lock(&s->lock);
    *id = r->id = ++s->last_id;
    *s->end = r;
    s->end = &r->next;
    s->waiting++;
    pthread_mutex_unlock(&s->lock);
    return NB_OK;
}

void nb_scheduler_cancel(struct nb_scheduler *s, int64_t id)
{
    pthread_mutex_lock(&s->lock);
    for (struct slot *r = s->first; r; r = r->next)
        r->cancelled |= r->id == id;
    for (int64_t i = 0; i < s->info.sequences; i++)
        if (s->running[i])
            s->running[i]->cancelled |= s->running[i]->id == id;
    pthread_mutex_unlock(&s->lock);
}

/* ---- slots ---- */

static enum nb_status was_cancelled(const struct slot *r)
{
    return nbi_fail(NB_EINTERRUPTED, "request %lld was cancelled", (long long)r->id);
}

/* Whether somebody wants a request to stop: nb_scheduler_cancel(), or its own nb_cancel. */
static enum nb_status check_cancelled(const struct slot *r)
{
    if (r->cancelled)
        return was_cancelled(r);
    if (!r->opts.cancel)
        return NB_OK;
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(r->opts.cancel);
    return nbi_check_interrupt();
}

/* Frees a slot and ends its request. */
static void leave(struct nb_scheduler *s, int64_t i, enum nb_status rc)
{
    struct slot *r = s->running[i];
    if (r->result.count > 0)
        r->result.seconds = nbi_now() - r->began;
    if (s->batch)
        NBI_BUG_IF(nb_batch_drop(s->batch, r->sequence) != NB_OK);
    else if (rc == NB_EVALUE) /* no other request may reuse keys that are not finite */
        nb_session_truncate(s->session, 0);
    pthread_mutex_lock(&s->lock);
    s->running[i] = NULL;
    s->reserved -= r->pages;
    pthread_mutex_unlock(&s->lock);
    finish(r, rc);
}

/* Takes a request out of the queue. */
static void unlink_request(struct nb_scheduler *s, struct slot **at)
{
    struct slot *r = *at;
    *at = r->next;
    if (s->end == &r->next)
        s->end = at;
    s->waiting--;
}

/* The first request of the queue that is to stop, taken out; NULL: there is none. */
static struct slot *take_cancelled(struct nb_scheduler *s, enum nb_status *rc)
{
    struct slot *r = NULL;
    pthread_mutex_lock(&s->lock);
    for (struct slot **at = &s->first; *at && !r; at = &(*at)->next) {
        *rc = check_cancelled(*at);
        if (*rc != NB_OK) {
            r = *at;
            unlink_request(s, at);
            break;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return r;
}

static void end_cancelled(struct nb_scheduler *s)
{
    enum nb_status rc;
    for (struct slot *r; (r = take_cancelled(s, &rc));)
        finish(r, rc);
    for (int64_t i = 0; i < s->info.sequences; i++) {
        pthread_mutex_lock(&s->lock);
        rc = s->running[i] ? check_cancelled(s->running[i]) : NB_OK;
        pthread_mutex_unlock(&s->lock);
        if (rc != NB_OK)
            leave(s, i, rc);
    }
}

/* Puts the first request of the queue into slot i, if the pool has its pages; NULL otherwise. */
static struct slot *admit(struct nb_scheduler *s, int64_t i)
{
    pthread_mutex_lock(&s->lock);
    struct slot *r = s->first;
    if (r && s->reserved + r->pages > s->info.pages)
        r = NULL;
    if (r) {
        unlink_request(s, &s->first);
        s->reserved += r->pages;
        s->running[i] = r;
    }
    pthread_mutex_unlock(&s->lock);
    return r;
}

/* Begins the request of a slot. */
static enum nb_status begin(struct nb_scheduler *s, struct slot *r)
{
    if (s->batch)
        NBI_BUG_IF(nb_batch_add(s->batch, &r->sequence) != NB_OK);
    NBI_TRY(nbi_response_begin(&r->answer, r->prompt, r->count, s->info.context));
    if (s->session) {
        r->result.reused_tokens = nbi_session_reuse(s->session, r->prompt, (int64_t)r->count);
        r->prefilled = (size_t)r->result.reused_tokens;
    }
    r->began = nbi_now();
    return NB_OK;
}

/* Fills free slots. A request that cannot begin ends at once. */
static void begin_requests(struct nb_scheduler *s)
{
    for (int64_t i = 0; i < s->info.sequences; i++) {
        struct slot *r = s->running[i] ? NULL : admit(s, i);
        enum nb_status rc = r ? begin(s, r) : NB_OK;
        if (rc != NB_OK)
            leave(s, i--, rc); /* the slot is free for the next one */
    }
}

/* ---- steps ---- */

/* A slot's input to a step: up to `limit` tokens of its prompt, or the last token of its answer.
 * Candidates or logits are wanted once the prompt is complete. */
static struct nb_batch_input next_input(struct slot *r, int64_t limit)
{
    struct nb_batch_input in = {.sequence = r->sequence, .ids = &r->last_id, .count = 1};
    struct nbi_logits_spec *spec = &r->answer.spec;
    int64_t left = (int64_t)(r->count - r->prefilled);
    if (left > 0) {
        in.ids = r->prompt + r->prefilled;
        in.count = left < limit ? left : limit;
    }
    if (left > in.count)
        return in;
    in.logits = spec->logits;
    in.candidates = spec->logits ? NULL : spec->candidates;
    in.topk = spec->logits ? 0 : spec->k;
    return in;
}

/* The next token of a slot whose prompt is complete. */
static enum nb_status next_token(struct nb_scheduler *s, struct slot *r, bool *done)
{
    int64_t length =
        s->batch ? nb_batch_length(s->batch, r->sequence) : nbi_session_length(s->session);
    if (r->result.count == 0) {
        double now = nbi_now();
        r->result.prompt_seconds = now - r->began;
        r->began = now;
    }
    return nbi_response_token(&r->answer, s->info.context - length, &r->last_id, done);
}

/* Appends the last token of an answer to the session as well, so that the next turn finds it. */
static enum nb_status append_last(struct nb_scheduler *s, const struct slot *r)
{
    if (nbi_session_length(s->session) == nbi_session_context(s->session))
        return NB_OK;
    return nbi_session_append(s->session, &r->last_id, 1, NULL, 0);
}

/* Takes the outcome of a step, and ends the request if it was its last. */
static void advance(struct nb_scheduler *s, int64_t i, const struct nb_batch_input *in)
{
    struct slot *r = s->running[i];
    bool done = false;
    if (in->status != NB_OK) { /* the request was checked, so it can only be this */
        leave(s, i, nbi_fail(in->status, "the model gave a logit that is not finite"));
        return;
    }
    if (r->prefilled < r->count)
        r->prefilled += (size_t)in->count;
    if (r->prefilled < r->count)
        return;
    enum nb_status rc = next_token(s, r, &done);
    if (rc == NB_OK && done && s->session)
        rc = append_last(s, r);
    if (rc != NB_OK || done)
        leave(s, i, rc);
}

/* How a prompt is divided into inputs may change bits on a GPU. So over a deterministic batch it
 * comes in whole chunks, whatever the others leave of a step, which then has room for all. */
static enum nb_status step_batch(struct nb_scheduler *s)
{
    int64_t slots = s->info.sequences, chunk = s->info.chunk, count = 0;
    int64_t spare = chunk - slots; /* beyond one token for every slot */
    for (int64_t i = 0; i < slots; i++) {
        if (!s->running[i])
            continue;
        s->inputs[count] = next_input(s->running[i], s->deterministic ? chunk : spare + 1);
        spare -= s->inputs[count++].count - 1;
    }
    if (count == 0)
        return NB_OK;
    NBI_TRY(nb_batch_step(s->batch, s->inputs, count));
    const struct nb_batch_input *in = s->inputs;
    for (int64_t i = 0; i < slots; i++)
        if (s->running[i])
            advance(s, i, in++);
    return NB_OK;
}

static enum nb_status step_session(struct nb_scheduler *s)
{
    struct slot *r = s->running[0];
    if (!r)
        return NB_OK;
    struct nb_batch_input in = next_input(r, s->info.chunk);
    bool complete = in.logits || in.topk > 0;
    in.status = complete ? nbi_session_append_next(s->session, in.ids, in.count, &r->answer.spec)
                         : nbi_session_append(s->session, in.ids, in.count, NULL, 0);
    if (in.status != NB_OK && in.status != NB_EVALUE)
        return in.status;
    advance(s, 0, &in);
    return NB_OK;
}

enum nb_status nb_scheduler_run(struct nb_scheduler *s, int64_t steps, int64_t *active)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(s->cancel);
    enum nb_status rc = NB_OK;
    struct nb_scheduler_info info;
    for (int64_t i = 0; rc == NB_OK; i++) {
        end_cancelled(s);
        begin_requests(s);
        nb_scheduler_info(s, &info);
        if (info.running + info.waiting == 0 || (steps > 0 && i == steps))
            break;
        rc = nbi_check_interrupt();
        if (rc == NB_OK)
            rc = s->batch ? step_batch(s) : step_session(s);
    }
    if (active) {
        nb_scheduler_info(s, &info);
        *active = info.running + info.waiting;
    }
    return rc;
}

void nb_scheduler_info(struct nb_scheduler *s, struct nb_scheduler_info *info)
{
    pthread_mutex_lock(&s->lock);
    *info = (struct nb_scheduler_info){
        .waiting = s->waiting, .pages = s->info.pages, .reserved = s->reserved};
    for (int64_t i = 0; i < s->info.sequences; i++)
        info->running += s->running[i] != NULL;
    pthread_mutex_unlock(&s->lock);
}

/* ---- open and close ---- */

static enum nb_status open_batch(struct nb_scheduler *s, const struct nb_batch_opts *opts)
{
    NBI_TRY(nb_batch_open(&s->batch, s->engine, opts));
    nb_batch_info(s->batch, &s->info);
    s->deterministic = opts->deterministic;
    return NB_OK;
}

static void use_session(struct nb_scheduler *s, struct nb_session *session, int64_t context)
{
    s->session = session;
    s->info = (struct nb_batch_info){.sequences = 1,
                                     .context = context,
                                     .chunk = nbi_session_chunk(session),
                                     .pages = nbi_kv_pages(nbi_session_context(session))};
}

/* A session in place of a batch of one sequence, with no more memory for keys and values. */
static enum nb_status open_session(struct nb_scheduler *s, const struct nb_batch_opts *opts)
{
    struct nb_batch_opts o;
    struct nb_session *session;
    NBI_TRY(nbi_batch_defaults(s->engine, opts, &o));
    int64_t pool = nbi_kv_pages(o.tokens) * NBI_PAGE;
    const struct nbi_session_opts session_opts = {.context = pool < o.context ? pool : o.context,
                                                  .chunk = o.chunk,
                                                  .kv = nbi_kv_types[o.kv].dtype,
                                                  .exact = o.exact};
    NBI_TRY(nbi_session_new(&session, s->engine, &session_opts));
    s->owns_session = true;
    use_session(s, session, o.context);
    return NB_OK;
}

/* The bits of a session on a GPU depend on how its tokens came in, and so on the request before. */
static bool suits_session(const struct nb_engine *engine, const struct nb_batch_opts *opts)
{
    return opts->sequences == 1 &&
           (!opts->deterministic || nbi_backend_has(engine->be, NBI_CAP_BATCH_INVARIANT));
}

static struct nb_scheduler *new_scheduler(const struct nb_engine *engine)
{
    struct nb_scheduler *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->engine = engine;
    s->end = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

static enum nb_status make_slots(struct nb_scheduler *s)
{
    size_t n = (size_t)s->info.sequences;
    s->running = calloc(n, sizeof *s->running);
    s->inputs = calloc(n, sizeof *s->inputs);
    return s->running && s->inputs ? NB_OK : nbi_fail_memory("scheduler", n * sizeof *s->inputs);
}

/* Hands out a scheduler that has what to compute with, or closes it. */
static enum nb_status hand_out(struct nb_scheduler **out, struct nb_scheduler *s, enum nb_status rc)
{
    if (rc == NB_OK)
        rc = make_slots(s);
    if (rc == NB_OK)
        *out = s;
    else
        nb_scheduler_close(s);
    return rc;
}

enum nb_status nb_scheduler_open(struct nb_scheduler **out, const struct nb_engine *engine,
                                 const struct nb_scheduler_opts *opts)
{
    struct nb_scheduler *s = new_scheduler(engine);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("scheduler", sizeof *s);
    s->cancel = opts->batch.cancel;
    return hand_out(out, s,
                    suits_session(engine, &opts->batch) ? open_session(s, &opts->batch)
                                                        : open_batch(s, &opts->batch));
}

enum nb_status nbi_scheduler_open_over(struct nb_scheduler **out, struct nb_session *session)
{
    struct nb_scheduler *s = new_scheduler(nbi_session_engine(session));
    *out = NULL;
    if (!s)
        return nbi_fail_memory("scheduler", sizeof *s);
    use_session(s, session, nbi_session_context(session));
    return hand_out(out, s, NB_OK);
}

void nbi_scheduler_end(struct nb_scheduler *s, enum nb_status rc)
{
    for (int64_t i = 0; s->running && i < s->info.sequences; i++)
        if (s->running[i])
            leave(s, i, rc != NB_OK ? rc : was_cancelled(s->running[i]));
    while (s->first) {
        struct slot *r = s->first;
        unlink_request(s, &s->first);
        finish(r, rc != NB_OK ? rc : was_cancelled(r));
    }
}

void nb_scheduler_close(struct nb_scheduler *s)
{
    if (!s)
        return;
    nbi_scheduler_end(s, NB_OK);
    nb_batch_close(s->batch);
    if (s->owns_session)
        nb_session_close(s->session);
    pthread_mutex_destroy(&s->lock);
    free(s->running);
    free(s->inputs);
    free(s);
}
