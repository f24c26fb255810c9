/* gemm.c - packing, and the loops around the microkernel gemm_tile.
 *
 * A block of B is packed into panels of nr columns as f32, whatever its type, then blocks of A into
 * panels of mr rows. Threads then take parts of the block of C that are small enough for their
 * operands to stay in a core's own cache. */
#include "backend/cpu/gemm.h"

#include <string.h>

#include "backend/cpu/internal.h"

/* The part of C that a thread takes at a time. With few such parts they get half as many columns.
 */
#define THREAD_M 120
#define THREAD_N 128

/* The current block: rows [m0, m0 + m), columns [n0, n0 + n), terms [k0, k0 + k). */
struct block {
    const struct nbi_gemm_f32 *g;
    int64_t m0, m, n0, n, k0, k;
    int64_t b_panels; /* 32-column panels of B to pack before A; 0: B is packed already */
    int64_t thread_n;
};

/* Rows of a packed panel of B: k rounded up to whole tiles. */
static int64_t panel_rows(const struct block *b)
{
    return ceil_div(b->k, CPU_TILE_ROWS) * CPU_TILE_ROWS;
}

/* Packs columns [n0 + col, n0 + end) of a B of floats; columns from N on become zeros. */
static void pack_floats(const struct block *b, const struct nbi_microkernels *k, float *y,
                        int64_t col, int64_t end)
{
    const struct nbi_gemm_f32 *g = b->g;
    int64_t panel = panel_rows(b) * k->nr, left = g->N - b->n0;
    for (int64_t i = 0; i < b->k; i++)
        for (int64_t c = col; c < end; c += k->nr) {
            int64_t at = (b->k0 + i) * g->N + b->n0 + c, width = min(k->nr, left - c);
            float *to = y + c / k->nr * panel + i * k->nr;
            if (width < k->nr)
                memset(to, 0, (size_t)k->nr * sizeof *to);
            if (width > 0)
                k->to_f32(to, (const uint8_t *)g->b + nbi_dtype_bytes(g->dtype, at), g->dtype,
                          width);
        }
}

static void pack_tiles(const struct block *b, const struct nbi_microkernels *k, float *y,
                       int64_t col, int64_t end)
{
    int64_t panel = panel_rows(b) * k->nr, across = nbi_tiles_across(b->g->N);
    for (int64_t i = 0; i < b->k; i += CPU_TILE_ROWS) {
        const uint8_t *tile =
            (const uint8_t *)b->g->b +
            ((b->k0 + i) / CPU_TILE_ROWS * across + (b->n0 + col) / CPU_TILE_COLS) * CPU_TILE_BYTES;
        for (int64_t c = col; c < end; c += CPU_TILE_COLS, tile += CPU_TILE_BYTES) {
            float *to = y + c / k->nr * panel + i * k->nr;
            k->tile_to_f32(to, to + (k->nr == 16 ? panel : 16), k->nr, tile);
        }
    }
}

/* The same of a matrix without codes. */
static void pack_scales(const struct block *b, const struct nbi_microkernels *k, float *y,
                        int64_t col, int64_t end)
{
    int64_t panel = panel_rows(b) * k->nr;
    uint8_t tile[CPU_TILE_BYTES];
    for (int64_t i = 0; i < b->k; i += CPU_TILE_ROWS)
        for (int64_t c = col; c < end; c += CPU_TILE_COLS) {
            float *to = y + c / k->nr * panel + i * k->nr;
            memset(tile, 0, sizeof tile);
            if (b->n0 + c < b->g->N)
                nbi_cpu_make_tiles(k, b->g->scales, b->k0 + i, b->n0 + c, CPU_TILE_COLS, tile);
            k->tile_to_f32(to, to + (k->nr == 16 ? panel : 16), k->nr, tile);
        }
}

/* Task u: columns [n0 + 32 u, n0 + 32 u + 32), the width of a tile. */
static void pack_b(const struct op *op, int64_t first, int64_t count)
{
    const struct block *b = op->args;
    (b->g->scales               ? pack_scales
     : b->g->dtype == NBI_NVFP4 ? pack_tiles
                                : pack_floats)(
        b, op->s->cpu->k, op->s->gemm_b, first * CPU_TILE_COLS, (first + count) * CPU_TILE_COLS);
}

/* Converts a panel of A from bf16: `rows` rows of k terms, in the order in which they are stored.
 * Returns where element (m, i) then is. */
static struct nbi_strided panel_to_f32(const struct nbi_gemm_f32 *g,
                                       const struct nbi_microkernels *k, float *y,
                                       const uint16_t *a, struct nbi_strided from)
{
    bool by_row = g->a_col == 1;
    int64_t lines = by_row ? from.rows : from.cols, n = by_row ? from.cols : from.rows;
    int64_t ld = by_row ? from.row : from.col;
    NBI_BUG_IF(!by_row && g->a_row != 1);
    for (int64_t i = 0; i < lines; i++)
        k->to_f32(y + i * n, a + i * ld, NBI_BF16, n);
    return (struct nbi_strided){from.rows, from.cols, by_row ? n : 1, by_row ? 1 : n};
}

