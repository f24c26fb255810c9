/* read.h - what the format readers share: each lists the stored tensors ("parts") of one file, and
 * layout.c joins them into entries. Private to formats/. */
#pragma once

#include "formats/store.h"

/* A tensor exactly as the file stores it. */
struct nbi_part {
    const char *name; /* as stored */
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    int64_t count;
    struct nbi_span span;
    bool used; /* already belongs to an entry */
};

struct nbi_parts {
    struct nbi_part *p;
    int64_t count;
    size_t capacity;
};

#define NBI_NAME_MAX 1024

/* Appends a part; name is copied into the store's arena. Checks the name (non-empty UTF-8 without
 * control characters), that the span lies inside the file, and that its size fits dtype and shape.
 */
enum nb_status nbi_parts_add(struct nbi_store *store, struct nbi_parts *parts, const char *name,
                             size_t name_len, const struct nbi_part *part);

enum nb_status nbi_meta_add(struct nbi_store *store, const char *key, const char *value);

typedef enum nb_status (*nbi_read_header_fn)(struct nbi_store *store, int file,
                                             struct nbi_parts *parts);

enum nb_status nbi_dat_read_header(struct nbi_store *store, int file, struct nbi_parts *parts);
enum nb_status nbi_safetensors_read_header(struct nbi_store *store, int file,
                                           struct nbi_parts *parts);
enum nb_status nbi_gguf_read_header(struct nbi_store *store, int file, struct nbi_parts *parts);

/* Sets store->entries, layout and by_name from the parts. */
enum nb_status nbi_join_parts(struct nbi_store *store, struct nbi_parts *parts);
