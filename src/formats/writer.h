/* writer.h - emits `.dat`, safetensors (one file or shards) and GGUF.
 *
 * All sizes are known before the first byte: begin lays out every file, writes the headers and
 * reserves the space; then values may come in any order and from any thread, each element once;
 * commit checks that none is missing and puts the files in place. */
#pragma once

#include "base/file.h"
#include "formats/store.h"

/* A tensor to be written. */
struct nbi_tensor_spec {
    const char *name;
    enum nbi_dtype dtype; /* NBI_NVFP4 or any type the format knows */
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    bool two_level; /* NVFP4: a tensor scale will be set */
};

/* GGUF metadata in the making: keys are appended in order. Strings are copied. */
struct nbi_gguf_meta;

enum nb_status nbi_gguf_meta_new(struct nbi_gguf_meta **out);
void nbi_gguf_meta_free(struct nbi_gguf_meta *meta);
void nbi_gguf_meta_u32(struct nbi_gguf_meta *meta, const char *key, uint32_t v);
void nbi_gguf_meta_f32(struct nbi_gguf_meta *meta, const char *key, float v);
void nbi_gguf_meta_bool(struct nbi_gguf_meta *meta, const char *key, bool v);
void nbi_gguf_meta_string(struct nbi_gguf_meta *meta, const char *key, const char *v);

/* An array: begin with its element type and length, then exactly that many values. */
void nbi_gguf_meta_strings(struct nbi_gguf_meta *meta, const char *key, uint64_t count);
void nbi_gguf_meta_next_string(struct nbi_gguf_meta *meta, const char *v, size_t len);
void nbi_gguf_meta_ints(struct nbi_gguf_meta *meta, const char *key, const int32_t *v,
                        uint64_t count);

struct nbi_writer_opts {
    enum nbi_format format;
    enum nbi_layout layout;           /* safetensors: modelopt or compressed-tensors */
    const char *path;                 /* the file; with shard_bytes the directory, which exists */
    uint64_t shard_bytes;             /* > 0: model*.safetensors and an index in the directory */
    const struct nbi_gguf_meta *meta; /* GGUF */
    nbi_name_fn gguf_name;            /* GGUF: what a tensor is called there; NULL: the same */
};

struct nbi_writer;

/* Refuses what the format cannot hold: see docs/FORMATS.md. `specs` is not kept. */
enum nb_status nbi_writer_begin(struct nbi_writer **out, const struct nbi_writer_opts *opts,
                                const struct nbi_tensor_spec *specs, int64_t count);

/* Elements [first, first + count) of tensor `index`, in its stored type. */
enum nb_status nbi_writer_put(struct nbi_writer *w, int64_t index, int64_t first, int64_t count,
                              const void *values);

/* NVFP4: codes and block scales; first a multiple of 64. */
enum nb_status nbi_writer_put_nvfp4(struct nbi_writer *w, int64_t index, int64_t first,
                                    int64_t count, const uint8_t *codes, const uint8_t *scales);

/* NVFP4: must be called once for every two-level tensor. divisor: what to store where the layout
 * wants the reciprocal, if it is known exactly, else 0. */
enum nb_status nbi_writer_put_tensor_scale(struct nbi_writer *w, int64_t index, float scale,
                                           float divisor);

uint64_t nbi_writer_bytes(const struct nbi_writer *w); /* of all files */

/* The only file as far as it is written, under its temporary name. from_gguf translates the names
 * of a GGUF back. */
enum nb_status nbi_writer_reopen(const struct nbi_writer *w, struct nbi_store **out,
                                 nbi_name_fn from_gguf);

/* Both end the writer, whatever they return. */
enum nb_status nbi_writer_commit(struct nbi_writer *w);
void nbi_writer_abort(struct nbi_writer *w);
