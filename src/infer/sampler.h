/* sampler.h - the next token from logits.
 *
 * Penalties and biases first, then temperature, top-k, top-p, min-p, then a draw. Tokens are
 * ordered by logit, equal ones by id, lower first; top-p keeps the token that crosses it. The
 * random generator is counter-based: the same seed and number of draws give the same token. */
#pragma once

#include "backend/decode.h"

struct nbi_sampler {
    struct nb_sampling opts;
    uint64_t draws; /* so far: the counter of the generator */
    int64_t vocab;
    struct nb_candidate *candidates; /* [vocab] */
    int32_t *counts;                 /* [vocab] how often each id was accepted */
    int32_t *seen;                   /* [vocab] the ids with a count */
    int64_t seen_count;
    bool penalties; /* any of the three is set */
};

/* NB_EINVAL if options are out of range. */
enum nb_status nbi_sampler_check(const struct nb_sampling *opts, int64_t vocab);

/* Checks the options. Nothing is allocated afterwards. */
enum nb_status nbi_sampler_init(struct nbi_sampler *s, const struct nb_sampling *opts,
                                int64_t vocab);
void nbi_sampler_release(struct nbi_sampler *s);

/* Counts a token of the text, for the penalties. */
void nbi_sampler_accept(struct nbi_sampler *s, int32_t id);

/* The index of the largest value, the first of equal ones. */
int32_t nbi_argmax(const float *x, int64_t n);

/* NB_EVALUE if one is not finite. */
enum nb_status nbi_check_logits(const float *logits, int64_t n);

/* How many of the most likely tokens are enough for the next draw; 0: it needs all logits. */
int64_t nbi_sampler_topk(const struct nbi_sampler *s);

/* The parameters of the next draw from those. */
struct nbi_draw nbi_sampler_draw(const struct nbi_sampler *s);

/* Draws from nbi_sampler_topk() candidates, most likely first: what nbi_sampler_pick() gives. */
int32_t nbi_sampler_from_topk(struct nbi_sampler *s, const struct nb_candidate *topk);

/* Draws from all logits [vocab], and changes them. NB_EVALUE if one is not finite. */
enum nb_status nbi_sampler_pick(struct nbi_sampler *s, float *logits, int32_t *id);
