/* ab.h - internals of nb_eval_ab, shared by ab.c, ab_text.c (text to tokens) and ab_score.c
 * (likelihoods). Two models, the sides A (0) and B (1), answer the same prompts; each side scores
 * its own answers, the other side's and the expected ones. */
#pragma once

#include "base/str.h"
#include "infer/session.h"
#include "nibble/eval.h"

struct nbi_ab_ids { /* owned by the item */
    int32_t *p;
    size_t count;
};

/* One prompt in the tokens of one model. */
struct nbi_ab_item {
    struct nbi_ab_ids prompt;            /* what the model answers */
    struct nbi_ab_ids no_think;          /* with an empty think block; empty: same as prompt */
    struct nbi_ab_ids text[NB_AB_TEXTS]; /* empty: none, or not known yet */
};

/* One model. Its items outlive the engine, which may be closed and opened again. */
struct nbi_ab_side {
    struct nb_engine *engine; /* NULL: not loaded */
    struct nbi_ab_item *items;
    int64_t V, tokens;   /* vocabulary size of the model; of the tokenizer */
    uint32_t vocabulary; /* CRC-32C of all tokens */

    /* Scoring, between nbi_ab_begin_scores and nbi_ab_end_scores. */
    struct nb_session *session;
    const int32_t *cached_prompt; /* its tokens, but for the last, are in the session */
    int32_t *sequence;            /* prompt and text */
    size_t capacity;
    float *logits; /* [chunk, V] */
    double *nll;   /* [chunk] */
};

struct nbi_ab {
    const struct nb_ab_opts *opts;
    struct nb_ab_result *result;
    struct nbi_ab_side side[2];
    int64_t chunk;        /* rows of logits per forward pass */
    double *kl;           /* [chunk] */
    uint64_t done, total; /* progress, in answers and scores */
};

void nbi_ab_progress(struct nbi_ab *ab, int steps);

/* ---- tokens (ab_text.c) ---- */

/* Fills in V, tokens and the checksum of the vocabulary. */
enum nb_status nbi_ab_vocabulary(struct nbi_ab_side *side);

/* Makes the items of side s: encodes the prompts and the expected answers. */
enum nb_status nbi_ab_prompts(struct nbi_ab *ab, int s);

/* Encodes the other side's answers with the tokenizer of side s. */
enum nb_status nbi_ab_encode_other(struct nbi_ab *ab, int s);
void nbi_ab_release_items(struct nbi_ab_side *side, int64_t count);

/* ---- scores (ab_score.c) ---- */

/* Allocates what scoring under sides [first, last] needs. Call nbi_ab_end_scores also after a
 * failure. */
enum nb_status nbi_ab_begin_scores(struct nbi_ab *ab, int first, int last);
void nbi_ab_end_scores(struct nbi_ab *ab);

/* Scores text t of prompt i under sides [first, last]. If both sides are given, share a vocabulary
 * and t is A's answer, also computes KL(A || B). */
enum nb_status nbi_ab_score(struct nbi_ab *ab, int64_t i, enum nb_ab_text t, int first, int last);
