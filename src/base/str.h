/* str.h - a growing text buffer with a size limit.
 *
 * A failure to append is sticky and reported by nbi_str_status, so a sequence of appends needs one
 * check at its end. The text is always NUL-terminated. */
#pragma once

#include <stddef.h>

#include "base/status.h"

struct nbi_str {
    char *p; /* NULL while empty; read it with nbi_str_text */
    size_t len, cap;
    bool failed;
};

/* Limit of a buffer's length. */
#define NBI_STR_MAX ((size_t)1 << 30)

void nbi_str_release(struct nbi_str *s);
const char *nbi_str_text(const struct nbi_str *s); /* "" while empty */
enum nb_status nbi_str_status(const struct nbi_str *s);

/* Shortens the text to an earlier length. Clears the failure of an append since then. */
void nbi_str_cut(struct nbi_str *s, size_t len);

/* Hands the text to the caller, who frees it, and empties s. NULL and a message after a failure. */
char *nbi_str_take(struct nbi_str *s);

void nbi_str_append(struct nbi_str *s, const void *bytes, size_t len);
void nbi_str_puts(struct nbi_str *s, const char *text);
void nbi_str_printf(struct nbi_str *s, const char *fmt, ...) NBI_PRINTF(2, 3);

bool nbi_ends_with(const char *text, const char *ending);
bool nbi_has_extension(const char *path, const char *extension); /* ignores case */
bool nbi_starts_with(const char *text, const char *start);

/* Shell-style match of the whole text: '*' matches any run of characters, '?' one. Usually linear,
 * never more than len(pattern) * len(text) steps. */
bool nbi_wildcard_match(const char *pattern, const char *text);

/* The ending of a noun of which there are n: "" or "s". */
const char *nbi_plural(int64_t n);

/* "1.50 GiB"; returns buf. */
char *nbi_format_bytes(char buf[32], double bytes);
