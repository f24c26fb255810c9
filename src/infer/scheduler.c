/* scheduler.c - continuous batching: when a request ends, the next one takes its slot.
 *
 * Each step has a token for every running answer; the rest of the chunk goes to prompts. So a long
 * prompt takes several steps, during which the answers of others go on. */
#include "infer/scheduler.h"

#include "infer/response.h"

struct slot {
    struct nbi_request *request; /* NULL: free */
    struct nbi_response answer;
    int64_t sequence;
    size_t prefilled; /* tokens of the prompt that are in the sequence */
    int32_t id;       /* the last token of the answer */
};

struct scheduler {
    const struct nb_engine *engine;
    const struct nbi_scheduler_opts *opts;
    struct nb_batch *batch;
    struct nb_batch_info info;
    struct slot *slots;             /* [parallel] */
    struct nb_batch_input *inputs;  /* [parallel] of a step, in the order of their slots */
    struct nbi_request *next, *end; /* requests that have not begun */
};

/* The context that every request fits into with its answer. */
static int64_t context_for(const struct nb_engine *engine, const struct nbi_request *requests,
                           int64_t count)
{
    int64_t context = 1, limit = engine->config.max_position;
    for (int64_t i = 0; i < count; i++) {
        int64_t max = requests[i].opts.max_tokens, n = (int64_t)requests[i].count;
        n = max > 0 && max < limit - n ? n + max : limit;
        context = n > context ? n : context;
    }
    return context;
}

static enum nb_status begin(struct scheduler *s, struct slot *slot)
{
    struct nbi_request *r = s->next++;
    if ((int64_t)r->count > s->info.context)
        return nbi_fail(NB_EVALUE, "a prompt has %zu tokens, and the context is of %lld", r->count,
                        (long long)s->info.context);
    *slot = (struct slot){.request = r,
                          .answer = {.engine = s->engine, .opts = &r->opts, .result = &r->result}};
    NBI_TRY(nbi_response_begin(&slot->answer, r->prompt, r->count, s->info.context));
    return nb_batch_add(s->batch, &slot->sequence);
}

static enum nb_status end(struct slot *slot, enum nb_status rc)
{
    slot->request = NULL;
    return nbi_response_end(&slot->answer, rc);
}

/* A slot's input to a step: up to `limit` tokens of its prompt, or the last token of its answer.
 * Candidates or logits are wanted once the prompt is complete. */
static struct nb_batch_input next_input(struct slot *slot, int64_t limit)
{
    struct nb_batch_input in = {.sequence = slot->sequence, .ids = &slot->id, .count = 1};
    struct nbi_logits_spec *spec = &slot->answer.spec;
    int64_t left = (int64_t)(slot->request->count - slot->prefilled);
    if (left > 0) {
        in.ids = slot->request->prompt + slot->prefilled;
        in.count = left < limit ? left : limit;
        slot->prefilled += (size_t)in.count;
    }
    if (left > in.count)
        return in;
    in.logits = spec->logits;
    in.candidates = spec->logits ? NULL : spec->candidates;
    in.topk = spec->logits ? 0 : spec->k;
    return in;
}

/* Samples a slot's next token after a step, and ends the request if it was the last. */
static enum nb_status advance(struct scheduler *s, struct slot *slot,
                              const struct nb_batch_input *in)
{
    bool done = false;
    if (!in->logits && !in->candidates)
        return NB_OK;
    if (in->nonfinite)
        return nbi_fail(NB_EVALUE, "a logit is not finite");
    int64_t left = s->info.context - nb_batch_length(s->batch, slot->sequence);
    NBI_TRY(nbi_response_token(&slot->answer, left, &slot->id, &done));
    if (!done)
        return NB_OK;
    NBI_TRY(nb_batch_drop(s->batch, slot->sequence));
    NBI_TRY(end(slot, NB_OK));
    if (s->opts->done)
        s->opts->done(s->opts->ctx);
    return NB_OK;
}

/* *active: whether any slot had something to do. */
static enum nb_status step(struct scheduler *s, bool *active)
{
    int64_t slots = s->opts->parallel, count = 0;
    int64_t spare = s->info.chunk - slots; /* beyond one token for every slot */
    NBI_TRY(nbi_check_interrupt());
    for (int64_t i = 0; i < slots; i++) {
        struct slot *slot = &s->slots[i];
        if (!slot->request && s->next < s->end)
            NBI_TRY(begin(s, slot));
        if (!slot->request)
            continue;
        s->inputs[count] = next_input(slot, spare + 1);
        spare -= s->inputs[count++].count - 1;
    }
    *active = count > 0;
    if (!*active)
        return NB_OK;
    NBI_TRY(nb_batch_step(s->batch, s->inputs, count));
    const struct nb_batch_input *in = s->inputs;
    for (int64_t i = 0; i < slots; i++)
        if (s->slots[i].request)
            NBI_TRY(advance(s, &s->slots[i], in++));
    return NB_OK;
}

static enum nb_status run(struct scheduler *s, int64_t context)
{
    int64_t n = s->opts->parallel;
    s->slots = calloc((size_t)n, sizeof *s->slots);
    s->inputs = calloc((size_t)n, sizeof *s->inputs);
    if (!s->slots || !s->inputs)
        return nbi_fail_memory("answers", (size_t)n * sizeof *s->slots);
    NBI_TRY(nb_batch_open(
        &s->batch, s->engine,
        &(struct nb_batch_opts){.sequences = n, .context = context, .kv = s->opts->kv}));
    nb_batch_info(s->batch, &s->info);
    enum nb_status rc = NB_OK;
    for (bool active = true; active && rc == NB_OK;)
        rc = step(s, &active);
    for (int64_t i = 0; i < n; i++)
        if (s->slots[i].request) /* it failed, or another did */
            rc = end(&s->slots[i], rc);
    return rc;
}

enum nb_status nbi_scheduler_run(const struct nb_engine *engine, struct nbi_request *requests,
                                 int64_t count, const struct nbi_scheduler_opts *opts)
{
    struct scheduler s = {
        .engine = engine, .opts = opts, .next = requests, .end = requests + count};
    enum nb_status rc = run(&s, context_for(engine, requests, count));
    nb_batch_close(s.batch);
    free(s.slots);
    free(s.inputs);
    return rc;
}

void nbi_requests_free(struct nbi_request *requests, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        free(requests[i].prompt);
        nb_generate_result_release(&requests[i].result);
    }
    free(requests);
}
