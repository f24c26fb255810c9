/* scheduler.h - answers to a list of prompts, several at a time in one batch. */
#pragma once

#include "infer/engine.h"

/* A prompt and its answer. The result is that of nb_generate(), on a CPU bit for bit. */
struct nbi_request {
    int32_t *prompt;
    size_t count;
    struct nb_generate_opts opts;
    struct nb_generate_result result;
};

struct nbi_scheduler_opts {
    int64_t parallel; /* requests that run at the same time */
    enum nb_kv_dtype kv;
    void (*done)(void *ctx); /* called after each answer; may be NULL */
    void *ctx;
};

/* Answers all requests. NB_EVALUE if a prompt does not fit the context. After a failure some
 * requests have results. */
enum nb_status nbi_scheduler_run(const struct nb_engine *engine, struct nbi_request *requests,
                                 int64_t count, const struct nbi_scheduler_opts *opts);

/* Frees the array with its prompts and results. */
void nbi_requests_free(struct nbi_request *requests, int64_t count);
