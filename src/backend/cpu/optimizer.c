/* optimizer.c - what follows the backward pass on the CPU: gradient statistics, AdamW, and rounding
 * masters to the weights of the forward pass. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

/* ---- statistics ---- */

#define PARTIALS 256 /* limit of partial sums, which are added in order at the end */

struct stats {
    const struct nbi_op_grad_stats *a;
    const struct nbi_microkernels *k;
    int64_t chunk; /* elements per partial sum; depends on n alone */
    struct nbi_grad_partial partials[PARTIALS];
};

static void stats_partials(void *ctx, int thread, int64_t first, int64_t count)
{
    struct stats *s = ctx;
    const float *grad = host(s->a->grad);
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t left = s->a->n - i * s->chunk;
        s->k->grad_stats(&s->partials[i], grad + i * s->chunk, min(left, s->chunk));
    }
}

enum nb_status nbi_cpu_grad_stats(struct nbi_stream *s, const struct nbi_op_grad_stats *a)
{
    struct stats stats = {.a = a, .k = s->cpu->k, .chunk = (a->n / PARTIALS / 4096 + 1) * 4096};
    int64_t partials = (a->n + stats.chunk - 1) / stats.chunk;
    double out[3] = {0};
    nbi_for_range(partials, 1, s->cpu->threads, stats_partials, &stats);
    for (int64_t i = 0; i < partials; i++) {
        const struct nbi_grad_partial *p = &stats.partials[i];
        out[0] += p->squares;
        out[1] = (double)p->amax > out[1] ? (double)p->amax : out[1];
        out[2] += (double)p->nonfinite;
    }
    memcpy(host(a->out), out, sizeof out);
    return NB_OK;
}

/* ---- AdamW ---- */

#define ADAMW_CHUNK 1024 /* elements per task; a multiple of ADAMW_BLOCK */

/* Magnitudes as floats are ordered like their bits. */
static void atomic_max_f32(uint32_t *running_max, float value)
{
    uint32_t bits = nbi_f32_bits(value), old = __atomic_load_n(running_max, __ATOMIC_RELAXED);
    while (bits > old && !__atomic_compare_exchange_n(running_max, &old, bits, true,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static void adamw_chunks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_adamw *a = op->args;
    float running_max[2] = {0};
    int64_t at = first * ADAMW_CHUNK, n = count * ADAMW_CHUNK;
    (void)thread;
    op->s->cpu->k->adamw(a, a->first + at, min(n, a->count - at), running_max);
    for (int i = 0; i < 2 && a->running_max.at; i++)
        atomic_max_f32((uint32_t *)host(a->running_max) + i, running_max[i]);
}

enum nb_status nbi_cpu_adamw(struct nbi_stream *s, const struct nbi_op_adamw *a)
{
    NBI_BUG_IF(a->first % 32 != 0);
    parallel_for(s, ceil_div(a->count, ADAMW_CHUNK), ADAMW_CHUNK * 8, adamw_chunks, a);
    return NB_OK;
}

/* ---- weights of the forward pass ---- */

#define STRIP 512 /* columns converted at a time */

static void amax_chunks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_amax *a = op->args;
    float x[STRIP], amax = 0;
    (void)thread;
    for (int64_t i = first * STRIP; i < (first + count) * STRIP && i < a->n; i += STRIP) {
        int64_t n = min(a->n - i, STRIP);
        op->s->cpu->k->to_f32(x, (const uint8_t *)host(a->x) + nbi_dtype_bytes(a->dtype, i),
                              a->dtype, n);
        float block_amax = nbi_codec_table()->amax(x, n);
        amax = nbi_f32_bits(block_amax) > nbi_f32_bits(amax) ? block_amax : amax;
    }
    atomic_max_f32(host(a->out), amax);
}

enum nb_status nbi_cpu_amax(struct nbi_stream *s, const struct nbi_op_amax *a)
{
    memset(host(a->out), 0, sizeof(float));
    if (a->n > 0)
        parallel_for(s, ceil_div(a->n, STRIP), STRIP, amax_chunks, a);
    return NB_OK;
}

/* Tile row t of an NVFP4 matrix. */
static void requantize_tiles(const struct op *op, int64_t t)
{
    const struct nbi_op_requantize *a = op->args;
    const struct nbi_weight *w = &a->w;
    int64_t row = t * CPU_TILE_ROWS, left = w->rows - row;
    int rows = (int)min(left, CPU_TILE_ROWS);
    uint8_t *tiles = (uint8_t *)host(w->data) + nbi_tiles_bytes(row, w->cols);
    uint8_t codes[CPU_TILE_ROWS * STRIP / 2], scales[CPU_TILE_ROWS * STRIP / 16];
    float x[STRIP];
    for (int64_t c = 0; c < w->cols; c += STRIP) {
        int64_t n = min(w->cols - c, STRIP);
        for (int r = 0; r < rows; r++) {
            uint64_t at = nbi_dtype_bytes(a->dtype, (row + r) * w->cols + c);
            op->s->cpu->k->to_f32(x, (const uint8_t *)host(a->master) + at, a->dtype, n);
            nbi_nvfp4_quantize(codes + r * n / 2, scales + r * n / 16, x, n / 16, NB_QUANT_SWEEP,
                               w->tensor_scale);
        }
        nbi_tiles_pack(tiles + nbi_tiles_across(c) * CPU_TILE_BYTES, codes, scales, rows, n);
    }
}

static void requantize_floats(const struct op *op, int64_t first, int64_t n)
{
    const struct nbi_op_requantize *a = op->args;
    const struct nbi_microkernels *k = op->s->cpu->k;
    float x[STRIP];
    uint16_t half[STRIP];
    k->to_f32(x, (const uint8_t *)host(a->master) + nbi_dtype_bytes(a->dtype, first), a->dtype, n);
    if ((a->round_to == NBI_BF16 || a->round_to == NBI_F16) && a->round_to != a->w.dtype) {
        k->from_f32(half, a->round_to, x, n);
        k->to_f32(x, half, a->round_to, n);
    }
    k->from_f32((uint8_t *)host(a->w.data) + nbi_dtype_bytes(a->w.dtype, first), a->w.dtype, x, n);
}

static int64_t values_of(const struct nbi_weight *w)
{
    return w->rows * (w->cols > 0 ? w->cols : 1);
}

static void requantize_chunks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_requantize *a = op->args;
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t left = values_of(&a->w) - i * STRIP;
        if (a->w.layout == NBI_WEIGHT_TILES)
            requantize_tiles(op, i);
        else
            requantize_floats(op, i * STRIP, min(left, STRIP));
    }
}

enum nb_status nbi_cpu_requantize(struct nbi_stream *s, const struct nbi_op_requantize *a)
{
    if (a->w.data.at == a->master.at)
        return NB_OK; /* w is its own master */
    if (a->w.layout == NBI_WEIGHT_TILES)
        parallel_for(s, nbi_tiles_down(a->w.rows), CPU_TILE_ROWS * a->w.cols * 8, requantize_chunks,
                     a);
    else
        parallel_for(s, ceil_div(values_of(&a->w), STRIP), STRIP, requantize_chunks, a);
    return NB_OK;
}
