/* read.h - what the format readers share: each turns one file into a list of stored parts, and
 * pairs.c makes entries of them. Private to formats/. */
#pragma once

#include "formats/store.h"

/* One tensor exactly as the file has it. */
struct nbi_part {
    const char *name; /* as stored */
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    int64_t count;
    struct nbi_span span;
    bool used; /* belongs to an entry already made */
};

struct nbi_parts {
    struct nbi_part *p;
    int64_t count;
    size_t capacity;
};

#define NBI_NAME_MAX 1024

/* Appends; name is copied into the store's arena. Checks the name (non-empty UTF-8 without control
 * characters) and that span.bytes fits dtype and shape. */
enum nb_status nbi_parts_add(struct nbi_store *store, struct nbi_parts *parts, const char *name,
                             size_t name_len, const struct nbi_part *part);

enum nb_status nbi_meta_add(struct nbi_store *store, const char *key, const char *value);

typedef enum nb_status (*nbi_read_header_fn)(struct nbi_store *store, int file,
                                             struct nbi_parts *parts);

enum nb_status nbi_dat_read_header(struct nbi_store *store, int file, struct nbi_parts *parts);
enum nb_status nbi_safetensors_read_header(struct nbi_store *store, int file,
                                           struct nbi_parts *parts);
enum nb_status nbi_gguf_read_header(struct nbi_store *store, int file, struct nbi_parts *parts);

/* Fills store->entries, layout and by_name from the parts. */
enum nb_status nbi_join_parts(struct nbi_store *store, struct nbi_parts *parts);
