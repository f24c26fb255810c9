/* linear_decode_resident.cu - products of up to 16 rows with NVFP4 matrices, where all of x that a
 * CTA needs has room in shared memory: on compute capability 9.0 and 10.x, and unless the same bits
 * are asked for in any company (linear_few.cu has the rest).
 *
 * A CTA has some rows of tiles and goes through 32 of them at a time. Warps share a pass out in
 * units of two tiles: two rows of a column, which share x, or two columns of a row that is alone.
 * x comes once, in pieces: the columns of everybody's first units, of the second ones, and the
 * rest. Weights of the next pass are on their way while sums of the one before are added up. */
#include "backend/cuda/linear_decode.cuh"

#define WARPS    16
#define THREADS  (32 * WARPS)
#define PASS     (2 * WARPS) /* rows of tiles at most */
#define STAGES   2           /* of a warp, a unit each; ring_next counts on it */
#define UNIT     (2 * CUDA_TILE_BYTES)
#define PIECES   3  /* of x */
#define ROWS_MAX 16 /* of x */

/* ---- shared memory ---- */

/* Behind these: a column of zeros, x, and sums. */
struct whole {
    uint64_t arrived[WARPS][STAGES]; /* units, */
    uint64_t x_arrived[PIECES];      /* x */
    float scale[ROWS_MAX];           /* what rows of x are to be times, */
    float up[ROWS_MAX];              /* and of SwiGLU */
    __align__(128) uint8_t units[WARPS][STAGES][UNIT];
};

extern __shared__ __align__(128) uint8_t shared[];

__device__ static inline struct whole &own(void)
{
    return *(struct whole *)shared;
}

static inline __host__ __device__ int column_bytes(int NT)
{
    return NT * X16_BYTES;
}

/* Column -1 is zeros. */
template <int NT> __device__ static inline uint32_t x_at(int col)
{
    return smem_addr(shared) + sizeof(struct whole) + (col + 1) * column_bytes(NT);
}

static inline __host__ __device__ int sums_at(int cols, int NT)
{
    return (int)sizeof(struct whole) + (cols + 1) * column_bytes(NT);
}

/* ---- who has what ---- */

/* Rows of tiles of a pass. Each pair of rows has `ways` warps, a row that is alone `single`. */
struct pass_shape {
    int row, rows, ways, single;
};

__device__ static inline struct pass_shape pass_of(const struct part &p, int pass)
{
    int row = p.rows.begin + pass * PASS, rows = min(PASS, p.rows.end - row);
    int ways = quotient(PASS, rows);
    ways = min(ways, WARPS);
    return {row, rows, ways, rows % 2 ? WARPS - rows / 2 * ways : 0};
}

/* What a warp has of a pass: units, and of each two tiles and two columns of x. */
struct job {
    const uint8_t *from[2]; /* of the next unit to be asked for */
    uint32_t x[2];          /* of the next to be multiplied */
    int units, left;        /* in all; to be asked for */
    int step;               /* columns from a unit to the next */
    bool odd;               /* the first one has a column alone */
};

/* An odd number of columns of a row that is alone begins with the one of zeros. */
template <int NT>
__device__ static inline struct job job_of(const struct product &a, const struct part &p,
                                           const struct pass_shape &s)
{
    /* From a lane to all, so that it is known to be the same. */
    int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), pairs = s.rows / 2;
    int cols = p.cols.end - p.cols.begin;
    bool alone = warp >= pairs * s.ways;
    int way = alone ? warp - pairs * s.ways : quotient(warp, pairs);
    int row = s.row + (alone ? s.rows - 1 : 2 * (warp - way * pairs));
    int first = alone ? 2 * way - (cols & 1) : way;
    struct job j = {};
    j.step = alone ? 2 * s.single : s.ways;
    if (first < cols && j.step)
        j.units = j.left = quotient(cols - first + j.step - 1, j.step);
    j.odd = first < 0;
    uint32_t x = x_at<NT>(first) + threadIdx.x % 32 * 16;
    j.x[0] = x;
    j.x[1] = alone ? x + column_bytes(NT) : x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        struct place at = place_of(a, alone ? row : row + i);
        j.from[i] = a.tiles[at.m] +
                    ((int64_t)at.tile * a.tile_cols + p.cols.begin + first + (alone ? i : 0)) *
                        CUDA_TILE_BYTES;
    }
    return j;
}

