/* char_width.h - what a terminal shows of a character, and the columns that it takes. */
#pragma once

#include <stddef.h>

/* Of a well-formed character of n bytes that is no line end and no tab; *bytes and *len are to be
 * written for it: itself, or U+FFFD for control characters and for those that terminals draw
 * differently or not at all. */
size_t cli_char_width(const char *p, size_t n, const char **bytes, size_t *len);
