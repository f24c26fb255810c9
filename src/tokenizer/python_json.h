/* python_json.h - prints JSON values exactly as Python does.
 *
 * Chat templates are Jinja, which is Python: tools and tool calls are printed by json.dumps or
 * str() of values that json.loads has read. These functions produce the same bytes. Integers have
 * any size and keep their digits; all other numbers are doubles. Among members with the same key
 * the last value wins, at the position of the first.
 *
 * Spans are checked JSON (base/jscan.h). Failures are recorded in the output buffer (base/str.h).
 */
#pragma once

#include "base/jscan.h"

/* bool(v); an absent span is false, like Jinja's Undefined. */
bool nbi_py_truth(struct nbi_jspan v);

/* json.dumps(v, ensure_ascii=False); v must not be absent. */
void nbi_py_json(struct nbi_str *out, struct nbi_jspan v);

/* str(v); prints nothing for an absent span, like Jinja's Undefined. Which characters are escaped
 * in strings inside lists and dicts depends on the Unicode version, here utf8proc's. */
void nbi_py_str(struct nbi_str *out, struct nbi_jspan v);

/* `for x in v`: prints `before` and json.dumps(x) for each element, key or character. Returns false
 * if Python cannot iterate over v. */
bool nbi_py_json_each(struct nbi_str *out, struct nbi_jspan v, const char *before);
