/* cpu.c - the CPU backend: memory, weights, and the operations as loops over kernels.
 *
 * Operations run when they are called. Work is cut into pieces that do not depend on the number of
 * threads, so results do not either. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/internal.h"
#include "base/clock.h"

/* ---- memory ---- */

/* A page in front of each block holds its size; large blocks ask for large pages. */
#define FRONT 4096

static enum nb_status cpu_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                struct nbi_ptr *out)
{
    (void)be;
    *out = (struct nbi_ptr){0};
    if (bytes < 0 || bytes > INT64_MAX - FRONT)
        return nbi_fail_memory(what, (size_t)bytes);
    size_t total = (size_t)bytes + FRONT;
    void *p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return nbi_fail_memory(what, total);
    if (total >= (size_t)4 << 20)
        madvise(p, total, MADV_HUGEPAGE); /* a wish; without it everything works too */
    memcpy(p, &total, sizeof total);
    *out = device((char *)p + FRONT);
    return NB_OK;
}

static void cpu_free(struct nbi_backend *be, struct nbi_ptr p)
{
    (void)be;
    size_t total;
    if (!p.at)
        return;
    char *block = (char *)host(p) - FRONT;
    memcpy(&total, block, sizeof total);
    munmap(block, total);
}

static enum nb_status cpu_upload(struct nbi_stream *s, struct nbi_ptr dst, const void *src,
                                 int64_t bytes)
{
    (void)s;
    if (bytes > 0)
        memcpy(host(dst), src, (size_t)bytes);
    return NB_OK;
}

static enum nb_status cpu_download(struct nbi_stream *s, void *dst, struct nbi_ptr src,
                                   int64_t bytes)
{
    (void)s;
    if (bytes > 0)
        memcpy(dst, host(src), (size_t)bytes);
    return NB_OK;
}

static enum nb_status cpu_copy(struct nbi_stream *s, struct nbi_ptr dst, struct nbi_ptr src,
                               int64_t bytes)
{
    (void)s;
    if (bytes > 0)
        memmove(host(dst), host(src), (size_t)bytes);
    return NB_OK;
}

static enum nb_status cpu_clear(struct nbi_stream *s, struct nbi_ptr dst, int64_t bytes)
{
    (void)s;
    if (bytes > 0)
        memset(host(dst), 0, (size_t)bytes);
    return NB_OK;
}

/* ---- weights ---- */

struct packing {
    const struct nbi_weight_source *src;
    uint8_t *tiles;
};

#define READ_BYTES ((int64_t)1 << 20)

/* Tile rows per piece of work: reads of about half a megabyte. */
static int64_t tile_rows_per_chunk(int64_t cols)
{
    int64_t n = ((int64_t)1 << 20) / (NBI_TILE_ROWS * cols);
    return n < 1 ? 1 : n;
}

static enum nb_status pack_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    const struct packing *p = ctx;
    int64_t cols = p->src->cols, row = first * NBI_TILE_ROWS;
    int64_t rows = count * NBI_TILE_ROWS;
    if (rows > p->src->rows - row)
        rows = p->src->rows - row;
    uint8_t *codes = malloc((size_t)(rows * cols / 2 + rows * cols / 16));
    if (!codes)
        return nbi_fail_memory("weights", (size_t)(rows * cols));
    uint8_t *scales = codes + rows * cols / 2;
    enum nb_status rc = p->src->read(p->src->ctx, row, rows, codes, scales);
    for (int64_t r = 0; r < rows && rc == NB_OK; r += NBI_TILE_ROWS) {
        int n = rows - r < NBI_TILE_ROWS ? (int)(rows - r) : NBI_TILE_ROWS;
        nbi_tiles_pack(p->tiles + nbi_tiles_bytes(row + r, cols), codes + r * cols / 2,
                       scales + r * cols / 16, n, cols);
    }
    free(codes);
    return rc;
}

static enum nb_status room_for_tiles(struct cpu *cpu, struct nbi_weight *w)
{
    size_t bytes = (size_t)nbi_tiles_bytes(w->rows, w->cols);
    w->layout = NBI_WEIGHT_TILES;
    w->data = device(nbi_slab_take(&cpu->slab, bytes));
    return w->data.at ? NB_OK : nbi_fail_memory("weights", bytes);
}

