/* replay.h - what a model says to questions that are not about it, to be learnt again beside what
 * is new: so it stays as it is. */
#pragma once

#include "identity/questions.h"

struct nbi_replay_opts {
    struct nb_engine_opts model;
    const char *out;    /* JSON lines of conversations */
    int64_t samples;    /* answers to open questions ("Tell me a story."), drawn at random */
    int64_t max_tokens; /* of an answer; one that is longer is left out */
    uint64_t seed;
    nb_progress_fn progress; /* in answers */
    void *progress_ctx;
};

struct nbi_replay_report {
    int64_t answers, samples, texts; /* of the model's own that were written */
};

/* The most likely answer to each question of the set that is not about the model, but for those
 * held out; then samples, and half as many texts that it goes on with from a word or two. An answer
 * that does not end, or says who the model is to be, is left out; the set's own takes its place. */
enum nb_status nbi_replay_write(const struct nbi_questions *q, const struct nbi_replay_opts *opts,
                                struct nbi_replay_report *report);
