/* unicode.h - what tokenization needs to know of a character, and canonical composition (NFC).
 *
 * Both must be those of the library that made the vocabularies, not those of the newest Unicode:
 * its regular expressions know Unicode 16, its NFC knows Unicode 9. The table is made by asking it
 * (tools/unicode/make_table.py); utf8proc supplies decompositions, which never change once a
 * character exists. */
#pragma once

#include "base/str.h"

#define NBI_CHAR_COUNT 0x110000

enum nbi_char_class {
    NBI_CHAR_OTHER = 0,
    NBI_CHAR_LETTER = 1, /* \p{L} */
    NBI_CHAR_NUMBER = 2, /* \p{N} */
    NBI_CHAR_SPACE = 3,  /* \s */
    NBI_CHAR_KIND = 3,   /* mask of the four above */
    NBI_CHAR_ACTIVE = 4, /* NFC may change it, move it or join it to what is before it */
    NBI_CHAR_BASE = 8    /* NFC may change it because of what follows */
};

struct nbi_char_range {
    uint32_t first, last;
    uint8_t bits;
};

extern const struct nbi_char_range nbi_char_ranges[];
extern const int nbi_char_range_count;

/* Fills a table of NBI_CHAR_COUNT classes. */
void nbi_char_table(uint8_t *classes);

/* Length of the part of well-formed text that is in NFC for certain; len if all of it is. */
size_t nbi_nfc_prefix(const uint8_t *classes, const char *text, size_t len);

/* Appends the NFC of well-formed text. */
enum nb_status nbi_nfc(const uint8_t *classes, const char *text, size_t len, struct nbi_str *out);
