/* test_prompts.h - the prompts of --test-prompts, answered before and after training. */
#pragma once

#include "infer/kv_cache.h"
#include "nibble/data.h"

struct nbi_run;

struct nbi_test_prompts {
    struct nb_prompts *list;
    char **before, **after; /* [count]; an answer is NULL until it is generated */
    int64_t count;
    struct nb_engine *engine;   /* borrows the model in training */
    struct nb_session *session; /* on a GPU it stays open: later its memory might not be there */
};

enum nb_status nbi_test_prompts_open(struct nbi_test_prompts *p, const char *path);
void nbi_test_prompts_close(struct nbi_test_prompts *p);

/* The memory of the session; needs no more of a run than its backend and its config. */
enum nb_status nbi_test_prompts_plan(const struct nbi_run *r, struct nbi_memory_plan *plan);

/* Prompt i with its answers; the strings belong to p. */
struct nb_train_answer nbi_test_prompts_at(const struct nbi_test_prompts *p, int64_t i);

/* Generates answers[count], greedily: p->before or p->after. */
enum nb_status nbi_test_prompts_run(struct nbi_test_prompts *p, struct nbi_run *r, char **answers);
