/* internal.h - what the files of the CPU backend share: the backend, a stream, work in pieces. */
#pragma once

#include "backend/cpu/gemm.h"
#include "backend/cpu/microkernels.h"
#include "backend/cpu/slabs.h"
#include "backend/ops.h"
#include "backend/ops_train.h"
#include "base/parallel.h"

struct cpu {
    struct nbi_backend be;
    const struct nbi_microkernels *k;
    int threads;
    struct nbi_slab *slab; /* being filled with weights */
};

struct nbi_stream {
    struct cpu *cpu;
    struct nbi_stream_limits limits;
    int16_t *x_i16;     /* x of a product as whole numbers, in panels */
    float *x_i16_scale; /* [N, blocks] */
    float *attend;      /* [threads][attend_floats] */
    int64_t attend_floats;
    float *wide;            /* [threads][nbi_wide_floats] rows of a matrix as f32 */
    float *backward;        /* what follows, in one block; NULL: this stream goes forward only */
    float *gemm_a, *gemm_b; /* packed operands */
    float *delta;           /* [N, heads] dy . y of attention */
    float *parts;           /* [pieces of N, 2, D] sums over rows of a piece */
    float *attend_bwd;      /* [threads][nbi_attend_bwd_floats] */
};

/* Sixteen rows of K floats, each a little longer than it must be. */
static inline int64_t nbi_wide_floats(int64_t K)
{
    return NBI_TILE_ROWS * (K + 16);
}

/* Rows whose sum is taken by itself where a sum over all rows is shared by threads. */
#define NBI_PIECE_ROWS 32

/* Addresses are addresses here. */
static inline void *host(struct nbi_ptr p)
{
    return (void *)p.at; // NOLINT(performance-no-int-to-ptr)
}

static inline struct nbi_ptr device(const void *p)
{
    return (struct nbi_ptr){(uintptr_t)p};
}

/* An operation under way. */
struct op {
    struct nbi_stream *s;
    const void *args;
};

/* Calls fn for pieces of [0, total), of `least` at least if all threads have one then. Fewer
 * threads where there is little to do: waking them costs about as much as 20,000 multiplications.
 * Several pieces for each, so that one that is held up holds up the others little. */
static inline void in_large_pieces(struct op op, int64_t total, int64_t work_each, int64_t least,
                                   nbi_range_fn fn)
{
    const struct cpu *cpu = op.s->cpu;
    int64_t most = total * work_each / 20000 + 1;
    int threads = most < cpu->threads ? (int)most : cpu->threads;
    int64_t share = (total + threads - 1) / threads, pieces = share / (least > 0 ? least : 1);
    pieces = pieces < 1 ? 1 : pieces > 16 ? 16 : pieces;
    nbi_for_range(total, (share + pieces - 1) / pieces, threads, fn, &op);
}

static inline void in_pieces(struct nbi_stream *s, int64_t total, int64_t work_each,
                             nbi_range_fn fn, const void *args)
{
    in_large_pieces((struct op){s, args}, total, work_each, 1, fn);
}

/* Scratch of one thread in attention_bwd. */
int64_t nbi_attend_bwd_floats(int64_t D);

/* The operations, and the two limits of roofline.c. */
#define X(op) enum nb_status nbi_cpu_##op(struct nbi_stream *s, const struct nbi_op_##op *a);
NBI_OP_LIST(X)
#undef X

double nbi_cpu_roofline(struct nbi_backend *be);
double nbi_cpu_roofline_f32(struct nbi_backend *be);
