/* ab.c - compares the answers of two models to the same prompts.
 *
 * Answers are generated as by `nibble generate`, several at a time; scores use f32 activations and
 * an f32 KV cache. With both models loaded, both score a text chunk by chunk, so that their
 * distributions can be compared row by row. One at a time, A is loaded twice: B's answers exist
 * only after A's turn. */
#include "eval/ab.h"

#include <math.h>
#include <string.h>

#include "eval/text_similarity.h"
#include "infer/answers.h"

void nbi_ab_progress(struct nbi_ab *ab, int steps)
{
    ab->done += (uint64_t)steps;
    if (ab->opts->progress)
        ab->opts->progress(ab->opts->progress_ctx, ab->done, ab->total);
}

/* ---- models ---- */

static enum nb_status load(struct nbi_ab *ab, int s)
{
    struct nbi_ab_side *side = &ab->side[s];
    const struct nb_engine_opts *o = &ab->opts->model[s];
    NBI_TRY(nb_engine_open(&side->engine, o));
    if (!side->engine->tokenizer || !side->engine->chat)
        return nbi_fail(NB_ENOTFOUND, "'%s' has no tokenizer", o->model);
    return NB_OK;
}

static void unload(struct nbi_ab *ab, int s)
{
    nb_engine_close(ab->side[s].engine);
    ab->side[s].engine = NULL;
}

static bool same_vocabulary(const struct nbi_ab *ab)
{
    const struct nbi_ab_side *a = &ab->side[0], *b = &ab->side[1];
    return a->V == b->V && a->tokens == b->tokens && a->vocabulary == b->vocabulary;
}

/* ---- answers ---- */

static void count_answer(void *ctx)
{
    nbi_ab_progress(ctx, 1);
}

/* What to ask of a model for each prompt. */
static void make_requests(const struct nbi_ab *ab, int s, struct nbi_answers *all)
{
    struct nb_generate_opts g = {.sampling = ab->side[s].engine->defaults,
                                 .max_tokens = ab->opts->max_tokens};
    g.sampling.temperature = ab->opts->temperature;
    g.sampling.seed = ab->opts->seed;
    for (int64_t i = 0; i < all->count; i++) {
        const struct nbi_ab_ids *prompt = &ab->side[s].items[i].prompt;
        all->list[i] = (struct nbi_answer){.ids = prompt->p, .count = prompt->count, .opts = g};
    }
}

static void keep_answer(struct nbi_ab *ab, int s, int64_t i, struct nb_generate_result *r)
{
    struct nb_ab_answer *out = &ab->result->rows[i].answer[s];
    out->text = r->text;
    out->len = r->len;
    out->tokens = (int64_t)r->count;
    out->finish = r->finish;
    ab->side[s].items[i].text[s] = (struct nbi_ab_ids){r->ids, r->count};
    *r = (struct nb_generate_result){0};
}

static enum nb_status answer_all(struct nbi_ab *ab, int s)
{
    struct nbi_answers all = {
        .count = ab->result->count, .answered = count_answer, .ctx = ab, .independent = true};
    all.list = calloc((size_t)all.count, sizeof *all.list);
    if (!all.list)
        return nbi_fail_memory("answers", (size_t)all.count * sizeof *all.list);
    make_requests(ab, s, &all);
    enum nb_status rc = nbi_answer_all(ab->side[s].engine, &all);
    if (rc != NB_OK && rc != NB_EINTERRUPTED)
        rc = nbi_context(rc, "%s, model %c",
                         all.failed < 0 ? "answers" : ab->result->rows[all.failed].prompt.place,
                         'A' + s);
    for (int64_t i = 0; i < all.count; i++) {
        if (rc == NB_OK)
            keep_answer(ab, s, i, &all.list[i].result);
        nb_generate_result_release(&all.list[i].result);
    }
    free(all.list);
    return rc;
}

/* ---- scores ---- */

/* Scores all prompts' texts of a set of bits under sides [first, last]. */
static enum nb_status score_all(struct nbi_ab *ab, unsigned texts, int first, int last)
{
    enum nb_status rc = nbi_ab_begin_scores(ab, first, last);
    for (int64_t i = 0; rc == NB_OK && i < ab->result->count; i++)
        for (int t = 0; rc == NB_OK && t < NB_AB_TEXTS; t++)
            if (texts >> t & 1) {
                rc = nbi_ab_score(ab, i, (enum nb_ab_text)t, first, last);
                if (rc != NB_EINTERRUPTED)
                    rc = nbi_context(rc, "%s", ab->result->rows[i].prompt.place);
            }
    nbi_ab_end_scores(ab);
    return rc;
}

enum { OF_A = 1 << NB_AB_A, OF_B = 1 << NB_AB_B, OF_EXPECTED = 1 << NB_AB_EXPECTED };

static enum nb_status run_both(struct nbi_ab *ab)
{
    for (int s = 0; s < 2; s++) {
        NBI_TRY(load(ab, s));
        NBI_TRY(nbi_ab_vocabulary(&ab->side[s]));
        NBI_TRY(nbi_ab_prompts(ab, s));
    }
    ab->result->same_vocabulary = same_vocabulary(ab);
    for (int s = 0; s < 2; s++)
        NBI_TRY(answer_all(ab, s));
    for (int s = 0; s < 2; s++)
        NBI_TRY(nbi_ab_encode_other(ab, s));
    return score_all(ab, OF_A | OF_B | OF_EXPECTED, 0, 1);
}

