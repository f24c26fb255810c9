/* prompts.h - prompts with the answers that are expected, made in memory instead of read from a
 * file (nb_prompts_open). */
#pragma once

#include "base/status.h"

struct nbi_prompt_pair {
    const char *prompt, *answer;
};

/* Copies the texts. place names the source in messages: "PLACE:LINE", the first pair on line 2. */
enum nb_status nbi_prompts_make(struct nb_prompts **out, const struct nbi_prompt_pair *pairs,
                                size_t count, const char *place);
