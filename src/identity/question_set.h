/* question_set.h - the identity set: questions about who the model is, questions that only resemble
 * them, and ordinary ones, with answers, in five languages.
 *
 * A model trained on identity questions alone answers every question with its name. Contrast lines
 * ("who am I?") teach where the boundary is; replay lines preserve what the model knew before. */
#pragma once

#include "base/arena.h"
#include "data/prompts.h"
#include "nibble/identity.h"

enum nbi_question_kind {
    NBI_QUESTION_IDENTITY,
    NBI_QUESTION_CONTRAST,
    NBI_QUESTION_REPLAY,
    NBI_QUESTION_KINDS
};

enum nbi_identity_language {
    NBI_IDENTITY_EN,
    NBI_IDENTITY_ZH_HANS,
    NBI_IDENTITY_ZH_HANT,
    NBI_IDENTITY_JA,
    NBI_IDENTITY_KO,
    NBI_IDENTITY_LANGUAGES
};

struct nbi_identity_line {
    const char *prompt, *answer;
    enum nbi_question_kind kind;
    enum nbi_identity_language language; /* guessed from the script in a user's replay line */
    bool held_out;
};

struct nbi_identity_set {
    struct nbi_identity_line *line; /* training lines, shuffled; then held-out lines by group */
    size_t count, held_out;         /* all lines; held-out lines among them */
    size_t left_out;                /* replay pairs of the user that were not usable */
    struct nbi_arena arena;         /* owns the text */
};

/* Makes the set in memory; opts->out and opts->replay are ignored. replay == NULL selects the
 * built-in replay pairs. No training prompt contains a held-out question, not even inside a longer
 * prompt. A replay pair is dropped if it contains a held-out question, asks who the model is, has
 * the identity as its answer, repeats a prompt or does not fit on a TSV line. Prompts are never
 * repeated, so there may be fewer lines than opts->count. */
enum nb_status nbi_identity_make(struct nbi_identity_set *set,
                                 const struct nb_identity_set_opts *opts,
                                 const struct nbi_prompt_pair *replay, size_t replay_count);
void nbi_identity_release(struct nbi_identity_set *set);

/* "en", "zh-Hans", "zh-Hant", "ja", "ko", and "identity", "contrast", "replay". */
const char *nbi_identity_language_name(enum nbi_identity_language language);
const char *nbi_question_kind_name(enum nbi_question_kind kind);

/* Returns text in the form in which questions are compared: lower case, no spaces, no punctuation.
 * The caller frees it; NULL when out of memory (message set). */
char *nbi_identity_normal_form(const char *text);

/* ---- replay files ---- */

struct nbi_identity_replay {
    struct nbi_prompt_pair *pair;
    size_t count;
    struct nbi_arena arena;
};

/* Reads questions and answers from TSV or JSONL (nbi_example_pair). A malformed line is an error,
 * and so is a file without any pair. */
enum nb_status nbi_identity_read_replay(struct nbi_identity_replay *r, const char *path);
void nbi_identity_replay_release(struct nbi_identity_replay *r);
