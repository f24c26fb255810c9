/* train_optimizer.cu - what follows the backward pass: gradient statistics, AdamW, and rounding
 * masters to the weights of the forward pass.
 *
 * Everything here has the bits of backend/cpu/optimizer.c; sums have its order. This file is
 * compiled without contraction (optimizer_math.cuh). */
#include "backend/cuda/launch.cuh"
#include "backend/cuda/nvfp4_sweep.cuh"
#include "backend/cuda/optimizer_moments.cuh"

extern "C" {
#include "tensor/nvfp4.h"
}

#define THREADS 256

/* CTAs of a kernel whose threads loop over their work. */
static unsigned grid_for(const struct nbi_stream *s, int64_t ctas)
{
    int64_t limit = (int64_t)s->cuda->sms * 16;
    return (unsigned)(ctas < limit ? ctas : limit);
}

/* The largest value of a CTA, in thread 0. */
__device__ static uint32_t cta_max(uint32_t v)
{
    __shared__ uint32_t warps[THREADS / 32];
    for (int o = 16; o > 0; o >>= 1)
        v = max(v, __shfl_xor_sync(0xFFFFFFFF, v, o));
    __syncthreads(); /* an earlier call may still read */
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < THREADS / 32 && threadIdx.x == 0; i++)
        v = max(v, warps[i]);
    return v;
}

/* ---- statistics ---- */

#define PARTIALS 256 /* limit of partial sums, which are added in order at the end */
#define LANES    16  /* element i of a partial goes to sum i % LANES; these are added in order */
#define TILE     4096

struct grad_partial {
    double squares;
    uint32_t amax; /* as bits, which order magnitudes */
    int32_t nonfinite;
};

/* Elements of a tile that a thread holds; those from `count` on are zero. */
__device__ static inline void load_grads(uint32_t bits[TILE / THREADS], const void *grad, bool bf16,
                                         int64_t first, int64_t count)
{
#pragma unroll
    for (int i = 0; i < TILE / THREADS; i++) {
        int at = (int)threadIdx.x + i * THREADS;
        bits[i] = at >= count ? 0
                  : bf16      ? (uint32_t)((const uint16_t *)grad)[first + at] << 16
                              : ((const uint32_t *)grad)[first + at];
    }
}

/* Moves a tile to shared memory as finite magnitudes, and counts those that are not. */
__device__ static inline void stage_grads(float *tile, const uint32_t bits[TILE / THREADS],
                                          uint32_t *amax, int32_t *nonfinite)
{
#pragma unroll
    for (int i = 0; i < TILE / THREADS; i++) {
        uint32_t magnitude = bits[i] & 0x7FFFFFFF;
        bool finite = magnitude < 0x7F800000;
        magnitude = finite ? magnitude : 0;
        *nonfinite += !finite;
        *amax = max(*amax, magnitude);
        tile[(int)threadIdx.x + i * THREADS] = float_of(magnitude);
    }
}

/* The totals of a CTA. The lanes' sums are those of the first LANES threads. */
__device__ static void finish_partial(struct grad_partial *out, double sum, uint32_t amax,
                                      int32_t nonfinite)
{
    __shared__ double lanes[LANES];
    __shared__ int32_t bad;
    if (threadIdx.x == 0)
        bad = 0;
    if (threadIdx.x < LANES)
        lanes[threadIdx.x] = sum;
    amax = cta_max(amax);
    if (nonfinite > 0)
        atomicAdd(&bad, nonfinite);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    *out = {0, amax, bad};
    for (int i = 0; i < LANES; i++)
        out->squares += lanes[i];
}

__device__ static void write_record(struct nbi_update_record *record, const struct grad_partial *p,
                                    int count)
{
    record->squares = record->amax = record->nonfinite = 0;
    for (int i = 0; i < count; i++) {
        record->squares += p[i].squares;
        record->amax = fmax(record->amax, (double)float_of(p[i].amax));
        record->nonfinite += p[i].nonfinite;
    }
}

