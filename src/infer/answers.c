/* answers.c - submits as many requests as run at a time; each that ends submits the next. */
#include "infer/answers.h"

#include <string.h>

#include "infer/batch.h"

#define PARALLEL   16
#define POOL_BYTES ((int64_t)512 << 20) /* of keys and values, unless one answer needs more */

struct nbi_answer_run {
    struct nbi_answers *all;
    struct nb_scheduler *scheduler;
    int64_t next;          /* the answer to request next */
    enum nb_status status; /* of the first failure */
    char error[1024];
};

/* Takes the message of the first failure; answer: the one that failed, or -1. */
static void note(struct nbi_answer_run *r, enum nb_status rc, int64_t answer)
{
    if (rc == NB_OK || r->status != NB_OK)
        return;
    r->status = rc;
    r->all->failed = answer;
    snprintf(r->error, sizeof r->error, "%s", nb_last_error());
}

static void submit_next(struct nbi_answer_run *r);

static void keep(void *ctx, int64_t id, enum nb_status status, struct nb_generate_result *result)
{
    struct nbi_answer *a = ctx;
    struct nbi_answer_run *r = a->run;
    struct nbi_answers *all = r->all;
    (void)id;
    a->result = *result;
    *result = (struct nb_generate_result){0};
    note(r, status, a - all->list);
    if (r->status != NB_OK)
        return;
    if (all->answered)
        all->answered(all->ctx);
    submit_next(r);
}

static void submit_next(struct nbi_answer_run *r)
{
    int64_t i = r->next, id;
    if (i == r->all->count)
        return;
    struct nbi_answer *a = &r->all->list[i];
    const struct nb_request request = {
        .ids = a->ids, .count = a->count, .opts = a->opts, .done = keep, .ctx = a};
    r->next++;
    a->run = r;
    note(r, nb_scheduler_submit(r->scheduler, &request, &id), i);
}

/* The context that every prompt fits into with its answer. */
static int64_t context_for(const struct nbi_config *c, const struct nbi_answers *all)
{
    int64_t context = 1, limit = c->max_position;
    for (int64_t i = 0; i < all->count; i++) {
        int64_t max = all->list[i].opts.max_tokens, n = (int64_t)all->list[i].count;
        n = max > 0 && max < limit - n ? n + max : limit;
        context = n > context ? n : context;
    }
    return context;
}

static struct nb_batch_opts batch_opts(const struct nb_engine *e, const struct nbi_answers *all)
{
    const struct nbi_config *c = &e->config;
    bool in_turn = all->independent && !nbi_batch_shares_passes(e, false);
    int64_t page_bytes =
        2 * c->layers * (int64_t)nbi_dtype_bytes(NBI_F16, NBI_PAGE * c->kv_heads * c->head_dim);
    struct nb_batch_opts o = {.sequences = in_turn ? 1 : PARALLEL,
                              .context = context_for(c, all),
                              .kv = NB_KV_F16,
                              .deterministic = all->independent && !in_turn};
    if (o.sequences > all->count)
        o.sequences = all->count;
    int64_t single = nbi_kv_pages(o.context), pages = POOL_BYTES / page_bytes;
    if (pages > o.sequences * single)
        pages = o.sequences * single;
    o.tokens = (pages > single ? pages : single) * NBI_PAGE;
    return o;
}

enum nb_status nbi_answer_all(const struct nb_engine *engine, struct nbi_answers *answers)
{
    struct nbi_answer_run r = {.all = answers};
    answers->failed = -1;
    if (answers->count == 0)
        return NB_OK;
    const struct nb_scheduler_opts opts = {.batch = batch_opts(engine, answers)};
    NBI_TRY(nb_scheduler_open(&r.scheduler, engine, &opts));
    for (int64_t i = 0; i < opts.batch.sequences; i++)
        submit_next(&r);
    for (int64_t active = 1; active > 0 && r.status == NB_OK;)
        note(&r, nb_scheduler_run(r.scheduler, 1, &active), -1);
    nb_scheduler_close(r.scheduler);
    return r.status == NB_OK ? NB_OK : nbi_fail(r.status, "%s", r.error);
}
