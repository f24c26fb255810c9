/* codec.c - measures the NVFP4 codec per core, next to the read bandwidth of memory.
 *
 * All threads run at once, each on its own data, which exceeds the L2 cache. Bandwidth is the best
 * of several rounds, the rate of an operation their median. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/parallel.h"
#include "base/rng.h"
#include "base/stats.h"
#include "base/status.h"
#include "base/sys.h"
#include "bench/bandwidth.h"
#include "nibble/tools.h"
#include "tensor/codec.h"
#include "tensor/nvfp4.h"

#define VALUES ((int64_t)1 << 22) /* per thread: 8 MiB of bf16 */
#define CHUNK  ((int64_t)4096)
#define ROUNDS 5

struct data {
    uint16_t *bf16;
    float *f32;
    uint8_t *codes, *scales;
};

struct op {
    const char *name;
    bool quantize;
    enum nb_quant_method method;
};

static const struct op ops[] = {
    {"quantize rtn", true, NB_QUANT_RTN},
    {"quantize 4over6", true, NB_QUANT_4OVER6},
    {"quantize sweep", true, NB_QUANT_SWEEP},
    {"dequantize f32", false, NB_QUANT_RTN},
};

static void run_chunk(const struct nbi_codec_table *k, const struct op *op, struct data *d,
                      int64_t at)
{
    int64_t blocks = CHUNK / NBI_NVFP4_BLOCK;
    uint8_t *q = d->codes + at / 2, *s = d->scales + at / NBI_NVFP4_BLOCK;
    if (op->quantize) {
        float x[CHUNK];
        k->bf16_to_f32(x, d->bf16 + at, CHUNK);
        k->quantize(q, s, x, blocks, 1, blocks, op->method);
    } else {
        k->dequantize_f32(d->f32 + at, q, s, blocks, 1.0f);
    }
}

struct measured {
    const struct nbi_codec_table *k;
    const struct op *op;
    struct data *data;
    int64_t values;
};

static void run_all(void *ctx, int thread, int threads)
{
    const struct measured *m = ctx;
    (void)threads;
    for (int64_t at = 0; at < m->values; at += CHUNK)
        run_chunk(m->k, m->op, &m->data[thread], at);
}

/* Values per second and core. The scalar path is slow, so it processes less data. */
static double measure(const struct nbi_codec_table *k, const struct op *op, struct data *data,
                      int threads)
{
    struct measured m = {k, op, data, k == &nbi_codec_scalar ? VALUES / 16 : VALUES};
    double rate[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double start = nbi_now();
        nbi_team_run(threads, run_all, &m);
        rate[r] = (double)m.values / (nbi_now() - start);
    }
    return nbi_median(rate, ROUNDS);
}

static bool make_data(struct data *d, int thread)
{
    d->bf16 = malloc(VALUES * sizeof *d->bf16);
    d->f32 = malloc(VALUES * sizeof *d->f32);
    d->codes = malloc(VALUES / 2);
    d->scales = malloc(VALUES / NBI_NVFP4_BLOCK);
    if (!d->bf16 || !d->f32 || !d->codes || !d->scales)
        return false;
    for (int64_t i = 0; i < VALUES; i += 4)
        nbi_philox_normal4(d->f32 + i, 7, (uint64_t)i, (uint64_t)thread);
    for (int64_t i = 0; i < VALUES; i++)
        d->f32[i] *= 0.02f;
    nbi_codec_table()->f32_to_bf16(d->bf16, d->f32, VALUES);
    nbi_nvfp4_quantize(d->codes, d->scales, d->f32, VALUES / NBI_NVFP4_BLOCK, NB_QUANT_RTN, 1.0f);
    return true;
}

static enum nb_status add_rows(struct nb_bench_ops *out, struct data *data)
{
    for (int level = NBI_SIMD_SCALAR; level <= NBI_SIMD_AVX512; level++) {
        const struct nbi_codec_table *k = nbi_codec_table_at((enum nbi_simd)level);
        for (size_t i = 0; k && i < sizeof ops / sizeof *ops; i++) {
            NBI_TRY(nbi_check_interrupt());
            struct nb_bench_row *row = &out->row[out->rows++];
            double rate = measure(k, &ops[i], data, out->threads);
            snprintf(row->op, sizeof row->op, "%s", ops[i].name);
            snprintf(row->path, sizeof row->path, "%s", k->name);
            row->gvalues_per_s_per_core = rate * 1e-9;
            row->gb_per_s_per_core = rate * 1e-9 * (ops[i].quantize ? 2.0 : 9.0 / 16.0);
        }
    }
    return NB_OK;
}

enum nb_status nb_bench_codec(struct nb_bench_ops *out, int threads, struct nb_cancel *cancel)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(cancel);
    struct nb_bench_ops found = {.threads = threads > 0 ? threads : nbi_cpu_count()};
    struct data *data = calloc((size_t)found.threads, sizeof *data);
    if (!data)
        return nbi_fail_memory("bench data", sizeof *data);
    enum nb_status rc = NB_OK;
    for (int i = 0; i < found.threads && rc == NB_OK; i++)
        if (!make_data(&data[i], i))
            rc = nbi_fail_memory("bench data", VALUES * 7);
    if (rc == NB_OK) {
        found.read_gb_per_s = nbi_read_bandwidth(found.threads) * 1e-9;
        rc = add_rows(&found, data);
    }
    if (rc == NB_OK)
        *out = found;
    for (int i = 0; i < found.threads; i++) {
        free(data[i].bf16);
        free(data[i].f32);
        free(data[i].codes);
        free(data[i].scales);
    }
    free(data);
    return rc;
}
