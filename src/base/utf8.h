/* utf8.h - UTF-8. Well-formed means no overlong forms, no surrogates, nothing beyond U+10FFFF. */
#pragma once

#include "base/str.h"

/* Length of the well-formed character at p (p < end); 0 if there is none. */
int nbi_utf8_length(const char *p, const char *end);

/* Code point of a well-formed character. */
uint32_t nbi_utf8_decode(const char *p);

/* Encodes a code point other than a surrogate; returns the length. */
int nbi_utf8_encode(char out[4], uint32_t c);
void nbi_str_put_char(struct nbi_str *s, uint32_t c);

bool nbi_utf8_valid(const char *bytes, size_t len);

/* Length of the malformed bytes at p (p < end) that one U+FFFD replaces: the longest prefix of a
 * well-formed character, else one byte. Python, Rust and browsers do the same. *cut: the text ends
 * before the character does. */
int nbi_utf8_bad_length(const char *p, const char *end, bool *cut);

/* Appends bytes, with U+FFFD for malformed ones. */
void nbi_utf8_repair(struct nbi_str *out, const char *bytes, size_t len);

/* Whether bytes are well-formed and free of control characters (U+0000 to U+001F, U+007F to
 * U+009F), which could move a terminal's cursor or break a line. */
bool nbi_utf8_printable(const char *bytes, size_t len);

/* Copies text for display: at most size - 1 bytes, never part of a character. Control characters
 * and malformed bytes become '?'; "..." marks truncation. */
void nbi_printable_copy(char *out, size_t size, const char *text, size_t len);
