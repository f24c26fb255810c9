/* str.h - a growing text buffer with a limit.
 *
 * Appending never fails on the spot: the first failure sticks, and nbi_str_status reports it, so
 * that a sequence of appends needs one check at its end. The text is always NUL-terminated. */
#pragma once

#include <stddef.h>

#include "base/status.h"

struct nbi_str {
    char *p; /* NULL while empty; use nbi_str_text to read */
    size_t len, cap;
    bool failed;
};

/* Longest text a buffer will hold. */
#define NBI_STR_MAX ((size_t)1 << 30)

void nbi_str_release(struct nbi_str *s);
const char *nbi_str_text(const struct nbi_str *s); /* "" while empty */
enum nb_status nbi_str_status(const struct nbi_str *s);

/* Shortens the text to len bytes, which it had before; an append that has failed since is
 * forgotten. */
void nbi_str_cut(struct nbi_str *s, size_t len);

/* Hands the text over to the caller, who frees it; NULL and the message after a failure. s is empty
 * then. */
char *nbi_str_take(struct nbi_str *s);

void nbi_str_append(struct nbi_str *s, const void *bytes, size_t len);
void nbi_str_puts(struct nbi_str *s, const char *text);
void nbi_str_printf(struct nbi_str *s, const char *fmt, ...) NBI_PRINTF(2, 3);

bool nbi_ends_with(const char *text, const char *ending);
bool nbi_has_extension(const char *path, const char *extension); /* whatever the case */
bool nbi_starts_with(const char *text, const char *start);

/* Shell-style match of the whole text: '*' any run of characters, '?' one. Linear in practice,
 * never more than len(pattern) * len(text). */
bool nbi_wildcard_match(const char *pattern, const char *text);

/* "1.50 GiB"; the result is buf. */
char *nbi_format_bytes(char buf[32], double bytes);
