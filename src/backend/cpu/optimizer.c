/* optimizer.c - what follows the backward pass: statistics of gradients, AdamW, and the weights of
 * the forward pass anew. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"
#include "tensor/codec.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

/* ---- statistics ---- */

#define PARTS 256 /* sums that are added in order at the end, at most */

struct stats {
    const struct nbi_op_grad_stats *a;
    const struct nbi_microkernels *k;
    int64_t each; /* elements of a part */
    struct nbi_grad_part parts[PARTS];
};

static void stats_parts(void *ctx, int thread, int64_t first, int64_t count)
{
    struct stats *s = ctx;
    const float *grad = host(s->a->grad);
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t left = s->a->n - i * s->each;
        s->k->grad_part(&s->parts[i], grad + i * s->each, left < s->each ? left : s->each);
    }
}

enum nb_status nbi_cpu_grad_stats(struct nbi_stream *s, const struct nbi_op_grad_stats *a)
{
    struct stats stats = {.a = a, .k = s->cpu->k, .each = (a->n / PARTS / 4096 + 1) * 4096};
    int64_t parts = (a->n + stats.each - 1) / stats.each;
    double out[3] = {0};
    nbi_for_range(parts, 1, s->cpu->threads, stats_parts, &stats);
    for (int64_t i = 0; i < parts; i++) {
        const struct nbi_grad_part *p = &stats.parts[i];
        out[0] += p->squares;
        out[1] = (double)p->most > out[1] ? (double)p->most : out[1];
        out[2] += (double)p->nonfinite;
    }
    memcpy(host(a->out), out, sizeof out);
    return NB_OK;
}

/* ---- AdamW ---- */

#define STEP_UNIT 1024 /* elements; a multiple of what the kernels take at a time */

/* Magnitudes are ordered like their bits. */
static void raise_to(uint32_t *peak, float value)
{
    uint32_t bits = nbi_f32_bits(value), seen = __atomic_load_n(peak, __ATOMIC_RELAXED);
    while (bits > seen && !__atomic_compare_exchange_n(peak, &seen, bits, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED))
        ;
}

static void adamw_pieces(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_adamw *a = op->args;
    float peak[2] = {0};
    int64_t at = first * STEP_UNIT, n = count * STEP_UNIT;
    (void)thread;
    op->s->cpu->k->adamw(a, a->first + at, n < a->count - at ? n : a->count - at, peak);
    for (int i = 0; i < 2 && a->running_max.at; i++)
        raise_to((uint32_t *)host(a->running_max) + i, peak[i]);
}

enum nb_status nbi_cpu_adamw(struct nbi_stream *s, const struct nbi_op_adamw *a)
{
    NBI_BUG_IF(a->first % 32 != 0);
    in_pieces(s, (a->count + STEP_UNIT - 1) / STEP_UNIT, STEP_UNIT * 8, adamw_pieces, a);
    return NB_OK;
}

/* ---- weights of the forward pass ---- */

#define STRIP 512 /* columns at a time */

static void amax_pieces(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_amax *a = op->args;
    float x[STRIP], most = 0;
    (void)thread;
    for (int64_t i = first * STRIP; i < (first + count) * STRIP && i < a->n; i += STRIP) {
        int64_t n = a->n - i < STRIP ? a->n - i : STRIP;
        op->s->cpu->k->widen(x, (const uint8_t *)host(a->x) + nbi_dtype_bytes(a->dtype, i),
                             a->dtype, n);
        float one = nbi_codec_table()->amax(x, n);
        most = nbi_f32_bits(one) > nbi_f32_bits(most) ? one : most;
    }
    raise_to(host(a->out), most);
}

enum nb_status nbi_cpu_amax(struct nbi_stream *s, const struct nbi_op_amax *a)
{
    memset(host(a->out), 0, sizeof(float));
    if (a->n > 0)
        in_pieces(s, (a->n + STRIP - 1) / STRIP, STRIP, amax_pieces, a);
    return NB_OK;
}

/* Row of tiles t of an NVFP4 matrix. */
static void refresh_tiles(const struct op *op, int64_t t)
{
    const struct nbi_op_requantize *a = op->args;
    const struct nbi_weight *w = &a->w;
    int64_t row = t * NBI_TILE_ROWS, left = w->rows - row;
    int rows = left < NBI_TILE_ROWS ? (int)left : NBI_TILE_ROWS;
    uint8_t *tiles = (uint8_t *)host(w->data) + nbi_tiles_bytes(row, w->cols);
    uint8_t codes[NBI_TILE_ROWS * STRIP / 2], scales[NBI_TILE_ROWS * STRIP / 16];
    float x[STRIP];
    for (int64_t c = 0; c < w->cols; c += STRIP) {
        int64_t n = w->cols - c < STRIP ? w->cols - c : STRIP;
        for (int r = 0; r < rows; r++) {
            uint64_t at = nbi_dtype_bytes(a->dtype, (row + r) * w->cols + c);
            op->s->cpu->k->widen(x, (const uint8_t *)host(a->master) + at, a->dtype, n);
            nbi_nvfp4_quantize(codes + r * n / 2, scales + r * n / 16, x, n / 16, NB_QUANT_SWEEP,
                               w->tensor_scale);
        }
        nbi_tiles_pack(tiles + nbi_tiles_across(c) * NBI_TILE_BYTES, codes, scales, rows, n);
    }
}

static void refresh_floats(const struct op *op, int64_t first, int64_t n)
{
    const struct nbi_op_requantize *a = op->args;
    const struct nbi_microkernels *k = op->s->cpu->k;
    float x[STRIP];
    uint16_t half[STRIP];
    k->widen(x, (const uint8_t *)host(a->master) + nbi_dtype_bytes(a->dtype, first), a->dtype, n);
    if ((a->round_to == NBI_BF16 || a->round_to == NBI_F16) && a->round_to != a->w.dtype) {
        k->narrow(half, a->round_to, x, n);
        k->widen(x, half, a->round_to, n);
    }
    k->narrow((uint8_t *)host(a->w.data) + nbi_dtype_bytes(a->w.dtype, first), a->w.dtype, x, n);
}

static int64_t values_of(const struct nbi_weight *w)
{
    return w->rows * (w->cols > 0 ? w->cols : 1);
}

static void refresh_pieces(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_requantize *a = op->args;
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t left = values_of(&a->w) - i * STRIP;
        if (a->w.layout == NBI_WEIGHT_TILES)
            refresh_tiles(op, i);
        else
            refresh_floats(op, i * STRIP, left < STRIP ? left : STRIP);
    }
}

enum nb_status nbi_cpu_requantize(struct nbi_stream *s, const struct nbi_op_requantize *a)
{
    if (a->w.data.at == a->master.at)
        return NB_OK; /* the master itself */
    if (a->w.layout == NBI_WEIGHT_TILES)
        in_pieces(s, nbi_tiles_down(a->w.rows), NBI_TILE_ROWS * a->w.cols * 8, refresh_pieces, a);
    else
        in_pieces(s, (values_of(&a->w) + STRIP - 1) / STRIP, STRIP, refresh_pieces, a);
    return NB_OK;
}
