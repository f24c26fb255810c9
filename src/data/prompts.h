/* prompts.h - prompts with expected answers from memory; nb_prompts_open reads them from a file. */
#pragma once

#include "base/status.h"
#include "nibble/data.h"

struct nbi_prompt_pair {
    const char *prompt, *answer;
};

/* Copies the texts. Messages name a pair as "PLACE:LINE"; the first pair is on line 2. */
enum nb_status nbi_prompts_make(struct nb_prompts **out, const struct nbi_prompt_pair *pairs,
                                size_t count, const char *place);