/* Task u: rows [m0 + u mr, m0 + u mr + mr), transposed. */
static void pack_a(const struct op *op, int64_t first, int64_t count)
{
    const struct block *b = op->args;
    const struct nbi_gemm_f32 *g = b->g;
    int64_t mr = op->s->cpu->k->mr;
    for (int64_t u = first; u < first + count; u++) {
        float *y = op->s->gemm_a + u * mr * b->k;
        int64_t at = (b->m0 + u * mr) * g->a_row + b->k0 * g->a_col;
        int64_t rows = min(mr, b->m - u * mr);
        struct nbi_strided view = {rows, b->k, g->a_row, g->a_col};
        float f32[NBI_GEMM_MR_MAX * NBI_GEMM_K];
        const float *a = f32;
        if (g->a_bf16)
            view = panel_to_f32(g, op->s->cpu->k, f32, (const uint16_t *)g->a + at, view);
        else
            a = (const float *)g->a + at;
        if (rows < mr)
            memset(y, 0, (size_t)(mr * b->k) * sizeof *y);
        op->s->cpu->k->pack(y, mr, a, view, g->alpha);
    }
}

static void pack(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct block *b = op->args;
    int64_t end = first + count, of_b = min(end, b->b_panels);
    (void)thread;
    if (first < of_b)
        pack_b(op, first, of_b - first);
    first = first > of_b ? first : of_b;
    if (first < end)
        pack_a(op, first - b->b_panels, end - first);
}

/* One gemm_tile of C. At the edges of C it goes through a buffer. */
static void compute_tile(const struct nbi_microkernels *k, const struct block *b,
                         struct nbi_gemm_tile *t, int64_t m, int64_t n)
{
    float edge[NBI_GEMM_TILE_MAX];
    const struct nbi_gemm_f32 *g = b->g;
    float *c = g->c + (b->m0 + m) * g->N + b->n0 + n;
    int64_t rows = min(k->mr, b->m - m), cols = min(k->nr, b->n - n);
    t->add = g->add || b->k0 > 0;
    t->c = c;
    t->ldc = g->N;
    if (rows == k->mr && cols == k->nr) {
        k->gemm_tile(t);
        return;
    }
    bool add = t->add;
    t->c = edge;
    t->ldc = k->nr;
    t->add = false;
    k->gemm_tile(t);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            c[i * g->N + j] = add ? c[i * g->N + j] + edge[i * k->nr + j] : edge[i * k->nr + j];
}

/* Task u: THREAD_M rows by thread_n columns of the block of C. */
static void multiply(void *ctx, int thread, int64_t first, int64_t count)
{
    const struct op *op = ctx;
    const struct block *b = op->args;
    const struct nbi_microkernels *k = op->s->cpu->k;
    int64_t down = ceil_div(b->m, THREAD_M), panel = panel_rows(b) * k->nr;
    struct nbi_gemm_tile t = {.a_row = 1, .a_col = k->mr, .ldb = k->nr, .k = b->k};
    (void)thread;
    for (int64_t u = first; u < first + count; u++) {
        int64_t m0 = u % down * THREAD_M, m1 = min(m0 + THREAD_M, b->m);
        int64_t n0 = u / down * b->thread_n, n1 = min(n0 + b->thread_n, b->n);
        for (int64_t n = n0; n < n1; n += k->nr)
            for (int64_t m = m0; m < m1; m += k->mr) {
                t.a = op->s->gemm_a + m * b->k;
                t.b = op->s->gemm_b + n / k->nr * panel;
                compute_tile(k, b, &t, m, n);
            }
    }
}

static void compute_block(struct nbi_stream *s, struct block *b)
{
    const int mr = s->cpu->k->mr;
    int64_t down = ceil_div(b->m, THREAD_M);
    b->b_panels = b->m0 == 0 ? ceil_div(b->n, CPU_TILE_COLS) : 0;
    b->thread_n = down * ceil_div(b->n, THREAD_N) < 6 * s->cpu->threads ? THREAD_N / 2 : THREAD_N;
    parallel_for(s, b->b_panels + ceil_div(b->m, mr), mr * b->k, pack, b);
    parallel_for(s, down * ceil_div(b->n, b->thread_n), THREAD_M * b->thread_n * b->k, multiply, b);
}

void nbi_cpu_gemm(struct nbi_stream *s, const struct nbi_gemm_f32 *g)
{
    struct block b = {.g = g};
    NBI_BUG_IF(!s->backward);
    for (b.k0 = 0; b.k0 < g->K; b.k0 += NBI_GEMM_K) {
        b.k = min(NBI_GEMM_K, g->K - b.k0);
        for (b.n0 = 0; b.n0 < g->N; b.n0 += NBI_GEMM_N) {
            b.n = min(NBI_GEMM_N, g->N - b.n0);
            for (b.m0 = 0; b.m0 < g->M; b.m0 += NBI_GEMM_M) {
                b.m = min(NBI_GEMM_M, g->M - b.m0);
                compute_block(s, &b);
            }
        }
    }
}
