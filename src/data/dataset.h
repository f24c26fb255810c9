/* dataset.h - data files as numbered samples.
 *
 * All files are read through once: bad lines come to light before anything is trained, and every
 * sample's place and length are known. A sample is read and tokenized again when it is wanted, so
 * memory grows by 40 bytes a sample and not with the text. */
#pragma once

#include "data/example.h"

/* ---- one file, record by record ---- */

struct nbi_walk {
    /* Called for each record. NB_EFORMAT means a bad line. */
    enum nb_status (*fn)(void *ctx, enum nbi_data_kind kind, const struct nbi_record *record,
                         const char *text);
    void *ctx;
    bool skip_bad;           /* go on after a bad line; the first few are logged */
    int64_t bad;             /* out: lines skipped */
    nb_progress_fn progress; /* bytes of this file; may be NULL */
    void *progress_ctx;
};

/* A failure says FILE:LINE. The line of a TSV that names the columns is passed over. */
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
    int64_t examples, documents; /* of the samples, those that are text */
    int64_t tokens, trained;
    int64_t longest; /* tokens */
    int64_t bad;     /* lines skipped */
    uint32_t sum;    /* CRC-32C over the tokens of all samples and which of them are trained */
};

struct nbi_dataset;

/* The tokenizer must outlive the set, and is used by it. */
enum nb_status nbi_dataset_open(struct nbi_dataset **out, const struct nbi_dataset_opts *opts);
void nbi_dataset_close(struct nbi_dataset *d);

const struct nbi_dataset_stats *nbi_dataset_stats(const struct nbi_dataset *d);

/* Tokens of sample i, and whether it is text, without reading it. */
int64_t nbi_dataset_tokens(const struct nbi_dataset *d, int64_t i);
bool nbi_dataset_is_document(const struct nbi_dataset *d, int64_t i);

/* Conversations that rows of T positions do not hold whole. */
int64_t nbi_dataset_longer(const struct nbi_dataset *d, int64_t T);

#define NBI_PLACE_MAX 4200

/* "FILE:LINE" for messages, in buf of NBI_PLACE_MAX. */
const char *nbi_dataset_place(const struct nbi_dataset *d, int64_t i, char *buf, size_t size);

/* Replaces *out. */
enum nb_status nbi_dataset_get(struct nbi_dataset *d, int64_t i, struct nbi_example *out);
