/* session.h - one sequence of tokens and its keys and values.
 *
 * A session only grows, or is cut back to a beginning of itself. Whatever the way its tokens came
 * in, whole or one by one, the logits are the same. Nothing is allocated after it is opened. */
#pragma once

#include "infer/engine.h"
#include "infer/sampler.h"

struct nbi_session_opts {
    int64_t context;   /* tokens at most */
    int64_t chunk;     /* tokens of a pass at most; 0: what suits the device */
    int64_t logits;    /* rows of logits of a pass at most; 0: 1 */
    enum nbi_dtype kv; /* f32, f16, bf16 or e4m3 */
    enum nb_kv_mode mode;
    bool exact;
};

/* What it will take, by part: all that nbi_session_new allocates. */
struct nbi_session_plan {
    int64_t kv, activations; /* of the backend's memory */
    int64_t scratch;         /* of the stream */
    int64_t host;            /* of malloc's */
};

void nbi_session_plan(const struct nb_engine *engine, const struct nbi_session_opts *opts,
                      struct nbi_session_plan *plan);

enum nb_status nbi_session_new(struct nb_session **out, const struct nb_engine *engine,
                               const struct nbi_session_opts *opts);
void nbi_session_free(struct nb_session *s);

const struct nb_engine *nbi_session_engine(const struct nb_session *s);
int64_t nbi_session_length(const struct nb_session *s);
int64_t nbi_session_context(const struct nb_session *s);
const int32_t *nbi_session_tokens(const struct nb_session *s);

/* Appends tokens. logits (may be NULL) receives those after the last `rows` tokens, [rows, V];
 * rows <= opts.logits unless the chunk is cut so small that each fits. Past the context: NB_EVALUE,
 * and nothing has changed. */
enum nb_status nbi_session_append(struct nb_session *s, const int32_t *ids, int64_t count,
                                  float *logits, int64_t rows);

/* What is wanted behind the last token: all logits, or the J best of them, best first. */
struct nbi_logits_spec {
    float *logits; /* [V], or NULL: */
    int64_t k;     /* up to NBI_TOPK_MAX and V */
    struct nb_candidate candidates[NBI_TOPK_MAX];
    /* How one of several will be drawn, so that it may be computed ahead; a unit of 0: nobody
     * knows, and so it is afterwards. */
    struct nbi_draw draw;
};

/* Appends tokens. A logit that is not finite is NB_EVALUE if the best are asked for. */
enum nb_status nbi_session_append_next(struct nb_session *s, const int32_t *ids, int64_t count,
                                       struct nbi_logits_spec *next);

/* Forgets all but the first `length` tokens. */
void nbi_session_truncate(struct nb_session *s, int64_t length);

/* Appends ids as far as they are not there already: what a session has of a beginning in common
 * with them is kept, the rest is forgotten. At least the last token is computed. *reused: tokens
 * that were there. */
enum nb_status nbi_session_set_prompt(struct nb_session *s, const int32_t *ids, int64_t count,
                                      struct nbi_logits_spec *next, int64_t *reused);

/* The prompt of a conversation that is a question alone, without thinking; the caller frees ids. */
enum nb_status nbi_question_ids(const struct nb_engine *e, const char *question, int32_t **ids,
                                size_t *count);

/* A copy of the tokens and their keys and values; restored into a session of the same options. */
struct nbi_snapshot;

enum nb_status nbi_session_save(const struct nb_session *s, struct nbi_snapshot **out);
enum nb_status nbi_session_restore(struct nb_session *s, const struct nbi_snapshot *snapshot);
void nbi_snapshot_free(struct nbi_snapshot *snapshot);

/* Residual stream after each layer of the next passes, for comparing paths; NULL: off. x is of
 * tokens [from, from + rows). */
typedef enum nb_status (*nbi_layer_fn)(void *ctx, int64_t layer, int64_t from, int64_t rows,
                                       const float *x);
enum nb_status nbi_session_layer_hook(struct nb_session *s, nbi_layer_fn fn, void *ctx);
