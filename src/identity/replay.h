/* replay.h - a replay set: the model's own answers to questions that are not about it.
 *
 * Training on these together with the new identity keeps the model's other answers as they were. */
#pragma once

#include "identity/questions.h"

struct nbi_replay_opts {
    struct nb_engine_opts model;
    const char *out;    /* JSON lines of conversations */
    int64_t samples;    /* sampled answers to open questions ("Tell me a story.") */
    int64_t max_tokens; /* longer answers are discarded */
    uint64_t seed;
    nb_progress_fn progress; /* in answers */
    void *progress_ctx;
};

struct nbi_replay_report {
    int64_t answers, samples, texts; /* of the model, as written; fallbacks do not count */
};

/* Writes the model's greedy answer to each training question of the set that is not about the
 * model, then opts->samples sampled answers to open questions, then half as many texts that the
 * model continues from a word or two. An answer that does not end, or that states the new identity,
 * is discarded; for a question of the set, the set's own answer replaces it. */
enum nb_status nbi_replay_write(const struct nbi_questions *q, const struct nbi_replay_opts *opts,
                                struct nbi_replay_report *report);
