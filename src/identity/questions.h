/* questions.h - the questions that test a model's identity, selected from the identity set. */
#pragma once

#include "identity/question_set.h"

struct nbi_questions {
    struct nbi_identity_set set;
    const struct nbi_identity_line **lines; /* [count] in set */
    enum nb_identity_kind *kinds;           /* [count] */
    size_t count;
    char *forms[NBI_IDENTITY_LANGUAGES]; /* normal form of the identity answer; NULL: unused */
};

/* Makes the identity set and selects at most `each` training questions of each kind (0: all), and
 * all held-out ones. */
enum nb_status nbi_questions_make(struct nbi_questions *q, const struct nb_identity_set_opts *set,
                                  int64_t each);
void nbi_questions_release(struct nbi_questions *q);

/* Whether a text contains the identity answer of any language, compared in normal form. */
enum nb_status nbi_says_identity(const struct nbi_questions *q, const char *text, size_t len,
                                 bool *yes);
