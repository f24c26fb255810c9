/* scheduler.c - as many answers at a time as there are lanes; where one ends the next job begins.
 */
#include "infer/scheduler.h"

#include "infer/response.h"

struct lane {
    struct nbi_request *job; /* NULL: free */
    struct nbi_response answer;
    int64_t sequence;
    size_t fed; /* tokens of the prompt */
    int32_t id; /* the last token of the answer, behind the prompt */
};

struct many {
    const struct nb_engine *engine;
    const struct nbi_scheduler_opts *opts;
    struct nb_batch *batch;
    struct nb_batch_info info;
    struct lane *lanes;
    struct nb_batch_input *parts;
    struct nbi_request *next, *end; /* jobs that have not begun */
};

/* Tokens of the longest one, with its answer. */
static int64_t longest(const struct nb_engine *engine, const struct nbi_request *jobs,
                       int64_t count)
{
    int64_t most = 1, limit = engine->config.max_position;
    for (int64_t i = 0; i < count; i++) {
        int64_t max = jobs[i].opts.max_tokens, n = (int64_t)jobs[i].count;
        n = max > 0 && max < limit - n ? n + max : limit;
        most = n > most ? n : most;
    }
    return most;
}

static enum nb_status begin(struct many *m, struct lane *l)
{
    struct nbi_request *job = m->next++;
    if ((int64_t)job->count > m->info.context)
        return nbi_fail(NB_EVALUE, "a prompt has %zu tokens, and the context is of %lld",
                        job->count, (long long)m->info.context);
    *l = (struct lane){.job = job,
                       .answer = {.engine = m->engine, .opts = &job->opts, .result = &job->result}};
    NBI_TRY(nbi_response_begin(&l->answer, job->prompt, job->count, m->info.context));
    return nb_batch_add(m->batch, &l->sequence);
}

static enum nb_status end(struct lane *l, enum nb_status rc)
{
    l->job = NULL;
    return nbi_response_end(&l->answer, rc);
}

/* What a lane has in a step: some of its prompt, or its last token. Nothing: count is 0. */
static struct nb_batch_input part_of(struct lane *l, int64_t room)
{
    struct nb_batch_input p = {.sequence = l->sequence, .ids = &l->id, .count = 1};
    struct nbi_logits_spec *next = &l->answer.next;
    int64_t left = (int64_t)(l->job->count - l->fed);
    if (left > 0) {
        p.ids = l->job->prompt + l->fed;
        p.count = left < room ? left : room;
        l->fed += (size_t)p.count;
    }
    if (left > p.count) /* nothing is wanted before the end of the prompt */
        return p;
    p.logits = next->logits;
    p.candidates = next->logits ? NULL : next->candidates;
    p.topk = next->logits ? 0 : next->k;
    return p;
}

/* After the step that had the part. */
static enum nb_status go_on(struct many *m, struct lane *l, const struct nb_batch_input *p)
{
    bool done = false;
    if (!p->logits && !p->candidates)
        return NB_OK;
    if (p->nonfinite)
        return nbi_fail(NB_EVALUE, "a logit is not finite");
    NBI_TRY(nbi_response_token(&l->answer, m->info.context - nb_batch_length(m->batch, l->sequence),
                               &l->id, &done));
    if (!done)
        return NB_OK;
    NBI_TRY(nb_batch_drop(m->batch, l->sequence));
    NBI_TRY(end(l, NB_OK));
    if (m->opts->done)
        m->opts->done(m->opts->ctx);
    return NB_OK;
}

/* A token of each answer that has begun; what room is left is for prompts. */
static enum nb_status step(struct many *m, bool *any)
{
    int64_t lanes = m->opts->parallel, count = 0, room = m->info.chunk - lanes;
    struct nb_batch_input *last = m->parts;
    NBI_TRY(nbi_check_interrupt());
    for (int64_t i = 0; i < lanes; i++) {
        struct lane *l = &m->lanes[i];
        if (!l->job && m->next < m->end)
            NBI_TRY(begin(m, l));
        if (!l->job)
            continue;
        *last = part_of(l, room + 1); /* the one that is everyone's */
        room -= last->count - 1;
        last++;
        count++;
    }
    *any = count > 0;
    if (!*any)
        return NB_OK;
    NBI_TRY(nb_batch_step(m->batch, m->parts, count));
    last = m->parts;
    for (int64_t i = 0; i < lanes; i++)
        if (m->lanes[i].job)
            NBI_TRY(go_on(m, &m->lanes[i], last++));
    return NB_OK;
}

static enum nb_status run(struct many *m, int64_t context)
{
    int64_t n = m->opts->parallel;
    m->lanes = calloc((size_t)n, sizeof *m->lanes);
    m->parts = calloc((size_t)n, sizeof *m->parts);
    if (!m->lanes || !m->parts)
        return nbi_fail_memory("answers", (size_t)n * sizeof *m->lanes);
    NBI_TRY(nb_batch_open(
        &m->batch, m->engine,
        &(struct nb_batch_opts){.sequences = n, .context = context, .kv = m->opts->kv}));
    nb_batch_info(m->batch, &m->info);
    enum nb_status rc = NB_OK;
    for (bool any = true; any && rc == NB_OK;)
        rc = step(m, &any);
    for (int64_t i = 0; i < n; i++)
        if (m->lanes[i].job) /* it failed, or another did */
            rc = end(&m->lanes[i], rc);
    return rc;
}

enum nb_status nbi_scheduler_run(const struct nb_engine *engine, struct nbi_request *jobs,
                                 int64_t count, const struct nbi_scheduler_opts *opts)
{
    struct many m = {.engine = engine, .opts = opts, .next = jobs, .end = jobs + count};
    enum nb_status rc = run(&m, longest(engine, jobs, count));
    nb_batch_close(m.batch);
    free(m.lanes);
    free(m.parts);
    return rc;
}

void nbi_requests_free(struct nbi_request *jobs, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        free(jobs[i].prompt);
        nb_generate_result_release(&jobs[i].result);
    }
    free(jobs);
}
