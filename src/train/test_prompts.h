/* test_prompts.h - the prompts of --test-prompts, answered before and after training. */
#pragma once

#include "base/status.h"

struct nbi_run;

struct nbi_test_prompts {
    struct nb_prompts *list;
    char **before, **after; /* [count]; an answer is NULL until it is generated */
    int64_t count;
};

enum nb_status nbi_test_prompts_open(struct nbi_test_prompts *p, const char *path);
void nbi_test_prompts_close(struct nbi_test_prompts *p);

/* Prompt i with its answers; the strings belong to p. */
struct nb_train_answer nbi_test_prompts_at(const struct nbi_test_prompts *p, int64_t i);

/* Generates answers[count], greedily: p->before or p->after. */
enum nb_status nbi_test_prompts_run(struct nbi_test_prompts *p, struct nbi_run *r, char **answers);
