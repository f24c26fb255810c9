/* optimizer.c - what follows the backward pass on the CPU: gradient statistics, AdamW, and rounding
 * masters to the weights of the forward pass. */
#include <math.h>
#include <string.h>

#include "backend/cpu/internal.h"
#include "base/rng.h"
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
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t left = s->a->n - i * s->chunk;
        s->k->grad_stats(&s->partials[i], act_at(s->a->grad, s->a->bf16, i * s->chunk), s->a->bf16,
                         min(left, s->chunk));
    }
}

enum nb_status nbi_cpu_grad_stats(struct nbi_stream *s, const struct nbi_op_grad_stats *a)
{
    struct stats stats = {.a = a, .k = s->cpu->k, .chunk = (a->n / PARTIALS / 4096 + 1) * 4096};
    int64_t partials = (a->n + stats.chunk - 1) / stats.chunk;
    struct nbi_update_record *record = host(a->record);
    nbi_for_range(partials, 1, s->cpu->threads, stats_partials, &stats);
    record->squares = record->amax = record->nonfinite = 0;
    for (int64_t i = 0; i < partials; i++) {
        const struct nbi_grad_partial *p = &stats.partials[i];
        record->squares += p->squares;
        record->amax = fmax(record->amax, (double)p->amax);
        record->nonfinite += (double)p->nonfinite;
    }
    return NB_OK;
}

/* An nvfp4 moment holds values up to its tensor scale times this: the largest block scale is 448,
 * the largest code 6 for m and 1 for sqrt(v). */
#define M_RANGE (6.0f * 448.0f)
#define V_RANGE 448.0f

static void plan_scales(struct nbi_update_record *r, const struct nbi_op_update_plan *a,
                        float grad_scale)
{
    float amax = (float)r->amax * grad_scale;
    float m = a->beta1 * r->m_max + (1 - a->beta1) * amax;
    float v = sqrtf(a->beta2 * r->v_max * r->v_max + (1 - a->beta2) * amax * amax);
    r->m_scale[0] = r->m_scale[1];
    r->v_scale[0] = r->v_scale[1];
    r->m_scale[1] = fmaxf(m * 1.001f / M_RANGE, 1e-30f);
    r->v_scale[1] = fmaxf(v * 1.001f / V_RANGE, 1e-30f);
    r->m_max = r->v_max = 0;
}

enum nb_status nbi_cpu_update_plan(struct nbi_stream *s, const struct nbi_op_update_plan *a)
{
    (void)s;
    struct nbi_update_control *control = host(a->control);
    struct nbi_update_record *records = host(a->records);
    const int32_t *tensors = host(a->tensors);
    double squares = 0, nonfinite = 0, clip = (double)a->clip;
    for (int64_t i = 0; i < a->count; i++) {
        squares += records[tensors[i]].squares;
        nonfinite += records[tensors[i]].nonfinite;
    }
    double norm = sqrt(squares);
    *control = (struct nbi_update_control){.squares = squares,
                                           .nonfinite = nonfinite,
                                           .grad_scale =
                                               clip > 0 && norm > clip ? (float)(clip / norm) : 1,
                                           .skip = nonfinite > 0};
    for (int64_t i = 0; i < a->count && !control->skip; i++)
        plan_scales(&records[tensors[i]], a, control->grad_scale);
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
    const struct nbi_adamw_args *a = op->args;
    float running_max[2] = {0};
    int64_t at = first * ADAMW_CHUNK, n = count * ADAMW_CHUNK;
    (void)thread;
    struct nbi_update_record *record = host(a->op->record);
    op->s->cpu->k->adamw(a, a->op->first + at, min(n, a->op->count - at), running_max);
    atomic_max_f32((uint32_t *)&record->m_max, running_max[0]);
    atomic_max_f32((uint32_t *)&record->v_max, running_max[1]);
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

/* ---- random values ---- */

static void draw_chunks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_draw *a = op->args;
    const float unit = a->deviation / NBI_DRAW_DEVIATION;
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        struct nbi_philox r = nbi_philox(a->seed, (uint64_t)i, a->stream);
        for (int64_t k = 0; k < 4 && 4 * i + k < a->n; k++) {
            uint32_t v = r.v[k];
            int sum = (int)((v & 255) + (v >> 8 & 255) + (v >> 16 & 255) + (v >> 24)) - 510;
            float x = (float)sum * unit;
            if (a->dtype == NBI_BF16)
                ((uint16_t *)host(a->out))[4 * i + k] = nbi_f32_to_bf16(x);
            else
                ((float *)host(a->out))[4 * i + k] = x;
        }
    }
}

enum nb_status nbi_cpu_draw(struct nbi_stream *s, const struct nbi_op_draw *a)
{
    NBI_BUG_IF(a->dtype != NBI_F32 && a->dtype != NBI_BF16);
    if (a->n > 0)
        parallel_for(s, ceil_div(a->n, 4), 64, draw_chunks, a);
    return NB_OK;
}

/* ---- requantize ---- */

/* The values of one row of tiles in bf16, which represents them exactly. */
static void copy_tiles(const struct nbi_microkernels *k, uint16_t *y, int64_t ld,
                       const uint8_t *tiles, int rows, int64_t cols)
{
    float x[CPU_TILE_ROWS][CPU_TILE_COLS];
    for (int64_t c = 0; c < cols; c += CPU_TILE_COLS, tiles += CPU_TILE_BYTES) {
        k->tile_to_f32(x[0], x[0] + 16, CPU_TILE_COLS, tiles);
        for (int r = 0; r < rows; r++)
            k->from_f32(y + r * ld + c, NBI_BF16, x[r], min(cols - c, CPU_TILE_COLS));
    }
}

