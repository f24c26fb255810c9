/* json.h - strict JSON, parsed into jansson trees.
 *
 * Duplicate keys, trailing bytes, NUL characters and nesting beyond NBI_JSON_DEPTH are errors.
 * Getters name the key in their message, so a caller only adds the file. */
#pragma once

#include <jansson.h>

#include "base/status.h"

#define NBI_JSON_DEPTH 64

/* The caller owns *out (json_decref). */
enum nb_status nbi_json_parse(json_t **out, const char *text, size_t len);
enum nb_status nbi_json_read_file(json_t **out, const char *path, size_t max_bytes);

/* Reads an integer in [min, max]. An optional one that is absent or null leaves *v unchanged. The
 * other getters behave the same. */
enum nb_status nbi_json_int(const json_t *obj, const char *key, bool required, int64_t min,
                            int64_t max, int64_t *v);
enum nb_status nbi_json_number(const json_t *obj, const char *key, bool required, double min,
                               double max, double *v);
enum nb_status nbi_json_bool(const json_t *obj, const char *key, bool required, bool *v);

/* *v points into obj. */
enum nb_status nbi_json_string(const json_t *obj, const char *key, bool required, const char **v);

/* Building values: *ok becomes false, and stays so, if value is NULL or cannot be added. Both take
 * ownership of value, also on failure. */
void nbi_json_set(json_t *object, const char *key, json_t *value, bool *ok);
void nbi_json_append(json_t *array, json_t *value, bool *ok);

/* The caller owns *out. */
enum nb_status nbi_json_copy(json_t **out, const json_t *value);

/* Serialises with jansson's flags. A NULL value counts as out of memory. The caller frees *text. */
enum nb_status nbi_json_dump(const json_t *value, size_t flags, char **text);

/* As nbi_json_dump, indented, with the fewest digits that round-trip. */
enum nb_status nbi_json_text(const json_t *value, char **text);

/* As nbi_json_text plus a final newline; written atomically. */
enum nb_status nbi_json_write_file(const json_t *value, const char *path);
