/* cuda_memory.c - sizes of streams and weights on a GPU, and what the driver adds to them. */
#include "backend/cuda_memory.h"

/* Of attention whose keys are split, unless batch-invariant calls need more. */
#define PARTIALS_BYTES ((int64_t)16 << 20)

/* In training the gate and up matrices of 4B take 95 MiB. Small models need less. */
#define TRAIN_WEIGHTS_MAX ((int64_t)96 << 20)
#define TRAIN_WEIGHTS_MIN ((int64_t)4 << 20) /* 8 columns of any vocabulary */

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- streams ---- */

bool nbi_cuda_has_prefill(const struct nbi_stream_limits *l)
{
    return l->N > NBI_DECODE_LINEAR_ROWS && !l->training;
}

int64_t nbi_cuda_train_weights_bytes(const struct nbi_stream_limits *l)
{
    int64_t columns = round_up(l->K, CUDA_TILE_COLS);
    int64_t bytes = smaller(16 * columns * columns, TRAIN_WEIGHTS_MAX);
    return bytes < TRAIN_WEIGHTS_MIN ? TRAIN_WEIGHTS_MIN : bytes;
}

int64_t nbi_cuda_attention_bytes(const struct nbi_stream_limits *l)
{
    int64_t rows = smaller(l->N, NBI_DECODE_ATTENTION_ROWS);
    int64_t per_split = rows * l->heads * (l->D + 2) * (int64_t)sizeof(float);
    int64_t minimum = per_split * NBI_INVARIANT_SPLITS;
    minimum = minimum > PARTIALS_BYTES ? minimum : PARTIALS_BYTES;
    return smaller(per_split * NBI_SPLITS_MAX, minimum);
}

int64_t nbi_cuda_bwd_rows(int64_t N)
{
    return round_up(N, NBI_BWD_TILE);
}

struct nbi_cuda_scratch nbi_cuda_scratch_for(const struct nbi_stream_limits *l)
{
    const int64_t size = sizeof(float);
    int64_t columns = round_up(l->K, CUDA_TILE_COLS);
    int64_t decode_rows = smaller(l->N, NBI_DECODE_LINEAR_ROWS);
    /* Products of training read x where it is. */
    int64_t x_rows = l->training ? decode_rows : l->N;
    struct nbi_cuda_scratch p = {
        .x_f16 = round_up(x_rows, 8) * columns * 2,
        .x_scale = round_up(x_rows * size, 256),
        .act_f16 = round_up(decode_rows, 8) * columns * 2,
        .act_scale = NBI_DECODE_LINEAR_ROWS * size,
        .attention = round_up(nbi_cuda_attention_bytes(l), 256),
        .counters = round_up(smaller(l->N, NBI_DECODE_ATTENTION_ROWS) * l->heads * size, 256),
        .stats = l->training ? round_up(nbi_cuda_bwd_rows(l->N) * l->heads * 2 * size, 256) : 0,
        .weights_bf16 = nbi_cuda_has_prefill(l) ? NBI_WEIGHTS_BF16_BYTES : 0,
        .workspace = l->bf16 ? NBI_TRAIN_WORKSPACE_BYTES : NBI_WORKSPACE_BYTES};
    if (l->bf16 && p.weights_bf16 < nbi_cuda_train_weights_bytes(l))
        p.weights_bf16 = nbi_cuda_train_weights_bytes(l);
    p.total = p.x_f16 + p.x_scale + p.act_f16 + p.act_scale + p.attention + p.counters + p.stats +
              p.weights_bf16 + p.workspace;
    return p;
}

/* Training also reads weights through the stages, which are therefore opened with its stream. */
static int64_t stream_bytes(struct nbi_backend *be, const struct nbi_stream_limits *l)
{
    (void)be;
    return nbi_cuda_scratch_for(l).total + (l->training ? 2 * NBI_STAGE_BYTES : 0);
}

/* ---- weights ---- */

/* After tiles comes the norm of the largest row. */
static int64_t weight_bytes(const struct nbi_backend *be, enum nbi_dtype dtype, int64_t rows,
                            int64_t cols)
{
    (void)be;
    if (dtype == NBI_NVFP4)
        return round_up(rows, CUDA_TILE_ROWS) / CUDA_TILE_ROWS *
                   (round_up(cols, CUDA_TILE_COLS) / CUDA_TILE_COLS) * CUDA_TILE_BYTES +
               16;
    return (int64_t)nbi_dtype_bytes(dtype, rows * (cols > 0 ? cols : 1));
}

/* ---- what the driver takes for blocks ---- */

/* Blocks of up to 1 MiB are pieces of 2 MiB, in units of 512 bytes; others are multiples of 2 MiB.
 */
static int64_t reserved_bytes(const int64_t *blocks, int count)
{
    const int64_t mib = (int64_t)1 << 20;
    int64_t large = 0, small = 0;
    for (int i = 0; i < count; i++)
        if (blocks[i] > mib)
            large += round_up(blocks[i], 2 * mib);
        else
            small += round_up(blocks[i], 512);
    return large + round_up(small, 2 * mib);
}

/* ---- the backend ---- */

void nbi_cuda_describe(struct nbi_backend *be)
{
    be->caps = NBI_CAP_TRAIN | NBI_CAP_BF16 | NBI_CAP_LAYERS | NBI_CAP_GRAPHS | NBI_CAP_OWN_MEMORY |
               NBI_CAP_TUNING;
    be->chunk = 1024;
    be->logit_rows = 2048;
    be->batch_invariant_rows = smaller(NBI_DECODE_ATTENTION_ROWS, NBI_DECODE_LINEAR_ROWS);
    be->graph_rows = NBI_DECODE_LINEAR_ROWS;
    be->context_bytes = NBI_CONTEXT_BYTES;
    be->pinned_bytes = NBI_PINNED_BYTES + 2 * NBI_STAGE_BYTES;
    be->reserved_bytes = reserved_bytes;
    be->stream_bytes = stream_bytes;
    be->weight_bytes = weight_bytes;
}
