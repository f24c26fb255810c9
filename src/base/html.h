/* html.h - pages that need nothing else.
 *
 * They are well-formed XML too, hold no script and load nothing (their content policy forbids it);
 * colours follow the reader's light or dark setting. */
#pragma once

#include "base/str.h"

/* Appends text for HTML or XML, inside elements and quoted attributes: markup is escaped, malformed
 * UTF-8 and characters that XML does not know become U+FFFD. */
void nbi_html_text(struct nbi_str *out, const char *text);
void nbi_html_bytes(struct nbi_str *out, const char *text, size_t len);

/* All that comes before the contents, with the title as a heading; style: CSS of the page's own. */
void nbi_html_begin(struct nbi_str *out, const char *title, const char *style);
void nbi_html_end(struct nbi_str *out);

/* A cell of a table that keeps line ends; a row of a name and a value. */
void nbi_html_cell(struct nbi_str *out, const char *text);
void nbi_html_row(struct nbi_str *out, const char *key, const char *value);
