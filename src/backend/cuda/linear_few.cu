/* linear_few.cu - products of up to NBI_SMALL_BATCH rows with NVFP4 matrices, on tensor cores.
 *
 * x is rounded to f16 times a power of two per row; weights are exact in f16. A CTA has some rows
 * of tiles and goes through them a pass at a time. A pass has groups of two rows of tiles, and as
 * many warps for each group as there are, whose ways are its columns: way w has columns w, w + ways
 * and so on. A warp has a ring of stages in shared memory for its tiles. Columns of x are there
 * once for all groups; one more warp brings them. At the end of a pass sums are added up.
 *
 * Weights do not depend on what ran before, so a kernel asks for its first ones before it waits for
 * that (launch_behind).
 *
 * Where rows are few and something is added to y, slices of columns go to different CTAs. Each
 * leaves its sums, which are added up in order by whoever reads y next (struct pending). All that
 * depends on shapes and the device alone, so a row of y does not depend on its company. */
#include "backend/cuda/few.cuh"
#include "backend/cuda/mma.cuh"

#define WARPS     15 /* and the one that brings x */
#define THREADS   (32 * WARPS + 32)
#define GROUP     2  /* rows of tiles, */
#define PASS      14 /* and of a pass at most: two ways at least */
#define STAGES    2
#define STAGE     (GROUP * NBI_TILE_BYTES)
#define RINGS     (WARPS * STAGES * STAGE)
#define SUMS_LINE (GROUP * NBI_TILE_ROWS + 4) /* so that lanes write to different banks */
#define SLOTS_MAX 32                          /* columns of x that are there at once */
#define WAYS_MAX  7

struct product {
    float *y[NBI_LINEAR_MAX];
    const uint8_t *tiles[NBI_LINEAR_MAX];
    int first[NBI_LINEAR_MAX]; /* row of tiles where each matrix begins */
    int rows[NBI_LINEAR_MAX];
    float scale[NBI_LINEAR_MAX];
    int count, tile_rows, tile_cols;
    int slices; /* of columns */
    int slots;  /* columns of x that shared memory has room for */
    int ways;   /* at most, whatever N is */
    const uint4 *x;
    const float *x_scale;
    float *parts; /* [slices, N, rows], if there are several */
    int N, n_tiles;
    bool add;
};

/* ---- who has what ---- */

__device__ static inline int matrix_of(const struct product &a, int row)
{
    int m = 0;
    while (m + 1 < a.count && row >= a.first[m + 1])
        m++;
    return m;
}

struct range {
    int begin, end;
};

__device__ static inline struct range even(unsigned count, unsigned i, unsigned of)
{
    return {(int)(count * i / of), (int)(count * (i + 1) / of)};
}

/* Rows of tiles of a CTA, its columns, and the passes it takes. */
struct part {
    struct range rows, cols;
    int slice, passes;
};

__device__ static inline struct part part_of(const struct product &a)
{
    unsigned lines = gridDim.x / (unsigned)a.slices, slice = blockIdx.x / lines;
    struct range rows = even(a.tile_rows, blockIdx.x - slice * lines, lines);
    return {rows, even(a.tile_cols, slice, a.slices), (int)slice,
            (rows.end - rows.begin + PASS - 1) / PASS};
}

/* Rows of tiles of a pass, and how many groups and ways it has. Warp w has way w / groups of group
 * w % groups. A way has so many slots for its columns of x. */
struct pass_shape {
    int row, rows, groups, ways, slots;
};

__device__ static inline struct pass_shape pass_of(const struct product &a, const struct part &p,
                                                   int pass)
{
    struct range r = even(p.rows.end - p.rows.begin, pass, p.passes);
    unsigned rows = r.end - r.begin, groups = (rows + GROUP - 1) / GROUP;
    unsigned ways = min(WARPS / groups, (unsigned)a.ways);
    return {p.rows.begin + r.begin, (int)rows, (int)groups, (int)ways,
            (int)((unsigned)a.slots / ways)};
}

/* Where in the slots of its way a column of x is, in turn, and which time that is. */
struct turn {
    int slot;
    uint32_t parity;
};

__device__ static inline void next_turn(struct turn &t, int slots)
{
    t.parity ^= t.slot + 1 == slots;
    t.slot = t.slot + 1 == slots ? 0 : t.slot + 1;
}

/* ---- copies ---- */

/* Barriers in shared memory, that copies to it arrive at. Before compute capability 9.0 every lane
 * copies and arrives for itself. */
#if __CUDA_ARCH__ >= 900
#define BULK      1
#define COPY_ENDS 1
#else
#define BULK      0
#define COPY_ENDS 32
#endif

