/* answers.h - the answers to many prompts, as requests of one scheduler. */
#pragma once

#include "infer/engine.h"

/* A prompt, how to answer it, and the answer. */
struct nbi_answer {
    const int32_t *ids; /* the prompt [count]; the caller's */
    size_t count;
    struct nb_generate_opts opts;
    struct nb_generate_result result; /* out, zeroed before; the caller releases it */
    struct nbi_answer_run *run;       /* used while they are generated */
};

struct nbi_answers {
    struct nbi_answer *list;
    int64_t count;
    void (*answered)(void *ctx); /* called after each answer, in any order; may be NULL */
    void *ctx;
    bool independent; /* no answer may depend on the other prompts of a batch, also on a GPU */
    int64_t failed;   /* out: the index of the answer whose failure ended all; -1: none did */
};

/* Generates all answers over a cache of f16 keys and values, up to 16 at a time. On the CPU each is
 * that of a session. On a GPU a batch gives other bits, and if it cannot both share passes and keep
 * its sequences independent, as was asked for, prompts are answered in turn, over a session. */
enum nb_status nbi_answer_all(const struct nb_engine *engine, struct nbi_answers *answers);
