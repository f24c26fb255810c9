/* cpu.c - the CPU backend: memory, weights, streams and the table of operations.
 *
 * Operations run to completion when they are called, on all threads. Work is divided by the shapes
 * alone, or so that no sum crosses a division; results therefore do not depend on the number of
 * threads. */
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/internal.h"
#include "backend/devices.h"

/* ---- memory ---- */

/* The page before each block holds the size of its mapping, which munmap needs. */
#define HEADER_BYTES 4096

static enum nb_status cpu_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                struct nbi_ptr *out)
{
    (void)be;
    *out = (struct nbi_ptr){0};
    if (bytes < 0 || bytes > INT64_MAX - HEADER_BYTES)
        return nbi_fail_memory(what, (size_t)bytes);
    size_t total = (size_t)bytes + HEADER_BYTES;
    void *p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return nbi_fail_memory(what, total);
    if (total >= (size_t)4 << 20)
        madvise(p, total, MADV_HUGEPAGE); /* a hint; failure is harmless */
    memcpy(p, &total, sizeof total);
    *out = device((char *)p + HEADER_BYTES);
    return NB_OK;
}

static void cpu_free(struct nbi_backend *be, struct nbi_ptr p)
{
    (void)be;
    size_t total;
    if (!p.at)
        return;
    char *block = (char *)host(p) - HEADER_BYTES;
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

struct tile_load {
    const struct nbi_weight_source *src;
    uint8_t *tiles;
};

#define READ_BYTES ((int64_t)1 << 20)

/* Tile rows per chunk, so that one read is about half a megabyte. */
static int64_t tile_rows_per_chunk(int64_t cols)
{
    int64_t n = ((int64_t)1 << 20) / (CPU_TILE_ROWS * cols);
    return n < 1 ? 1 : n;
}

static enum nb_status pack_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    const struct tile_load *p = ctx;
    int64_t cols = p->src->cols, row = first * CPU_TILE_ROWS;
    int64_t rows = min(count * CPU_TILE_ROWS, p->src->rows - row);
    uint8_t *codes = malloc((size_t)(rows * cols / 2 + rows * cols / 16));
    if (!codes)
        return nbi_fail_memory("weights", (size_t)(rows * cols));
    uint8_t *scales = codes + rows * cols / 2;
    enum nb_status rc = p->src->read(p->src->ctx, row, rows, codes, scales);
    for (int64_t r = 0; r < rows && rc == NB_OK; r += CPU_TILE_ROWS) {
        int n = (int)min(rows - r, CPU_TILE_ROWS);
        nbi_tiles_pack(p->tiles + nbi_tiles_bytes(row + r, cols), codes + r * cols / 2,
                       scales + r * cols / 16, n, cols);
    }
    free(codes);
    return rc;
}

/* Vectors are kept in f32, which the norm kernels take. */
static int64_t cpu_weight_bytes(const struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                int64_t cols)
{
    (void)be;
    if (cols == 0)
        return rows * (int64_t)sizeof(float);
    return dtype == NBI_NVFP4 ? nbi_tiles_bytes(rows, cols)
                              : (int64_t)nbi_dtype_bytes(dtype, rows * cols);
}

/* The caller's memory, or an own block: tiles are parts of slabs. */
static enum nb_status alloc_weight(struct cpu *cpu, const struct nbi_weight_memory *memory,
                                   struct nbi_weight *w)
{
    int64_t bytes = cpu_weight_bytes(&cpu->be, w->dtype, w->rows, w->cols);
    bool tiles = w->dtype == NBI_NVFP4;
    w->layout = tiles ? NBI_WEIGHT_TILES : NBI_WEIGHT_ROWS;
    w->borrowed = memory != NULL;
    if (memory)
        w->data = memory->data;
    else if (!tiles)
        return cpu_alloc(&cpu->be, "weights", bytes, &w->data);
    else
        w->data = device(nbi_slab_alloc(&cpu->slab, (size_t)bytes));
    return w->data.at ? NB_OK : nbi_fail_memory("weights", (size_t)bytes);
}