__device__ static inline void barrier_init(uint32_t bar, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ static inline void barrier_end(uint32_t bar)
{
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ static inline void barrier_arrive(uint32_t bar)
{
    asm volatile("{\n"
                 ".reg .b64 state;\n"
                 "mbarrier.arrive.shared.b64 state, [%0];\n"
                 "}" ::"r"(bar)
                 : "memory");
}

/* Until the phase of that parity is over, by all lanes of a warp. */
__device__ static inline void barrier_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n"
                     ".reg .pred p;\n"
#if BULK
                     "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
                     "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    __syncwarp();
}

/* By all lanes of a warp: so many bytes will come, */
__device__ static inline void copies_begin(uint32_t bar, int bytes)
{
#if BULK
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                     : "memory");
#endif
}

/* each of them by this, */
__device__ static inline void copy(uint32_t to, const void *from, int bytes, uint32_t bar)
{
#if BULK
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(from), "r"(bytes), "r"(bar)
                     : "memory");
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i),
                     "l"((const uint8_t *)from + i)
                     : "memory");
#endif
}

/* and this is the end. */
__device__ static inline void copies_end(uint32_t bar)
{
#if !BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

/* Shared memory: rings and columns of x, where sums go at the end of a pass; before them barriers:
 * tiles of each warp have arrived, x has, and x is free again; and what rows of x are to be times.
 */
#define BARS       (WARPS * STAGES)
#define SCALES_AT  ((BARS + 2 * SLOTS_MAX) * 8)
#define HEAD_BYTES ((SCALES_AT + NBI_SMALL_BATCH * 4) / 128 * 128 + 128)

extern __shared__ __align__(128) uint8_t shared[];

__device__ static inline uint32_t tiles_bar(int stage)
{
    return shared_at(shared) + (threadIdx.x / 32 * STAGES + stage) * 8;
}

__device__ static inline uint32_t x_full(int slot)
{
    return shared_at(shared) + (BARS + slot) * 8;
}

__device__ static inline uint32_t x_free(int slot)
{
    return shared_at(shared) + (BARS + SLOTS_MAX + slot) * 8;
}

__device__ static inline uint8_t *stage_at(int stage)
{
    return shared + HEAD_BYTES + (threadIdx.x / 32 * STAGES + stage) * STAGE;
}

__device__ static inline float *scales(void)
{
    return (float *)(shared + SCALES_AT);
}

template <int NT> __device__ static inline uint8_t *slot_at(int slot)
{
    return shared + HEAD_BYTES + RINGS + slot * NT * X16_BYTES;
}

/* Those of a pass before are over. */
__device__ static inline void end_barriers(const struct product &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < WARPS && lane < STAGES)
        barrier_end(tiles_bar(lane));
    if (warp == WARPS && lane < a.slots) {
        barrier_end(x_full(lane));
        barrier_end(x_free(lane));
    }
}

/* Each warp has its own, the one that brings x the others. */
__device__ static inline void begin_barriers(const struct product &a, const struct pass_shape &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < WARPS && lane < STAGES)
        barrier_init(tiles_bar(lane), COPY_ENDS);
    if (warp == WARPS && lane < a.slots) {
        barrier_init(x_full(lane), COPY_ENDS);
        barrier_init(x_free(lane), 32 * s.groups);
    }
#if BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncwarp();
}

/* ---- weights ---- */

/* What a warp fetches: `rows` tiles of its columns. */
struct feed {
    const uint8_t *from[GROUP]; /* column 0 */
    int rows, first, end, step; /* of columns, but rows */
};

__device__ static inline void feed_begin(struct feed &f, const struct product &a,
                                         const struct part &p, const struct pass_shape &s)
{
    int warp = threadIdx.x / 32, way = warp / s.groups, group = warp - way * s.groups;
    f.rows = min(GROUP, s.rows - group * GROUP);
    f.first = p.cols.begin + way;
    f.end = way < s.ways ? p.cols.end : 0;
    f.step = s.ways;
#pragma unroll
    for (int r = 0; r < GROUP; r++) {
        int row = s.row + group * GROUP + min(r, f.rows - 1), m = matrix_of(a, row);
        f.from[r] = a.tiles[m] + (int64_t)(row - a.first[m]) * a.tile_cols * NBI_TILE_BYTES;
    }
}

