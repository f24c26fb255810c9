/* jscan.h - JSON read in place, without building a tree.
 *
 * For what base/json.h is not made for: large files (a tokenizer.json holds 300,000 strings), lines
 * by the million, strings that contain NUL, and numbers whose text must survive. A text is checked
 * once as a whole; walking through it afterwards cannot fail. */
#pragma once

#include "base/str.h"

/* The text of one value, from its first to its last character; borrowed. A zeroed span stands for
 * "not there" and is of no type. */
struct nbi_jspan {
    const char *p;
    size_t len;
};

enum nbi_jtype {
    NBI_JNONE,
    NBI_JNULL,
    NBI_JFALSE,
    NBI_JTRUE,
    NBI_JNUMBER,
    NBI_JSTRING,
    NBI_JARRAY,
    NBI_JOBJECT
};

/* Checks that text is one JSON value and nothing else: syntax, well-formed UTF-8, no lone
 * surrogates, nesting at most NBI_JSON_DEPTH (base/json.h). The message says in which line. */
enum nb_status nbi_jscan(struct nbi_jspan *out, const char *text, size_t len);

enum nbi_jtype nbi_jtype(struct nbi_jspan v);

/* "a string", "a number", ... for messages; "missing" for a span that is not there. */
const char *nbi_jtype_text(struct nbi_jspan v);

/* Walks over the members of an object or the elements of an array; nothing else has any. The key
 * is a string span, quotes included; empty for arrays. */
struct nbi_jiter {
    const char *p;
    bool object;
};

void nbi_jiter_init(struct nbi_jiter *it, struct nbi_jspan v);
bool nbi_jiter_next(struct nbi_jiter *it, struct nbi_jspan *key, struct nbi_jspan *value);
size_t nbi_jcount(struct nbi_jspan v);

/* The same in two steps, for values too large to be walked over first and then read: after each key
 * either the value is taken, or its members are: enter, inner to its end, leave. */
bool nbi_jiter_key(struct nbi_jiter *it, struct nbi_jspan *key);
struct nbi_jspan nbi_jiter_value(struct nbi_jiter *it);
bool nbi_jiter_enter(struct nbi_jiter *it, struct nbi_jiter *inner); /* false: has no members */
void nbi_jiter_leave(struct nbi_jiter *it, const struct nbi_jiter *inner);

/* The member of that name; the last one where there are several, as most readers have it. Not
 * there: an empty span. */
struct nbi_jspan nbi_jget(struct nbi_jspan object, const char *key);

/* Appends the characters that a string stands for, as UTF-8. */
void nbi_jstring(struct nbi_jspan string, struct nbi_str *out);
bool nbi_jequals(struct nbi_jspan string, const char *text);

/* A whole number in [min, max]; false for anything else. */
bool nbi_jint(struct nbi_jspan number, int64_t min, int64_t max, int64_t *out);

/* Appends text as a JSON string, quotes included: what must be escaped is, nothing else. Malformed
 * UTF-8 becomes U+FFFD, one per maximal part. */
void nbi_jquote(struct nbi_str *out, const char *text, size_t len);