/* A CTA per partial sum: all threads load the next tile while the first LANES of them add up the
 * last one. Squares are exact in f64, so that fusing them with the sum changes nothing. */
__global__ static void k_grad_partials(struct grad_partial *partials,
                                       struct nbi_update_record *record, const void *grad,
                                       bool bf16, int64_t n, int64_t chunk)
{
    __shared__ float tiles[2][TILE];
    __shared__ struct grad_partial total;
    uint32_t bits[TILE / THREADS], amax = 0;
    int32_t nonfinite = 0;
    double sum = 0;
    int64_t first = blockIdx.x * chunk, end = first + chunk < n ? first + chunk : n;
    load_grads(bits, grad, bf16, first, end - first);
    for (int which = 0; first < end; first += TILE, which ^= 1) {
        stage_grads(tiles[which], bits, &amax, &nonfinite);
        __syncthreads();
        if (first + TILE < end)
            load_grads(bits, grad, bf16, first + TILE, end - first - TILE);
        if (threadIdx.x < LANES) {
#pragma unroll 16
            for (int i = (int)threadIdx.x; i < TILE; i += LANES)
                sum = fma((double)tiles[which][i], (double)tiles[which][i], sum);
        }
    }
    finish_partial(&total, sum, amax, nonfinite);
    if (threadIdx.x == 0 && gridDim.x == 1)
        write_record(record, &total, 1);
    else if (threadIdx.x == 0)
        partials[blockIdx.x] = total;
}