__device__ static inline void fetch_stage(const struct feed &f, int col, int stage)
{
    if (col >= f.end)
        return;
    uint32_t bar = tiles_bar(stage), to = shared_at(stage_at(stage));
    copies_begin(bar, f.rows * NBI_TILE_BYTES);
#pragma unroll
    for (int r = 0; r < GROUP; r++)
        if (r < f.rows)
            copy(to + r * NBI_TILE_BYTES, f.from[r] + (int64_t)col * NBI_TILE_BYTES, NBI_TILE_BYTES,
                 bar);
    copies_end(bar);
}

/* The warp that brings x, column after column. */
template <int NT>
__device__ static inline void bring_x(const struct product &a, const struct part &p,
                                      const struct pass_shape &s)
{
    int n0 = (int)blockIdx.y * NT, bytes = min(NT, a.n_tiles - n0) * X16_BYTES, way = 0;
    const uint8_t *x = (const uint8_t *)a.x + (int64_t)n0 * X16_BYTES;
    struct turn t = {0, 1}; /* all are free at first */
#pragma unroll 1
    for (int col = p.cols.begin; col < p.cols.end; col++) {
        int slot = way * s.slots + t.slot;
        barrier_wait(x_free(slot), t.parity);
        copies_begin(x_full(slot), bytes);
        copy(shared_at(slot_at<NT>(slot)), x + (int64_t)col * a.n_tiles * X16_BYTES, bytes,
             x_full(slot));
        copies_end(x_full(slot));
        if (++way == s.ways) {
            way = 0;
            next_turn(t, s.slots);
        }
    }
}

/* ---- sums ---- */

/* Half a tile as operands: w[p] is pair p. */
__device__ static inline void widen_half(uint32_t w[4][4], const uint4 *tile, int half)
{
    int lane = threadIdx.x % 32;
    uint4 codes = tile[half * 32 + lane];
    uint32_t s = ((const uint32_t *)(tile + 64))[lane];
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    __half2 by[4];
#pragma unroll
    for (int q = 0; q < 4; q++) { /* the scale times 2^7, so the weight times 2^-7 */
        uint32_t h = (s >> (8 * q) & 0xFF) * 0x00800080u;
        by[q] = __hmul2(*(__half2 *)&h, __float2half2_rn(32768.0f));
    }
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint32_t pair = tile_pair(word[q], p);
            __half2 v = __hmul2(*(__half2 *)&pair, by[q]);
            w[p][q] = *(uint32_t *)&v;
        }
}

/* Adds half a column. Both rows of tiles are computed: a group of one has something there too, and
 * nobody looks at what comes of it. */
template <int NT>
__device__ static inline void add_half(float acc[GROUP][NT][4], const uint8_t *stage,
                                       const uint4 *x, int half)
{
    uint32_t w[GROUP][4][4];
#pragma unroll
    for (int r = 0; r < GROUP; r++)
        widen_half(w[r], (const uint4 *)(stage + r * NBI_TILE_BYTES), half);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 b = x[t * 128 + (2 * half + i) * 32];
#pragma unroll
            for (int r = 0; r < GROUP; r++)
                mma<false>(acc[r][t], w[r][2 * i], b.x, b.y);
#pragma unroll
            for (int r = 0; r < GROUP; r++)
                mma<false>(acc[r][t], w[r][2 * i + 1], b.z, b.w);
        }
}

/* acc to the warp's place in sums [WARPS, 8 NT, SUMS_LINE]; it is 0 afterwards. */
template <int NT> __device__ static inline void leave_sums(float acc[GROUP][NT][4], float *sums)
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float *to = sums + (warp * 8 * NT + 2 * t) * SUMS_LINE + g;
#pragma unroll
    for (int r = 0; r < GROUP; r++)
#pragma unroll
        for (int c = 0; c < NT; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                to[(8 * c + j % 2) * SUMS_LINE + r * 16 + j / 2 * 8] = acc[r][c][j];
                acc[r][c][j] = 0;
            }
}

/* Results of row o of two rows of tiles, from the sums of all ways in order. */
template <int NT>
__device__ static inline void add_up(const struct product &a, const struct part &p,
                                     const struct pass_shape &s, const float *sums)
{
    int warp = threadIdx.x / 32, o = threadIdx.x % 32, n0 = (int)blockIdx.y * 8 * NT;
    int count = min(8 * NT, a.N - n0), stride = s.groups * 8 * NT * SUMS_LINE;
#pragma unroll 1
    for (int group = 0; group < s.groups; group++) {
        int row = s.row + group * GROUP + o / 16, m = matrix_of(a, min(row, a.tile_rows - 1));
        int out = (row - a.first[m]) * 16 + o % 16;
        bool any = row < s.row + s.rows && out < a.rows[m], add = a.add && a.slices == 1;
        float by = 128.0f * a.scale[m];
        float *y = a.slices > 1 ? a.parts + (int64_t)p.slice * a.N * a.rows[m] : a.y[m];
        y += (int64_t)n0 * a.rows[m] + out;
#pragma unroll 2
        for (int n = warp; n < count; n += WARPS + 1) {
            const float *from = sums + (group * 8 * NT + n) * SUMS_LINE + o;
            float *to = y + (int64_t)n * a.rows[m], old = any && add ? *to : 0, sum = *from;
#pragma unroll 4
            for (int i = 1; i < s.ways; i++)
                sum += *(from += stride);
            if (any)
                *to = __fmul_rn(sum, by * scales()[n]) + old;
        }
    }
}

