/* dataset.h - data files as numbered examples.
 *
 * Opening a data set reads all files once: bad lines are found before training starts, and place
 * and length of every example are known. An example is read and tokenized again each time it is
 * used, so memory grows by 40 bytes per example and not with the text. */
#pragma once

#include "data/example.h"

/* ---- one file, record by record ---- */

struct nbi_walk {
    /* Called for each record. NB_EFORMAT, NB_EVALUE and NB_EUNSUPPORTED mean a bad line. */
    enum nb_status (*fn)(void *ctx, enum nbi_data_kind kind, const struct nbi_record *record,
                         const char *text);
    void *ctx;
    bool skip_bad;           /* continue after a bad line; the first five are logged */
    int64_t bad;             /* out: lines skipped */
    nb_progress_fn progress; /* bytes of this file; may be NULL */
    void *progress_ctx;
};

/* Reads all records. Messages start with FILE:LINE. Skips the header line of a TSV. */
enum nb_status nbi_walk(struct nbi_walk *w, const struct nbi_source *src);

/* ---- the set ---- */

struct nbi_dataset_opts {
    const char *const *files; /* NULL-terminated */
    struct nb_tokenizer *tokenizer;
    enum nbi_chat_kind chat;
    bool skip_bad;
    nb_progress_fn progress; /* bytes of all files */
    void *progress_ctx;
};

struct nbi_dataset_stats {
    int64_t examples, documents; /* documents: examples that are text */
    int64_t tokens, trained;
    int64_t longest; /* tokens */
    int64_t bad;     /* lines skipped */
    uint32_t crc;    /* CRC-32C over tokens and loss masks of all examples */
};

struct nbi_dataset;

/* The tokenizer is borrowed and must not be used by another thread at the same time. */
enum nb_status nbi_dataset_open(struct nbi_dataset **out, const struct nbi_dataset_opts *opts);
void nbi_dataset_close(struct nbi_dataset *d);

const struct nbi_dataset_stats *nbi_dataset_stats(const struct nbi_dataset *d);

/* Tokens of example i, and whether it is text; does not read it. */
int64_t nbi_dataset_tokens(const struct nbi_dataset *d, int64_t i);
bool nbi_dataset_is_document(const struct nbi_dataset *d, int64_t i);

/* Number of conversations that are too long for a row of T positions. */
int64_t nbi_dataset_longer(const struct nbi_dataset *d, int64_t T);

#define NBI_PLACE_MAX 4200

/* Writes "FILE:LINE" of an example to buf, of NBI_PLACE_MAX bytes, and returns it. */
const char *nbi_dataset_place(const struct nbi_dataset *d, int64_t i, char *buf, size_t size);

/* Reads and tokenizes example i, replacing *out. Fails if its file has changed. */
enum nb_status nbi_dataset_get(struct nbi_dataset *d, int64_t i, struct nbi_example *out);
