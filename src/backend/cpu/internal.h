/* internal.h - what the files of the CPU backend share: the backend, a stream, work in chunks. */
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
    int16_t *x_i16;           /* x of a product as whole numbers, in panels */
    float *x_i16_scale;       /* [N, blocks] */
    float *attention_scratch; /* [threads][attention_floats] */
    int64_t attention_floats;
    float *weights_f32;     /* [threads][nbi_weights_f32_floats] rows of a matrix as f32 */
    float *backward;        /* what follows, in one block; NULL: this stream goes forward only */
    float *gemm_a, *gemm_b; /* packed operands */
    float *delta;           /* [N, heads] dy . y of attention */
    float *norm_partials;   /* [chunks of N, 2, D] sums over rows of a piece */
    float *attention_bwd_scratch; /* [threads][nbi_attention_bwd_floats] */
};

/* Sixteen rows of K floats, each a little longer than it must be. */
static inline int64_t nbi_weights_f32_floats(int64_t K)
{
    return CPU_TILE_ROWS * (K + 16);
}

/* Rows whose sum is taken by itself where a sum over all rows is shared by threads. */
#define NBI_SUM_ROWS 32

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

/* Calls fn for chunks of [0, total), of `min_chunk` at min_chunk if all threads have one then.
 * Fewer threads where there is little to do: waking them costs about as much as 20,000
 * multiplications. Several chunks for each, so that one that is held up holds up the others little.
 */
static inline void parallel_for_min(struct op op, int64_t total, int64_t work_each,
                                    int64_t min_chunk, nbi_range_fn fn)
{
    const struct cpu *cpu = op.s->cpu;
    int64_t limit = total * work_each / 20000 + 1;
    int threads = limit < cpu->threads ? (int)limit : cpu->threads;
    int64_t share = (total + threads - 1) / threads,
            chunks = share / (min_chunk > 0 ? min_chunk : 1);
    chunks = chunks < 1 ? 1 : chunks > 16 ? 16 : chunks;
    nbi_for_range(total, (share + chunks - 1) / chunks, threads, fn, &op);
}

static inline void parallel_for(struct nbi_stream *s, int64_t total, int64_t work_each,
                                nbi_range_fn fn, const void *args)
{
    parallel_for_min((struct op){s, args}, total, work_each, 1, fn);
}

/* Scratch of one thread in attention_bwd. */
int64_t nbi_attention_bwd_floats(int64_t D);

/* The operations, and the two limits of roofline.c. */
#define X(op) enum nb_status nbi_cpu_##op(struct nbi_stream *s, const struct nbi_op_##op *a);
NBI_OP_LIST(X)
#undef X

double nbi_cpu_roofline(struct nbi_backend *be);
double nbi_cpu_roofline_f32(struct nbi_backend *be);