/* By all lanes. */
__device__ static inline void ask_for_unit(struct job &j, const uint8_t *first, uint32_t to,
                                           uint32_t bar)
{
    if (j.left == 0)
        return;
    copy_async_two_evict_first(to, first, j.from[1], CUDA_TILE_BYTES, bar);
    j.from[0] += j.step * CUDA_TILE_BYTES;
    j.from[1] += j.step * CUDA_TILE_BYTES;
    j.left--;
}

/* A warp's units, of which the next one has its turn: in which place, and how often they were. */
struct ring {
    uint32_t unit, bar; /* of the turn */
    uint32_t turn;
};

__device__ static inline struct ring ring_begin(void)
{
    struct whole &w = own();
    int warp = threadIdx.x / 32;
    return {smem_addr(w.units[warp]), smem_addr(w.arrived[warp]), 0};
}

__device__ static inline void ring_next(struct ring &r)
{
    struct whole &w = own();
    int warp = threadIdx.x / 32;
    r.turn++;
    r.unit = 2 * smem_addr(w.units[warp]) + UNIT - r.unit;
    r.bar ^= 8;
}

/* The first units of a pass. A column that is not there is the one behind it, which meets zeros. */
__device__ static inline void ask_for_first(struct job &j, struct ring r)
{
    ask_for_unit(j, j.odd ? j.from[1] : j.from[0], r.unit, r.bar);
    ring_next(r);
    ask_for_unit(j, j.from[0], r.unit, r.bar);
}

/* By all lanes of a warp. */
template <int NT>
__device__ static inline void bring_x(const struct product &a, const struct part &p)
{
    const struct pass_shape s = pass_of(p, 0);
    int cols = p.cols.end - p.cols.begin, width = max(s.ways, 2 * s.single);
    const uint8_t *from = a.x + p.cols.begin * column_bytes(NT);
#pragma unroll 1
    for (int i = 0; i < PIECES; i++) {
        int first = min(i * width, cols), end = i + 1 == PIECES ? cols : min(first + width, cols);
        uint32_t bar = smem_addr(&own().x_arrived[i]);
        int at = first * column_bytes(NT), bytes = (end - first) * column_bytes(NT);
        copy_expect(bar, bytes);
        if (bytes > 0)
            copy_async(x_at<NT>(first), from + at, bytes, bar);
        copy_arrive(bar);
    }
}

/* ---- sums ---- */

/* Half of each column. */
template <int NT>
__device__ static inline void add_half(float acc[2][NT][4], uint32_t unit, const uint32_t x[2],
                                       int half)
{
    uint32_t w[2][4][4];
    widen_tiles<2>(w, unit, half);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t b[4];
                load_matrices(b, x[r] + t * X16_BYTES + (4 * half + 2 * i) * X16_STEP_BYTES);
#pragma unroll
                for (int e = 0; e < 2; e++)
                    mma<false>(acc[r][t], w[r][2 * i + e], b[2 * e], b[2 * e + 1]);
            }
}

template <int NT>
__device__ static inline void multiply(float acc[2][NT][4], struct job &j, struct ring &r)
{
    int step = j.step * column_bytes(NT);
#pragma unroll 1
    for (int i = 0; i < j.units; i++) {
        if (i < PIECES)
            mbarrier_wait(smem_addr(&own().x_arrived[i]), 0);
        while (!mbarrier_try_wait(r.bar, r.turn >> 1 & 1))
            ; /* lanes meet again at what they read together */
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_half<NT>(acc, r.unit, j.x, half);
        __syncwarp(); /* the unit was read by all */
        ask_for_unit(j, j.from[0], r.unit, r.bar);
        j.x[0] += step;
        j.x[1] += step;
        ring_next(r);
    }
}