/* Columns [col, col + cols) of `rows` rows that have been made. */
struct made_strip {
    int64_t row, col, cols;
    int rows;
    uint8_t codes[CPU_TILE_ROWS * STRIP / 2], scales[CPU_TILE_ROWS * STRIP / 16];
};

static void store_strip(const struct nbi_microkernels *k, const struct nbi_weight *w,
                        const struct made_strip *m)
{
    int64_t first = m->row * w->cols + m->col;
    if (w->layout == NBI_WEIGHT_SCALES) {
        for (int r = 0; r < m->rows; r++)
            memcpy((uint8_t *)host(w->scales) + (first + r * w->cols) / 16,
                   m->scales + r * m->cols / 16, (size_t)m->cols / 16);
        return;
    }
    uint8_t *tiles = (uint8_t *)host(w->data) + nbi_tiles_bytes(m->row, w->cols) +
                     nbi_tiles_across(m->col) * CPU_TILE_BYTES;
    nbi_tiles_pack(tiles, m->codes, m->scales, m->rows, m->cols);
    if (w->bf16.at)
        copy_tiles(k, (uint16_t *)host(w->bf16) + first, w->cols, tiles, m->rows, m->cols);
}

/* Tile row t of an NVFP4 matrix. */
static void requantize_tiles(const struct op *op, int64_t t)
{
    const struct nbi_op_requantize *a = op->args;
    const struct nbi_weight *w = &a->w;
    struct made_strip m = {.row = t * CPU_TILE_ROWS};
    float x[STRIP];
    m.rows = (int)min(w->rows - m.row, CPU_TILE_ROWS);
    for (; m.col < w->cols; m.col += STRIP) {
        int64_t n = m.cols = min(w->cols - m.col, STRIP);
        for (int r = 0; r < m.rows; r++) {
            uint64_t at = nbi_dtype_bytes(a->dtype, (m.row + r) * w->cols + m.col);
            op->s->cpu->k->to_f32(x, (const uint8_t *)host(a->master) + at, a->dtype, n);
            nbi_nvfp4_quantize(m.codes + r * n / 2, m.scales + r * n / 16, x, n / 16,
                               NB_QUANT_SWEEP, w->tensor_scale);
        }
        store_strip(op->s->cpu->k, w, &m);
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

/* Elements of a vector or of a row. */
static int64_t row_values(const struct nbi_weight *w)
{
    return w->cols > 0 ? w->cols : 1;
}

/* Values [first, end) of a weight; of tiles, the tile rows that have them. */
struct weight_part {
    const struct nbi_op_requantize *a;
    int64_t first, end;
};

static void requantize_chunks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct weight_part *p = op->args;
    const struct op part = {op->s, p->a};
    (void)thread;
    for (int64_t i = first; i < first + count; i++) {
        int64_t at = p->first + i * STRIP;
        if (p->a->w.dtype == NBI_NVFP4)
            requantize_tiles(&part, p->first / (CPU_TILE_ROWS * p->a->w.cols) + i);
        else
            requantize_floats(&part, at, min(p->end - at, STRIP));
    }
}

static void requantize_rows(struct nbi_stream *s, const struct nbi_op_requantize *a, int64_t row,
                            int64_t end)
{
    int64_t values = row_values(&a->w);
    const struct weight_part part = {a, row * values, end * values};
    if (a->w.data.at == a->master.at)
        return; /* w is its own master */
    if (a->w.dtype == NBI_NVFP4)
        parallel_for(s, nbi_tiles_down(end) - row / CPU_TILE_ROWS, CPU_TILE_ROWS * a->w.cols * 8,
                     requantize_chunks, &part);
    else
        parallel_for(s, ceil_div(part.end - part.first, STRIP), STRIP, requantize_chunks, &part);
}

enum nb_status nbi_cpu_requantize(struct nbi_stream *s, const struct nbi_op_requantize *a)
{
    requantize_rows(s, a, 0, a->w.rows);
    return NB_OK;
}

/* ---- the update ---- */

enum nb_status nbi_cpu_adamw(struct nbi_stream *s, const struct nbi_op_adamw *a)
{
    const struct nbi_update_control *control = host(a->control);
    const struct nbi_update_record *r = host(a->record);
    const struct nbi_adamw_args args = {
        a, control->grad_scale, {r->m_scale[0], r->m_scale[1]}, {r->v_scale[0], r->v_scale[1]}};
    NBI_BUG_IF(a->first % 32 != 0 || a->grad_first > a->first || a->m.kind != a->v.kind);
    if (control->skip)
        return NB_OK;
    parallel_for(s, ceil_div(a->count, ADAMW_CHUNK), ADAMW_CHUNK * 8, adamw_chunks, &args);
    if (!nbi_weight_exists(&a->w))
        return NB_OK;
    int64_t values = row_values(&a->w);
    NBI_BUG_IF(a->first % values != 0 || a->count % values != 0);
    const struct nbi_op_requantize requantize = {a->w, a->master, a->dtype, a->round_to};
    requantize_rows(s, &requantize, a->first / values, (a->first + a->count) / values);
    return NB_OK;
}
