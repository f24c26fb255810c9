/* execute.h - runs forward passes on a backend, in the fastest way that it has for each. */
#pragma once

#include "model/transformer.h"

/* Runs a pass: leaves the logits [M, V] of pass->rows in a->logits. Returns once everything is
 * queued on s, and reads the arrays of the pass before that. Nothing is allocated, except what
 * nbi_backend.graph_run keeps. */
enum nb_status nbi_execute(const struct nbi_weights *w, struct nbi_acts *a, struct nbi_stream *s,
                           const struct nbi_pass *pass);

/* Logits of pass->rows after a pass over the same activations with M = 0. */
enum nb_status nbi_execute_head(const struct nbi_weights *w, struct nbi_acts *a,
                                struct nbi_stream *s, const struct nbi_pass *pass);

/* From now on decode steps of one token over these KV views run in the backend's megakernel, if it
 * has one for this model. The weights, the cache behind kv [layers] and s must outlive a. */
enum nb_status nbi_execute_use_megakernel(struct nbi_acts *a, const struct nbi_weights *w,
                                          struct nbi_stream *s, const struct nbi_kv_view *kv);

/* ---- running ahead ---- */

/* Whether nbi_execute_run_ahead() may follow this pass. */
bool nbi_execute_can_run_ahead(const struct nbi_acts *a, const struct nbi_pass *pass);

/* Chooses a token from the one row of logits that the last pass left, as r->k and r->draw say, and
 * starts the next decode step with it. `pass` is that step; its id is ignored. Returns as soon as
 * the candidates are in *r, while the step may still be running. */
enum nb_status nbi_execute_run_ahead(const struct nbi_weights *w, const struct nbi_acts *a,
                                     struct nbi_stream *s, const struct nbi_pass *pass,
                                     struct nbi_run_ahead *r);

/* ---- top-k ---- */

/* The k most likely ids of the first M <= a->topk_rows rows of logits, ordered as nbi_op_topk
 * orders them. Leaves three arrays in a->topk, one after the other: int32 nonfinite [M], int32
 * ids [M, k], f32 logits [M, k]. */
enum nb_status nbi_execute_topk(const struct nbi_weights *w, const struct nbi_acts *a,
                                struct nbi_stream *s, int64_t M, int64_t k);

/* Copies one row out of a host copy of a->topk. False: a logit of the row was not finite, and the
 * candidates mean nothing. */
bool nbi_topk_row(struct nb_candidate *out, const int32_t *topk, int64_t row, int64_t M, int64_t k);
