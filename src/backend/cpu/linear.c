/* linear.c - y = x W^T on the CPU.
 *
 * A task is one row of tiles of one matrix (16 outputs) with a group of rows of x. Each output is
 * one dot product over all of K, computed by one thread in one order, so its bits depend on neither
 * the threads nor the other rows. */
#include "backend/cpu/internal.h"

#define FLOAT_X_ROWS     12 /* rows of x per call of rows_float */
#define CONVERT_MIN_ROWS 24 /* rows of x from which on w is converted to f32 first */

/* Rows of x per task: whole panels, as many as fit into a core's L2 cache, since each row of tiles
 * is read once per group. */
static int64_t group_rows(const struct nbi_op_linear *a)
{
    int64_t rows = ((int64_t)384 << 10) / (a->K * (int64_t)sizeof(int16_t)) / NBI_X_PANEL_ROWS;
    return (rows < 1 ? 1 : rows) * NBI_X_PANEL_ROWS;
}

/* Converts the task's rows of w to f32 in the thread's scratch, once for all rows of x. Rows are
 * padded: at a multiple of the page size apart they would evict each other from the cache. */
static void convert_rows(const struct nbi_stream *s, struct nbi_dot_tile *p, int thread)
{
    float *y = s->weights_f32 + thread * nbi_weights_f32_floats(s->limits.K);
    int64_t row = p->K * nbi_dtypes[p->dtype].bytes,
            ld = nbi_weights_f32_floats(p->K) / CPU_TILE_ROWS;
    for (int r = 0; r < p->rows; r++)
        s->cpu->k->to_f32(y + r * ld, (const uint8_t *)p->w + r * row, p->dtype, p->K);
    p->w = y;
    p->dtype = NBI_F32;
    p->ldw = ld;
}

/* Makes the tile row at `row` in the thread's scratch. */
static const uint8_t *make_tile_row(const struct nbi_stream *s, const struct nbi_weight *w,
                                    int64_t row, int thread)
{
    uint8_t *tiles = (uint8_t *)(s->weights_f32 + thread * nbi_weights_f32_floats(s->limits.K));
    NBI_BUG_IF(w->cols > s->limits.K);
    nbi_cpu_make_tiles(s->cpu->k, w, row, 0, w->cols, tiles);
    return tiles;
}

/* The rows of x that are multiplied at a time: all, or as many as have been converted to f32. */
struct product {
    const struct nbi_op_linear *a;
    const float *x;   /* [N, K] */
    int64_t first, N; /* of the operation's rows */
};

/* Whether x is rounded to 16-bit integers for matrices in tiles. Products in bf16 are of f32. */
static bool rounds_x(const struct nbi_op_linear *a)
{
    return a->matmul == NBI_MATMUL_FAST && !a->bf16;
}

/* Tile row t of matrix i with rows [c, end) of x. */
struct task {
    int i;
    int64_t t, c, end;
};

/* Points p at its outputs: columns from `first` on of the operation's rows from `row` on. Sums
 * start from what x W^T is added to. Results in bf16 go through `tile` (see store_outputs). */
static void open_outputs(const struct nbi_stream *s, const struct nbi_op_linear *a,
                         const struct task *task, struct nbi_dot_tile *p, int64_t row, float *tile)
{
    int64_t O = a->w[task->i].rows, first = task->t * CPU_TILE_ROWS;
    int64_t ldy = stride(a->ldy[task->i], O), ld_from = a->r.at ? O : ldy;
    const struct nbi_ptr y = a->y[task->i], from = a->r.at ? a->r : y;
    p->ldy = a->bf16 ? CPU_TILE_ROWS : ldy;
    p->y = act_out(tile, y, a->bf16, row * ldy + first);
    if (!a->add || (from.at == y.at && !a->bf16))
        return;
    for (int64_t n = 0; n < p->n; n++)
        s->cpu->k->to_f32(p->y + n * p->ldy, act_at(from, a->bf16, (row + n) * ld_from + first),
                          a->bf16 ? NBI_BF16 : NBI_F32, p->rows);
}

static void store_outputs(const struct nbi_stream *s, const struct nbi_op_linear *a,
                          const struct task *task, const struct nbi_dot_tile *p, int64_t row)
{
    int64_t ldy = stride(a->ldy[task->i], a->w[task->i].rows), first = task->t * CPU_TILE_ROWS;
    for (int64_t n = 0; n < p->n && a->bf16; n++)
        act_store(s, a->y[task->i], true, (row + n) * ldy + first, p->y + n * p->ldy, p->rows);
}