/* To the warp's place in sums [WARPS, 2, NT, 32]; those of a row that is alone are one. */
template <int NT>
__device__ static inline void leave_sums(float acc[2][NT][4], float4 *sums, bool alone)
{
    float4 *to = sums + threadIdx.x / 32 * 2 * NT * 32 + threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float *u = acc[0][t], *v = acc[1][t];
        if (alone)
            to[t * 32] = make_float4(u[0] + v[0], u[1] + v[1], u[2] + v[2], u[3] + v[3]);
        else
            to[t * 32] = make_float4(u[0], u[1], u[2], u[3]);
        to[(NT + t) * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

/* ---- results ---- */

/* Rows 2j and 2j + 1 of a row of tiles, for row n of x: the sums of all ways in order. */
template <int NT>
__device__ static inline float2 add_up(const float *sums, const struct pass_shape &s, int row,
                                       int n, int j)
{
    int pairs = s.rows / 2;
    bool alone = row == 2 * pairs;
    int warp = alone ? pairs * s.ways : row / 2, ways = alone ? s.single : s.ways;
    int stride = (alone ? 1 : pairs) * 2 * NT * 128;
    const float *from = sums + ((warp * 2 + row % 2) * NT + n / 8) * 128 + j % 4 * 32 +
                        n % 8 / 2 * 4 + j / 4 * 2 + n % 2;
    float2 sum = {from[0], from[16]};
#pragma unroll 2
    for (int way = 1; way < ways; way++) {
        from += stride;
        sum.x += from[0];
        sum.y += from[16];
    }
    return sum;
}

__device__ static inline void put_results(const struct product &a, const struct part &p, int row,
                                          int n, int j, float2 sum)
{
    struct place at = place_of(a, row);
    int rows = a.rows[at.m], out = at.tile * CUDA_TILE_ROWS + 2 * j;
    float by = 128.0f * a.scale[at.m] * own().scale[n];
    float *y = a.slices > 1 ? a.parts + (int64_t)p.slice * a.N * rows : a.y[at.m];
    bool add = a.add && a.slices == 1;
    y += (int64_t)n * rows + out;
    if (out < rows)
        y[0] = __fmul_rn(sum.x, by) + (add ? y[0] : 0);
    if (out + 1 < rows)
        y[1] = __fmul_rn(sum.y, by) + (add ? y[1] : 0);
}

/* SwiGLU as x of the product behind. NaN: zeros, and the scale is not a number. */
__device__ static inline void put_gated(const struct product &a, int tile, int n, int j,
                                        float2 gate, float2 up)
{
    float by = 128.0f * own().scale[n], to = own().up[n];
    float x = swiglu(__fmul_rn(gate.x, a.scale[0] * by), __fmul_rn(up.x, a.scale[1] * by));
    float y = swiglu(__fmul_rn(gate.y, a.scale[0] * by), __fmul_rn(up.y, a.scale[1] * by));
    *(__half2 *)x16_at(a.act, n, tile * CUDA_TILE_ROWS + 2 * j) =
        to > 0 ? __floats2half2_rn(x * to, y * to) : __half2();
}

template <int NT>
__device__ static inline void put_all(const struct product &a, const struct part &p,
                                      const struct pass_shape &s, const float *sums)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < (s.rows >> a.gated) * 64 * NT; i += THREADS) {
        int j = i % 8, n = i / 8 % (8 * NT), row = i / (64 * NT) << a.gated;
        if (n >= a.N)
            continue;
        float2 sum = add_up<NT>(sums, s, row, n, j);
        if (a.gated)
            put_gated(a, (s.row + row) / 2, n, j, sum, add_up<NT>(sums, s, row + 1, n, j));
        else
            put_results(a, p, s.row + row, n, j, sum);
    }
}

