/* questions.h - what is asked of a model to learn who it takes itself for. */
#pragma once

#include "identity/question_set.h"

struct nbi_questions {
    struct nbi_identity_set set;
    const struct nbi_identity_line **lines; /* of the set */
    enum nb_identity_kind *kinds;           /* of each */
    size_t count;
    char *forms[NBI_IDENTITY_LANGUAGES]; /* normal forms of the answers to identity questions */
};

/* At most `each` of those of the set of a kind, and all that are held out; 0: all. */
enum nb_status nbi_questions_make(struct nbi_questions *q, const struct nb_identity_set_opts *set,
                                  int64_t each);
void nbi_questions_release(struct nbi_questions *q);

/* Whether a text says who the model is, in any language, whatever stands around it. */
enum nb_status nbi_says_identity(const struct nbi_questions *q, const char *text, size_t len,
                                 bool *yes);