__global__ static void k_grad_total(struct nbi_update_record *record,
                                    const struct grad_partial *partials, int count)
{
    __shared__ struct grad_partial all[PARTIALS];
    if ((int)threadIdx.x < count)
        all[threadIdx.x] = partials[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
        write_record(record, all, count);
}

enum nb_status nbi_cuda_grad_stats(struct nbi_stream *s, const struct nbi_op_grad_stats *a)
{
    CU_HERE(s);
    int64_t chunk = (a->n / PARTIALS / TILE + 1) * TILE, partials = ceil_div(a->n, chunk);
    struct grad_partial *scratch = (struct grad_partial *)s->workspace;
    if (partials > 0)
        CU_LAUNCH(k_grad_partials, (unsigned)partials, THREADS, 0, s->queue, scratch,
                  at<struct nbi_update_record>(a->record), at<void>(a->grad), a->bf16, a->n, chunk);
    if (partials != 1)
        CU_LAUNCH(k_grad_total, 1, PARTIALS, 0, s->queue, at<struct nbi_update_record>(a->record),
                  scratch, (int)partials);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- the plan of an update ---- */

/* An nvfp4 moment holds values up to its tensor scale times this: the largest block scale is 448,
 * the largest code 6 for m and 1 for sqrt(v). */
#define M_RANGE (6.0f * 448.0f)
#define V_RANGE 448.0f

__device__ static void plan_scales(struct nbi_update_record *r, float beta1, float beta2,
                                   float grad_scale)
{
    float amax = (float)r->amax * grad_scale;
    float m = beta1 * r->m_max + (1 - beta1) * amax;
    float v = sqrtf(beta2 * r->v_max * r->v_max + (1 - beta2) * amax * amax);
    r->m_scale[0] = r->m_scale[1];
    r->v_scale[0] = r->v_scale[1];
    r->m_scale[1] = fmaxf(m * 1.001f / M_RANGE, 1e-30f);
    r->v_scale[1] = fmaxf(v * 1.001f / V_RANGE, 1e-30f);
    r->m_max = r->v_max = 0;
}

/* One CTA. Thread 0 adds in order what the others have fetched. */
__global__ static void k_update_plan(struct nbi_update_control *control,
                                     struct nbi_update_record *records, const int32_t *tensors,
                                     int count, float clip, float beta1, float beta2)
{
    __shared__ double squares[THREADS], nonfinite[THREADS];
    __shared__ struct nbi_update_control plan;
    double sums[2] = {};
    for (int first = 0; first < count; first += THREADS) {
        int i = first + (int)threadIdx.x;
        __syncthreads();
        if (i < count) {
            squares[threadIdx.x] = records[tensors[i]].squares;
            nonfinite[threadIdx.x] = records[tensors[i]].nonfinite;
        }
        __syncthreads();
        for (int k = 0; k < THREADS && first + k < count && threadIdx.x == 0; k++) {
            sums[0] += squares[k];
            sums[1] += nonfinite[k];
        }
    }
    if (threadIdx.x == 0) {
        double norm = sqrt(sums[0]), limit = (double)clip;
        plan = {sums[0], sums[1], limit > 0 && norm > limit ? (float)(limit / norm) : 1.0f,
                sums[1] > 0};
        *control = plan;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < count && !plan.skip; i += THREADS)
        plan_scales(&records[tensors[i]], beta1, beta2, plan.grad_scale);
}

enum nb_status nbi_cuda_update_plan(struct nbi_stream *s, const struct nbi_op_update_plan *a)
{
    CU_HERE(s);
    CU_LAUNCH(k_update_plan, 1, THREADS, 0, s->queue, at<struct nbi_update_control>(a->control),
              at<struct nbi_update_record>(a->records), at<int32_t>(a->tensors), (int)a->count,
              a->clip, a->beta1, a->beta2);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- AdamW ---- */

struct adamw_args {
    const struct nbi_update_control *control;
    struct nbi_update_record *record;
    void *master;
    const void *grad;
    bool master_bf16, grad_bf16;
    struct nbi_moment m, v;
    int64_t first, end; /* elements */
    float beta1, rest1, beta2, rest2, eps, lr, decay, limit;
    float correct1, correct2, reciprocal1, reciprocal2;
    bool normal; /* the corrections and eps are as is_normal_step needs them */
    struct adamw_random random;
};

/* What the threads of a launch share: read once. */
struct adamw_scales {
    float grad, m[2], v[2];
};

__device__ static inline struct adamw_scales adamw_read(const struct adamw_args &a)
{
    const struct nbi_update_record *r = a.record;
    return {a.control->grad_scale, {r->m_scale[0], r->m_scale[1]}, {r->v_scale[0], r->v_scale[1]}};
}

/* The moments after a step. */
__device__ static inline void step_moments(const struct adamw_args &a, float grad_scale,
                                           const float g[RUN], float m[RUN], float v[RUN])
{
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float d = g[i] * grad_scale;
        m[i] = a.beta1 * m[i] + a.rest1 * d;
        v[i] = a.beta2 * v[i] + a.rest2 * (d * d);
    }
}

/* Whether divide_normal and sqrt_normal do for a step: m 0 or in [2^-80, 2^40], v in [2^-100,
 * 2^40]. Then quotients by the corrections, which are in [2^-20, 1], are at most 2^60, roots in
 * [2^-50, 2^31], and the last quotient in [2^-111, 2^110]. */
__device__ static inline bool is_normal_step(const struct adamw_args &a, const float m[RUN],
                                             const float v[RUN])
{
    uint32_t m_min = 0xFFFFFFFF, v_min = 0xFFFFFFFF; /* of m, of those that are not 0, less 1 */
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        m_min = min(m_min, (bits_of(m[i]) & 0x7FFFFFFF) - 1);
        v_min = min(v_min, bits_of(v[i]));
    }
    return a.normal && m_min >= bits_of(0x1p-80f) && v_min >= bits_of(0x1p-100f) &&
           max(amax_bits(m), amax_bits(v)) <= bits_of(0x1p40f);
}

__device__ static inline float step_weight(const struct adamw_args &a, float w, float u)
{
    u = fmaxf(fminf(u, a.limit), -a.limit);
    return w - a.decay * w - a.lr * u;
}

__device__ static inline void step_weights(const struct adamw_args &a, bool normal,
                                           const float m[RUN], const float v[RUN], float w[RUN])
{
    if (normal) {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            float root = sqrt_normal(divide_by(v[i], a.correct2, a.reciprocal2));
            float u = divide_normal(divide_by(m[i], a.correct1, a.reciprocal1), root + a.eps);
            w[i] = step_weight(a, w[i], u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++)
            w[i] = step_weight(a, w[i], m[i] / a.correct1 / (sqrtf(v[i] / a.correct2) + a.eps));
    }
}

/* Stores the master of a run; w becomes what is stored. */
__device__ static inline void store_master(const struct adamw_args &a, float w[RUN], int64_t first,
                                           int valid)
{
    uint32_t words[RUN], random[RUN / 2];
    if (!a.master_bf16) {
#pragma unroll
        for (int i = 0; i < RUN; i++)
            words[i] = bits_of(w[i]);
        store_run<uint32_t, RUN>(a.master, first, words, valid);
        return;
    }
    random_words(random, a.random, first, ADAMW_MASTER);
#pragma unroll
    for (int i = 0; i < RUN; i += 2)
        words[i / 2] = round_bf16(w[i], random_bits(random, i)) |
                       (uint32_t)round_bf16(w[i + 1], random_bits(random, i + 1)) << 16;
    store_run<uint16_t, RUN>(a.master, first, words, valid);
    decode_floats(w, words, true);
}

/* Updates the run at `first`, of which `valid` elements exist; w is what its master becomes. Raises
 * amax[0] to the largest |m| and amax[1] to the largest v, as bits. All lanes of a warp call it
 * together; pairs of lanes have neighbouring runs. */
template <enum nb_moment_type KIND>
__device__ static inline void adamw_run(const struct adamw_args &a, const struct adamw_scales &s,
                                        int64_t first, int valid, float w[RUN], uint32_t amax[2])
{
    struct moment_run<KIND> codes[2];
    uint32_t master[RUN], grad[RUN];
    float m[RUN], v[RUN], g[RUN];
    load_floats(grad, a.grad, a.grad_bf16, first, valid);
    moment_load(codes[0], a.m, first, valid);
    moment_load(codes[1], a.v, first, valid);
    load_floats(master, a.master, a.master_bf16, first, valid);
    decode_floats(g, grad, a.grad_bf16);
    decode_floats(w, master, a.master_bf16);
    moment_decode<KIND, false>(m, codes[0], s.m[0]);
    moment_decode<KIND, true>(v, codes[1], s.v[0]);
    step_moments(a, s.grad, g, m, v);
    const bool normal = is_normal_step(a, m, v);
    step_weights(a, normal, m, v, w);
    store_master(a, w, first, valid);
    amax[0] = max(amax[0], amax_bits(m));
    amax[1] = max(amax[1], amax_bits(v));
    moment_encode<KIND, false>(codes[0], m, s.m[1], normal, a.random, first);
    moment_store(a.m, codes[0], first, valid);
    moment_encode<KIND, true>(codes[1], v, s.v[1], normal, a.random, first);
    moment_store(a.v, codes[1], first, valid);
}

__device__ static inline void raise_record(const struct adamw_args &a, const uint32_t amax[2])
{
    uint32_t m = cta_max(amax[0]), v = cta_max(amax[1]);
    if (threadIdx.x != 0)
        return;
    atomicMax((uint32_t *)&a.record->m_max, m);
    atomicMax((uint32_t *)&a.record->v_max, bits_of(sqrtf(float_of(v))));
}

template <enum nb_moment_type KIND>
__global__ static void __launch_bounds__(THREADS) k_adamw(const struct adamw_args a)
{
    if (a.control->skip)
        return;
    const struct adamw_scales scales = adamw_read(a);
    const int64_t step = (int64_t)gridDim.x * THREADS * RUN;
    uint32_t amax[2] = {};
    for (int64_t i = a.first + (int64_t)blockIdx.x * THREADS * RUN; i < a.end; i += step) {
        int64_t first = i + threadIdx.x * RUN, left = a.end - first;
        float w[RUN];
        adamw_run<KIND>(a, scales, first, left < 0 ? 0 : left < RUN ? (int)left : RUN, w, amax);
    }
    raise_record(a, amax);
}

static struct adamw_args adamw_args_of(const struct nbi_op_adamw *a)
{
    struct adamw_args x = {};
    x.control = at<struct nbi_update_control>(a->control);
    x.record = at<struct nbi_update_record>(a->record);
    x.master = at<void>(a->master);
    x.grad = at<void>({a->grad.at - (uintptr_t)a->grad_first * (a->grad_bf16 ? 2 : 4)});
    x.master_bf16 = a->dtype == NBI_BF16;
    x.grad_bf16 = a->grad_bf16;
    x.m = a->m;
    x.v = a->v;
    x.first = a->first;
    x.end = a->first + a->count;
    x.beta1 = a->beta1;
    x.rest1 = 1.0f - a->beta1;
    x.beta2 = a->beta2;
    x.rest2 = 1.0f - a->beta2;
    x.correct1 = a->correct1;
    x.correct2 = a->correct2;
    x.reciprocal1 = 1.0f / a->correct1;
    x.reciprocal2 = 1.0f / a->correct2;
    x.normal = a->correct1 >= 0x1p-20f && a->correct1 <= 1 && a->correct2 >= 0x1p-20f &&
               a->correct2 <= 1 && a->eps >= 0 && a->eps <= 1;
    x.eps = a->eps;
    x.lr = a->lr;
    x.decay = a->lr * a->decay;
    x.limit = a->max_update > 0 ? a->max_update : INFINITY;
    x.random = {{(uint32_t)a->seed, (uint32_t)(a->seed >> 32)}, a->tensor, a->step};
    return x;
}

/* ---- weights of the forward pass ---- */

/* An NVFP4 matrix that is being made. */
struct tile_args {
    uint8_t *tiles;        /* or NULL */
    uint8_t *scales;       /* [rows, cols / 16] without tiles */
    void *bf16;            /* [rows, cols], or NULL */
    int64_t row, rows_end; /* rows to make */
    int64_t cols;
    int tile_cols;
    struct tensor_scale tensor_scale;
};

/* Makes block `block` of a row from its masters: codes and scale, where the tiles have them, and
 * values in bf16, which has them exactly; or the scale alone. */
__device__ static inline void store_block(const struct tile_args &t, int64_t row, int64_t block,
                                          const float x[RUN], const float2 *table)
{
    const int sign[4] = {15, 12, 14, 13}; /* its position in pair p of a word, see e2m1_pair */
    float a[RUN], value;
    uint32_t negative = 0, words[2] = {}, bf16[RUN / 2];
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float q = divide(x[i], t.tensor_scale);
        a[i] = fabsf(q);
        negative |= bits_of(q) >> 31 << i;
    }
    uint32_t code = sweep(a, table);
    const float2 entry = table[code];
    if (!t.tiles) {
        t.scales[(row * t.cols) / RUN + block] = (uint8_t)code;
        return;
    }
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        int p = i % 8 / 2;
        uint32_t minus = negative >> i & 1, magnitude = encode_e2m1(a[i], entry, &value);
        words[i / 8] |= (minus << sign[p] | magnitude << (9 - 3 * p)) << 16 * (i % 2);
        uint32_t half = bits_of(value * entry.x) >> 16 | minus << 15;
        bf16[i / 2] = i % 2 ? bf16[i / 2] | half << 16 : half;
    }
    int r = (int)(row % CUDA_TILE_ROWS), b = (int)(block % 8);
    int at = 4 * ((r & 7) * 4 + b / 2) + (r >> 3) + 2 * (b & 1); /* 4 lane + quarter */
    uint8_t *tile = t.tiles + (row / CUDA_TILE_ROWS * t.tile_cols + block / 8) * CUDA_TILE_BYTES;
    ((uint32_t *)tile)[at] = words[0];
    ((uint32_t *)tile)[128 + at] = words[1];
    tile[1024 + at] = (uint8_t)code;
    if (t.bf16)
        store_run<uint16_t, RUN>(t.bf16, row * t.cols + block * RUN, bf16, RUN);
}

