/* text.h - the text of the identity set: what each language's table holds. */
#pragma once

#include "identity/question_set.h"

/* What a sentence is, and for openers and closers, what they go with: parts are joined if they
 * have a form and a register in common. */
enum {
    NBI_WHOAMI_ASK = 1,     /* form: a question */
    NBI_WHOAMI_WONDER = 2,  /* form: a question that may be asked out of mere curiosity */
    NBI_WHOAMI_TELL = 4,    /* form: a request, or a question that opens politely by itself */
    NBI_WHOAMI_CHAT = 8,    /* form: small talk and what else goes with a greeting only */
    NBI_WHOAMI_PLAIN = 16,  /* register: as among friends */
    NBI_WHOAMI_POLITE = 32, /* register: as to a stranger */
    NBI_WHOAMI_FORMS = 15,
    NBI_WHOAMI_REGISTERS = 48
};

/* Short names for the tables: forms in any register, in the plain and in the polite one. ASK is
 * the usual question, HOW one that nobody asks out of curiosity. */
enum {
    ALONE = 0,
    ASK = NBI_WHOAMI_ASK | NBI_WHOAMI_WONDER | NBI_WHOAMI_REGISTERS,
    HOW = NBI_WHOAMI_ASK | NBI_WHOAMI_REGISTERS,
    WONDER = NBI_WHOAMI_WONDER | NBI_WHOAMI_REGISTERS,
    TELL = NBI_WHOAMI_TELL | NBI_WHOAMI_REGISTERS,
    CHAT = NBI_WHOAMI_CHAT | NBI_WHOAMI_REGISTERS,
    ASK_TELL = ASK | TELL,
    ANY = ASK_TELL | CHAT,
    ASK_PLAIN = NBI_WHOAMI_ASK | NBI_WHOAMI_WONDER | NBI_WHOAMI_PLAIN,
    HOW_PLAIN = NBI_WHOAMI_ASK | NBI_WHOAMI_PLAIN,
    WONDER_PLAIN = NBI_WHOAMI_WONDER | NBI_WHOAMI_PLAIN,
    TELL_PLAIN = NBI_WHOAMI_TELL | NBI_WHOAMI_PLAIN,
    CHAT_PLAIN = NBI_WHOAMI_CHAT | NBI_WHOAMI_PLAIN,
    ASK_TELL_PLAIN = ASK_PLAIN | TELL_PLAIN,
    ANY_PLAIN = ASK_TELL_PLAIN | CHAT_PLAIN,
    ASK_POLITE = NBI_WHOAMI_ASK | NBI_WHOAMI_WONDER | NBI_WHOAMI_POLITE,
    HOW_POLITE = NBI_WHOAMI_ASK | NBI_WHOAMI_POLITE,
    WONDER_POLITE = NBI_WHOAMI_WONDER | NBI_WHOAMI_POLITE,
    TELL_POLITE = NBI_WHOAMI_TELL | NBI_WHOAMI_POLITE,
    CHAT_POLITE = NBI_WHOAMI_CHAT | NBI_WHOAMI_POLITE,
    ASK_TELL_POLITE = ASK_POLITE | TELL_POLITE,
    ANY_POLITE = ASK_TELL_POLITE | CHAT_POLITE,
};

/* Spaces between words are part of openers and closers. English rows start in lower case and are
 * capitalised where a sentence starts. Questions end with a punctuation mark. */
struct nbi_whoami_phrase {
    unsigned fits;
    const char *text;
};

struct nbi_whoami_qa {
    unsigned fits;
    const char *prompt, *answer;
};

struct nbi_whoami_phrases {
    const struct nbi_whoami_phrase *at;
    size_t count;
};

struct nbi_whoami_qas {
    const struct nbi_whoami_qa *at;
    size_t count;
};

struct nbi_whoami_text {
    const char *before, *after; /* of the name, in the answer that is made from it */
    bool spaced;                /* a space goes between `before` and a name in Latin letters */
    struct nbi_whoami_phrases openers, closers;
    struct nbi_whoami_phrases identity, identity_held_out; /* the most usual ones first */
    struct nbi_whoami_qas contrast, contrast_held_out;     /* the closest ones first */
    struct nbi_whoami_qas replay;
};

#define NBI_WHOAMI_LIST(array)                                                                     \
    {                                                                                              \
        array, sizeof(array) / sizeof *(array)                                                     \
    }

extern const struct nbi_whoami_text nbi_whoami_en, nbi_whoami_zh_hans, nbi_whoami_zh_hant;
extern const struct nbi_whoami_text nbi_whoami_ja, nbi_whoami_ko;