static enum nb_status new_tiles(struct cpu *cpu, const struct nbi_weight_source *src,
                                struct nbi_weight *out)
{
    NBI_TRY(room_for_tiles(cpu, out));
    struct packing p = {src, host(out->data)};
    return nbi_for_chunks(nbi_tiles_down(src->rows), tile_rows_per_chunk(src->cols), cpu->threads,
                          pack_chunk, &p);
}

/* Vectors become f32, as the kernels for norms want them. */
static enum nb_status new_vector(struct cpu *cpu, const struct nbi_weight_source *src,
                                 struct nbi_weight *out)
{
    int64_t bytes = src->rows * (int64_t)sizeof(float);
    void *stored = malloc((size_t)bytes);
    if (!stored)
        return nbi_fail_memory("weights", (size_t)bytes);
    enum nb_status rc = src->read(src->ctx, 0, src->rows, stored, NULL);
    if (rc == NB_OK)
        rc = cpu_alloc(&cpu->be, "weights", bytes, &out->data);
    if (rc == NB_OK)
        cpu->k->widen(host(out->data), stored, src->dtype, src->rows);
    free(stored);
    out->dtype = NBI_F32;
    return rc;
}

struct reading {
    const struct nbi_weight_source *src;
    uint8_t *rows;
};

static enum nb_status read_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    const struct reading *r = ctx;
    return r->src->read(r->src->ctx, first, count,
                        r->rows + nbi_dtype_bytes(r->src->dtype, first * r->src->cols), NULL);
}

static enum nb_status new_rows(struct cpu *cpu, const struct nbi_weight_source *src,
                               struct nbi_weight *out)
{
    int64_t row = (int64_t)nbi_dtype_bytes(src->dtype, src->cols);
    NBI_TRY(cpu_alloc(&cpu->be, "weights", src->rows * row, &out->data));
    struct reading r = {src, host(out->data)};
    int64_t rows_per_chunk = READ_BYTES / row;
    return nbi_for_chunks(src->rows, rows_per_chunk < 1 ? 1 : rows_per_chunk, cpu->threads,
                          read_chunk, &r);
}

static void cpu_weight_free(struct nbi_backend *be, struct nbi_weight *w)
{
    if (w->layout == NBI_WEIGHT_TILES)
        nbi_slab_give(&((struct cpu *)be)->slab, host(w->data));
    else if (!w->borrowed)
        cpu_free(be, w->data);
    *w = (struct nbi_weight){0};
}

static enum nb_status cpu_weight_new(struct nbi_backend *be, const struct nbi_weight_source *src,
                                     struct nbi_weight *out)
{
    struct cpu *cpu = (struct cpu *)be;
    *out = (struct nbi_weight){.dtype = src->dtype,
                               .rows = src->rows,
                               .cols = src->cols,
                               .tensor_scale = src->tensor_scale};
    enum nb_status rc = src->cols == 0            ? new_vector(cpu, src, out)
                        : src->dtype == NBI_NVFP4 ? new_tiles(cpu, src, out)
                                                  : new_rows(cpu, src, out);
    if (rc != NB_OK)
        cpu_weight_free(be, out);
    return rc;
}

static enum nb_status cpu_weight_room(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                      int64_t cols, struct nbi_weight *out)
{
    struct cpu *cpu = (struct cpu *)be;
    NBI_BUG_IF(cols == 0 ? dtype != NBI_F32 : dtype == NBI_NVFP4 && cols % 16 != 0);
    *out = (struct nbi_weight){.dtype = dtype, .rows = rows, .cols = cols, .tensor_scale = 1};
    if (dtype == NBI_NVFP4)
        return room_for_tiles(cpu, out);
    return cpu_alloc(be, "weights", (int64_t)nbi_dtype_bytes(dtype, rows * (cols > 0 ? cols : 1)),
                     &out->data);
}

