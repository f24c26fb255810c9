/* scheduler.h - answers to many prompts, several at a time. */
#pragma once

#include "infer/engine.h"

/* A prompt, and what becomes of it: as nb_generate gives it, on a CPU to the last bit. */
struct nbi_request {
    int32_t *prompt;
    size_t count;
    struct nb_generate_opts opts;
    struct nb_generate_result result;
};

struct nbi_scheduler_opts {
    int64_t parallel; /* answers at a time */
    enum nb_kv_dtype kv;
    void (*done)(void *ctx); /* after each answer, may be NULL */
    void *ctx;
};

/* A prompt that the model has no room for is NB_EVALUE. After a failure some jobs have results. */
enum nb_status nbi_scheduler_run(const struct nb_engine *engine, struct nbi_request *jobs,
                                 int64_t count, const struct nbi_scheduler_opts *opts);

/* Prompts and results, and the array. */
void nbi_requests_free(struct nbi_request *jobs, int64_t count);
