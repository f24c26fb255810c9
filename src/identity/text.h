/* text.h - the text of the identity set: one table per language. */
#pragma once

#include "identity/question_set.h"

/* The forms and registers of a sentence; for openers and closers, those that they combine with. Two
 * phrases may be combined if they share a form and a register. */
enum {
    NBI_IDENTITY_ASK = 1,     /* form: a question */
    NBI_IDENTITY_WONDER = 2,  /* form: a question that fits "just curious" */
    NBI_IDENTITY_TELL = 4,    /* form: a request, or a question that is already polite */
    NBI_IDENTITY_CHAT = 8,    /* form: small talk, which fits greetings only */
    NBI_IDENTITY_PLAIN = 16,  /* register: familiar */
    NBI_IDENTITY_POLITE = 32, /* register: polite */
    NBI_IDENTITY_FORMS = 15,
    NBI_IDENTITY_REGISTERS = 48
};

/* Short names for the tables: forms in any register, in the plain one and in the polite one. ASK is
 * the usual question, HOW a question that does not fit "just curious", ALONE takes no opener or
 * closer. */
enum {
    ALONE = 0,
    ASK = NBI_IDENTITY_ASK | NBI_IDENTITY_WONDER | NBI_IDENTITY_REGISTERS,
    HOW = NBI_IDENTITY_ASK | NBI_IDENTITY_REGISTERS,
    WONDER = NBI_IDENTITY_WONDER | NBI_IDENTITY_REGISTERS,
    TELL = NBI_IDENTITY_TELL | NBI_IDENTITY_REGISTERS,
    CHAT = NBI_IDENTITY_CHAT | NBI_IDENTITY_REGISTERS,
    ASK_TELL = ASK | TELL,
    ANY = ASK_TELL | CHAT,
    ASK_PLAIN = NBI_IDENTITY_ASK | NBI_IDENTITY_WONDER | NBI_IDENTITY_PLAIN,
    HOW_PLAIN = NBI_IDENTITY_ASK | NBI_IDENTITY_PLAIN,
    WONDER_PLAIN = NBI_IDENTITY_WONDER | NBI_IDENTITY_PLAIN,
    TELL_PLAIN = NBI_IDENTITY_TELL | NBI_IDENTITY_PLAIN,
    CHAT_PLAIN = NBI_IDENTITY_CHAT | NBI_IDENTITY_PLAIN,
    ASK_TELL_PLAIN = ASK_PLAIN | TELL_PLAIN,
    ANY_PLAIN = ASK_TELL_PLAIN | CHAT_PLAIN,
    ASK_POLITE = NBI_IDENTITY_ASK | NBI_IDENTITY_WONDER | NBI_IDENTITY_POLITE,
    HOW_POLITE = NBI_IDENTITY_ASK | NBI_IDENTITY_POLITE,
    WONDER_POLITE = NBI_IDENTITY_WONDER | NBI_IDENTITY_POLITE,
    TELL_POLITE = NBI_IDENTITY_TELL | NBI_IDENTITY_POLITE,
    CHAT_POLITE = NBI_IDENTITY_CHAT | NBI_IDENTITY_POLITE,
    ASK_TELL_POLITE = ASK_POLITE | TELL_POLITE,
    ANY_POLITE = ASK_TELL_POLITE | CHAT_POLITE,
};

/* Openers and closers include the space next to the question. English questions are in lower case
 * and are capitalised at the start of a sentence. Questions end with a punctuation mark. */
struct nbi_identity_phrase {
    unsigned fits;
    const char *text;
};

struct nbi_identity_qa {
    unsigned fits;
    const char *prompt, *answer;
};

struct nbi_identity_phrases {
    const struct nbi_identity_phrase *at;
    size_t count;
};

struct nbi_identity_qas {
    const struct nbi_identity_qa *at;
    size_t count;
};

struct nbi_identity_text {
    const char *before, *after; /* the default answer is before, name, after */
    bool spaced;                /* put a space between `before` and a name in Latin letters */
    struct nbi_identity_phrases openers, closers;
    struct nbi_identity_phrases identity, identity_held_out; /* most common first */
    struct nbi_identity_qas contrast, contrast_held_out;     /* most similar to identity first */
    struct nbi_identity_qas replay;
};

#define NBI_IDENTITY_LIST(array)                                                                   \
    {                                                                                              \
        array, sizeof(array) / sizeof *(array)                                                     \
    }

extern const struct nbi_identity_text nbi_identity_en, nbi_identity_zh_hans, nbi_identity_zh_hant;
extern const struct nbi_identity_text nbi_identity_ja, nbi_identity_ko;