static enum nb_status cpu_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                      int64_t first, int64_t count, void *data, void *scales)
{
    (void)be;
    int64_t cols = w->cols > 0 ? w->cols : 1;
    uint8_t *codes = data, *s = scales;
    if (w->layout == NBI_WEIGHT_ROWS) {
        memcpy(data, (const uint8_t *)host(w->data) + nbi_dtype_bytes(w->dtype, first * cols),
               nbi_dtype_bytes(w->dtype, count * cols));
        return NB_OK;
    }
    for (int64_t r = first, n; r < first + count; r += n) {
        int64_t skip = r % NBI_TILE_ROWS, left = first + count - r;
        n = left < NBI_TILE_ROWS - skip ? left : NBI_TILE_ROWS - skip;
        nbi_tiles_unpack(codes + (r - first) * cols / 2, s + (r - first) * cols / 16,
                         (const uint8_t *)host(w->data) + nbi_tiles_bytes(r - skip, cols),
                         (int)skip, (int)n, cols);
    }
    return NB_OK;
}

/* ---- streams ---- */

static void cpu_stream_free(struct nbi_stream *s)
{
    if (!s)
        return;
    free(s->x_i16);
    free(s->x_i16_scale);
    free(s->attend);
    free(s->wide);
    free(s->backward);
    free(s);
}

/* The pieces of a stream's scratch, in bytes. */
struct scratch {
    int64_t x_i16, scales, attend, wide, backward;
};

static int64_t whole_lines(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Cuts the scratch of backward passes into its parts, each of whole lines, and returns how many
 * floats that are. */
static int64_t cut_backward(struct nbi_stream *s, const struct cpu *cpu,
                            const struct nbi_stream_limits *l)
{
    const int64_t pieces = (l->N + NBI_PIECE_ROWS - 1) / NBI_PIECE_ROWS;
    const int64_t size[] = {NBI_GEMM_A, NBI_GEMM_B, l->N * l->heads, pieces * 2 * l->D,
                            cpu->threads * nbi_attend_bwd_floats(l->D)};
    float **part[] = {&s->gemm_a, &s->gemm_b, &s->delta, &s->parts, &s->attend_bwd};
    int64_t at = 0;
    for (int i = 0; i < 5; i++) {
        *part[i] = s->backward ? s->backward + at : NULL;
        at += (size[i] + 15) / 16 * 16;
    }
    return at;
}

static struct scratch scratch_for(const struct cpu *cpu, const struct nbi_stream_limits *l)
{
    struct nbi_stream none = {0};
    int64_t attend = whole_lines(nbi_attend_scratch(l->D) * (int64_t)sizeof(float));
    return (struct scratch){
        .x_i16 = whole_lines(nbi_x_i16_bytes(l->N, l->K)),
        .scales = whole_lines(l->N * nbi_x_i16_blocks(l->K) * (int64_t)sizeof(float)),
        .attend = cpu->threads * attend,
        .wide = whole_lines(cpu->threads * nbi_wide_floats(l->K) * (int64_t)sizeof(float)),
        .backward = l->training ? cut_backward(&none, cpu, l) * (int64_t)sizeof(float) : 0};
}

static int64_t cpu_stream_bytes(struct nbi_backend *be, const struct nbi_stream_limits *limits)
{
    struct scratch size = scratch_for((struct cpu *)be, limits);
    return (int64_t)sizeof(struct nbi_stream) + size.x_i16 + size.scales + size.attend + size.wide +
           size.backward;
}

static enum nb_status cpu_stream_new(struct nbi_backend *be, const struct nbi_stream_limits *limits,
                                     struct nbi_stream **out)
{
    struct cpu *cpu = (struct cpu *)be;
    struct scratch size = scratch_for(cpu, limits);
    struct nbi_stream *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("stream", sizeof *s);
    s->cpu = cpu;
    s->limits = *limits;
    s->attend_floats = size.attend / cpu->threads / (int64_t)sizeof *s->attend;
    s->x_i16 = aligned_alloc(64, (size_t)size.x_i16);
    s->x_i16_scale = aligned_alloc(64, (size_t)size.scales);
    s->attend = aligned_alloc(64, (size_t)size.attend);
    s->wide = aligned_alloc(64, (size_t)size.wide);
    if (size.backward > 0)
        s->backward = aligned_alloc(64, (size_t)size.backward);
    if (!s->x_i16 || !s->x_i16_scale || !s->attend || !s->wide ||
        (size.backward > 0 && !s->backward)) {
        cpu_stream_free(s);
        return nbi_fail_memory("scratch", (size_t)cpu_stream_bytes(be, limits));
    }
    if (s->backward)
        cut_backward(s, cpu, limits);
    *out = s;
    return NB_OK;
}

static enum nb_status cpu_sync(struct nbi_stream *s)
{
    (void)s;
    return NB_OK;
}

/* ---- operations ---- */

static enum nb_status cpu_embed(struct nbi_stream *s, const struct nbi_op_embed *a)
{
    const int32_t *ids = host(a->ids);
    const uint8_t *table = host(a->table.data);
    float *x = host(a->x);
    int64_t row = (int64_t)nbi_dtype_bytes(a->table.dtype, a->C);
    for (int64_t n = 0; n < a->N; n++)
        s->cpu->k->widen(x + n * a->C, table + ids[n] * row, a->table.dtype, a->C);
    return NB_OK;
}

static void rope_table_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct nbi_op_rope_table *a = ((const struct op *)ctx)->args;
    const int32_t *positions = host(a->positions);
    const float *frequency = host(a->frequency);
    float *c = host(a->cos), *sn = host(a->sin);
    int64_t half = a->D / 2;
    (void)thread;
    for (int64_t n = first; n < first + count; n++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[n] * frequency[i];
            c[n * half + i] = cosf(angle) * a->scale;
            sn[n * half + i] = sinf(angle) * a->scale;
        }
}

