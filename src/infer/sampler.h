/* sampler.h - the next token from logits.
 *
 * Penalties and biases first, then temperature, top-k, top-p, min-p, then a draw. Tokens are in the
 * order of their logits, of equals the lower id first; top-p keeps the one that crosses it. The
 * generator is counter-based: the same seed and the same number of draws give the same token. */
#pragma once

#include "backend/decode.h"

struct nbi_sampler {
    struct nb_sampling opts;
    uint64_t draws;
    int64_t vocab;
    struct nb_candidate *candidates; /* [vocab] */
    int32_t *counts;                 /* [vocab] times each id was seen */
    int32_t *seen;                   /* [vocab] ids with a count */
    int64_t seen_count;
    bool penalties;
};

/* Nothing is allocated afterwards. Out of range options are NB_EINVAL. */
enum nb_status nbi_sampler_init(struct nbi_sampler *s, const struct nb_sampling *opts,
                                int64_t vocab);
void nbi_sampler_release(struct nbi_sampler *s);

/* Tells it of a token that is in the text now. */
void nbi_sampler_accept(struct nbi_sampler *s, int32_t id);

/* The index of the largest value, the first of equal ones. */
int32_t nbi_argmax(const float *x, int64_t n);

/* How many of the best logits decide; 0: all logits do. */
int64_t nbi_sampler_topk(const struct nbi_sampler *s);

/* How the next draw from those will go. */
struct nbi_draw nbi_sampler_draw(const struct nbi_sampler *s);

/* As nbi_sampler_pick, from as many of the best as it wants, best first. */
int32_t nbi_sampler_from_topk(struct nbi_sampler *s, const struct nb_candidate *best);

/* logits [vocab] are changed. NaN or infinity among them is an error. */
enum nb_status nbi_sampler_pick(struct nbi_sampler *s, float *logits, int32_t *id);
