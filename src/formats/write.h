/* write.h - what the writer and the three emitters share. Private to formats/. */
#pragma once

#include "base/str.h"
#include "formats/writer.h"

/* Where a stored part of a tensor goes in its file; bytes 0: there is no such part. */
struct nbi_extent {
    uint64_t offset, bytes;
};

struct nbi_out_tensor {
    struct nbi_tensor_spec out; /* name: a copy of the writer's own */
    const char *file_name;      /* what the file calls it; NULL: the format has no name for it */
    int64_t count;
    int file;
    struct nbi_extent data, scale, tscale;
    _Atomic uint64_t written; /* bytes so far, all parts */
};

/* A tensor of a safetensors file. */
struct nbi_st_part {
    char name[1100]; /* the longest tensor name and a suffix */
    enum nbi_dtype dtype;
    int ndim;
    int64_t shape[NB_MAX_DIMS];
    struct nbi_extent *place;
};

/* The one to three of them that make a slot; the return value says how many. */
int nbi_safetensors_parts(struct nbi_out_tensor *slot, enum nbi_layout layout,
                          struct nbi_st_part out[3]);

/* Each lays out the slots of one file, writes its header through f and gives the file's size. */
enum nb_status nbi_dat_write_header(struct nbi_outfile *f, struct nbi_out_tensor *slots,
                                    int64_t count, uint64_t *size);
enum nb_status nbi_safetensors_write_header(struct nbi_outfile *f, struct nbi_out_tensor *slots,
                                            int64_t count, enum nbi_layout layout, uint64_t *size);
enum nb_status nbi_gguf_write_header(struct nbi_outfile *f, struct nbi_out_tensor *slots,
                                     int64_t count, const struct nbi_gguf_meta *meta,
                                     uint64_t *size);

/* What a format can hold, checked before anything is laid out. */
enum nb_status nbi_check_dat(const struct nbi_out_tensor *slot);
enum nb_status nbi_check_safetensors(const struct nbi_out_tensor *slot);
enum nb_status nbi_check_gguf(const struct nbi_out_tensor *slot);