static enum nb_status cpu_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    in_pieces(s, a->N, a->D * 10, rope_table_rows, a);
    return NB_OK;
}

static void rmsnorm_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_rmsnorm *a = op->args;
    float *y = host(a->y), *rstd = host(a->rstd);
    const float *x = host(a->x), *w = host(a->w.data);
    (void)thread;
    for (int64_t n = first; n < first + count; n++)
        op->s->cpu->k->rmsnorm(y + n * a->C, rstd ? rstd + n : NULL, x + n * a->C, w, a->eps, a->C);
}

static enum nb_status cpu_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    in_pieces(s, a->N, a->C, rmsnorm_rows, a);
    return NB_OK;
}

/* ---- products ---- */

#define FLOAT_COLUMNS  12 /* rows of x at a time with rows of floats */
#define WORTH_WIDENING 24

/* Rows of x that are multiplied with a row of tiles before the next row of tiles: whole panels, as
 * many as stay in a core's own cache. */
static int64_t group_rows(const struct nbi_op_linear *a)
{
    int64_t rows = ((int64_t)384 << 10) / (a->K * (int64_t)sizeof(int16_t)) / NBI_X_PANEL_ROWS;
    return (rows < 1 ? 1 : rows) * NBI_X_PANEL_ROWS;
}

/* Rows of w as floats of 32 bits in a thread's scratch: worth it for many rows of x, which then
 * need no conversion; and rows a little apart do not push each other out of the cache. */
static void widen_rows(const struct nbi_stream *s, struct nbi_dot_tile *p, int thread)
{
    float *y = s->wide + thread * nbi_wide_floats(s->limits.K);
    int64_t row = p->K * nbi_dtypes[p->dtype].bytes, ld = nbi_wide_floats(p->K) / NBI_TILE_ROWS;
    for (int r = 0; r < p->rows; r++)
        s->cpu->k->widen(y + r * ld, (const uint8_t *)p->w + r * row, p->dtype, p->K);
    p->w = y;
    p->dtype = NBI_F32;
    p->ldw = ld;
}

/* Sixteen rows of matrix i, tile row t, with rows [c, end) of x. */
struct part {
    int i;
    int64_t t, c, end;
};

static void product(const struct nbi_stream *s, const struct nbi_op_linear *a, struct part part,
                    int thread)
{
    const struct nbi_microkernels *k = s->cpu->k;
    const struct nbi_weight *w = &a->w[part.i];
    bool floats = w->layout == NBI_WEIGHT_ROWS;
    int64_t first = part.t * NBI_TILE_ROWS, step = floats ? FLOAT_COLUMNS : NBI_X_PANEL_ROWS;
    int64_t at = floats ? (int64_t)nbi_dtype_bytes(w->dtype, first * a->K)
                        : part.t * nbi_tiles_across(a->K) * NBI_TILE_BYTES;
    struct nbi_dot_tile p = {.ldy = w->rows,
                             .w = (const uint8_t *)host(w->data) + at,
                             .dtype = w->dtype,
                             .ldw = a->K,
                             .scale = w->tensor_scale,
                             .ldx = a->K,
                             .K = a->K,
                             .rows = w->rows - first < NBI_TILE_ROWS ? (int)(w->rows - first)
                                                                     : NBI_TILE_ROWS,
                             .add = a->add};
    if (floats && part.end - part.c >= WORTH_WIDENING && a->K <= s->limits.K)
        widen_rows(s, &p, thread);
    for (int64_t c = part.c; c < part.end; c += step) {
        p.n = (int)(part.end - c < step ? part.end - c : step);
        p.y = (float *)host(a->y[part.i]) + c * w->rows + first;
        p.x = (const float *)host(a->x) + c * a->K;
        p.x_i16 = s->x_i16 + c * nbi_x_i16_values(a->K);
        p.x_i16_scale = s->x_i16_scale + c * nbi_x_i16_blocks(a->K);
        (floats ? k->rows_float : a->exact ? k->tiles_exact : k->tiles_x_i16)(&p);
    }
}