static enum nb_status load_tiles(struct cpu *cpu, const struct nbi_weight_source *src,
                                 struct nbi_weight *out)
{
    NBI_TRY(alloc_weight(cpu, src->memory, out));
    struct tile_load p = {src, host(out->data)};
    return nbi_for_chunks(nbi_tiles_down(src->rows), tile_rows_per_chunk(src->cols), cpu->threads,
                          pack_chunk, &p);
}

static enum nb_status load_vector(struct cpu *cpu, const struct nbi_weight_source *src,
                                  struct nbi_weight *out)
{
    int64_t bytes = src->rows * (int64_t)sizeof(float);
    void *stored = malloc((size_t)bytes);
    if (!stored)
        return nbi_fail_memory("weights", (size_t)bytes);
    enum nb_status rc = src->read(src->ctx, 0, src->rows, stored, NULL);
    if (rc == NB_OK)
        rc = alloc_weight(cpu, src->memory, out);
    if (rc == NB_OK)
        cpu->k->to_f32(host(out->data), stored, src->dtype, src->rows);
    free(stored);
    out->dtype = NBI_F32;
    return rc;
}

struct row_load {
    const struct nbi_weight_source *src;
    uint8_t *rows;
};

static enum nb_status read_chunk(void *ctx, int thread, int64_t first, int64_t count)
{
    (void)thread;
    const struct row_load *r = ctx;
    return r->src->read(r->src->ctx, first, count,
                        r->rows + nbi_dtype_bytes(r->src->dtype, first * r->src->cols), NULL);
}

static enum nb_status load_rows(struct cpu *cpu, const struct nbi_weight_source *src,
                                struct nbi_weight *out)
{
    int64_t row = (int64_t)nbi_dtype_bytes(src->dtype, src->cols);
    NBI_TRY(alloc_weight(cpu, src->memory, out));
    struct row_load r = {src, host(out->data)};
    int64_t rows_per_chunk = READ_BYTES / row;
    return nbi_for_chunks(src->rows, rows_per_chunk < 1 ? 1 : rows_per_chunk, cpu->threads,
                          read_chunk, &r);
}

static void cpu_weight_free(struct nbi_backend *be, struct nbi_weight *w)
{
    if (!w->borrowed && w->layout == NBI_WEIGHT_TILES)
        nbi_slab_free(&((struct cpu *)be)->slab, host(w->data));
    else if (!w->borrowed)
        cpu_free(be, w->data);
    if (!w->borrowed)
        cpu_free(be, w->bf16);
    if (!w->borrowed)
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
    enum nb_status rc = src->cols == 0            ? load_vector(cpu, src, out)
                        : src->dtype == NBI_NVFP4 ? load_tiles(cpu, src, out)
                                                  : load_rows(cpu, src, out);
    if (rc != NB_OK)
        cpu_weight_free(be, out);
    return rc;
}

/* A part of a weight: the caller's memory, or a block of its own. */
static enum nb_status take_part(const struct nbi_ptr *memory, int64_t bytes, struct nbi_ptr *out)
{
    if (!memory)
        return cpu_alloc(NULL, "weights", bytes, out);
    *out = *memory;
    return NB_OK;
}

static enum nb_status alloc_nvfp4(struct cpu *cpu, enum nb_weight_store store,
                                  const struct nbi_weight_memory *memory, struct nbi_weight *w)
{
    int64_t n = w->rows * w->cols;
    if (store == NB_WEIGHT_STORE_SCALES) {
        w->layout = NBI_WEIGHT_SCALES;
        w->borrowed = memory != NULL;
        return take_part(memory ? &memory->data : NULL, n / 16, &w->scales);
    }
    enum nb_status rc = alloc_weight(cpu, memory, w);
    if (rc == NB_OK && store == NB_WEIGHT_STORE_BF16)
        rc = take_part(memory ? &memory->bf16 : NULL, n * (int64_t)sizeof(uint16_t), &w->bf16);
    if (rc != NB_OK)
        cpu_weight_free(&cpu->be, w);
    return rc;
}

static enum nb_status cpu_weight_alloc(struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                                       int64_t cols, enum nb_weight_store store,
                                       const struct nbi_weight_memory *memory,
                                       struct nbi_weight *out)
{
    NBI_BUG_IF(cols == 0 ? dtype != NBI_F32 : dtype == NBI_NVFP4 && cols % 16 != 0);
    *out = (struct nbi_weight){.dtype = dtype, .rows = rows, .cols = cols, .tensor_scale = 1};
    return dtype == NBI_NVFP4 ? alloc_nvfp4((struct cpu *)be, store, memory, out)
                              : alloc_weight((struct cpu *)be, memory, out);
}

