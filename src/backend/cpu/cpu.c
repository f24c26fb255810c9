/* cpu.c - the CPU backend: memory, weights, and the operations as loops over kernels.
 *
 * Operations run when they are called. Work is cut into pieces that do not depend on the number of
 * threads, so results do not either. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/kernels.h"
#include "base/clock.h"
#include "base/parallel.h"

struct cpu {
    struct nbi_backend be;
    const struct nbi_cpu_kernels *k;
    int threads;
};

struct nbi_stream {
    struct cpu *cpu;
    struct nbi_stream_limits limits;
    struct nbi_q15_block *q15; /* [N, K/32] */
    float *attend;             /* [threads][attend_floats] */
    int64_t attend_floats;
};

/* Addresses are addresses here. */
static void *host(struct nbi_ptr p)
{
    return (void *)p.at; // NOLINT(performance-no-int-to-ptr)
}

static struct nbi_ptr device(const void *p)
{
    return (struct nbi_ptr){(uintptr_t)p};
}

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

static enum nb_status new_tiles(struct cpu *cpu, const struct nbi_weight_source *src,
                                struct nbi_weight *out)
{
    out->layout = NBI_WEIGHT_TILES;
    NBI_TRY(cpu_alloc(&cpu->be, "weights", nbi_tiles_bytes(src->rows, src->cols), &out->data));
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

static enum nb_status new_rows(struct cpu *cpu, const struct nbi_weight_source *src,
                               struct nbi_weight *out)
{
    if (src->mapped && !src->keep_rows) {
        out->data = device(src->mapped);
        out->borrowed = true;
        return NB_OK;
    }
    int64_t bytes = (int64_t)nbi_dtype_bytes(src->dtype, src->rows * src->cols);
    NBI_TRY(cpu_alloc(&cpu->be, "weights", bytes, &out->data));
    return src->read(src->ctx, 0, src->rows, host(out->data), NULL);
}

static void cpu_weight_free(struct nbi_backend *be, struct nbi_weight *w)
{
    if (!w->borrowed)
        cpu_free(be, w->data);
    cpu_free(be, w->scales);
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

/* ---- streams ---- */

static void cpu_stream_free(struct nbi_stream *s)
{
    if (!s)
        return;
    free(s->q15);
    free(s->attend);
    free(s);
}

static enum nb_status cpu_stream_new(struct nbi_backend *be, const struct nbi_stream_limits *limits,
                                     struct nbi_stream **out)
{
    struct cpu *cpu = (struct cpu *)be;
    struct nbi_stream *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("stream", sizeof *s);
    s->cpu = cpu;
    s->limits = *limits;
    s->attend_floats = (nbi_attend_scratch(NBI_SHARED_MAX, limits->D) + 15) / 16 * 16;
    size_t q15 = (size_t)(limits->N * nbi_tiles_across(limits->K)) * sizeof *s->q15;
    s->q15 = aligned_alloc(64, (q15 + 63) / 64 * 64);
    s->attend = aligned_alloc(64, (size_t)(cpu->threads * s->attend_floats) * sizeof *s->attend);
    if (!s->q15 || !s->attend) {
        cpu_stream_free(s);
        return nbi_fail_memory("scratch", q15);
    }
    *out = s;
    return NB_OK;
}

static enum nb_status cpu_sync(struct nbi_stream *s)
{
    (void)s;
    return NB_OK;
}

/* ---- operations ---- */

/* Fewer threads where there is little to do: starting them costs about as much as 20,000
 * multiplications. */
static int threads_for(const struct nbi_stream *s, int64_t work)
{
    int64_t n = work / 20000 + 1;
    return n < s->cpu->threads ? (int)n : s->cpu->threads;
}

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

static enum nb_status cpu_rope_table(struct nbi_stream *s, const struct nbi_op_rope_table *a)
{
    const int32_t *positions = host(a->positions);
    const float *frequency = host(a->frequency);
    float *c = host(a->cos), *sn = host(a->sin);
    int64_t half = a->D / 2;
#pragma omp parallel for num_threads(threads_for(s, a->N *half * 20)) schedule(static)
    for (int64_t n = 0; n < a->N; n++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[n] * frequency[i];
            c[n * half + i] = cosf(angle) * a->scale;
            sn[n * half + i] = sinf(angle) * a->scale;
        }
    return NB_OK;
}

static enum nb_status cpu_rmsnorm(struct nbi_stream *s, const struct nbi_op_rmsnorm *a)
{
    float *y = host(a->y), *rstd = host(a->rstd);
    const float *x = host(a->x), *w = host(a->w.data);
#pragma omp parallel for num_threads(threads_for(s, a->N * a->C)) schedule(static)
    for (int64_t n = 0; n < a->N; n++)
        s->cpu->k->rmsnorm(y + n * a->C, rstd ? rstd + n : NULL, x + n * a->C, w, a->eps, a->C);
    return NB_OK;
}

/* Rows [16 * t, ...) of one matrix, for all rows of x. */
static void product(const struct nbi_stream *s, const struct nbi_op_linear *a, int which, int64_t t)
{
    const struct nbi_cpu_kernels *k = s->cpu->k;
    const struct nbi_weight *w = &a->w[which];
    bool floats = w->layout == NBI_WEIGHT_ROWS;
    int64_t first = t * NBI_TILE_ROWS, across = nbi_tiles_across(a->K);
    int64_t at =
        floats ? (int64_t)nbi_dtype_bytes(w->dtype, first * a->K) : t * across * NBI_TILE_BYTES;
    struct nbi_product p = {.ldy = w->rows,
                            .w = (const uint8_t *)host(w->data) + at,
                            .dtype = w->dtype,
                            .scale = w->tensor_scale,
                            .ldx = a->K,
                            .K = a->K,
                            .rows = w->rows - first < NBI_TILE_ROWS ? (int)(w->rows - first)
                                                                    : NBI_TILE_ROWS,
                            .add = a->add};
    for (int64_t c = 0; c < a->N; c += NBI_COLUMNS) {
        p.n = a->N - c < NBI_COLUMNS ? (int)(a->N - c) : NBI_COLUMNS;
        p.y = (float *)host(a->y[which]) + c * w->rows + first;
        p.x = (const float *)host(a->x) + c * a->K;
        p.q15 = s->q15 + c * across;
        (floats ? k->rows_float : a->exact ? k->tiles_exact : k->tiles_q15)(&p);
    }
}

static enum nb_status cpu_linear(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    int64_t tiles[NBI_LINEAR_MAX + 1] = {0}, total = 0, across = nbi_tiles_across(a->K);
    bool quantize = false;
    for (int i = 0; i < a->count; i++) {
        tiles[i] = total;
        total += nbi_tiles_down(a->w[i].rows);
        quantize = quantize || (a->w[i].layout == NBI_WEIGHT_TILES && !a->exact);
    }
    NBI_BUG_IF(quantize && (a->N > s->limits.N || a->K > s->limits.K));
    const float *x = host(a->x);
#pragma omp parallel num_threads(threads_for(s, total *NBI_TILE_ROWS * a->K * a->N))
    {
        if (quantize) {
#pragma omp for schedule(static)
            for (int64_t n = 0; n < a->N; n++)
                s->cpu->k->quantize_q15(s->q15 + n * across, x + n * a->K, a->K);
        }
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < total; t++) {
            int which = a->count - 1;
            while (t < tiles[which])
                which--;
            product(s, a, which, t - tiles[which]);
        }
    }
    return NB_OK;
}

static enum nb_status cpu_qkv_rope(struct nbi_stream *s, const struct nbi_op_qkv_rope *a)
{
    const struct nbi_cpu_kernels *k = s->cpu->k;
    const int32_t *slots = host(a->slots);
    const float *q = host(a->q), *key = host(a->k), *value = host(a->v);
    const float *qw = host(a->q_norm.data), *kw = host(a->k_norm.data);
    const float *c = host(a->cos), *sn = host(a->sin);
    float *q_out = host(a->q_out), *rq = host(a->rstd_q), *rk = host(a->rstd_k);
    uint8_t *ks = host(a->store.k), *vs = host(a->store.v);
    int64_t D = a->D, row = (int64_t)nbi_dtype_bytes(a->store.dtype, a->NKV * D);
    int64_t head = (int64_t)nbi_dtype_bytes(a->store.dtype, D);
#pragma omp parallel for num_threads(threads_for(s, a->N *(a->NH + a->NKV) * D)) schedule(static)
    for (int64_t n = 0; n < a->N; n++) {
        const struct nbi_turn turn = {c + n * D / 2, sn + n * D / 2};
        float rotated[NBI_HEAD_MAX];
        for (int64_t h = 0; h < a->NH; h++)
            k->norm_rope(q_out + (n * a->NH + h) * D, rq ? rq + n * a->NH + h : NULL,
                         q + (n * a->NH + h) * D, qw, turn, a->eps, D);
        for (int64_t h = 0; h < a->NKV; h++) {
            k->norm_rope(rotated, rk ? rk + n * a->NKV + h : NULL, key + (n * a->NKV + h) * D, kw,
                         turn, a->eps, D);
            k->narrow(ks + slots[n] * row + h * head, a->store.dtype, rotated, D);
        }
        k->narrow(vs + slots[n] * row, a->store.dtype, value + n * a->NKV * D, a->NKV * D);
    }
    return NB_OK;
}

static enum nb_status cpu_attention(struct nbi_stream *s, const struct nbi_op_attention *a)
{
    const int32_t *first = host(a->first), *last = host(a->last);
    const float *q = host(a->q);
    const uint8_t *ks = host(a->store.k), *vs = host(a->store.v);
    float *y = host(a->y), *lse = host(a->lse);
    int64_t D = a->D, heads = a->NH / a->NKV, work = 0;
    int64_t row = (int64_t)nbi_dtype_bytes(a->store.dtype, a->NKV * D);
    for (int64_t n = 0; n < a->N; n++)
        work += (last[n] - first[n] + 1) * a->NH * D;
#pragma omp parallel for num_threads(threads_for(s, work)) schedule(dynamic, 1)
    for (int64_t i = 0; i < a->N * a->NKV; i++) {
        int64_t n = i / a->NKV, h = i % a->NKV;
        int64_t at = first[n] * row + h * (int64_t)nbi_dtype_bytes(a->store.dtype, D);
        int64_t out = n * a->NH + h * heads;
        const struct nbi_attend job = {.y = y + out * D,
                                       .lse = lse ? lse + out : NULL,
                                       .q = q + out * D,
                                       .k = ks + at,
                                       .v = vs + at,
                                       .stride = row,
                                       .dtype = a->store.dtype,
                                       .count = last[n] - first[n] + 1,
                                       .heads = (int)heads,
                                       .D = D,
                                       .scratch =
                                           s->attend + omp_get_thread_num() * s->attend_floats};
        s->cpu->k->attend(&job);
    }
    return NB_OK;
}

static enum nb_status cpu_swiglu(struct nbi_stream *s, const struct nbi_op_swiglu *a)
{
    float *y = host(a->y);
    const float *gate = host(a->gate), *up = host(a->up);
#pragma omp parallel for num_threads(threads_for(s, a->N * a->F * 8)) schedule(static)
    for (int64_t n = 0; n < a->N; n++)
        s->cpu->k->swiglu(y + n * a->F, gate + n * a->F, up + n * a->F, a->F);
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

static enum nb_status cpu_argmax(struct nbi_stream *s, const struct nbi_op_argmax *a)
{
    int32_t *ids = host(a->ids);
    for (int64_t n = 0; n < a->N; n++)
        ids[n] = (int32_t)s->cpu->k->argmax((const float *)host(a->logits) + n * a->V, a->V);
    return NB_OK;
}

/* The best of some rounds over a row of tiles that stays in the nearest cache. */
static double cpu_peak(struct nbi_backend *be)
{
    enum { K = 512, ROUNDS = 50, CALLS = 200 };
    static const int64_t blocks = K / NBI_TILE_COLS;
    struct nbi_q15_block *q15 = calloc((size_t)(NBI_COLUMNS * blocks), sizeof *q15);
    uint8_t *tiles = calloc((size_t)blocks, NBI_TILE_BYTES);
    float y[NBI_COLUMNS * NBI_TILE_ROWS];
    const struct nbi_product p = {.y = y,
                                  .ldy = NBI_TILE_ROWS,
                                  .w = tiles,
                                  .scale = 1,
                                  .q15 = q15,
                                  .K = K,
                                  .rows = NBI_TILE_ROWS,
                                  .n = NBI_COLUMNS};
    double best = 0;
    for (int r = 0; r < ROUNDS && q15 && tiles; r++) {
        double start = nbi_now();
        for (int i = 0; i < CALLS; i++)
            ((struct cpu *)be)->k->tiles_q15(&p);
        double rate = (double)CALLS * K * NBI_TILE_ROWS * NBI_COLUMNS / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    free(q15);
    free(tiles);
    return best;
}

/* ---- the table ---- */

static void cpu_close(struct nbi_backend *be)
{
    free(be);
}

enum nb_status nbi_cpu_open(struct nbi_backend **out, const struct nbi_backend_opts *opts)
{
    struct cpu *cpu = calloc(1, sizeof *cpu);
    *out = NULL;
    if (!cpu)
        return nbi_fail_memory("backend", sizeof *cpu);
    cpu->k = nbi_cpu_kernels_at(opts->level);
    cpu->threads = opts->threads > 0 ? opts->threads : nbi_cpu_count();
    if (!cpu->k) {
        free(cpu);
        return nbi_fail(NB_EUNSUPPORTED, "this CPU has no %s", nbi_simd_name(opts->level));
    }
    cpu->be = (struct nbi_backend){.name = "cpu",
                                   .close = cpu_close,
                                   .alloc = cpu_alloc,
                                   .free = cpu_free,
                                   .weight_new = cpu_weight_new,
                                   .weight_free = cpu_weight_free,
                                   .stream_new = cpu_stream_new,
                                   .stream_free = cpu_stream_free,
                                   .sync = cpu_sync,
                                   .upload = cpu_upload,
                                   .download = cpu_download,
                                   .copy = cpu_copy,
                                   .clear = cpu_clear,
                                   .peak = cpu_peak,
                                   .embed = cpu_embed,
                                   .rope_table = cpu_rope_table,
                                   .rmsnorm = cpu_rmsnorm,
                                   .linear = cpu_linear,
                                   .qkv_rope = cpu_qkv_rope,
                                   .attention = cpu_attention,
                                   .swiglu = cpu_swiglu,
                                   .gather = cpu_gather,
                                   .argmax = cpu_argmax};
    *out = &cpu->be;
    return NB_OK;
}