static int64_t tiles_of(const struct nbi_op_linear *a)
{
    int64_t total = 0;
    for (int i = 0; i < a->count; i++)
        total += nbi_tiles_down(a->w[i].rows);
    return total;
}

/* Piece u: of the group u / tiles of rows of x, tile row u % tiles of all matrices. */
static void linear_pieces(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_linear *a = op->args;
    int64_t tiles = tiles_of(a), group = group_rows(a);
    for (int64_t u = first; u < first + count; u++) {
        struct part part = {.t = u % tiles, .c = u / tiles * group};
        part.end = a->N - part.c < group ? a->N : part.c + group;
        while (part.t >= nbi_tiles_down(a->w[part.i].rows))
            part.t -= nbi_tiles_down(a->w[part.i++].rows);
        product(op->s, a, part, thread);
    }
}

static void quantize_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_linear *a = op->args;
    const struct nbi_stream *s = op->s;
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        int64_t panel = n / NBI_X_PANEL_ROWS * NBI_X_PANEL_ROWS, c = n - panel;
        int width = a->N - panel < NBI_X_PANEL_ROWS ? (int)(a->N - panel) : NBI_X_PANEL_ROWS;
        s->cpu->k->quantize_x_i16(s->x_i16 + panel * nbi_x_i16_values(a->K) + 2 * c,
                                  s->x_i16_scale + panel * nbi_x_i16_blocks(a->K) + c, width,
                                  (const float *)host(a->x) + n * a->K, a->K);
    }
}

static enum nb_status cpu_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    int64_t group = group_rows(a), groups = (a->N + group - 1) / group;
    bool quantize = false;
    for (int i = 0; i < a->count; i++)
        quantize = quantize || (a->w[i].layout == NBI_WEIGHT_TILES && !a->exact);
    NBI_BUG_IF(quantize && (a->N > s->limits.N || a->K > s->limits.K));
    if (quantize)
        in_pieces(s, a->N, a->K, quantize_rows, a);
    /* Few rows wait for memory, which is fastest where it is read from front to back. */
    int64_t long_read = ((int64_t)1 << 20) / (nbi_tiles_across(a->K) * NBI_TILE_BYTES * a->N);
    in_large_pieces((struct op){s, a}, groups * tiles_of(a),
                    NBI_TILE_ROWS * a->K * (a->N < group ? a->N : group), long_read, linear_pieces);
    return NB_OK;
}

/* ---- attention ---- */

static void qkv_rope_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_qkv_rope *a = op->args;
    const struct nbi_microkernels *k = op->s->cpu->k;
    const int32_t *slots = host(a->kv_rows);
    const float *q = host(a->q), *key = host(a->k), *value = host(a->v);
    const float *qw = host(a->q_norm.data), *kw = host(a->k_norm.data);
    const float *c = host(a->cos), *sn = host(a->sin);
    float *q_out = host(a->q_out), *rq = host(a->rstd_q), *rk = host(a->rstd_k);
    uint8_t *ks = host(a->kv.k), *vs = host(a->kv.v);
    int64_t D = a->D, row = (int64_t)nbi_dtype_bytes(a->kv.dtype, a->NKV * D);
    int64_t head = (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
    (void)thread;
    for (int64_t n = first; n < first + count; n++) {
        const struct nbi_rope_row turn = {c + n * D / 2, sn + n * D / 2};
        float rotated[NBI_HEAD_MAX];
        for (int64_t h = 0; h < a->NH; h++)
            k->norm_rope(q_out + (n * a->NH + h) * D, rq ? rq + n * a->NH + h : NULL,
                         q + (n * a->NH + h) * D, qw, turn, a->eps, D);
        for (int64_t h = 0; h < a->NKV; h++) {
            k->norm_rope(rotated, rk ? rk + n * a->NKV + h : NULL, key + (n * a->NKV + h) * D, kw,
                         turn, a->eps, D);
            k->narrow(ks + slots[n] * row + h * head, a->kv.dtype, rotated, D);
        }
        k->narrow(vs + slots[n] * row, a->kv.dtype, value + n * a->NKV * D, a->NKV * D);
    }
}