/* A CTA makes 16 rows x 256 columns at a time: two tiles. A warp has rows g and g + 8, so that its
 * lanes write whole sectors of a tile. */
struct tile_place {
    int64_t row, block;
    bool inside;
};

__device__ static inline struct tile_place place_in(const struct tile_args &t, int64_t tile_row)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t row = tile_row * CUDA_TILE_ROWS + warp + 8 * (lane / 16);
    int64_t block = (int64_t)blockIdx.x * 16 + lane % 16;
    return {row, block, row >= t.row && row < t.rows_end && block * RUN < t.cols};
}

/* The table of a sweep, in shared memory. All threads of a CTA call it together. */
__device__ static const float2 *make_sweep_table(void)
{
    __shared__ float2 table[SWEEP_CODES];
    for (int i = (int)threadIdx.x; i < SWEEP_CODES; i += THREADS)
        table[i] = sweep_entry((uint32_t)i);
    __syncthreads();
    return table;
}

__global__ static void __launch_bounds__(THREADS)
    k_requantize_tiles(const struct tile_args t, const void *master, bool bf16)
{
    const float2 *table = make_sweep_table();
    uint32_t words[RUN];
    float x[RUN];
    int64_t i = t.row / CUDA_TILE_ROWS + blockIdx.y;
    for (; i * CUDA_TILE_ROWS < t.rows_end; i += gridDim.y) {
        const struct tile_place p = place_in(t, i);
        if (!p.inside)
            continue;
        load_floats(words, master, bf16, p.row * t.cols + p.block * RUN, RUN);
        decode_floats(x, words, bf16);
        store_block(t, p.row, p.block, x, table);
    }
}

