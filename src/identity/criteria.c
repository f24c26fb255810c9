/* criteria.c - checks whether a model learned its identity and kept everything else.
 *
 * The model before and after training answers the same questions; answers, likelihoods and
 * perplexity are compared with fixed limits. */
#include <math.h>
#include <string.h>

#include "base/file.h"
#include "eval/text_similarity.h"
#include "identity/questions.h"
#include "infer/engine.h"

/* The old answer counts as kept if the new model gives its tokens, on average, at most this much
 * lower log-likelihood. */
#define KEPT_NATS 0.1

/* An answer is repetitive if a phrase of this many words occurs this often. */
#define PHRASE_WORDS 4
#define PHRASE_TIMES 3

#define TEXT_MAX ((size_t)64 << 20)

_Static_assert((int)NB_IDENTITY_LANGUAGES == (int)NBI_IDENTITY_LANGUAGES,
               "public and internal count agree");

/* ---- counting ---- */

static enum nb_status repeats(const struct nb_ab_answer *a, bool *yes)
{
    return nbi_repeats((struct nbi_strview){a->text, a->len}, PHRASE_WORDS, PHRASE_TIMES, yes);
}

/* Classifies the answers to one question. For questions that are not about the model, a fault that
 * the base model had already is not counted. */
static enum nb_status classify(const struct nbi_questions *q, const struct nb_ab_row *row,
                               enum nb_identity_kind kind, struct nb_identity_count *c)
{
    const struct nb_ab_answer *before = &row->answer[0], *after = &row->answer[1];
    bool lenient = kind == NB_IDENTITY_CONTRAST || kind == NB_IDENTITY_UNRELATED;
    bool said[2], repeated[2];
    NBI_TRY(nbi_says_identity(q, before->text, before->len, &said[0]));
    NBI_TRY(nbi_says_identity(q, after->text, after->len, &said[1]));
    NBI_TRY(repeats(before, &repeated[0]));
    NBI_TRY(repeats(after, &repeated[1]));
    double lost = row->score[1][NB_AB_A].nll - row->score[0][NB_AB_A].nll;
    *c = (struct nb_identity_count){.asked = 1,
                                    .identity = said[1],
                                    .identity_before = said[0],
                                    .same = row->identical,
                                    .kept = row->identical || lost <= KEPT_NATS,
                                    .ended = after->finish == NB_FINISH_STOP ||
                                             (lenient && before->finish != NB_FINISH_STOP),
                                    .repeated = repeated[1] && !(lenient && repeated[0])};
    return NB_OK;
}

static void add(struct nb_identity_count *sum, const struct nb_identity_count *one)
{
    sum->asked += one->asked;
    sum->identity += one->identity;
    sum->identity_before += one->identity_before;
    sum->same += one->same;
    sum->kept += one->kept;
    sum->ended += one->ended;
    sum->repeated += one->repeated;
}

static enum nb_status count_all(const struct nbi_questions *q, struct nb_identity_result *r)
{
    double kl = 0;
    int64_t tokens = 0;
    for (size_t i = 0; i < q->count; i++) {
        const struct nb_ab_row *row = &r->ab.rows[i];
        struct nb_identity_count one;
        NBI_TRY(classify(q, row, q->kinds[i], &one));
        add(&r->kind[q->kinds[i]], &one);
        if (q->kinds[i] == NB_IDENTITY_HELD_OUT)
            add(&r->held_out[q->lines[i]->language], &one);
        if (q->kinds[i] != NB_IDENTITY_UNRELATED)
            continue;
        kl += row->kl * (double)row->score[0][NB_AB_A].tokens;
        tokens += row->score[0][NB_AB_A].tokens;
    }
    r->kl = kl / (double)tokens;
    return NB_OK;
}

/* ---- perplexity ---- */

static enum nb_status measure(const struct nb_engine_opts *model, const char *text, size_t len,
                              double *ppl)
{
    struct nb_engine *engine = NULL;
    struct nb_ppl_result result;
    const struct nb_ppl_opts opts = {.kv = NB_KV_F32};
    int32_t *ids = NULL;
    size_t count = 0;
    NBI_TRY(nb_engine_open(&engine, model));
    enum nb_status rc = engine->tokenizer
                            ? nb_tokenizer_encode(engine->tokenizer, text, len, false, &ids, &count)
                            : nbi_fail(NB_ENOTFOUND, "'%s' has no tokenizer", model->model);
    if (rc == NB_OK)
        rc = nb_eval_ppl(engine, ids, (int64_t)count, &opts, &result);
    free(ids);
    nb_engine_close(engine);
    if (rc == NB_OK)
        *ppl = result.ppl;
    return rc;
}

