/* write.h - what the writer and the format-specific headers share. Private to formats/. */
#pragma once

#include "base/str.h"
#include "formats/writer.h"

/* A range of bytes in a file. bytes is 0 if the tensor has no such part. */
struct nbi_extent {
    uint64_t offset, bytes;
};

/* A tensor of the output. The writer sets spec, file_name, count and file; the format's
 * write_header sets the extents. */
struct nbi_out_tensor {
    struct nbi_tensor_spec spec; /* spec.name is the writer's copy */
    const char *file_name;       /* name in the file; NULL: the format has none */
    int64_t count;
    int file;
    struct nbi_extent data, scale, tscale;
    _Atomic uint64_t written; /* bytes so far, over all extents */
};

/* A stored tensor of a safetensors file. */
struct nbi_st_part {
    char name[1100]; /* the longest tensor name and a suffix */
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    struct nbi_extent *extent;
};

/* Lists the one to three stored tensors of t; returns how many. */
int nbi_safetensors_parts(struct nbi_out_tensor *t, enum nbi_layout layout,
                          struct nbi_st_part out[3]);

/* Lays out the tensors of one file, writes the header through f and returns the file's size. */
typedef enum nb_status (*nbi_write_header_fn)(struct nbi_outfile *f,
                                              const struct nbi_writer_opts *opts,
                                              struct nbi_out_tensor *tensors, int64_t count,
                                              uint64_t *size);

enum nb_status nbi_dat_write_header(struct nbi_outfile *f, const struct nbi_writer_opts *opts,
                                    struct nbi_out_tensor *tensors, int64_t count, uint64_t *size);
enum nb_status nbi_safetensors_write_header(struct nbi_outfile *f,
                                            const struct nbi_writer_opts *opts,
                                            struct nbi_out_tensor *tensors, int64_t count,
                                            uint64_t *size);
enum nb_status nbi_gguf_write_header(struct nbi_outfile *f, const struct nbi_writer_opts *opts,
                                     struct nbi_out_tensor *tensors, int64_t count, uint64_t *size);

/* Refuses a tensor that the format cannot store. Called before anything is laid out. */
typedef enum nb_status (*nbi_check_tensor_fn)(const struct nbi_out_tensor *t);

enum nb_status nbi_dat_check_tensor(const struct nbi_out_tensor *t);
enum nb_status nbi_safetensors_check_tensor(const struct nbi_out_tensor *t);
enum nb_status nbi_gguf_check_tensor(const struct nbi_out_tensor *t);
