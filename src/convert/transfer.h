/* transfer.h - copies, casts or quantises one tensor from a store to a writer, in chunks. Memory is
 * a few chunks per thread, whatever the tensor's size. */
#pragma once

#include "convert/model_writer.h"

/* Sums over quantised values, for the error figures. */
struct nbi_quant_sums {
    double error, signal, zeros;
    int64_t values;
};

struct nbi_transfer {
    const struct nbi_store *store;
    struct nbi_writer *writer;
    enum nb_quant_method method;
    int threads;
    struct nbi_buffers *buffers; /* one set per thread */
    uint64_t done, total;        /* source bytes, for progress */
    nb_progress_fn progress;
    void *progress_ctx;
};

enum nb_status nbi_transfer_init(struct nbi_transfer *t, const struct nb_convert_opts *opts,
                                 const struct nbi_store *store);
void nbi_transfer_release(struct nbi_transfer *t);

/* sums is zero unless the tensor was quantised here. */
enum nb_status nbi_transfer_entry(struct nbi_transfer *t, const struct nbi_manifest_entry *item,
                                  int64_t index, struct nbi_quant_sums *sums);

/* Fails if x, elements of a tensor from `first` on, contains NaN or infinity. */
enum nb_status nbi_check_finite(const char *name, const float *x, int64_t first, int64_t count,
                                float *amax);

/* Largest absolute value of a source tensor. NaN and infinity are errors. */
enum nb_status nbi_transfer_amax(struct nbi_transfer *t, const struct nbi_entry *e, float *amax);
