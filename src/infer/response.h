/* response.h - one answer as it grows: its tokens, its text, and what ends it.
 *
 * The caller computes logits, with a session for one answer or a batch for several. It asks
 * response->spec what it needs after the last token, and fills that in. */
#pragma once

#include "base/str.h"
#include "infer/session.h"

struct nbi_response {
    const struct nb_engine *engine;
    const struct nb_generate_opts *opts;
    struct nb_generate_result *result;
    struct nbi_sampler sampler;
    struct nbi_logits_spec spec; /* for the next token; the caller fills it in */
    float *logits;
    struct nb_decoder decoder;
    struct nbi_str text; /* all of it */
    size_t emitted;      /* bytes of it that opts->text has been given */
    bool stopped;        /* by a stop text */
};

/* Begins an answer to a prompt. engine, opts and result are set, the rest is zero. Call
 * nbi_response_end() also after a failure. */
enum nb_status nbi_response_begin(struct nbi_response *a, const int32_t *prompt, size_t count,
                                  int64_t context);

/* Samples the next token from a->spec; *done: it was the last. left: tokens that the context still
 * has room for. */
enum nb_status nbi_response_token(struct nbi_response *a, int64_t left, int32_t *id, bool *done);

/* Ends an answer with the status of its last step, and returns the status of the whole. After NB_OK
 * and NB_EINTERRUPTED the result has the text; otherwise it is released. */
enum nb_status nbi_response_end(struct nbi_response *a, enum nb_status rc);
