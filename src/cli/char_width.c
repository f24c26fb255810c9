/* char_width.c - what a terminal shows of a character, and the columns that it takes. */
#include "cli/char_width.h"

#include <string.h>

#include <utf8proc.h>

#include "base/utf8.h"

#define REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

size_t cli_char_width(const char *p, size_t n, const char **bytes, size_t *len)
{
    utf8proc_int32_t code = (utf8proc_int32_t)nbi_utf8_decode(p);
    utf8proc_category_t category = utf8proc_category(code);
    int width = utf8proc_charwidth(code);
    *bytes = p;
    *len = n;
    if (category != UTF8PROC_CATEGORY_CN && category != UTF8PROC_CATEGORY_ZL &&
        category != UTF8PROC_CATEGORY_ZP && category != UTF8PROC_CATEGORY_CC)
        return width > 0 ? (size_t)width : 0;
    *bytes = REPLACEMENT;
    *len = strlen(REPLACEMENT);
    return 1;
}