static void run_task(const struct nbi_stream *s, const struct product *q, struct task task,
                     int thread)
{
    const struct nbi_microkernels *k = s->cpu->k;
    const struct nbi_op_linear *a = q->a;
    const struct nbi_weight *w = &a->w[task.i];
    bool floats = w->layout == NBI_WEIGHT_ROWS;
    int64_t first = task.t * CPU_TILE_ROWS, step = floats ? FLOAT_X_ROWS : NBI_X_PANEL_ROWS;
    int64_t at = floats ? (int64_t)nbi_dtype_bytes(w->dtype, first * a->K)
                        : task.t * nbi_tiles_across(a->K) * CPU_TILE_BYTES;
    float tile[FLOAT_X_ROWS * CPU_TILE_ROWS];
    struct nbi_dot_tile p = {.w = w->layout == NBI_WEIGHT_SCALES
                                      ? make_tile_row(s, w, first, thread)
                                      : (const uint8_t *)host(w->data) + at,
                             .dtype = w->dtype,
                             .ldw = a->K,
                             .scale = w->tensor_scale,
                             .ldx = a->K,
                             .K = a->K,
                             .rows = (int)min(w->rows - first, CPU_TILE_ROWS),
                             .add = a->add};
    if (floats && task.end - task.c >= CONVERT_MIN_ROWS && a->K <= s->limits.K)
        convert_rows(s, &p, thread);
    for (int64_t c = task.c; c < task.end; c += step) {
        p.n = (int)min(task.end - c, step);
        open_outputs(s, a, &task, &p, q->first + c, tile);
        p.x = q->x + c * a->K;
        p.x_i16 = s->x_i16 + c * nbi_x_i16_values(a->K);
        p.x_i16_scale = s->x_i16_scale + c * nbi_x_i16_blocks(a->K);
        (floats ? k->rows_float : rounds_x(a) ? k->tiles_x_i16 : k->tiles_exact)(&p);
        store_outputs(s, a, &task, &p, q->first + c);
    }
}

static int64_t tile_rows_of(const struct nbi_op_linear *a)
{
    int64_t total = 0;
    for (int i = 0; i < a->count; i++)
        total += nbi_tiles_down(a->w[i].rows);
    return total;
}

/* Task u: group u / tiles of rows of x, tile row u % tiles counted over all matrices. */
static void linear_tasks(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct product *q = op->args;
    const struct nbi_op_linear *a = q->a;
    int64_t tiles = tile_rows_of(a), group = group_rows(a);
    for (int64_t u = first; u < first + count; u++) {
        struct task task = {.t = u % tiles, .c = u / tiles * group};
        task.end = min(q->N, task.c + group);
        while (task.t >= nbi_tiles_down(a->w[task.i].rows))
            task.t -= nbi_tiles_down(a->w[task.i++].rows);
        run_task(op->s, q, task, thread);
    }
}

static void quantize_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct product *q = op->args;
    const struct nbi_op_linear *a = q->a;
    const struct nbi_stream *s = op->s;
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        int64_t panel = n / NBI_X_PANEL_ROWS * NBI_X_PANEL_ROWS, c = n - panel;
        int panel_rows = (int)min(q->N - panel, NBI_X_PANEL_ROWS);
        s->cpu->k->quantize_x_i16(s->x_i16 + panel * nbi_x_i16_values(a->K) + 2 * c,
                                  s->x_i16_scale + panel * nbi_x_i16_blocks(a->K) + c, panel_rows,
                                  q->x + n * a->K, a->K);
    }
}

static void multiply(struct nbi_stream *s, const struct product *q)
{
    const struct nbi_op_linear *a = q->a;
    int64_t group = group_rows(a), groups = ceil_div(q->N, group);
    bool quantize = false;
    for (int i = 0; i < a->count; i++)
        quantize = quantize || (a->w[i].layout != NBI_WEIGHT_ROWS && rounds_x(a));
    NBI_BUG_IF(quantize && (q->N > s->limits.N || a->K > s->limits.K));
    if (quantize)
        parallel_for(s, q->N, a->K, quantize_rows, q);
    /* With few rows of x the product is bound by memory, which is fastest when it is read in
     * sequence: a chunk of tasks reads at least 1 MiB / N of weights. */
    int64_t min_tasks = ((int64_t)1 << 20) / (nbi_tiles_across(a->K) * CPU_TILE_BYTES * q->N);
    parallel_for_min((struct op){s, q}, groups * tile_rows_of(a),
                     CPU_TILE_ROWS * a->K * min(q->N, group), min_tasks, linear_tasks);
}

static void rows_to_f32(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct product *q = op->args;
    int64_t K = q->a->K;
    (void)thread;
    op->s->cpu->k->to_f32(op->s->rows_f32 + first * K,
                          act_at(q->a->x, true, (q->first + first) * K), NBI_BF16, count * K);
}

enum nb_status nbi_cpu_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct product q = {.a = a, .x = a->bf16 ? s->rows_f32 : host(a->x)};
    int64_t rows = a->bf16 ? NBI_BF16_ROWS : a->N;
    NBI_BUG_IF(!act_fits(s, a->bf16, a->K) || (a->r.at && (a->count > 1 || !a->add)));
    for (; q.first < a->N; q.first += rows) {
        q.N = min(a->N - q.first, rows);
        if (a->bf16)
            parallel_for(s, q.N, a->K, rows_to_f32, &q);
        multiply(s, &q);
    }
    return NB_OK;
}
