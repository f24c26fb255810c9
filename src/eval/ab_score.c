/* ab_score.c - scores texts under each model: mean negative log-likelihood, and KL divergence. */
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "base/parallel.h"
#include "eval/ab.h"
#include "eval/perplexity.h"

#define MAX_ROWS 512 /* of logits at a time */

/* ---- sessions ---- */

static const struct nbi_ab_ids *prompt_of(const struct nbi_ab_item *item, enum nb_ab_text t)
{
    return t == NB_AB_EXPECTED && item->no_think.count > 0 ? &item->no_think : &item->prompt;
}

/* How many tokens of a text can be scored: those that fit into the context after the prompt. The
 * last one is predicted but never fed, so it takes no position. */
static int64_t scored_tokens(const struct nbi_ab_side *side, int64_t i, enum nb_ab_text t)
{
    const struct nbi_ab_item *item = &side->items[i];
    int64_t n = (int64_t)item->text[t].count;
    int64_t left = side->engine->config.max_position - (int64_t)prompt_of(item, t)->count + 1;
    return left < 0 ? 0 : n < left ? n : left;
}

static enum nb_status open_side(struct nbi_ab *ab, struct nbi_ab_side *side)
{
    int64_t context = 1;
    for (int64_t i = 0; i < ab->result->count; i++)
        for (int t = 0; t < NB_AB_TEXTS; t++) {
            int64_t n = scored_tokens(side, i, t);
            int64_t all = (int64_t)prompt_of(&side->items[i], t)->count + n - 1;
            context = n > 0 && all > context ? all : context;
        }
    const struct nbi_session_opts opts = {
        .context = context, .logits = ab->chunk, .kv = NBI_F32, .exact = true};
    side->cached_prompt = NULL;
    side->logits = malloc((size_t)(ab->chunk * side->V) * sizeof *side->logits);
    side->nll = malloc((size_t)ab->chunk * sizeof *side->nll);
    if (!side->logits || !side->nll)
        return nbi_fail_memory("logits", (size_t)(ab->chunk * side->V) * sizeof *side->logits);
    return nbi_session_new(&side->session, side->engine, &opts);
}

enum nb_status nbi_ab_begin_scores(struct nbi_ab *ab, int first, int last)
{
    int64_t V = ab->side[first].V > ab->side[last].V ? ab->side[first].V : ab->side[last].V;
    ab->chunk = nbi_logits_rows(V, 1, MAX_ROWS);
    ab->kl = malloc((size_t)ab->chunk * sizeof *ab->kl);
    if (!ab->kl)
        return nbi_fail_memory("scores", (size_t)ab->chunk * sizeof *ab->kl);
    for (int s = first; s <= last; s++)
        NBI_TRY(open_side(ab, &ab->side[s]));
    return NB_OK;
}

void nbi_ab_end_scores(struct nbi_ab *ab)
{
    for (int s = 0; s < 2; s++) {
        struct nbi_ab_side *side = &ab->side[s];
        nb_session_close(side->session);
        free(side->sequence);
        free(side->logits);
        free(side->nll);
        side->session = NULL;
        side->sequence = NULL;
        side->logits = NULL;
        side->nll = NULL;
        side->capacity = 0;
    }
    free(ab->kl);
    ab->kl = NULL;
}

/* ---- one chunk ---- */

struct pass {
    struct nbi_ab *ab;
    int first, last; /* sides */
    bool kl;
    const int32_t *targets[2]; /* by side: the token that each row of logits should predict */
};

static enum nb_status score_rows(void *ctx, int thread, int64_t from, int64_t count)
{
    struct pass *p = ctx;
    (void)thread;
    for (int64_t i = from; i < from + count; i++) {
        for (int s = p->first; s <= p->last; s++) {
            struct nbi_ab_side *side = &p->ab->side[s];
            side->nll[i] = nbi_token_nll(side->logits + i * side->V, side->V, p->targets[s][i]);
        }
        if (p->kl) {
            int64_t V = p->ab->side[0].V;
            p->ab->kl[i] =
                nbi_token_kl(p->ab->side[0].logits + i * V, p->ab->side[1].logits + i * V, V);
        }
    }
    return NB_OK;
}

