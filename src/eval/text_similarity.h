/* text_similarity.h - how alike two texts are.
 *
 * A word is a run of letters, digits and '_' (all of Unicode below U+2E80 that is not ASCII counts
 * as letters); every other visible character is one by itself, and so is each character from
 * U+2E80 on, since those scripts do not put spaces between words. Case matters. */
#pragma once

#include "base/status.h"

struct nbi_strview {
    const char *p;
    size_t len;
};

/* 2 * common / (words of a + words of b), each word counted as often as it is there; two texts
 * without words: 1. */
enum nb_status nbi_word_f1(struct nbi_strview a, struct nbi_strview b, double *f1);

/* How much of the longer text, in bytes of whole characters, is what both begin with; two empty
 * ones: 1. */
double nbi_common_prefix(struct nbi_strview a, struct nbi_strview b);

/* Whether some `words` words in a row come `times` times, anywhere in the text. */
enum nb_status nbi_repeats(struct nbi_strview text, size_t words, size_t times, bool *yes);

/* Without the thought in front of it, if that has an end, and without white space around it. */
struct nbi_strview nbi_strip_thinking(const char *text, size_t len);

bool nbi_strview_equal(struct nbi_strview a, struct nbi_strview b);