static struct tile_args tile_args_of(const struct nbi_weight *w, int64_t row, int64_t rows)
{
    struct tile_args t = {};
    t.tiles = at<uint8_t>(w->data);
    t.scales = at<uint8_t>(w->scales);
    t.bf16 = at<void>(w->bf16);
    t.row = row;
    t.rows_end = row + rows;
    t.cols = w->cols;
    t.tile_cols = tiles_of(w->rows, w->cols).cols;
    t.tensor_scale = tensor_scale_of(w->tensor_scale);
    return t;
}

/* CTAs along columns and rows. Those along rows loop. */
static dim3 tile_grid(const struct tile_args *t)
{
    int64_t rows = ceil_div(t->rows_end, CUDA_TILE_ROWS) - t->row / CUDA_TILE_ROWS;
    return dim3((unsigned)ceil_div(t->cols, 16 * RUN), (unsigned)(rows < 4096 ? rows : 4096));
}

__global__ static void k_requantize_floats(void *out, enum nbi_dtype to, const void *master,
                                           bool bf16, enum nbi_dtype round_to, int64_t first,
                                           int64_t end)
{
    for (int64_t i = first + (int64_t)blockIdx.x * THREADS + threadIdx.x; i < end;
         i += (int64_t)gridDim.x * THREADS) {
        float x = load_f32(master, i, bf16 ? NBI_BF16 : NBI_F32);
        float rounded; /* or a half of it */
        if (round_to != NBI_F32 && round_to != to) {
            store_f32(&rounded, 0, round_to, x);
            x = load_f32(&rounded, 0, round_to);
        }
        store_f32(out, i, to, x);
    }
}

