/* generate.c - the loop: prompt, then token by token until something ends it. */
#include <string.h>

#include "base/clock.h"
#include "base/crc.h"
#include "base/str.h"
#include "infer/sampler.h"
#include "infer/session.h"

/* ---- text as it grows ---- */

struct answer {
    const struct nb_generate_opts *opts;
    const struct nb_tokenizer *tokenizer; /* NULL: ids alone */
    struct nb_decoder decoder;
    struct nbi_str text; /* all of it; the first `shown` bytes have been handed out */
    size_t shown;
    bool stopped; /* by a stop text */
};

/* Bytes at the end that may be the beginning of a stop text. */
static size_t held_back(const struct answer *a)
{
    size_t most = 0;
    for (const char *const *stop = a->opts->stop; stop && *stop; stop++) {
        size_t n = strlen(*stop);
        if (n > a->text.len - a->shown + 1)
            n = a->text.len - a->shown + 1;
        while (n > 0 && --n > most)
            if (memcmp(a->text.p + a->text.len - n, *stop, n) == 0)
                most = n;
    }
    return most;
}

/* Where the first stop text starts that is not wholly in what was there before; len if none. */
static size_t find_stop(const struct answer *a)
{
    size_t at = a->text.len;
    for (const char *const *stop = a->opts->stop; stop && *stop; stop++) {
        const char *from = a->text.p + a->shown;
        const char *p = **stop ? memmem(from, a->text.len - a->shown, *stop, strlen(*stop)) : NULL;
        if (p && (size_t)(p - a->text.p) < at)
            at = (size_t)(p - a->text.p);
    }
    return at;
}

static enum nb_status show(struct answer *a, size_t end)
{
    size_t from = a->shown;
    a->shown = end;
    if (!a->opts->text || end == from)
        return NB_OK;
    return a->opts->text(a->opts->ctx, a->text.p + from, end - from);
}

/* id -1: the answer ends. */
static enum nb_status grow(struct answer *a, int32_t id)
{
    const char *text;
    size_t len;
    if (!a->tokenizer || a->stopped)
        return NB_OK;
    NBI_TRY(nb_decoder_next(&a->decoder, a->tokenizer, id, &text, &len));
    nbi_str_append(&a->text, text, len);
    NBI_TRY(nbi_str_status(&a->text));
    size_t stop = find_stop(a);
    if (stop < a->text.len) {
        a->stopped = true;
        a->text.len = stop;
        a->text.p[stop] = 0;
        return show(a, stop);
    }
    return show(a, id < 0 ? a->text.len : a->text.len - held_back(a));
}

/* ---- the loop ---- */

struct loop {
    struct nb_session *session;
    const struct nb_generate_opts *opts;
    struct nb_generate_result *result;
    struct nbi_token_sampler sampler;
    struct answer answer;
    struct nbi_next next; /* what the sampler needs */
    float *logits;
    int64_t max;
};

static int64_t room(const struct nb_session *s)
{
    return nbi_session_context(s) - nbi_session_length(s);
}

/* One token more; *done when it was the last. */
static enum nb_status next(struct loop *l, bool *done)
{
    const struct nb_engine *e = nbi_session_engine(l->session);
    struct nb_generate_result *r = l->result;
    int32_t id;
    NBI_TRY(nbi_check_interrupt());
    if (l->opts->check_logits)
        r->logits_crc = nbi_crc32c(0, l->logits, (size_t)e->config.vocab_size * sizeof *l->logits);
    if (l->next.logits)
        NBI_TRY(nbi_token_sampler_next(&l->sampler, l->logits, &id));
    else
        id = nbi_token_sampler_of(&l->sampler, l->next.best);
    nbi_token_sampler_accept(&l->sampler, id);
    r->ids[r->count++] = id;
    bool end = !l->opts->ignore_eos && nbi_engine_ends(e, id);
    if (!end)
        NBI_TRY(grow(&l->answer, id));
    *done = true;
    if (end || l->answer.stopped) {
        r->finish = NB_FINISH_STOP;
    } else if ((int64_t)r->count == l->opts->max_tokens) {
        r->finish = NB_FINISH_LENGTH;
    } else if (room(l->session) < 1) {
        r->finish = NB_FINISH_CONTEXT;
        return NB_OK;
    } else {
        *done = false;
    }
    /* The token joins the session also if it is the last, so that the next turn finds it there. */
    if (room(l->session) < 1)
        return NB_OK;
    return *done ? nb_session_append(l->session, &id, 1, NULL)
                 : nbi_session_append_next(l->session, &id, 1, &l->next);
}

static enum nb_status run(struct loop *l, const int32_t *prompt, size_t count)
{
    struct nb_generate_result *r = l->result;
    double start = nbi_now();
    NBI_TRY(nbi_session_continue(l->session, prompt, (int64_t)count, &l->next, &r->reused_tokens));
    r->prompt_seconds = nbi_now() - start;
    for (size_t i = 0; i < count; i++)
        nbi_token_sampler_accept(&l->sampler, prompt[i]);
    start = nbi_now();
    enum nb_status rc = NB_OK;
    for (bool done = false; rc == NB_OK && !done;)
        rc = next(l, &done);
    r->seconds = nbi_now() - start;
    /* An answer that was interrupted keeps what there is of it. */
    if (rc == NB_OK || rc == NB_EINTERRUPTED)
        NBI_TRY(grow(&l->answer, -1));
    return rc;
}

static enum nb_status prepare(struct loop *l, size_t count)
{
    const struct nb_engine *e = nbi_session_engine(l->session);
    int64_t V = e->config.vocab_size, context = nbi_session_context(l->session);
    if (count == 0)
        return nbi_fail(NB_EINVAL, "the prompt is empty");
    l->max = l->opts->max_tokens > 0 ? l->opts->max_tokens : context;
    if (l->max > context)
        l->max = context;
    l->answer = (struct answer){.opts = l->opts, .tokenizer = e->tokenizer};
    l->logits = malloc((size_t)V * sizeof *l->logits);
    l->result->ids = malloc((size_t)l->max * sizeof *l->result->ids);
    if (!l->logits || !l->result->ids)
        return nbi_fail_memory("logits", (size_t)V * sizeof *l->logits);
    NBI_TRY(nbi_token_sampler_init(&l->sampler, &l->opts->sampling, V));
    l->next.J = nbi_token_sampler_wants(&l->sampler);
    if (l->next.J == 0 || l->opts->check_logits)
        l->next.logits = l->logits;
    return NB_OK;
}

enum nb_status nb_generate(struct nb_session *session, const int32_t *prompt, size_t count,
                           const struct nb_generate_opts *opts, struct nb_generate_result *result)
{
    struct loop l = {.session = session, .opts = opts, .result = result};
    memset(result, 0, sizeof *result);
    result->prompt_tokens = (int64_t)count;
    enum nb_status rc = prepare(&l, count);
    if (rc == NB_OK)
        rc = run(&l, prompt, count);
    nbi_token_sampler_release(&l.sampler);
    free(l.logits);
    nb_decoder_release(&l.answer.decoder);
    result->text = l.answer.text.p ? l.answer.text.p : strdup("");
    result->len = l.answer.text.len;
    if (rc != NB_OK && rc != NB_EINTERRUPTED)
        nb_generate_result_release(result);
    return rc;
}

void nb_generate_result_release(struct nb_generate_result *result)
{
    free(result->text);
    free(result->ids);
    *result = (struct nb_generate_result){0};
}
