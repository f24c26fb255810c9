/* question_set.h - the identity set: questions about who the model is, questions that only look
 * like them, and ordinary ones, in five languages.
 *
 * A model that is trained on identity questions alone answers everything with its name. Contrast
 * lines ("who am I?") draw the border, replay lines keep what the model could do before. */
#pragma once

#include "base/arena.h"
#include "data/prompts.h"

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
    enum nbi_identity_language language; /* of a caller's replay line: a guess from its script */
    bool held_out;
};

struct nbi_identity_set {
    struct nbi_identity_line *line; /* training lines, shuffled; then the held-out ones by group */
    size_t count, held_out;         /* all lines; how many of them are held out */
    size_t left_out;                /* replay pairs of the caller that could not be used */
    struct nbi_arena arena;         /* owns the text */
};

/* Makes the set in memory; opts->out and opts->replay are not looked at. Without replay pairs
 * (replay == NULL) the built-in ones are used. Held-out questions appear in no training prompt,
 * also not inside a longer one; a replay pair is left out if it holds one of them, asks who the
 * model is, has the identity as its answer, repeats a prompt or cannot stand on a TSV line. There
 * may be fewer lines than opts->count; prompts are never repeated to fill up. */
enum nb_status nbi_identity_make(struct nbi_identity_set *w,
                                 const struct nb_identity_set_opts *opts,
                                 const struct nbi_prompt_pair *replay, size_t replay_count);
void nbi_identity_release(struct nbi_identity_set *w);

/* "en", "zh-Hans", "zh-Hant", "ja", "ko"; "identity", "contrast", "replay". */
const char *nbi_identity_language_name(enum nbi_identity_language language);
const char *nbi_question_kind_name(enum nbi_question_kind kind);

/* Text as held-out questions are compared: lower case, no spaces, no punctuation. The caller frees
 * the result; NULL when memory is out (message set). */
char *nbi_identity_normal_form(const char *text);

/* ---- a replay file ---- */

struct nbi_identity_replay {
    struct nbi_prompt_pair *pair;
    size_t count;
    struct nbi_arena arena;
};

/* A TSV or JSONL file of questions and answers (nbi_example_pair). A bad line is an error, and so
 * is a file without a pair. */
enum nb_status nbi_identity_read_replay(struct nbi_identity_replay *r, const char *path);
void nbi_identity_replay_release(struct nbi_identity_replay *r);
