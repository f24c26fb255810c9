/* response.h - one answer as it grows: which token is next, its text, and whether it was the last.
 *
 * Whoever computes the logits, a session for one answer or a batch for many, asks here what of them
 * is wanted and hands it over. */
#pragma once

#include "base/str.h"
#include "infer/session.h"

struct nbi_response {
    const struct nb_engine *engine;
    const struct nb_generate_opts *opts;
    struct nb_generate_result *result;
    struct nbi_sampler sampler;
    struct nbi_logits_spec next; /* what is wanted behind the last token; to be filled in */
    float *logits;
    struct nb_decoder decoder;
    struct nbi_str text; /* all of it; the first `shown` bytes have been handed out */
    size_t shown;
    bool stopped; /* by a stop text */
};

/* Behind a prompt, in a context of so many tokens. nbi_response_end also after a failure. */
enum nb_status nbi_response_begin(struct nbi_response *a, const int32_t *prompt, size_t count,
                                  int64_t context);

/* The next token, from a->next; *done when it was the last. room: tokens that the context has left.
 */
enum nb_status nbi_response_token(struct nbi_response *a, int64_t room, int32_t *id, bool *done);

/* With what the answer ended with. The result has its text then, or was released. */
enum nb_status nbi_response_end(struct nbi_response *a, enum nb_status rc);
