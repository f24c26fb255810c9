/* session.h - one sequence of tokens with its keys and values.
 *
 * A session only grows, or is cut back to a prefix of itself. The logits do not depend on how its
 * tokens came in, in one call or one by one. Nothing is allocated after it is opened, except for
 * snapshots and the layer hook. */
#pragma once

#include "infer/kv_cache.h"
#include "infer/sampler.h"

struct nbi_session_opts {
    int64_t context;   /* limit of tokens */
    int64_t chunk;     /* limit of tokens in a pass; 0: what suits the device */
    int64_t logits;    /* limit of rows of logits in a pass; 0: 1 */
    enum nbi_dtype kv; /* f32, f16, bf16 or e4m3 */
    enum nb_kv_mode mode;
    bool exact;
};

/* All that nbi_session_new() allocates. */
void nbi_session_plan(const struct nb_engine *engine, const struct nbi_session_opts *opts,
                      struct nbi_memory_plan *plan);

/* nb_session_close() ends it. */
enum nb_status nbi_session_new(struct nb_session **out, const struct nb_engine *engine,
                               const struct nbi_session_opts *opts);

const struct nb_engine *nbi_session_engine(const struct nb_session *s);
int64_t nbi_session_context(const struct nb_session *s);
int64_t nbi_session_chunk(const struct nb_session *s); /* tokens of a pass */
int64_t nbi_session_length(const struct nb_session *s);
struct nb_cancel *nbi_session_cancel(const struct nb_session *s); /* NULL: none */

/* Appends tokens. logits (may be NULL) receives those after each of the last `rows` tokens,
 * [rows, V]. Past the context: NB_EVALUE, and nothing has changed. */
enum nb_status nbi_session_append(struct nb_session *s, const int32_t *ids, int64_t count,
                                  float *logits, int64_t rows);

/* What to return after the last token: all logits, or the k most likely candidates. */
struct nbi_logits_spec {
    float *logits;                                /* [V]; NULL: candidates instead */
    int64_t k;                                    /* at most NBI_TOPK_MAX and V */
    struct nb_candidate candidates[NBI_TOPK_MAX]; /* out, most likely first */
    /* How the caller will draw one of several candidates, so that the session can compute the
     * next step ahead; unit 0: not known. Used once: the session sets unit to 0. */
    struct nbi_draw draw;
};

/* Appends tokens and fills in *spec. NB_EVALUE if candidates are wanted and a logit is not
 * finite. */
enum nb_status nbi_session_append_next(struct nb_session *s, const int32_t *ids, int64_t count,
                                       struct nbi_logits_spec *spec);

/* Forgets what differs from a prompt: keeps the tokens that the session has in common with ids from
 * the beginning, but never the last id, after which logits are wanted. Returns how many it keeps;
 * the ids after them are to be appended. */
int64_t nbi_session_reuse(struct nb_session *s, const int32_t *ids, int64_t count);

/* A host copy of tokens, keys and values. It can be restored into any session of the same model
 * and KV type whose context is long enough. */
struct nbi_snapshot;

enum nb_status nbi_session_save(const struct nb_session *s, struct nbi_snapshot **out);
enum nb_status nbi_session_restore(struct nb_session *s, const struct nbi_snapshot *snapshot);
void nbi_snapshot_free(struct nbi_snapshot *snapshot);

/* Calls fn after each layer of the following passes, to compare two ways of computing; NULL: off.
 * x [rows, C] is the residual stream of tokens [from, from + rows). */
typedef enum nb_status (*nbi_layer_fn)(void *ctx, int64_t layer, int64_t from, int64_t rows,
                                       const float *x);
enum nb_status nbi_session_layer_hook(struct nb_session *s, nbi_layer_fn fn, void *ctx);