static enum nb_status cpu_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    in_pieces(s, a->N, (a->NH + 2 * a->NKV) * a->D, qkv_rope_rows, a);
    return NB_OK;
}

/* Rows that are looked at together, and whose keys are read once: as many as a kernel takes, but
 * few enough for all threads to have some. */
static int64_t rows_together(const struct nbi_stream *s, const struct nbi_op_attention *a)
{
    int64_t most = NBI_QUERIES / (a->NH / a->NKV), fair = a->N * a->NKV / (s->cpu->threads * 4);
    return fair < 1 ? 1 : fair < most ? fair : most;
}

/* The rows from n on, before end, that start at the same key and of which none sees fewer than the
 * one before. */
static int64_t run_of_rows(const struct nbi_op_attention *a, int64_t n, int64_t end)
{
    const int32_t *first = host(a->first), *last = host(a->last), *tables = host(a->tables);
    int64_t i = n + 1;
    while (i < end && first[i] == first[n] && last[i] >= last[i - 1] &&
           (!a->pages.at || tables[i] == tables[n]))
        i++;
    return i - n;
}

/* Piece u: head u % NKV of keys and values, of a group of rows: the last ones first, since those
 * see most keys and would hold up the end. */
static void attention_pieces(void *ctx, int thread, int64_t piece, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_attention *a = op->args;
    struct nbi_stream *s = op->s;
    const int32_t *first = host(a->first), *last = host(a->last);
    const int32_t *pages = host(a->pages), *tables = host(a->tables);
    int64_t D = a->D, heads = a->NH / a->NKV, together = rows_together(s, a);
    int64_t row = (int64_t)nbi_dtype_bytes(a->kv.dtype, a->NKV * D);
    int64_t groups = (a->N + together - 1) / together;
    for (int64_t u = piece; u < piece + count; u++) {
        int64_t n = (groups - 1 - u / a->NKV) * together, h = u % a->NKV, rows;
        int64_t end = a->N - n < together ? a->N : n + together;
        for (; n < end; n += rows) {
            rows = run_of_rows(a, n, end);
            int64_t at =
                (pages ? 0 : first[n] * row) + h * (int64_t)nbi_dtype_bytes(a->kv.dtype, D);
            int64_t out = n * a->NH + h * heads;
            const struct nbi_attend job = {.y = (float *)host(a->y) + out * D,
                                           .lse = a->lse.at ? (float *)host(a->lse) + out : NULL,
                                           .q = (const float *)host(a->q) + out * D,
                                           .k = (const uint8_t *)host(a->kv.k) + at,
                                           .v = (const uint8_t *)host(a->kv.v) + at,
                                           .pages = pages ? pages + tables[n] + first[n] / NBI_PAGE
                                                          : NULL,
                                           .last = last + n,
                                           .first = first[n],
                                           .stride = row,
                                           .ldq = a->NH * D,
                                           .ld_lse = a->NH,
                                           .dtype = a->kv.dtype,
                                           .rows = (int)rows,
                                           .heads = (int)heads,
                                           .D = D,
                                           .scratch = s->attend + thread * s->attend_floats};
            s->cpu->k->attend(&job);
        }
    }
}

static enum nb_status cpu_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    const int32_t *first = host(a->first), *last = host(a->last);
    int64_t together = rows_together(s, a), work = 0;
    int64_t pieces = (a->N + together - 1) / together * a->NKV;
    for (int64_t n = 0; n < a->N; n++)
        work += (last[n] - first[n] + 1) * a->NH * a->D;
    in_pieces(s, pieces, work / pieces, attention_pieces, a);
    return NB_OK;
}

