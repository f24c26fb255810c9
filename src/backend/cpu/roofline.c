/* roofline.c - how many multiply-adds per second a core can do, for benches to compare with. */
#include <pthread.h>
#include <stdlib.h>

#include "backend/cpu/internal.h"
#include "base/clock.h"

/* The fastest of ROUNDS over one row of tiles, which stays in the L1 cache; one core. */
double nbi_cpu_roofline(struct nbi_backend *be)
{
    enum { K = 512, ROUNDS = 50, CALLS = 200 };
    int16_t *x_i16 = calloc(NBI_X_PANEL_ROWS * K, sizeof *x_i16);
    uint8_t *tiles = calloc(K / CPU_TILE_COLS, CPU_TILE_BYTES);
    float y[NBI_X_PANEL_ROWS * CPU_TILE_ROWS], scale[NBI_X_PANEL_ROWS * K / NBI_X_I16_BLOCK] = {0};
    const struct nbi_dot_tile p = {.y = y,
                                   .ldy = CPU_TILE_ROWS,
                                   .w = tiles,
                                   .scale = 1,
                                   .x_i16 = x_i16,
                                   .x_i16_scale = scale,
                                   .K = K,
                                   .rows = CPU_TILE_ROWS,
                                   .n = NBI_X_PANEL_ROWS};
    double best = 0;
    for (int r = 0; r < ROUNDS && x_i16 && tiles; r++) {
        double start = nbi_now();
        for (int i = 0; i < CALLS; i++)
            ((struct cpu *)be)->k->tiles_x_i16(&p);
        double rate = (double)CALLS * K * CPU_TILE_ROWS * NBI_X_PANEL_ROWS / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    free(x_i16);
    free(tiles);
    return best;
}

/* The sum of all threads' rates in f32, each the fastest of ROUNDS over panels that stay in the L1
 * cache. */
struct f32_rate {
    const struct nbi_microkernels *k;
    double sum;
    pthread_mutex_t lock;
};

static void measure_thread(void *ctx, int thread, int threads)
{
    enum { K = 192, ROUNDS = 50, CALLS = 1000 };
    struct f32_rate *p = ctx;
    float c[NBI_GEMM_TILE_MAX] = {0}, *a = calloc((size_t)(p->k->mr + p->k->nr) * K, sizeof *a);
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
            p->k->gemm_tile(&t);
        double rate = (double)CALLS * K * p->k->mr * p->k->nr / (nbi_now() - start);
        best = rate > best ? rate : best;
    }
    free(a);
    pthread_mutex_lock(&p->lock);
    p->sum += best;
    pthread_mutex_unlock(&p->lock);
}

double nbi_cpu_roofline_f32(struct nbi_backend *be)
{
    const struct cpu *cpu = (const struct cpu *)be;
    struct f32_rate p = {.k = cpu->k, .lock = PTHREAD_MUTEX_INITIALIZER};
    nbi_team_run(cpu->threads, measure_thread, &p);
    return p.sum / cpu->threads;
}
