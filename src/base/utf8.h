/* utf8.h - characters and their bytes. Well-formed means: no overlong forms, no surrogates, nothing
 * past U+10FFFF. */
#pragma once

#include "base/str.h"

/* Length of the well-formed character that starts at p (p < end); 0 if there is none. */
int nbi_utf8_length(const char *p, const char *end);

/* The code point of a well-formed character. */
uint32_t nbi_utf8_decode(const char *p);

/* Writes a code point that is no surrogate; its length. */
int nbi_utf8_encode(char out[4], uint32_t c);
void nbi_str_put_char(struct nbi_str *s, uint32_t c);

bool nbi_utf8_valid(const char *bytes, size_t len);

/* How many bytes at p (p < end, where no well-formed character starts) one U+FFFD stands for: the
 * longest beginning of a character that they are, or one. This is what Python, Rust and browsers
 * do. *cut: the bytes end before the character does. */
int nbi_utf8_bad_length(const char *p, const char *end, bool *cut);

/* Appends bytes with U+FFFD for what is malformed. */
void nbi_utf8_repair(struct nbi_str *out, const char *bytes, size_t len);

/* Well-formed and without control characters (U+0000 to U+001F, U+007F to U+009F), which could
 * move a terminal's cursor or end a line. */
bool nbi_utf8_printable(const char *bytes, size_t len);

/* Copies text for people to see: at most size - 1 bytes, whole characters, control characters and
 * malformed bytes as '?', "..." at the end of what was cut. */
void nbi_printable_copy(char *out, size_t size, const char *text, size_t len);