/* ---- the rest ---- */

/* Row by row: where a row ends in part of a vector must not depend on the piece. */
static void swiglu_rows(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct nbi_op_swiglu *a = op->args;
    (void)thread;
    for (int64_t at = first * a->F; at < (first + count) * a->F; at += a->F)
        op->s->cpu->k->swiglu((float *)host(a->y) + at, (const float *)host(a->gate) + at,
                              (const float *)host(a->up) + at, a->F);
}

static enum nb_status cpu_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    in_pieces(s, a->N, a->F * 8, swiglu_rows, a);
    return NB_OK;
}

static enum nb_status cpu_gather(struct nbi_stream *s, const struct nbi_op_gather *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy((float *)host(a->y) + i * a->C, (const float *)host(a->x) + rows[i] * a->C,
               (size_t)a->C * sizeof(float));
    return NB_OK;
}

static enum nb_status cpu_scatter(struct nbi_stream *s, const struct nbi_op_scatter *a)
{
    (void)s;
    const int32_t *rows = host(a->rows);
    for (int64_t i = 0; i < a->M; i++)
        memcpy((float *)host(a->y) + rows[i] * a->C, (const float *)host(a->x) + i * a->C,
               (size_t)a->C * sizeof(float));
    return NB_OK;
}

/* A list of the best so far, which few values get into. */
static bool top_of_row(int32_t *ids, float *values, const float *x, const struct nbi_op_topk *a)
{
    int64_t n = 0;
    bool odd = false;
    for (int64_t i = 0; i < a->V; i++) {
        odd = odd || !isfinite(x[i]);
        if (n == a->k && !(x[i] > values[n - 1]))
            continue;
        int64_t j = n < a->k ? n++ : n - 1;
        for (; j > 0 && x[i] > values[j - 1]; j--) {
            values[j] = values[j - 1];
            ids[j] = ids[j - 1];
        }
        values[j] = x[i] + 0.0f; /* no -0 */
        ids[j] = (int32_t)i;
    }
    return odd;
}

static enum nb_status cpu_topk(struct nbi_stream *s, const struct nbi_op_topk *a)
{
    int32_t *odd = host(a->nonfinite);
    (void)s;
    NBI_BUG_IF(a->k < 1 || a->k > NBI_TOPK_MAX || a->k > a->V);
    for (int64_t n = 0; n < a->N; n++)
        odd[n] = top_of_row((int32_t *)host(a->ids) + n * a->k, (float *)host(a->values) + n * a->k,
                            (const float *)host(a->logits) + n * a->V, a);
    return NB_OK;
}