/* ---- the kernel ---- */

template <int NT> __device__ static inline void begin(void)
{
    struct whole &w = own();
    uint4 *zeros = (uint4 *)(shared + sizeof w); /* column -1 */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < STAGES)
        mbarrier_init(smem_addr(&w.arrived[warp][lane]), COPY_ARRIVALS);
    if (threadIdx.x < PIECES)
        mbarrier_init(smem_addr(&w.x_arrived[threadIdx.x]), COPY_ARRIVALS);
#if HAS_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    if (threadIdx.x < column_bytes(NT) / 16)
        zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

/* It leaves registers to the small kernels before and behind it, so that it can be there while they
 * are at work. */
template <int NT>
__global__ static void __maxnreg__(NT == 1 ? 88 : 80)
    k_linear_whole(const __grid_constant__ struct product a)
{
    const struct part p = part_of(a, (int)blockIdx.x);
    const int warp = threadIdx.x / 32, cols = p.cols.end - p.cols.begin;
    float by[2] = {}; /* x and SwiGLU; they come while the first pass is at work */
    struct ring r = ring_begin();
    pdl_trigger();
    begin<NT>();
    struct job j = job_of<NT>(a, p, pass_of(p, 0));
    ask_for_first(j, r);
    pdl_wait();
    if (threadIdx.x < a.N) {
        by[0] = a.x_scale[threadIdx.x];
        if (a.gated)
            by[1] = a.act.scale[threadIdx.x];
    }
    if (warp == WARPS - 1)
        bring_x<NT>(a, p);
#pragma unroll 1
    for (int pass = 0;; pass++) {
        float acc[2][NT][4] = {};
        float *sums = (float *)(shared + sums_at(cols, NT));
        multiply<NT>(acc, j, r);
        const struct part again = part_of(a, opaque((int)blockIdx.x));
        const struct pass_shape s = pass_of(again, pass);
        const bool last = s.row + s.rows == again.rows.end;
        leave_sums<NT>(acc, (float4 *)sums, warp >= s.rows / 2 * s.ways);
        if (pass == 0 && threadIdx.x < a.N) {
            own().scale[threadIdx.x] = by[0];
            own().up[threadIdx.x] = by[1] != 0 ? 1 / by[1] : 0;
        }
        if (!last) {
            j = job_of<NT>(a, again, pass_of(again, pass + 1));
            ask_for_first(j, r);
        }
        __syncthreads();
        put_all<NT>(a, again, s, sums);
        if (last)
            break;
        __syncthreads(); /* sums were read */
    }
}

/* ---- launch ---- */

static int64_t bytes_for(const struct product *p)
{
    int64_t cols = ceil_div(p->tile_cols, p->slices);
    return sums_at((int)cols, p->n_tiles) + WARPS * 2 * p->n_tiles * 512;
}

bool nbi_cuda_whole_fits(const struct nbi_stream *s, const struct product *p)
{
    return s->cuda->ptx_version >= 90 && p->N <= ROWS_MAX &&
           bytes_for(p) <= s->cuda->smem_per_cta - BESIDE_BYTES;
}

template <int NT> static enum nb_status launch(struct nbi_stream *s, const struct product &a)
{
    /* Of the kernel, so of all its users. */
    CU_TRY(cudaFuncSetAttribute(k_linear_whole<NT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                s->cuda->smem_per_cta));
    CU_TRY(pdl_launch(s, k_linear_whole<NT>, (unsigned)(a.lines * a.slices), THREADS,
                      (int)bytes_for(&a), a));
    return NB_OK;
}

enum nb_status nbi_cuda_linear_whole(struct nbi_stream *s, const struct product *p)
{
    return p->n_tiles == 1 ? launch<1>(s, *p) : launch<2>(s, *p);
}
