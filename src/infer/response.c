/* response.c - samples tokens and emits their text, up to a stop text or the end of the turn.
 *
 * Text is emitted as soon as it cannot be the beginning of a stop text any more. */
#include "infer/response.h"

#include <string.h>

#include "base/crc.h"

/* ---- text ---- */

/* The length of the longest end of the text that is a proper prefix of a stop text, and so may
 * become one. Only text that is not yet emitted counts. */
static size_t stop_prefix(const struct nbi_response *a)
{
    size_t longest = 0;
    for (const char *const *stop = a->opts->stop; stop && *stop; stop++) {
        size_t n = strlen(*stop);
        if (n > a->text.len - a->emitted + 1)
            n = a->text.len - a->emitted + 1;
        while (n > 0 && --n > longest)
            if (memcmp(a->text.p + a->text.len - n, *stop, n) == 0)
                longest = n;
    }
    return longest;
}

/* Where the first stop text begins in the text that is not yet emitted; text.len: nowhere. */
static size_t find_stop(const struct nbi_response *a)
{
    size_t at = a->text.len;
    for (const char *const *stop = a->opts->stop; stop && *stop; stop++) {
        const char *from = a->text.p + a->emitted;
        const char *p =
            **stop ? memmem(from, a->text.len - a->emitted, *stop, strlen(*stop)) : NULL;
        if (p && (size_t)(p - a->text.p) < at)
            at = (size_t)(p - a->text.p);
    }
    return at;
}

static enum nb_status emit(struct nbi_response *a, size_t end)
{
    size_t from = a->emitted;
    a->emitted = end;
    if (!a->opts->text || end == from)
        return NB_OK;
    return a->opts->text(a->opts->ctx, a->text.p + from, end - from);
}

/* Appends the text of a token, and emits what can be. id -1: the answer ends. */
static enum nb_status add_text(struct nbi_response *a, int32_t id)
{
    const char *text;
    size_t len;
    if (!a->engine->tokenizer || a->stopped) /* without a tokenizer an answer is only ids */
        return NB_OK;
    NBI_TRY(nb_decoder_next(&a->decoder, a->engine->tokenizer, id, &text, &len));
    nbi_str_append(&a->text, text, len);
    NBI_TRY(nbi_str_status(&a->text));
    size_t stop = find_stop(a);
    if (stop < a->text.len) {
        a->stopped = true;
        a->text.len = stop;
        a->text.p[stop] = 0;
        return emit(a, stop);
    }
    return emit(a, id < 0 ? a->text.len : a->text.len - stop_prefix(a));
}

/* ---- tokens ---- */

enum nb_status nbi_response_begin(struct nbi_response *a, const int32_t *prompt, size_t count,
                                  int64_t context)
{
    int64_t V = a->engine->config.vocab_size, max = a->opts->max_tokens;
    memset(a->result, 0, sizeof *a->result);
    a->result->prompt_tokens = (int64_t)count;
    if (count == 0)
        return nbi_fail(NB_EINVAL, "the prompt is empty");
    if (max <= 0 || max > context)
        max = context;
    a->logits = malloc((size_t)V * sizeof *a->logits);
    a->result->ids = malloc((size_t)max * sizeof *a->result->ids);
    if (!a->logits || !a->result->ids)
        return nbi_fail_memory("logits", (size_t)V * sizeof *a->logits);
    NBI_TRY(nbi_sampler_init(&a->sampler, &a->opts->sampling, V));
    a->spec.k = nbi_sampler_topk(&a->sampler);
    a->spec.draw = nbi_sampler_draw(&a->sampler);
    if (a->spec.k == 0 || a->opts->check_logits)
        a->spec.logits = a->logits;
    for (size_t i = 0; i < count; i++)
        nbi_sampler_accept(&a->sampler, prompt[i]);
    return NB_OK;
}

enum nb_status nbi_response_token(struct nbi_response *a, int64_t left, int32_t *id, bool *done)
{
    struct nb_generate_result *r = a->result;
    size_t bytes = (size_t)a->engine->config.vocab_size * sizeof *a->logits;
    if (a->opts->check_logits)
        r->logits_crc = nbi_crc32c(0, a->logits, bytes);
    if (a->spec.logits)
        NBI_TRY(nbi_sampler_pick(&a->sampler, a->logits, id));
    else
        *id = nbi_sampler_from_topk(&a->sampler, a->spec.candidates);
    a->spec.draw = nbi_sampler_draw(&a->sampler);
    nbi_sampler_accept(&a->sampler, *id);
    r->ids[r->count++] = *id;
    bool end = !a->opts->ignore_eos && nbi_engine_is_eos(a->engine, *id);
    if (!end)
        NBI_TRY(add_text(a, *id));
    *done = true;
    if (end || a->stopped)
        r->finish = NB_FINISH_STOP;
    else if ((int64_t)r->count == a->opts->max_tokens)
        r->finish = NB_FINISH_LENGTH;
    else if (left < 1)
        r->finish = NB_FINISH_CONTEXT;
    else
        *done = false;
    return NB_OK;
}

enum nb_status nbi_response_end(struct nbi_response *a, enum nb_status rc)
{
    /* An interrupted answer keeps the text so far. */
    if (rc == NB_OK || rc == NB_EINTERRUPTED) {
        enum nb_status last = add_text(a, -1);
        rc = last == NB_OK ? rc : last;
    }
    nbi_sampler_release(&a->sampler);
    free(a->logits);
    nb_decoder_release(&a->decoder);
    a->result->text = a->text.p ? a->text.p : strdup("");
    a->result->len = a->text.len;
    if (!a->result->text && (rc == NB_OK || rc == NB_EINTERRUPTED))
        rc = nbi_fail_memory("an answer", 1);
    if (rc != NB_OK && rc != NB_EINTERRUPTED)
        nb_generate_result_release(a->result);
    return rc;
}