/* Elements of a vector or of a row. */
static int64_t row_values(const struct nbi_weight *w)
{
    return w->cols > 0 ? w->cols : 1;
}

/* What depends on a whole matrix, once rows up to `end` are made. */
static enum nb_status after_rows(struct nbi_stream *s, const struct nbi_weight *w, int64_t end)
{
    bool whole = end == w->rows && w->layout == NBI_WEIGHT_TILES;
    return whole ? nbi_cuda_measure_rows(w, s->queue) : NB_OK;
}

static enum nb_status requantize_rows(struct nbi_stream *s, const struct nbi_op_requantize *a,
                                      int64_t row, int64_t rows)
{
    const struct nbi_weight *w = &a->w;
    bool bf16 = a->dtype == NBI_BF16;
    int64_t first = row * row_values(w), n = rows * row_values(w);
    if (w->data.at == a->master.at || n == 0)
        return NB_OK; /* w is its own master */
    if (w->dtype != NBI_NVFP4) {
        CU_LAUNCH(k_requantize_floats, grid_for(s, ceil_div(n, THREADS)), THREADS, 0, s->queue,
                  at<void>(w->data), w->dtype, at<void>(a->master), bf16, a->round_to, first,
                  first + n);
        CU_LAUNCHED();
        return NB_OK;
    }
    NBI_BUG_IF(a->master.at % 16 != 0);
    const struct tile_args t = tile_args_of(w, row, rows);
    CU_LAUNCH(k_requantize_tiles, tile_grid(&t), THREADS, 0, s->queue, t, at<void>(a->master),
              bf16);
    CU_LAUNCHED();
    return after_rows(s, w, row + rows);
}

