/* html.h - self-contained HTML pages.
 *
 * Pages are also well-formed XML, contain no script and load nothing (their content security policy
 * forbids it). Colours follow the reader's light or dark setting. */
#pragma once

#include "base/str.h"

/* Appends text, escaped for HTML and XML elements and quoted attributes. Malformed UTF-8 and
 * characters that XML does not allow become U+FFFD. */
void nbi_html_text(struct nbi_str *out, const char *text);
void nbi_html_bytes(struct nbi_str *out, const char *text, size_t len);

/* Appends everything before the contents, with the title as a heading. style is the page's own CSS.
 */
void nbi_html_begin(struct nbi_str *out, const char *title, const char *style);
void nbi_html_end(struct nbi_str *out);

/* A table cell that keeps line breaks; a table row of a name and a value. */
void nbi_html_cell(struct nbi_str *out, const char *text);
void nbi_html_row(struct nbi_str *out, const char *key, const char *value);