static enum nb_status cpu_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                      int64_t first, int64_t count, void *data, void *scales)
{
    const struct cpu *cpu = (struct cpu *)be;
    int64_t cols = w->cols > 0 ? w->cols : 1;
    uint8_t *codes = data, *s = scales;
    if (w->layout == NBI_WEIGHT_SCALES) {
        for (int64_t r = 0; r < count; r++)
            nbi_cpu_make_codes(cpu->k, w, first + r, 0, cols, codes + r * cols / 2);
        memcpy(scales, (const uint8_t *)host(w->scales) + first * cols / 16,
               (size_t)(count * cols / 16));
        return NB_OK;
    }
    if (w->layout == NBI_WEIGHT_ROWS) {
        memcpy(data, (const uint8_t *)host(w->data) + nbi_dtype_bytes(w->dtype, first * cols),
               nbi_dtype_bytes(w->dtype, count * cols));
        return NB_OK;
    }
    for (int64_t r = first, n; r < first + count; r += n) {
        int64_t skip = r % CPU_TILE_ROWS, left = first + count - r;
        n = min(left, CPU_TILE_ROWS - skip);
        nbi_tiles_unpack(codes + (r - first) * cols / 2, s + (r - first) * cols / 16,
                         (const uint8_t *)host(w->data) + nbi_tiles_bytes(r - skip, cols),
                         (int)skip, (int)n, cols);
    }
    return NB_OK;
}

static struct nbi_weight cpu_weight_rows(const struct nbi_weight *w, int64_t first, int64_t count)
{
    struct nbi_weight out = *w;
    int64_t at = first * w->cols;
    NBI_BUG_IF(first % NBI_ROWS_AT != 0 || w->cols == 0);
    out.rows = count;
    out.borrowed = true;
    if (w->data.at)
        out.data = nbi_ptr_add(w->data, w->layout == NBI_WEIGHT_TILES
                                            ? nbi_tiles_bytes(first, w->cols)
                                            : (int64_t)nbi_dtype_bytes(w->dtype, at));
    if (w->layout == NBI_WEIGHT_SCALES) {
        out.scales = nbi_ptr_add(w->scales, at / 16);
        out.master = nbi_ptr_add(w->master, (int64_t)nbi_dtype_bytes(w->master_dtype, at));
    }
    if (w->bf16.at)
        out.bf16 = nbi_ptr_add(w->bf16, at * (int64_t)sizeof(uint16_t));
    return out;
}

/* ---- streams ---- */

static void cpu_stream_free(struct nbi_stream *s)
{
    if (!s)
        return;
    free(s->x_i16);
    free(s->x_i16_scale);
    free(s->attention_scratch);
    free(s->weights_f32);
    free(s->backward);
    free(s->bf16);
    free(s);
}

/* Bytes of a stream's scratch buffers. */
struct scratch {
    int64_t x_i16, scales, attention, weights_f32, backward, bf16;
};

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Divides the training scratch into its buffers, each a multiple of 64 bytes, and returns the
 * number of floats of all of them. With s->backward NULL the buffers become NULL too. */
static int64_t carve_backward(struct nbi_stream *s, const struct cpu *cpu,
                              const struct nbi_stream_limits *l)
{
    const int64_t partials = ceil_div(l->N, NBI_SUM_ROWS);
    const int64_t size[] = {NBI_GEMM_A, NBI_GEMM_B, l->N * l->heads, partials * 2 * l->D,
                            cpu->threads * nbi_attention_bwd_floats(l->D)};
    float **field[] = {&s->gemm_a, &s->gemm_b, &s->delta, &s->norm_partials,
                       &s->attention_bwd_scratch};
    int64_t at = 0;
    for (int i = 0; i < 5; i++) {
        *field[i] = s->backward ? s->backward + at : NULL;
        at += (size[i] + 15) / 16 * 16;
    }
    return at;
}

static int64_t row_buffer_floats(const struct cpu *cpu, const struct nbi_stream_limits *l)
{
    return cpu->threads * NBI_ROW_BUFFERS * l->K;
}