enum nb_status nbi_cuda_requantize(struct nbi_stream *s, const struct nbi_op_requantize *a)
{
    CU_HERE(s);
    return requantize_rows(s, a, 0, a->w.rows);
}

/* ---- the update ---- */

/* AdamW and the tiles of rows in one pass over memory. Rows are multiples of 32 elements, so that a
 * pair of lanes has a group of an int8 moment. */
template <enum nb_moment_type KIND>
__global__ static void __launch_bounds__(THREADS, 2)
    k_adamw_tiles(const struct adamw_args a, const struct tile_args t)
{
    if (a.control->skip)
        return;
    const struct adamw_scales scales = adamw_read(a);
    const float2 *table = make_sweep_table();
    uint32_t amax[2] = {};
    int64_t i = t.row / CUDA_TILE_ROWS + blockIdx.y;
    for (; i * CUDA_TILE_ROWS < t.rows_end; i += gridDim.y) {
        const struct tile_place p = place_in(t, i);
        float w[RUN];
        adamw_run<KIND>(a, scales, p.row * t.cols + p.block * RUN, p.inside ? RUN : 0, w, amax);
        if (p.inside)
            store_block(t, p.row, p.block, w, table);
    }
    raise_record(a, amax);
}

template <enum nb_moment_type KIND>
static void launch_adamw(struct nbi_stream *s, const struct adamw_args &a,
                         const struct tile_args *t)
{
    if (t)
        CU_LAUNCH(k_adamw_tiles<KIND>, tile_grid(t), THREADS, 0, s->queue, a, *t);
    else
        CU_LAUNCH(k_adamw<KIND>, grid_for(s, ceil_div(a.end - a.first, THREADS * RUN)), THREADS, 0,
                  s->queue, a);
}