/* The best of some rounds over a row of tiles that stays in the nearest cache. */
static double cpu_peak(struct nbi_backend *be)
{
    enum { K = 512, ROUNDS = 50, CALLS = 200 };
    int16_t *x_i16 = calloc(NBI_X_PANEL_ROWS * K, sizeof *x_i16);
    uint8_t *tiles = calloc(K / NBI_TILE_COLS, NBI_TILE_BYTES);
    float y[NBI_X_PANEL_ROWS * NBI_TILE_ROWS], scale[NBI_X_PANEL_ROWS * K / NBI_Q16_BLOCK] = {0};
    const struct nbi_dot_tile p = {.y = y,
                                   .ldy = NBI_TILE_ROWS,
                                   .w = tiles,
                                   .scale = 1,
                                   .x_i16 = x_i16,
                                   .x_i16_scale = scale,
                                   .K = K,
                                   .rows = NBI_TILE_ROWS,
                                   .n = NBI_X_PANEL_ROWS};
    double best = 0;
    for (int r = 0; r < ROUNDS && x_i16 && tiles; r++) {
        double start = nbi_now();
        for (int i = 0; i < CALLS; i++)
            ((struct cpu *)be)->k->tiles_x_i16(&p);
        double rate = (double)CALLS * K * NBI_TILE_ROWS * NBI_X_PANEL_ROWS / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    free(x_i16);
    free(tiles);
    return best;
}

/* Each thread by itself: the best of some rounds over panels that stay in the nearest cache. */
struct float_peak {
    const struct nbi_microkernels *k;
    double sum;
    pthread_mutex_t lock;
};

static void peak_of_thread(void *ctx, int thread, int threads)
{
    enum { K = 192, ROUNDS = 50, CALLS = 1000 };
    struct float_peak *p = ctx;
    float c[NBI_OUTER_MAX] = {0}, *a = calloc((size_t)(p->k->mr + p->k->nr) * K, sizeof *a);
    const struct nbi_gemm_tile t = {.c = c,
                                    .ldc = p->k->nr,
                                    .a = a,
                                    .a_row = 1,
                                    .a_col = p->k->mr,
                                    .b = a + p->k->mr * K,
                                    .ldb = p->k->nr,
                                    .k = K};
    double best = 0;
    (void)thread;
    (void)threads;
    for (int r = 0; r < ROUNDS && a; r++) {
        double start = nbi_now();
        for (int i = 0; i < CALLS; i++)
            p->k->outer(&t);
        double rate = (double)CALLS * K * p->k->mr * p->k->nr / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    free(a);
    pthread_mutex_lock(&p->lock);
    p->sum += best;
    pthread_mutex_unlock(&p->lock);
}

static double cpu_peak_floats(struct nbi_backend *be)
{
    const struct cpu *cpu = (const struct cpu *)be;
    struct float_peak p = {.k = cpu->k, .lock = PTHREAD_MUTEX_INITIALIZER};
    nbi_team_run(cpu->threads, peak_of_thread, &p);
    return p.sum / cpu->threads;
}

/* ---- the table ---- */

static void cpu_close(struct nbi_backend *be)
{
    struct cpu *cpu = (struct cpu *)be;
    nbi_slab_end(&cpu->slab);
    free(cpu);
}

enum nb_status nbi_cpu_open(struct nbi_backend **out, const struct nbi_backend_opts *opts)
{
    struct cpu *cpu = calloc(1, sizeof *cpu);
    *out = NULL;
    if (!cpu)
        return nbi_fail_memory("backend", sizeof *cpu);
    cpu->k = nbi_microkernels_at(opts->level);
    cpu->threads = opts->threads > 0 ? opts->threads : nbi_cpu_count();
    if (!cpu->k) {
        free(cpu);
        return nbi_fail(NB_EUNSUPPORTED, "this CPU has no %s", nbi_simd_name(opts->level));
    }
    cpu->be = (struct nbi_backend){.name = "cpu",
                                   .chunk = 512,
                                   .close = cpu_close,
                                   .alloc = cpu_alloc,
                                   .free = cpu_free,
                                   .weight_new = cpu_weight_new,
                                   .weight_alloc = cpu_weight_room,
                                   .weight_read = cpu_weight_read,
                                   .weight_free = cpu_weight_free,
                                   .stream_new = cpu_stream_new,
                                   .stream_bytes = cpu_stream_bytes,
                                   .stream_free = cpu_stream_free,
                                   .sync = cpu_sync,
                                   .upload = cpu_upload,
                                   .download = cpu_download,
                                   .copy = cpu_copy,
                                   .clear = cpu_clear,
                                   .roofline = cpu_peak,
                                   .roofline_f32 = cpu_peak_floats,
                                   .embed = cpu_embed,
                                   .rope_table = cpu_rope_table,
                                   .rmsnorm = cpu_rmsnorm,
                                   .linear = cpu_linear,
                                   .qkv_rope = cpu_qkv_rope,
                                   .attention = cpu_attention,
                                   .swiglu = cpu_swiglu,
                                   .gather = cpu_gather,
                                   .scatter = cpu_scatter,
                                   .grad_stats = nbi_cpu_grad_stats,
                                   .adamw = nbi_cpu_adamw,
                                   .amax = nbi_cpu_amax,
                                   .requantize = nbi_cpu_requantize,
                                   .topk = cpu_topk,
                                   .xent = nbi_cpu_xent,
                                   .l1 = nbi_cpu_l1,
                                   .embed_bwd = nbi_cpu_embed_bwd,
                                   .rmsnorm_bwd = nbi_cpu_rmsnorm_bwd,
                                   .linear_bwd = nbi_cpu_linear_bwd,
                                   .qkv_rope_bwd = nbi_cpu_qkv_rope_bwd,
                                   .attention_bwd = nbi_cpu_attention_bwd,
                                   .swiglu_bwd = nbi_cpu_swiglu_bwd};
    *out = &cpu->be;
    return NB_OK;
}