static enum nb_status measure_both(const struct nb_identity_opts *o, struct nb_identity_result *r)
{
    char *text = NULL;
    size_t len = 0;
    r->ppl_before = r->ppl_after = NAN;
    if (!o->text)
        return NB_OK;
    NBI_TRY(nbi_file_read(o->text, TEXT_MAX, &text, &len));
    enum nb_status rc = measure(&o->base, text, len, &r->ppl_before);
    if (rc == NB_OK)
        rc = measure(&o->model, text, len, &r->ppl_after);
    free(text);
    return nbi_context(rc, "'%s'", o->text);
}

/* ---- the criteria ---- */

static void add_criterion(struct nb_identity_result *r, const char *name, double value,
                          double limit, bool at_least)
{
    struct nb_identity_criterion *c = &r->criteria[r->criteria_count++];
    bool passed = at_least ? value >= limit : value <= limit;
    *c = (struct nb_identity_criterion){name, value, limit, at_least, passed};
    r->passed = r->passed && passed;
}

static double share(int64_t part, int64_t of)
{
    return of > 0 ? (double)part / (double)of : 0;
}

static void check_criteria(struct nb_identity_result *r)
{
    const struct nb_identity_count *trained = &r->kind[NB_IDENTITY_TRAINED],
                                   *held_out = &r->kind[NB_IDENTITY_HELD_OUT],
                                   *contrast = &r->kind[NB_IDENTITY_CONTRAST],
                                   *unrelated = &r->kind[NB_IDENTITY_UNRELATED];
    struct nb_identity_count all = {0}, others = {0};
    for (int i = 0; i < NB_IDENTITY_KINDS; i++)
        add(&all, &r->kind[i]);
    add(&others, contrast);
    add(&others, unrelated);
    r->passed = true;
    add_criterion(r, "knows who it is, asked as in training",
                  share(trained->identity, trained->asked), 0.95, true);
    add_criterion(r, "knows who it is, asked in other words",
                  share(held_out->identity, held_out->asked), 0.9, true);
    add_criterion(r, "says so where it was not asked", share(others.identity, others.asked), 0.02,
                  false);
    add_criterion(r, "ordinary answers kept", share(unrelated->kept, unrelated->asked), 0.9, true);
    add_criterion(r, "answers that end", share(all.ended, all.asked), 1, true);
    add_criterion(r, "answers that repeat a phrase", share(all.repeated, all.asked), 0, false);
    if (isfinite(r->ppl_before))
        add_criterion(r, "perplexity of the text, after / before", r->ppl_after / r->ppl_before,
                      1.02, false);
}

/* ---- the evaluation ---- */

static enum nb_status make_prompts(const struct nbi_questions *q, struct nb_prompts **out)
{
    struct nbi_prompt_pair *pairs = calloc(q->count ? q->count : 1, sizeof *pairs);
    if (!pairs)
        return nbi_fail_memory("questions", q->count * sizeof *pairs);
    for (size_t i = 0; i < q->count; i++)
        pairs[i] = (struct nbi_prompt_pair){q->lines[i]->prompt, q->lines[i]->answer};
    enum nb_status rc = nbi_prompts_make(out, pairs, q->count, "question");
    free(pairs);
    return rc;
}

static enum nb_status ask(const struct nb_identity_opts *o, const struct nbi_questions *q,
                          struct nb_identity_result *r)
{
    NBI_TRY(make_prompts(q, &r->prompts));
    const struct nb_ab_opts ab = {.model = {o->base, o->model},
                                  .one_at_a_time = o->one_at_a_time,
                                  .prompts = r->prompts,
                                  .no_think = true,
                                  .max_tokens = o->max_tokens,
                                  .progress = o->progress,
                                  .progress_ctx = o->progress_ctx};
    NBI_TRY(nb_eval_ab(&ab, &r->ab));
    return count_all(q, r);
}

enum nb_status nb_identity_eval(const struct nb_identity_opts *o, struct nb_identity_result *r)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(o->cancel);
    struct nbi_questions q;
    *r = (struct nb_identity_result){0};
    for (int i = 0; i < NB_IDENTITY_LANGUAGES; i++)
        r->language[i] = nbi_identity_language_name((enum nbi_identity_language)i);
    NBI_TRY(nbi_questions_make(&q, &o->set, o->questions));
    enum nb_status rc = ask(o, &q, r);
    if (rc == NB_OK)
        rc = measure_both(o, r);
    if (rc == NB_OK) {
        check_criteria(r);
        r->kinds = q.kinds;
        q.kinds = NULL;
    }
    nbi_questions_release(&q);
    if (rc != NB_OK)
        nb_identity_result_release(r);
    return rc;
}

void nb_identity_result_release(struct nb_identity_result *r)
{
    nb_ab_result_release(&r->ab);
    nb_prompts_close(r->prompts);
    free(r->kinds);
    *r = (struct nb_identity_result){0};
}