static enum nb_status run_one_at_a_time(struct nbi_ab *ab)
{
    for (int s = 0; s < 2; s++) {
        NBI_TRY(load(ab, s));
        NBI_TRY(nbi_ab_vocabulary(&ab->side[s]));
        NBI_TRY(nbi_ab_prompts(ab, s));
        NBI_TRY(answer_all(ab, s));
        ab->result->same_vocabulary = s == 1 && same_vocabulary(ab);
        if (s == 1)
            NBI_TRY(nbi_ab_encode_other(ab, s));
        NBI_TRY(score_all(ab, s == 0 ? OF_A | OF_EXPECTED : OF_A | OF_B | OF_EXPECTED, s, s));
        unload(ab, s);
    }
    NBI_TRY(load(ab, 0));
    NBI_TRY(nbi_ab_encode_other(ab, 0));
    return score_all(ab, OF_B, 0, 0);
}

/* ---- results ---- */

static enum nb_status compare_answers(struct nb_ab_row *row)
{
    struct nbi_strview text[2];
    for (int s = 0; s < 2; s++) {
        struct nb_ab_answer *a = &row->answer[s];
        text[s] = (struct nbi_strview){a->text, a->len};
        if (!row->prompt.expected)
            continue;
        struct nbi_strview plain = nbi_strip_thinking(a->text, a->len);
        struct nbi_strview wanted =
            nbi_strip_thinking(row->prompt.expected, strlen(row->prompt.expected));
        a->match = nbi_strview_equal(plain, wanted);
        NBI_TRY(nbi_word_f1(plain, wanted, &a->f1));
    }
    row->identical = nbi_strview_equal(text[0], text[1]);
    row->prefix = nbi_common_prefix(text[0], text[1]);
    return nbi_word_f1(text[0], text[1], &row->f1);
}

static void add_score(struct nb_ab_score *sum, const struct nb_ab_score *one)
{
    sum->nll += one->nll * (double)one->tokens;
    sum->tokens += one->tokens;
}

static void add_row(struct nb_ab_totals *t, const struct nb_ab_row *row)
{
    t->prompts++;
    t->expected += row->prompt.expected != NULL;
    t->identical += row->identical;
    t->f1 += row->f1;
    t->prefix += row->prefix;
    for (int s = 0; s < 2; s++) {
        t->match[s] += row->answer[s].match;
        t->expected_f1[s] += row->prompt.expected ? row->answer[s].f1 : 0;
        for (int k = 0; k < NB_AB_TEXTS; k++)
            add_score(&t->score[s][k], &row->score[s][k]);
    }
    t->kl += row->kl * (double)row->score[0][NB_AB_A].tokens; /* NaN if any row has none */
}

static enum nb_status finish(struct nb_ab_result *r)
{
    struct nb_ab_totals *t = &r->totals;
    for (int64_t i = 0; i < r->count; i++) {
        NBI_TRY(compare_answers(&r->rows[i]));
        add_row(t, &r->rows[i]);
    }
    t->f1 /= (double)t->prompts;
    t->prefix /= (double)t->prompts;
    t->kl /= (double)t->score[0][NB_AB_A].tokens;
    for (int s = 0; s < 2; s++) {
        t->expected_f1[s] /= (double)t->expected;
        for (int k = 0; k < NB_AB_TEXTS; k++)
            t->score[s][k].nll /= (double)t->score[s][k].tokens;
    }
    return NB_OK;
}

static enum nb_status begin(struct nbi_ab *ab)
{
    struct nb_ab_result *r = ab->result;
    int64_t count = nb_prompts_count(ab->opts->prompts);
    if (ab->opts->max_tokens < 1)
        return nbi_fail(NB_EINVAL, "answers of %lld tokens", (long long)ab->opts->max_tokens);
    r->rows = calloc((size_t)count, sizeof *r->rows);
    if (!r->rows)
        return nbi_fail_memory("rows", (size_t)count * sizeof *r->rows);
    r->count = count;
    for (int64_t i = 0; i < count; i++) {
        struct nb_ab_row *row = &r->rows[i];
        nb_prompts_at(ab->opts->prompts, i, &row->prompt);
        row->kl = row->answer[0].f1 = row->answer[1].f1 = NAN;
        ab->total += row->prompt.expected ? 8 : 6; /* two answers, two or three texts under both */
    }
    return NB_OK;
}

enum nb_status nb_eval_ab(const struct nb_ab_opts *opts, struct nb_ab_result *result)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nbi_ab ab = {.opts = opts, .result = result};
    memset(result, 0, sizeof *result);
    enum nb_status rc = begin(&ab);
    if (rc == NB_OK)
        rc = opts->one_at_a_time ? run_one_at_a_time(&ab) : run_both(&ab);
    if (rc == NB_OK)
        rc = finish(result);
    for (int s = 0; s < 2; s++) {
        unload(&ab, s);
        nbi_ab_release_items(&ab.side[s], result->count);
    }
    if (rc != NB_OK)
        nb_ab_result_release(result);
    return rc;
}

void nb_ab_result_release(struct nb_ab_result *result)
{
    for (int64_t i = 0; i < result->count; i++)
        for (int s = 0; s < 2; s++)
            free(result->rows[i].answer[s].text);
    free(result->rows);
    *result = (struct nb_ab_result){0};
}
