/* python_json.h - JSON values as Python sees and writes them.
 *
 * Chat templates are Jinja, hence Python: what they print of a tool or of a tool call is json.dumps
 * or str() of a value that json.loads has read. These functions give the same bytes. Numbers: whole
 * ones have any size and keep their digits, all others are doubles. Of members with the same key
 * the last value counts, in the place of the first.
 *
 * Spans come from checked text (base/jscan.h). Failures stick to the output (base/str.h). */
#pragma once

#include "base/jscan.h"

/* bool(v); a span that is not there is false, as Jinja's Undefined is. */
bool nbi_py_truth(struct nbi_jspan v);

/* json.dumps(v, ensure_ascii=False); v is there. */
void nbi_py_json(struct nbi_str *out, struct nbi_jspan v);

/* str(v); nothing for a span that is not there, as for Jinja's Undefined. Which characters of a
 * string inside a list or a dict are escaped depends on the Unicode version: utf8proc's here. */
void nbi_py_str(struct nbi_str *out, struct nbi_jspan v);

/* `for x in v`: the text before and json.dumps(x), over elements, keys or characters. false for a
 * value that Python cannot iterate over. */
bool nbi_py_json_each(struct nbi_str *out, struct nbi_jspan v, const char *before);