/* With tiles, makes them too; otherwise t is NULL. */
static enum nb_status adamw(struct nbi_stream *s, const struct nbi_op_adamw *a,
                            const struct tile_args *t)
{
    const struct adamw_args x = adamw_args_of(a);
    if (a->m.kind == NB_MOMENT_F32)
        launch_adamw<NB_MOMENT_F32>(s, x, t);
    else if (a->m.kind == NB_MOMENT_BF16)
        launch_adamw<NB_MOMENT_BF16>(s, x, t);
    else if (a->m.kind == NB_MOMENT_INT8)
        launch_adamw<NB_MOMENT_INT8>(s, x, t);
    else
        launch_adamw<NB_MOMENT_NVFP4>(s, x, t);
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_adamw(struct nbi_stream *s, const struct nbi_op_adamw *a)
{
    CU_HERE(s);
    const struct nbi_weight *w = &a->w;
    NBI_BUG_IF(a->first % 32 != 0 || a->grad_first > a->first || a->m.kind != a->v.kind);
    NBI_BUG_IF((a->master.at | a->grad.at | a->m.values.at | a->v.values.at) % 16 != 0);
    if (a->count == 0)
        return NB_OK;
    if (!nbi_weight_exists(w))
        return adamw(s, a, NULL);
    NBI_BUG_IF(a->first % row_values(w) != 0 || a->count % row_values(w) != 0);
    int64_t row = a->first / row_values(w), rows = a->count / row_values(w);
    if (w->dtype == NBI_NVFP4 && w->cols % 32 == 0) {
        const struct tile_args t = tile_args_of(w, row, rows);
        NBI_TRY(adamw(s, a, &t));
        return after_rows(s, w, row + rows);
    }
    const struct nbi_op_requantize requantize = {*w, a->master, a->dtype, a->round_to};
    NBI_TRY(adamw(s, a, NULL));
    return requantize_rows(s, &requantize, row, rows);
}

/* ---- amax ---- */

__global__ static void k_amax(uint32_t *out, const void *x, bool bf16, int64_t n)
{
    uint32_t amax = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS)
        amax = max(amax, bits_of(load_f32(x, i, bf16 ? NBI_BF16 : NBI_F32)) & 0x7FFFFFFF);
    amax = cta_max(amax);
    if (threadIdx.x == 0)
        atomicMax(out, amax);
}

enum nb_status nbi_cuda_amax(struct nbi_stream *s, const struct nbi_op_amax *a)
{
    CU_HERE(s);
    CU_TRY(cudaMemsetAsync(at<void>(a->out), 0, sizeof(float), s->queue));
    if (a->n > 0)
        CU_LAUNCH(k_amax, grid_for(s, ceil_div(a->n, THREADS * RUN)), THREADS, 0, s->queue,
                  at<uint32_t>(a->out), at<void>(a->x), a->dtype == NBI_BF16, a->n);
    CU_LAUNCHED();
    return NB_OK;
}

/* ---- random values ---- */

__device__ static void store_value(float *to, float v)
{
    *to = v;
}

__device__ static void store_value(__nv_bfloat16 *to, float v)
{
    *to = __float2bfloat16_rn(v);
}

/* Four values a thread, which share a counter of Philox. */
template <typename T>
__global__ static void k_draw(T *out, int64_t n, float unit, uint2 seed, uint2 stream)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; 4 * i < n;
         i += (int64_t)gridDim.x * THREADS) {
        const uint4 r =
            philox({(uint32_t)i, (uint32_t)(i >> 32), stream.x, stream.y}, seed.x, seed.y);
        const uint32_t words[4] = {r.x, r.y, r.z, r.w};
        for (int k = 0; k < 4 && 4 * i + k < n; k++) {
            const uint32_t v = words[k];
            int sum = (int)((v & 255) + (v >> 8 & 255) + (v >> 16 & 255) + (v >> 24)) - 510;
            store_value(out + 4 * i + k, (float)sum * unit);
        }
    }
}

static uint2 halves(uint64_t v)
{
    return make_uint2((uint32_t)v, (uint32_t)(v >> 32));
}

template <typename T> static enum nb_status draw(struct nbi_stream *s, const struct nbi_op_draw *a)
{
    CU_LAUNCH(k_draw<T>, grid_for(s, ceil_div(a->n, 4 * THREADS)), THREADS, 0, s->queue,
              at<T>(a->out), a->n, a->deviation / NBI_DRAW_DEVIATION, halves(a->seed),
              halves(a->stream));
    CU_LAUNCHED();
    return NB_OK;
}

enum nb_status nbi_cuda_draw(struct nbi_stream *s, const struct nbi_op_draw *a)
{
    CU_HERE(s);
    NBI_BUG_IF(a->dtype != NBI_F32 && a->dtype != NBI_BF16);
    if (a->n == 0)
        return NB_OK;
    return a->dtype == NBI_BF16 ? draw<__nv_bfloat16>(s, a) : draw<float>(s, a);
}
