/* ab.h - the parts of nb_eval_ab: the tokens of prompts and texts, and their scores. */
#pragma once

#include "base/str.h"
#include "infer/session.h"

struct nbi_ab_ids {
    int32_t *p;
    size_t count;
};

/* One prompt as one model sees it. */
struct nbi_ab_item {
    struct nbi_ab_ids prompt;            /* what it answers */
    struct nbi_ab_ids bare;              /* with an empty thought; empty: the same as prompt */
    struct nbi_ab_ids text[NB_AB_TEXTS]; /* empty: none, or not known yet */
};

/* One model; what the items hold outlives the engine. */
struct nbi_ab_side {
    struct nb_engine *engine; /* NULL: not loaded now */
    struct nbi_ab_item *items;
    int64_t V, tokens;   /* of the model; of the tokenizer */
    uint32_t vocabulary; /* checksum of all its tokens */

    struct nb_session *session; /* of scoring */
    const int32_t *held;        /* the prompt that it holds but for the last token */
    int32_t *sequence;          /* prompt and text */
    size_t capacity;
    float *logits; /* [chunk, V] */
    double *nll;   /* [chunk] */
};

struct nbi_ab {
    const struct nb_ab_opts *opts;
    struct nb_ab_result *result;
    struct nbi_ab_side side[2];
    int64_t chunk;
    double *kl; /* [chunk] */
    uint64_t done, total;
};

void nbi_ab_progress(struct nbi_ab *ab, int steps);

/* ---- tokens (compare_text.c) ---- */

enum nb_status nbi_ab_vocabulary(struct nbi_ab_side *side);

/* The prompts of a side, and the expected answers. */
enum nb_status nbi_ab_prompts(struct nbi_ab *ab, int s);

/* The other side's answers in the tokens of this one. */
enum nb_status nbi_ab_translate(struct nbi_ab *ab, int s);
void nbi_ab_release_items(struct nbi_ab_side *side, int64_t count);

/* ---- scores (compare_score.c) ---- */

/* Opens what scoring sides [first, last] takes; they must have the same chunk. */
enum nb_status nbi_ab_begin_scores(struct nbi_ab *ab, int first, int last);
void nbi_ab_end_scores(struct nbi_ab *ab);

/* Text t of prompt i under sides [first, last], and how far they are apart on A's answer. */
enum nb_status nbi_ab_score(struct nbi_ab *ab, int64_t i, enum nb_ab_text t, int first, int last);