/* ---- the kernel ---- */

template <int NT>
__device__ static inline void multiply_pass(float acc[GROUP][NT][4], const struct feed &f,
                                            const struct part &p, int slots)
{
    int lane = threadIdx.x % 32, own = (f.first - p.cols.begin) * slots;
    struct turn t = {};
#pragma unroll 1
    for (int i = 0, col = f.first; col < f.end; i++, col += f.step) {
        int stage = i % STAGES, slot = own + t.slot;
        barrier_wait(tiles_bar(stage), i / STAGES % 2);
        barrier_wait(x_full(slot), t.parity);
        const uint4 *x = (const uint4 *)slot_at<NT>(slot) + lane;
#pragma unroll NT <= 2 ? 2 : 1
        for (int half = 0; half < 2; half++)
            add_half(acc, stage_at(stage), x, half);
        barrier_arrive(x_free(slot));
        __syncwarp(); /* the stage was read by all */
        fetch_stage(f, col + STAGES * f.step, stage);
        next_turn(t, slots);
    }
}

/* For few rows of x it leaves registers to the small kernels before and behind it, so that it can
 * be there while they are at work. */
template <int NT>
__global__ static void __launch_bounds__(NT <= 2 ? THREADS * 3 / 2 : THREADS, 1)
    k_linear_few(const __grid_constant__ struct product a)
{
    const struct part own = part_of(a);
    const bool brings_x = threadIdx.x / 32 == WARPS;
    float *sums = (float *)(shared + HEAD_BYTES);
    float acc[GROUP][NT][4] = {};
    next_may_start();
#pragma unroll 1
    for (int pass = 0; pass < own.passes; pass++) {
        const struct pass_shape s = pass_of(a, own, pass);
        struct feed f = {};
        if (pass > 0)
            end_barriers(a);
        begin_barriers(a, s);
        __syncthreads();
        if (!brings_x)
            feed_begin(f, a, own, s);
#pragma unroll 1
        for (int i = 0; i < STAGES; i++)
            fetch_stage(f, f.first + i * f.step, i);
        if (pass == 0) {
            int n = (int)blockIdx.y * 8 * NT + threadIdx.x;
            wait_before();
            if (threadIdx.x < 8 * NT && n < a.N)
                scales()[threadIdx.x] = a.x_scale[n];
        }
        if (brings_x)
            bring_x<NT>(a, own, s);
        else
            multiply_pass(acc, f, own, s.slots);
        __syncthreads(); /* rings and x were read */
        if (!brings_x)
            leave_sums(acc, sums);
        __syncthreads();
        add_up<NT>(a, own, s, sums);
#if BULK
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* copies come behind this */
#endif
        __syncthreads();
    }
}

/* ---- launch ---- */

/* Columns of x that there is room for. */
static int slots_for(const struct nbi_stream *s, int n_tiles)
{
    int n = (s->cuda->shared - HEAD_BYTES - RINGS) / (n_tiles * X16_BYTES);
    return n < SLOTS_MAX ? n : SLOTS_MAX;
}

template <int NT> static enum nb_status launch(struct nbi_stream *s, struct product &a, int ctas)
{
    int64_t sums = WARPS * 8 * NT * SUMS_LINE * 4, useful = ceil_div(a.tile_cols, a.slices);
    a.slots = slots_for(s, NT);
    useful = ceil_div(useful, a.ways) * a.ways;
    a.slots = (int)(useful < a.slots ? useful : a.slots);
    int64_t data = RINGS + a.slots * NT * X16_BYTES,
            bytes = HEAD_BYTES + (data > sums ? data : sums);
    NBI_BUG_IF(a.slots < a.ways || a.ways < 1 || bytes > s->cuda->shared);
    dim3 grid((unsigned)ctas, (unsigned)ceil_div(a.n_tiles, NT));
    /* Of the kernel, so of all its users. */
    CU_TRY(cudaFuncSetAttribute(k_linear_few<NT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                s->cuda->shared));
    CU_TRY(launch_behind(s, k_linear_few<NT>, grid, THREADS, (int)bytes, a));
    return NB_OK;
}

