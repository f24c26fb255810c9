/* internal.h - what the files of the CPU backend share: the backend, its stream, and dividing work
 * over threads. */
#pragma once

#include <string.h>

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
    struct nbi_slab *slab; /* the slab being filled with weights */
};

struct nbi_stream {
    struct cpu *cpu;
    struct nbi_stream_limits limits;
    int16_t *x_i16;           /* x of a product as 16-bit integers, in panels (nvfp4_tile.h) */
    float *x_i16_scale;       /* [N, blocks] */
    float *attention_scratch; /* [threads][attention_floats] */
    int64_t attention_floats;
    float *weights_f32; /* [threads][nbi_weights_f32_floats], rows of a matrix converted to f32 */
    float *backward;    /* one block with all that follows; NULL: forward passes only */
    float *gemm_a, *gemm_b; /* packed operands */
    float *delta;           /* [N, heads] dy . y of attention */
    float *norm_partials;   /* [blocks of NBI_SUM_ROWS rows, 2, D] sums of dq_norm and dk_norm */
    float *attention_bwd_scratch; /* [threads][nbi_attention_bwd_floats] */
    float *bf16;                  /* one block with the next two; NULL: activations in f32 only */
    float *row_buffers;           /* [threads][NBI_ROW_BUFFERS][limits.K] rows as f32 */
    float *rows_f32;              /* [NBI_BF16_ROWS, limits.K] rows of a product as f32 */
};

#define NBI_ROW_BUFFERS 5
/* Rows of bf16 that a product converts at a time: enough that reading the matrix again for the next
 * ones costs little. */
#define NBI_BF16_ROWS 512

static inline int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t ceil_div(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* Sixteen rows of K floats, each padded. */
static inline int64_t nbi_weights_f32_floats(int64_t K)
{
    return CPU_TILE_ROWS * (K + 16);
}

/* Rows that are summed by one thread, where a sum over all rows is divided over threads. */
#define NBI_SUM_ROWS 32

/* Addresses of this backend are host addresses. */
static inline void *host(struct nbi_ptr p)
{
    return (void *)p.at; // NOLINT(performance-no-int-to-ptr)
}

static inline struct nbi_ptr device(const void *p)
{
    return (struct nbi_ptr){(uintptr_t)p};
}

/* ---- activations, f32 or bf16 ---- */

static inline int64_t nbi_act_bytes(bool bf16, int64_t n)
{
    return n * (bf16 ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float));
}

/* Element `at` of p. */
static inline void *act_at(struct nbi_ptr p, bool bf16, int64_t at)
{
    return (uint8_t *)host(p) + nbi_act_bytes(bf16, at);
}

/* The n elements from `at` on as f32: in place, or converted to buf. */
static inline const float *act_load(const struct nbi_stream *s, float *buf, struct nbi_ptr p,
                                    bool bf16, int64_t at, int64_t n)
{
    if (!bf16)
        return act_at(p, false, at);
    s->cpu->k->to_f32(buf, act_at(p, true, at), NBI_BF16, n);
    return buf;
}

/* Where to write elements from `at` on as f32: in place, or buf, which act_store converts. */
static inline float *act_out(float *buf, struct nbi_ptr p, bool bf16, int64_t at)
{
    return bf16 ? buf : act_at(p, false, at);
}

static inline void act_store(const struct nbi_stream *s, struct nbi_ptr p, bool bf16, int64_t at,
                             const float *buf, int64_t n)
{
    if (bf16)
        s->cpu->k->from_f32(act_at(p, true, at), NBI_BF16, buf, n);
}

/* ---- NVFP4 matrices without codes (scales.c) ---- */

/* Codes of columns [col, col + cols) of a row, in the order of a file. Both are multiples of 16. */
void nbi_cpu_make_codes(const struct nbi_microkernels *k, const struct nbi_weight *w, int64_t row,
                        int64_t col, int64_t cols, uint8_t *codes);
/* Tiles of columns [col, col + cols) of the tile row that begins at `row`, as far as the matrix
 * goes. col is a multiple of CPU_TILE_COLS. */
void nbi_cpu_make_tiles(const struct nbi_microkernels *k, const struct nbi_weight *w, int64_t row,
                        int64_t col, int64_t cols, uint8_t *tiles);

/* Buffer i of a thread for a row of up to limits.K elements. */
static inline float *row_buffer(const struct nbi_stream *s, int thread, int i)
{
    return s->bf16 ? s->row_buffers + (thread * NBI_ROW_BUFFERS + i) * s->limits.K : NULL;
}

/* Whether the stream can do an operation on rows of `cols` elements. */
static inline bool act_fits(const struct nbi_stream *s, bool bf16, int64_t cols)
{
    return !bf16 || (s->bf16 && cols <= s->limits.K);
}

/* A row stride, for rows of `cols` elements. */
static inline int64_t stride(int64_t ld, int64_t cols)
{
    return ld > 0 ? ld : cols;
}

/* An operation in progress. */
struct op {
    struct nbi_stream *s;
    const void *args;
};

/* Calls fn for chunks of [0, total), several per thread so that a slow one delays the others
 * little; of at least min_chunk, as long as every thread gets one. `cost` is multiplications per
 * element: little work takes fewer threads, since waking one costs about as much as 20,000
 * multiplications. */
static inline void parallel_for_min(struct op op, int64_t total, int64_t cost, int64_t min_chunk,
                                    nbi_range_fn fn)
{
    const struct cpu *cpu = op.s->cpu;
    int threads = (int)min(total * cost / 20000 + 1, cpu->threads);
    int64_t share = ceil_div(total, threads);
    int64_t chunks = min(share / (min_chunk > 0 ? min_chunk : 1), 16);
    nbi_for_range(total, ceil_div(share, chunks < 1 ? 1 : chunks), threads, fn, &op);
}

static inline void parallel_for(struct nbi_stream *s, int64_t total, int64_t cost, nbi_range_fn fn,
                                const void *args)
{
    parallel_for_min((struct op){s, args}, total, cost, 1, fn);
}

/* Scratch floats of one thread in attention_bwd. */
int64_t nbi_attention_bwd_floats(int64_t D);

/* The operations, and the limits of roofline.c. */
#define X(op) enum nb_status nbi_cpu_##op(struct nbi_stream *s, const struct nbi_op_##op *a);
NBI_OP_LIST(X)
#undef X

double nbi_cpu_roofline(struct nbi_backend *be);
double nbi_cpu_roofline_f32(struct nbi_backend *be);
