/* generate.c - one answer over a session: the prompt, then token by token. */
#include <string.h>

#include "base/clock.h"
#include "infer/response.h"

static int64_t context_left(const struct nb_session *s)
{
    return nbi_session_context(s) - nbi_session_length(s);
}

static enum nb_status next_token(struct nb_session *s, struct nbi_response *a, bool *done)
{
    int32_t id;
    NBI_TRY(nbi_check_interrupt());
    NBI_TRY(nbi_response_token(a, context_left(s), &id, done));
    /* Append the last token as well, so that the next turn finds it in the session. */
    if (context_left(s) < 1)
        return NB_OK;
    return *done ? nb_session_append(s, &id, 1, NULL)
                 : nbi_session_append_next(s, &id, 1, &a->spec);
}

static enum nb_status run(struct nb_session *s, struct nbi_response *a, const int32_t *prompt,
                          size_t count)
{
    struct nb_generate_result *r = a->result;
    NBI_TRY(nbi_response_begin(a, prompt, count, nbi_session_context(s)));
    double start = nbi_now();
    NBI_TRY(nbi_session_set_prompt(s, prompt, (int64_t)count, &a->spec, &r->reused_tokens));
    r->prompt_seconds = nbi_now() - start;
    start = nbi_now();
    enum nb_status rc = NB_OK;
    for (bool done = false; rc == NB_OK && !done;)
        rc = next_token(s, a, &done);
    r->seconds = nbi_now() - start;
    return rc;
}

enum nb_status nb_generate(struct nb_session *session, const int32_t *prompt, size_t count,
                           const struct nb_generate_opts *opts, struct nb_generate_result *result)
{
    NBI_SCOPED struct nb_cancel *before =
        nbi_cancel_enter(opts->cancel ? opts->cancel : nbi_session_cancel(session));
    struct nbi_response a = {.engine = nbi_session_engine(session), .opts = opts, .result = result};
    return nbi_response_end(&a, run(session, &a, prompt, count));
}

void nb_generate_result_release(struct nb_generate_result *result)
{
    free(result->text);
    free(result->ids);
    *result = (struct nb_generate_result){0};
}