static struct scratch scratch_for(const struct cpu *cpu, const struct nbi_stream_limits *l)
{
    struct nbi_stream none = {0};
    int64_t attention = align64(nbi_attention_floats(l->D) * (int64_t)sizeof(float));
    if (l->bf16)
        attention += align64(2 * NBI_QUERY_BLOCK * l->D * (int64_t)sizeof(float));
    return (struct scratch){
        .x_i16 = align64(nbi_x_i16_bytes(l->N, l->K)),
        .scales = align64(l->N * nbi_x_i16_blocks(l->K) * (int64_t)sizeof(float)),
        .attention = cpu->threads * attention,
        .weights_f32 =
            align64(cpu->threads * nbi_weights_f32_floats(l->K) * (int64_t)sizeof(float)),
        .backward = l->training ? carve_backward(&none, cpu, l) * (int64_t)sizeof(float) : 0,
        .bf16 = l->bf16 ? align64((row_buffer_floats(cpu, l) + NBI_BF16_ROWS * l->K) *
                                  (int64_t)sizeof(float))
                        : 0};
}

static int64_t cpu_stream_bytes(struct nbi_backend *be, const struct nbi_stream_limits *limits)
{
    struct scratch size = scratch_for((struct cpu *)be, limits);
    return (int64_t)sizeof(struct nbi_stream) + size.x_i16 + size.scales + size.attention +
           size.weights_f32 + size.backward + size.bf16;
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
    s->attention_floats = size.attention / cpu->threads / (int64_t)sizeof *s->attention_scratch;
    s->x_i16 = aligned_alloc(64, (size_t)size.x_i16);
    s->x_i16_scale = aligned_alloc(64, (size_t)size.scales);
    s->attention_scratch = aligned_alloc(64, (size_t)size.attention);
    s->weights_f32 = aligned_alloc(64, (size_t)size.weights_f32);
    if (size.backward > 0)
        s->backward = aligned_alloc(64, (size_t)size.backward);
    if (size.bf16 > 0)
        s->bf16 = s->row_buffers = aligned_alloc(64, (size_t)size.bf16);
    if (!s->x_i16 || !s->x_i16_scale || !s->attention_scratch || !s->weights_f32 ||
        (size.backward > 0 && !s->backward) || (size.bf16 > 0 && !s->bf16)) {
        cpu_stream_free(s);
        return nbi_fail_memory("scratch", (size_t)cpu_stream_bytes(be, limits));
    }
    if (s->backward)
        carve_backward(s, cpu, limits);
    if (s->bf16)
        s->rows_f32 = s->row_buffers + row_buffer_floats(cpu, limits);
    *out = s;
    return NB_OK;
}

static enum nb_status cpu_sync(struct nbi_stream *s)
{
    (void)s;
    return NB_OK;
}

/* ---- the table ---- */

static void cpu_close(struct nbi_backend *be)
{
    struct cpu *cpu = (struct cpu *)be;
    nbi_slabs_close(&cpu->slab);
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
                                   .caps = NBI_CAP_TRAIN | NBI_CAP_BF16 | NBI_CAP_BATCH_INVARIANT,
                                   .chunk = 512,
                                   .close = cpu_close,
                                   .alloc = cpu_alloc,
                                   .free = cpu_free,
                                   .weight_bytes = cpu_weight_bytes,
                                   .weight_new = cpu_weight_new,
                                   .weight_alloc = cpu_weight_alloc,
                                   .weight_read = cpu_weight_read,
                                   .weight_free = cpu_weight_free,
                                   .weight_rows = cpu_weight_rows,
                                   .stream_new = cpu_stream_new,
                                   .stream_bytes = cpu_stream_bytes,
                                   .stream_free = cpu_stream_free,
                                   .sync = cpu_sync,
                                   .upload = cpu_upload,
                                   .download = cpu_download,
                                   .copy = cpu_copy,
                                   .clear = cpu_clear,
                                   .roofline = nbi_cpu_roofline,
                                   .roofline_f32 = nbi_cpu_roofline_f32,
#define X(op) .op = nbi_cpu_##op,
                                   NBI_OP_LIST(X)
#undef X
    };
    *out = &cpu->be;
    return NB_OK;
}
