/* jscan.h - JSON read in place, without building a tree.
 *
 * For what base/json.h is not suited to: large files (a tokenizer.json holds 300,000 strings),
 * millions of lines, strings that contain NUL, and numbers whose text must be kept. A text is
 * validated once as a whole; iterating over it afterwards cannot fail. */
#pragma once

#include "base/str.h"

/* The text of one value, from its first to its last character; borrowed. A zeroed span means
 * "absent" and has type NBI_JNONE. */
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

/* Validates that text is exactly one JSON value: syntax, well-formed UTF-8, no lone surrogates,
 * nesting of at most NBI_JSON_DEPTH (base/json.h). The message names the line. */
enum nb_status nbi_jscan(struct nbi_jspan *out, const char *text, size_t len);

enum nbi_jtype nbi_jtype(struct nbi_jspan v);

/* "a string", "a number", ... for messages; "missing" for an absent value. */
const char *nbi_jtype_text(struct nbi_jspan v);

/* Iterates over the members of an object or the elements of an array; other values have none. key
 * is a string span, quotes included; empty in arrays. */
struct nbi_jiter {
    const char *p;
    bool object;
};

void nbi_jiter_init(struct nbi_jiter *it, struct nbi_jspan v);
bool nbi_jiter_next(struct nbi_jiter *it, struct nbi_jspan *key, struct nbi_jspan *value);
size_t nbi_jcount(struct nbi_jspan v);

/* The same in two steps, so that large values are not scanned twice. After each key, either take
 * the value, or visit its members: enter, iterate over inner to its end, leave. */
bool nbi_jiter_key(struct nbi_jiter *it, struct nbi_jspan *key);
struct nbi_jspan nbi_jiter_value(struct nbi_jiter *it);
bool nbi_jiter_enter(struct nbi_jiter *it,
                     struct nbi_jiter *inner); /* false: not an array or object */
void nbi_jiter_leave(struct nbi_jiter *it, const struct nbi_jiter *inner);

/* Returns the member of that name, the last one if there are several (as most readers do), or an
 * absent span. */
struct nbi_jspan nbi_jget(struct nbi_jspan object, const char *key);

/* Appends the decoded string as UTF-8. */
void nbi_jstring(struct nbi_jspan string, struct nbi_str *out);
bool nbi_jequals(struct nbi_jspan string, const char *text);

/* Reads an integer in [min, max]; false for anything else. */
bool nbi_jint(struct nbi_jspan number, int64_t min, int64_t max, int64_t *out);

/* Appends text as a JSON string with quotes. Escapes only what must be escaped. Malformed UTF-8
 * becomes U+FFFD, one per maximal subpart. */
void nbi_jquote(struct nbi_str *out, const char *text, size_t len);