/* As many rows of x at once as there are, where shared memory allows it. */
static enum nb_status launch_for(struct nbi_stream *s, struct product &a, int ctas)
{
    bool large = s->cuda->shared >= (160 << 10);
    a.ways = slots_for(s, large ? 8 : 4);
    a.ways = a.ways < WAYS_MAX ? a.ways : WAYS_MAX;
    return a.n_tiles <= 1             ? launch<1>(s, a, ctas)
           : a.n_tiles <= 2           ? launch<2>(s, a, ctas)
           : a.n_tiles <= 4 || !large ? launch<4>(s, a, ctas)
                                      : launch<8>(s, a, ctas);
}

/* x is in s->x16. */
static enum nb_status multiply(struct nbi_stream *s, const struct nbi_op_linear *a)
{
    struct product p = {};
    for (int i = 0; i < a->count; i++) {
        struct tile_shape t = tiles_of(a->w[i].rows, a->K);
        p.y[i] = at<float>(a->y[i]);
        p.tiles[i] = at<const uint8_t>(a->w[i].data);
        p.rows[i] = (int)a->w[i].rows;
        p.scale[i] = a->w[i].tensor_scale;
        p.first[i] = p.tile_rows;
        p.tile_rows += t.rows;
        p.tile_cols = t.cols;
    }
    p.count = a->count;
    p.x = (const uint4 *)s->x16;
    p.x_scale = s->x16_scale;
    p.parts = (float *)s->workspace;
    p.N = (int)a->N;
    p.n_tiles = (int)ceil_div(a->N, 8);
    p.add = a->add;
    p.slices = 1;
    if (a->add && a->count == 1) { /* few, since someone has to add them up; whatever N is */
        int64_t room = NBI_WORKSPACE_BYTES / (NBI_SMALL_BATCH * 4 * a->w[0].rows);
        p.slices = column_slices(p.tile_rows, p.tile_cols, s->cuda->sms,
                                 (int)(room < SLICES_MAX ? room : SLICES_MAX), false);
    }
    int64_t useful = (int64_t)p.tile_rows * p.slices, most = s->cuda->sms / p.slices * p.slices;
    NBI_TRY(launch_for(s, p, (int)(useful < most ? useful : most)));
    if (p.slices > 1)
        s->pending = {p.y[0], p.parts, p.slices, a->N, a->w[0].rows};
    return NB_OK;
}

bool nbi_cuda_few(const struct nbi_op_linear *a)
{
    bool nvfp4 = true;
    for (int i = 0; i < a->count; i++)
        nvfp4 = nvfp4 && a->w[i].dtype == NBI_NVFP4;
    return !a->exact && nvfp4 && a->N <= NBI_SMALL_BATCH;
}

enum nb_status nbi_cuda_linear_few(struct nbi_stream *s, const struct nbi_op_linear *a, bool ready)
{
    if (!ready)
        NBI_TRY(nbi_cuda_x_of_rows(s, a));
    return multiply(s, a);
}

enum nb_status nbi_cuda_norm_linear(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                    const struct nbi_op_linear *a)
{
    struct pending p = s->pending;
    bool few = !norm->rstd.at && nbi_cuda_few(a);
    if (!few || p.y != at<float>(norm->x) || p.N != norm->N || p.C != norm->C || s->rope.N > 0) {
        CU_HERE(s); /* which settles what is pending */
        p = {};
    }
    if (!few && !norm->rstd.at && nbi_cuda_large(s, a))
        return nbi_cuda_norm_large(s, norm, a);
    if (!few) {
        NBI_TRY(nbi_cuda_rmsnorm(s, norm));
        return nbi_cuda_linear(s, a);
    }
    CU_TRY(cudaSetDevice(s->cuda->index));
    s->pending = {};
    s->ready = {};
    NBI_TRY(nbi_cuda_x_of_norm(s, norm, a, &p));
    return multiply(s, a);
}

enum nb_status nbi_cuda_swiglu_linear(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                      const struct nbi_op_linear *a)
{
    CU_HERE(s);
    if (nbi_cuda_few(a)) {
        NBI_TRY(nbi_cuda_x_of_swiglu(s, act, a));
        return multiply(s, a);
    }
    if (nbi_cuda_large(s, a))
        return nbi_cuda_swiglu_large(s, act, a);
    NBI_TRY(nbi_cuda_swiglu(s, act));
    return nbi_cuda_linear(s, a);
}
