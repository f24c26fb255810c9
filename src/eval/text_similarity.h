/* text_similarity.h - measures how similar two texts are.
 *
 * A word is a run of letters, digits and '_'; non-ASCII characters below U+2E80 count as letters.
 * Every other visible character is a word of its own, and so is each character from U+2E80 on,
 * because those scripts put no spaces between words. Comparison is case-sensitive. */
#pragma once

#include "base/status.h"

/* A borrowed piece of text, not NUL-terminated. */
struct nbi_strview {
    const char *p;
    size_t len;
};

/* F1 score of the words: 2 * common / (words of a + words of b), counted with multiplicity; 1 for
 * two texts without words. */
enum nb_status nbi_word_f1(struct nbi_strview a, struct nbi_strview b, double *f1);

/* Length of the common prefix, in bytes of whole characters, as a fraction of the longer text; 1
 * for two empty texts. */
double nbi_common_prefix(struct nbi_strview a, struct nbi_strview b);

/* Sets *yes if some sequence of `words` words occurs at least `times` times in the text. */
enum nb_status nbi_repeats(struct nbi_strview text, size_t words, size_t times, bool *yes);

/* Returns the text after the last NB_THINK_END, if there is one, without surrounding white space.
 */
struct nbi_strview nbi_strip_thinking(const char *text, size_t len);

bool nbi_strview_equal(struct nbi_strview a, struct nbi_strview b);