/* ---- one text ---- */

/* Copies prompt and n tokens of the text into the sequence, and puts the prompt without its last
 * token into the session, unless it is there already. */
static enum nb_status begin_text(struct nbi_ab_side *side, int64_t i, enum nb_ab_text t, int64_t n)
{
    const struct nbi_ab_ids *prompt = prompt_of(&side->items[i], t);
    const struct nbi_ab_ids *text = &side->items[i].text[t];
    size_t all = prompt->count + (size_t)n;
    NBI_TRY(NBI_ARRAY_RESERVE(side->sequence, side->capacity, all, "tokens"));
    memcpy(side->sequence, prompt->p, prompt->count * sizeof *prompt->p);
    memcpy(side->sequence + prompt->count, text->p, (size_t)n * sizeof *text->p);
    /* The session checks ids too, but never sees the last one. */
    NBI_TRY(nbi_engine_check_ids(side->engine, side->sequence + prompt->count, n));
    bool cached = side->cached_prompt == prompt->p;
    int64_t n_prompt = (int64_t)prompt->count - 1;
    nb_session_truncate(side->session, cached ? n_prompt : 0);
    if (!cached && n_prompt > 0)
        NBI_TRY(nbi_session_append(side->session, prompt->p, n_prompt, NULL, 0));
    side->cached_prompt = prompt->p;
    return NB_OK;
}

/* Scores tokens [at, at + rows) of the text. */
static enum nb_status score_chunk(struct pass *p, int64_t i, enum nb_ab_text t, int64_t at,
                                  int64_t rows)
{
    struct nb_ab_row *row = &p->ab->result->rows[i];
    for (int s = p->first; s <= p->last; s++) {
        struct nbi_ab_side *side = &p->ab->side[s];
        const int32_t *from = side->sequence + prompt_of(&side->items[i], t)->count - 1 + at;
        NBI_TRY(nbi_check_interrupt());
        NBI_TRY(nbi_session_append(side->session, from, rows, side->logits, rows));
        p->targets[s] = from + 1;
    }
    NBI_TRY(nbi_for_chunks(rows, 1, p->ab->side[p->first].engine->threads, score_rows, p));
    for (int64_t k = 0; k < rows; k++) {
        for (int s = p->first; s <= p->last; s++) {
            if (!isfinite(p->ab->side[s].nll[k]))
                return nbi_fail(NB_EVALUE, "model %c gave a logit that is not finite", 'A' + s);
            row->score[s][t].nll += p->ab->side[s].nll[k];
        }
        if (p->kl)
            row->kl += p->ab->kl[k];
    }
    return NB_OK;
}

enum nb_status nbi_ab_score(struct nbi_ab *ab, int64_t i, enum nb_ab_text t, int first, int last)
{
    struct nb_ab_row *row = &ab->result->rows[i];
    int64_t n = scored_tokens(&ab->side[first], i, t), other = scored_tokens(&ab->side[last], i, t);
    struct pass p = {.ab = ab, .first = first, .last = last};
    if (first != last && !ab->result->same_vocabulary) {
        NBI_TRY(nbi_ab_score(ab, i, t, first, first));
        return nbi_ab_score(ab, i, t, last, last);
    }
    n = other < n ? other : n;
    if (n == 0)
        return NB_OK;
    p.kl = first != last && t == NB_AB_A;
    for (int s = first; s <= last; s++) {
        NBI_TRY(begin_text(&ab->side[s], i, t, n));
        row->score[s][t] = (struct nb_ab_score){.tokens = n};
    }
    if (p.kl)
        row->kl = 0;
    for (int64_t at = 0, rows; at < n; at += rows) {
        rows = n - at < ab->chunk ? n - at : ab->chunk;
        NBI_TRY(score_chunk(&p, i, t, at, rows));
    }
    for (int s = first; s <= last; s++)
        row->score[s][t].nll /= (double)n;
    if (p.kl)
        row->kl /= (double)n;
    nbi_ab_progress(ab, last - first + 1);
    return NB_OK;
}
