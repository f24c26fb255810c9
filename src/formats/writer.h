/* writer.h - writes `.dat`, safetensors (one file or shards) and GGUF.
 *
 * All sizes are known before the first value: begin lays out every file, writes the headers and
 * reserves the space. Then values may come in any order and from any thread, each element once.
 * Commit checks that none is missing and renames the files into place. */
#pragma once

#include "base/file.h"
#include "formats/store.h"

/* A tensor to be written. */
struct nbi_tensor_spec {
    const char *name;
    enum nbi_dtype dtype; /* NBI_NVFP4 or any type that the format supports */
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    bool two_level; /* NVFP4: a tensor scale will be set */
};

/* GGUF metadata under construction: keys are appended in order. Strings are copied. */
struct nbi_gguf_meta;

enum nb_status nbi_gguf_meta_new(struct nbi_gguf_meta **out);
void nbi_gguf_meta_free(struct nbi_gguf_meta *meta);
void nbi_gguf_meta_u32(struct nbi_gguf_meta *meta, const char *key, uint32_t v);
void nbi_gguf_meta_f32(struct nbi_gguf_meta *meta, const char *key, float v);
void nbi_gguf_meta_bool(struct nbi_gguf_meta *meta, const char *key, bool v);
void nbi_gguf_meta_string(struct nbi_gguf_meta *meta, const char *key, const char *v);

/* Arrays: the element type and length first, then exactly that many values. */
void nbi_gguf_meta_strings(struct nbi_gguf_meta *meta, const char *key, uint64_t count);
void nbi_gguf_meta_next_string(struct nbi_gguf_meta *meta, const char *v, size_t len);
void nbi_gguf_meta_ints(struct nbi_gguf_meta *meta, const char *key, const int32_t *v,
                        uint64_t count);

struct nbi_writer_opts {
    enum nbi_format format;
    enum nbi_layout layout;           /* safetensors: modelopt or compressed-tensors */
    const char *path;                 /* the file; with shard_bytes, an existing directory */
    uint64_t shard_bytes;             /* > 0: write model*.safetensors and an index */
    const struct nbi_gguf_meta *meta; /* GGUF */
    nbi_name_fn gguf_name;            /* GGUF: translates names; NULL: keep them */
};

struct nbi_writer;

/* Fails if the format cannot store a tensor; see docs/FORMATS.md. `specs` is not kept. */
enum nb_status nbi_writer_begin(struct nbi_writer **out, const struct nbi_writer_opts *opts,
                                const struct nbi_tensor_spec *specs, int64_t count);

/* Writes elements [first, first + count) of tensor `index`, in its stored type. */
enum nb_status nbi_writer_put(struct nbi_writer *w, int64_t index, int64_t first, int64_t count,
                              const void *values);

/* NVFP4: writes codes and block scales; first is a multiple of 64. */
enum nb_status nbi_writer_put_nvfp4(struct nbi_writer *w, int64_t index, int64_t first,
                                    int64_t count, const uint8_t *codes, const uint8_t *scales);

/* NVFP4: must be called once for every two-level tensor. divisor: the exact reciprocal, if the
 * source stores one, for layouts that store it; else 0. */
enum nb_status nbi_writer_put_tensor_scale(struct nbi_writer *w, int64_t index, float scale,
                                           float divisor);

uint64_t nbi_writer_bytes(const struct nbi_writer *w); /* of all files */

/* Opens the only file as written so far, under its temporary name. from_gguf translates the names
 * of a GGUF back. */
enum nb_status nbi_writer_reopen(const struct nbi_writer *w, struct nbi_store **out,
                                 nbi_name_fn from_gguf);

/* Both free the writer, also on failure. */
enum nb_status nbi_writer_commit(struct nbi_writer *w);
void nbi_writer_abort(struct nbi_writer *w);
