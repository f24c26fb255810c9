/* linear_decode.cu - products of up to NBI_DECODE_LINEAR_ROWS rows with NVFP4 matrices, on tensor
 * cores; linear_whole.cu has those of up to 16 whose x fits shared memory, unless they are to be
 * steady.
 *
 * x is rounded to f16 times a power of two per row; weights are exact in f16. A CTA has some rows
 * of tiles and goes through them a pass at a time. A pass has groups of rows, and as many teams of
 * warps for each group as there are, whose ways are its columns. A warp has a ring of stages in
 * shared memory for its tiles. Columns of x are there once for all groups; one more warp brings
 * them, or the first one of each way. At the end of a pass sums are added up.
 *
 * Weights do not depend on what ran before, so a kernel asks for its first ones before it waits for
 * that (pdl_launch).
 *
 * Where rows are few and something is added to y, slices of columns go to different CTAs. Each
 * leaves its sums, which are added up in order by whoever reads y next (struct splitk_partials).
 * All that depends on the matrices' shapes and the device alone, but for whether warps work in
 * teams: so a row of y does not depend on its company, if it has to be steady. */
#include <string.h>

#include "backend/cuda/linear_decode.cuh"
#include "backend/cuda/wgmma.cuh"

#define SLOTS_MAX 32 /* columns of x that are there at once */

/* How warps work together. Of Hopper (WG) four are a team, with a row of tiles each: a product of
 * theirs reads x from shared memory by itself, and goes on while they widen the next weights. Of
 * others each is for itself and has two rows, which share what it reads of x. */
template <bool WG> struct crew {
    static constexpr int WARPS = WG ? 12 : 15; /* that multiply */
    static constexpr int THREADS = WG ? 384 : 512;
    static constexpr int registers(int NT) /* of a thread */
    {
        return WG ? 104 : NT <= 2 ? 80 : 128;
    }
    static constexpr int TEAM = WG ? 4 : 1;           /* warps */
    static constexpr int EACH = WG ? 1 : 2;           /* rows of tiles of a warp, */
    static constexpr int GROUP = TEAM * EACH;         /* of a team, */
    static constexpr int PASS = WARPS / TEAM * GROUP; /* and of a pass at most */
    static constexpr int WAYS = WG ? 3 : 7;           /* at most */
    static constexpr int STAGES = 2;
    static constexpr int COLS = WG ? 2 : 1; /* of a stage */
    static constexpr int STAGE = EACH * COLS * CUDA_TILE_BYTES;
    static constexpr int RINGS = WARPS * STAGES * STAGE;
    /* Shared memory: rings and columns of x, where sums go at the end of a pass; before them
     * barriers: tiles of each warp have arrived, x has, and x is free again; what rows of x are to
     * be times; and rows of SwiGLU. */
    static constexpr int BARS = WARPS * STAGES;
    static constexpr int SCALES_AT = (BARS + 2 * SLOTS_MAX) * 8;
    static constexpr int UPS_AT = SCALES_AT + NBI_DECODE_LINEAR_ROWS * 4;
    static constexpr int HEAD_BYTES = (UPS_AT + NBI_DECODE_LINEAR_ROWS * 4) / 128 * 128 + 128;
};

/* Rows of tiles of a pass, and how many groups and ways it has. Team t has way t / groups of group
 * t % groups. A way has so many slots for its columns of x. */
struct pass_shape {
    int row, rows, groups, ways, slots;
};

template <class C>
__device__ static inline struct pass_shape pass_of(const struct product &a, const struct part &p,
                                                   int pass)
{
    unsigned count = (unsigned)(p.rows.end - p.rows.begin) >> a.gated;
    struct range r = {0, (int)count};
    if (a.passes > 1)
        r = {(int)(count * pass / a.passes), (int)(count * (pass + 1) / a.passes)};
    r = rows_of(a, r);
    int rows = r.end - r.begin, groups = (rows + C::GROUP - 1) / C::GROUP;
    int ways = min(quotient(C::WARPS / C::TEAM, groups), a.ways);
    return {p.rows.begin + r.begin, rows, groups, ways, quotient(a.slots, ways)};
}

/* ---- shared memory ---- */

extern __shared__ __align__(128) uint8_t shared[];

template <class C> __device__ static inline uint32_t x_full(int slot)
{
    return smem_addr(shared) + (C::BARS + slot) * 8;
}

template <class C> __device__ static inline uint32_t x_free(int slot)
{
    return smem_addr(shared) + (C::BARS + SLOTS_MAX + slot) * 8;
}

/* A warp's barriers and stages. */
struct ring {
    uint32_t bars, data;
};

template <class C> __device__ static inline struct ring ring_of(int warp)
{
    uint32_t base = smem_addr(shared);
    return {base + warp * C::STAGES * 8, base + C::HEAD_BYTES + warp * C::STAGES * C::STAGE};
}

template <class C> __device__ static inline float *scales(void)
{
    return (float *)(shared + C::SCALES_AT);
}

template <class C> __device__ static inline float *ups(void)
{
    return (float *)(shared + C::UPS_AT);
}

/* What a row of x is to be times, and what SwiGLU is divided by. */
template <class C, int NT> __device__ static inline void keep_scales(const struct product &a)
{
    int n = (int)blockIdx.y * 8 * NT + threadIdx.x;
    float x = 0, act = 0;
    if (threadIdx.x >= 8 * NT)
        return;
    if (n < a.N) {
        x = a.x_scale[n];
        act = a.gated ? a.act.scale[n] : 0;
    }
    scales<C>()[threadIdx.x] = x;
    ups<C>()[threadIdx.x] = act != 0 ? 1 / act : 0;
}

template <class C, int NT> __device__ static inline uint32_t slot_at(int slot)
{
    return smem_addr(shared) + C::HEAD_BYTES + C::RINGS + slot * NT * X16_BYTES;
}

/* Those of a pass before are over. */
template <class C> __device__ static inline void end_barriers(const struct product &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < C::WARPS && lane < C::STAGES)
        mbarrier_inval(ring_of<C>(warp).bars + lane * 8);
    if (warp == C::THREADS / 32 - 1 && lane < a.slots) {
        mbarrier_inval(x_full<C>(lane));
        mbarrier_inval(x_free<C>(lane));
    }
}

/* Each warp has its own, the last one the others. */
template <class C>
__device__ static inline void begin_barriers(const struct product &a, const struct pass_shape &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < C::WARPS && lane < C::STAGES)
        mbarrier_init(ring_of<C>(warp).bars + lane * 8, COPY_ARRIVALS);
    if (warp == C::THREADS / 32 - 1 && lane < a.slots) {
        mbarrier_init(x_full<C>(lane), COPY_ARRIVALS);
        mbarrier_init(x_free<C>(lane), 32 * C::TEAM * s.groups);
    }
#if HAS_BULK_COPY
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncwarp();
}

/* ---- weights ---- */

/* What a warp fetches: `rows` tiles of its columns. */
template <class C> struct feed {
    const uint8_t *from[C::EACH]; /* column 0 */
    struct ring ring;
    int rows;             /* of tiles */
    int first, end, step; /* columns, of a stage each time */
    int way;
    bool leads; /* the warps of its way */
};

template <class C>
__device__ static inline void feed_begin(struct feed<C> &f, const struct product &a,
                                         const struct part &p, const struct pass_shape &s)
{
    /* From a lane to all, so that it is known to be the same. */
    int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), team = warp / C::TEAM;
    int way = quotient(team, s.groups);
    int row = (team - way * s.groups) * C::GROUP + warp % C::TEAM * C::EACH;
    f.ring = ring_of<C>(warp);
    f.rows = max(0, min(C::EACH, s.rows - row));
    f.leads = row == 0;
    f.first = p.cols.begin + way;
    f.end = way < s.ways ? p.cols.end : 0;
    f.step = s.ways;
    if (C::COLS > 1 && way < s.ways) {
        struct range r = even(p.cols.end - p.cols.begin, way, s.ways);
        f.first = p.cols.begin + r.begin;
        f.end = p.cols.begin + r.end;
        f.step = C::COLS;
    }
    f.way = way;
#pragma unroll
    for (int r = 0; r < C::EACH; r++) {
        struct place at = place_of(a, s.row + min(row + r, s.rows - 1));
        f.from[r] = a.tiles[at.m] + (int64_t)at.tile * a.tile_cols * CUDA_TILE_BYTES;
    }
}

/* From column col on. */
template <class C>
__device__ static inline void fetch_stage(const struct feed<C> &f, int col, int stage)
{
    if (col >= f.end || f.rows == 0)
        return;
    uint32_t bar = f.ring.bars + stage * 8, to = f.ring.data + stage * C::STAGE;
    int bytes = min(C::COLS, f.end - col) * CUDA_TILE_BYTES;
    copy_expect(bar, f.rows * bytes);
#pragma unroll
    for (int r = 0; r < C::EACH; r++)
        if (r < f.rows)
            copy_async_evict_first(to + r * C::COLS * CUDA_TILE_BYTES,
                                   f.from[r] + (int64_t)col * CUDA_TILE_BYTES, bytes, bar);
    copy_arrive(bar);
}

/* ---- x ---- */

/* Columns of x that are still to come: of all ways, or of one. */
struct supply {
    int next, end;
    int way, ways, slots; /* way: of the next one */
    struct turn t;
};

/* By all lanes of a warp: brings the next one, as soon as its slot is free. */
template <class C, int NT>
__device__ static inline void bring_column(const struct product &a, struct supply &r)
{
    int slot = r.way * r.slots + r.t.slot, n0 = (int)blockIdx.y * NT;
    int bytes = min(NT, a.n_tiles - n0) * X16_BYTES;
    uint32_t full = x_full<C>(slot);
    mbarrier_wait(x_free<C>(slot), r.t.parity);
    copy_expect(full, bytes);
    copy_async(slot_at<C, NT>(slot), a.x + (r.next * a.n_tiles + n0) * X16_BYTES, bytes, full);
    copy_arrive(full);
    r.next++;
    if (r.ways > 1)
        r.way = r.way + 1 == r.ways ? 0 : r.way + 1;
    if (r.ways == 1 || r.way == 0)
        next_turn(r.t, r.slots);
}

/* ---- sums of a warp by itself ---- */

/* Adds half a column. Both rows of tiles are computed: a group of one has something there too, and
 * nobody looks at what comes of it. */
template <class C, int NT>
__device__ static inline void add_half(float acc[][NT][4], uint32_t stage, uint32_t x, int half)
{
    uint32_t w[C::EACH][4][4];
    widen_tiles<C::EACH>(w, stage, half);
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t b[4];
            load_matrices(b, x + t * X16_BYTES + (4 * half + 2 * i) * X16_STEP_BYTES);
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int r = 0; r < C::EACH; r++)
                    mma<false>(acc[r][t], w[r][2 * i + e], b[2 * e], b[2 * e + 1]);
        }
}

template <class C, int NT>
__device__ static inline void multiply_alone(float acc[][NT][4], const struct feed<C> &f, int slots)
{
    int own = f.way * slots;
    struct turn t = {}, stage = {};
#pragma unroll 1
    for (int col = f.first; col < f.end; col += f.step) {
        int slot = own + t.slot;
        mbarrier_wait(f.ring.bars + stage.slot * 8, stage.parity);
        mbarrier_wait(x_full<C>(slot), t.parity);
        uint32_t x = slot_at<C, NT>(slot) + threadIdx.x % 32 * 16;
#pragma unroll NT <= 2 ? 2 : 1
        for (int half = 0; half < 2; half++)
            add_half<C, NT>(acc, f.ring.data + stage.slot * C::STAGE, x, half);
        mbarrier_arrive(x_free<C>(slot));
        __syncwarp(); /* the stage was read by all */
        fetch_stage(f, col + C::STAGES * f.step, stage.slot);
        next_turn(stage, C::STAGES);
        next_turn(t, slots);
    }
}

/* ---- sums of a team ---- */

/* Four steps of a column of x: they go on by themselves until team_products_wait says that only the
 * last one or none of such calls is left. */
template <int NT>
__device__ static inline void add_half_together(float acc[NT][4], uint32_t w[4][4], uint32_t x)
{
    keep(w);
    team_products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
        team_product<NT>(acc, w[i], x + i * (X16_STEP_BYTES >> 4), X16_BYTES >> 4);
    team_products_end();
}

/* What a warp's registers hold of a team's products belongs to those until they are over: there are
 * two sets of weights. A column of x is free when its second half is over, which is known in the
 * round behind it. Who brings x asks for the next column one round after that: it would wait for
 * slower teams otherwise. (What the compiler says about wgmma being serialized is worth a look:
 * weights that are widened right before a copy, for example, cost the overlap.) */
static_assert(crew<true>::STAGES == 2, "one stage is read, the one before is fetched");

template <class C, int NT>
__device__ static inline void multiply_together(float acc[NT][4], const struct feed<C> &f,
                                                const struct product &a, struct supply &more)
{
    int slots = more.slots, own = more.way * slots;
    uint32_t w[2][4][4], x0 = team_operand(slot_at<C, NT>(own), X16_STEP_BYTES / 2), before = 0;
    struct turn t = {}, stage = {};
#pragma unroll 1
    for (int i = 0; i < slots && more.next < more.end; i++)
        bring_column<C, NT>(a, more);
#pragma unroll 1
    for (int col = f.first; col < f.end; col += C::COLS) {
        if (col > f.first) {
            __syncwarp(); /* the stage before was read by all */
            fetch_stage(f, col + C::COLS, 1 - stage.slot);
        }
        if (f.rows > 0) /* else it has something, and nobody looks at what comes of it */
            mbarrier_wait(f.ring.bars + stage.slot * 8, stage.parity);
#pragma unroll
        for (int c = 0; c < C::COLS; c++) {
            uint32_t tile = f.ring.data + stage.slot * C::STAGE + c * CUDA_TILE_BYTES, codes[2][4];
            __half2 by[2];
            if (col + c >= f.first + 2 && more.next < more.end)
                bring_column<C, NT>(a, more);
            codes_at(codes[0], tile, 0);
            codes_at(codes[1], tile, 1);
            widen_scales(by, scales_at(tile));
            team_products_wait<1>();
            widen_half(w[0], codes[0], by);
            mbarrier_wait(x_full<C>(own + t.slot), t.parity);
            /* From a lane to all, so that it is known to be the same. */
            uint32_t x = __shfl_sync(0xFFFFFFFF, x0 + t.slot * (NT * X16_BYTES >> 4), 0);
            add_half_together<NT>(acc, w[0], x);
            team_products_wait<1>();
            if (before)
                mbarrier_arrive(before);
            widen_half(w[1], codes[1], by);
            add_half_together<NT>(acc, w[1], x + 4 * (X16_STEP_BYTES >> 4));
            before = x_free<C>(own + t.slot);
            next_turn(t, slots);
            if (col + c + 1 == f.end)
                break;
        }
        next_turn(stage, C::STAGES);
    }
    team_products_wait<0>();
    keep<NT>(acc);
}

/* ---- results ---- */

/* Of a row of tiles and eight rows of x, as an mma leaves them. */
template <class C, int NT>
__device__ static inline void put_results(const struct product &a, const struct part &p, int row,
                                          int n0, float4 sum)
{
    struct place at = place_of(a, row);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, rows = a.rows[at.m];
    int out = at.tile * CUDA_TILE_ROWS + g, first = (int)blockIdx.y * 8 * NT + n0 + 2 * t;
    const float by = 128.0f * a.scale[at.m], v[4] = {sum.x, sum.y, sum.z, sum.w};
    bool add = a.add && a.slices == 1;
    float *y = a.slices > 1 ? a.parts + (int64_t)p.slice * a.N * rows : a.y[at.m], old[4];
    y += (int64_t)first * rows + out;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        bool any = add && first + e % 2 < a.N && out + e / 2 * 8 < rows;
        old[e] = any ? y[e % 2 * rows + e / 2 * 8] : 0;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (first + e % 2 < a.N && out + e / 2 * 8 < rows)
            y[e % 2 * rows + e / 2 * 8] =
                __fmul_rn(v[e], by * scales<C>()[n0 + 2 * t + e % 2]) + old[e];
}

/* SwiGLU of a row of tiles, from sums of gate and up, as x of the product behind. Lanes of g and
 * g + 1 give each other what makes it two neighbours each: rows g and g + 1, or g + 8 and g + 9. */
template <class C, int NT>
__device__ static inline void put_gated(const struct product &a, int tile, int n0, float4 gate,
                                        float4 up)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
        first = (int)blockIdx.y * 8 * NT + n0 + 2 * t;
    int k = tile * CUDA_TILE_ROWS + g / 2 * 2 + g % 2 * 8;
    const float gates[4] = {gate.x, gate.y, gate.z, gate.w}, rest[4] = {up.x, up.y, up.z, up.w};
    bool odd = g % 2;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float by = scales<C>()[n0 + 2 * t + e], to = ups<C>()[n0 + 2 * t + e], v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            v[i] = swiglu(__fmul_rn(gates[2 * i + e], 128.0f * a.scale[0] * by),
                          __fmul_rn(rest[2 * i + e], 128.0f * a.scale[1] * by));
            v[i] = to > 0 ? v[i] * to : 0; /* NaN: zeros, and the scale is not a number */
        }
        float mine = odd ? v[1] : v[0], other = __shfl_xor_sync(0xFFFFFFFF, odd ? v[0] : v[1], 4);
        if (first + e < a.N)
            *(__half2 *)x16_at(a.act, first + e, k) =
                odd ? __floats2half2_rn(other, mine) : __floats2half2_rn(mine, other);
    }
}

/* acc to the warp's place in sums [WARPS, EACH, NT, 32]. */
template <class C, int NT>
__device__ static inline void leave_sums(float acc[][NT][4], float4 *sums)
{
    float4 *to = sums + threadIdx.x / 32 * C::EACH * NT * 32 + threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < C::EACH; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
            to[(r * NT + t) * 32] =
                make_float4(acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]);
}

/* The sums of all ways in order, each `stride` behind the one before. */
__device__ static inline float4 all_ways(const float4 *from, int ways, int stride)
{
    float4 sum = *from;
#pragma unroll 2
    for (int way = 1; way < ways; way++) {
        float4 v = *(from += stride);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    return sum;
}

/* Results from the sums. */
template <class C, int NT>
__device__ static inline void add_up(const struct product &a, const struct part &p,
                                     const struct pass_shape &s, const float4 *sums)
{
    int stride = s.groups * C::GROUP * NT * 32, step = 1 + a.gated;
    sums += threadIdx.x % 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < s.rows / step * NT; i += C::THREADS / 32) {
        int row = i / NT * step, t = i % NT;
        float4 sum = all_ways(sums + (row * NT + t) * 32, s.ways, stride);
        if (a.gated)
            put_gated<C, NT>(a, (s.row + row) / 2, t * 8, sum,
                             all_ways(sums + ((row + 1) * NT + t) * 32, s.ways, stride));
        else
            put_results<C, NT>(a, p, s.row + row, t * 8, sum);
    }
}

/* Of a pass; what is known of it is found out again. */
template <class C, int NT>
__device__ static inline void finish(const struct product &a, int pass, float acc[][NT][4])
{
    const struct part own = part_of(a, opaque((int)blockIdx.x));
    const struct pass_shape s = pass_of<C>(a, own, pass);
    float4 *sums = (float4 *)(shared + C::HEAD_BYTES);
    int warp = threadIdx.x / 32;
    if (s.ways == 1 && !a.gated) { /* nobody else has a part of it; team t has group t */
#pragma unroll
        for (int r = 0; r < C::EACH; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
                if (warp < C::WARPS && warp * C::EACH + r < s.rows)
                    put_results<C, NT>(
                        a, own, s.row + warp * C::EACH + r, 8 * t,
                        make_float4(acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]));
        return;
    }
    if (warp < C::WARPS)
        leave_sums<C, NT>(acc, sums);
    __syncthreads();
    add_up<C, NT>(a, own, s, sums);
}

/* ---- the kernel ---- */

/* It leaves registers to the small kernels before and behind it, so that it can be there while they
 * are at work; but for many rows of x where warps work alone. */
template <int NT, bool WG>
__global__ static void __maxnreg__(crew<WG>::registers(NT))
    k_linear_few(const __grid_constant__ struct product a)
{
    using C = crew<WG>;
#if defined(__CUDA_ARCH__) && !defined(WGMMA_HERE)
    if constexpr (WG) {
        __trap(); /* never chosen, see teams */
        return;
    }
#endif
    const bool brings_x = threadIdx.x / 32 == C::WARPS; /* and nothing else */
    pdl_trigger();
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        const struct part own = part_of(a, opaque((int)blockIdx.x));
        const struct pass_shape s = pass_of<C>(a, own, pass);
        float acc[C::EACH][NT][4] = {};
        feed<C> f = {};
        if (pass > 0)
            end_barriers<C>(a);
        begin_barriers<C>(a, s);
        __syncthreads();
        if (!brings_x)
            feed_begin(f, a, own, s);
#pragma unroll 1
        for (int i = 0; i < C::STAGES; i++)
            fetch_stage(f, f.first + i * f.step, i);
        if (pass == 0) {
            pdl_wait();
            keep_scales<C, NT>(a);
        }
        if constexpr (WG) {
            struct supply x = {f.first, f.end, f.way, 1, s.slots, {0, 1}};
            if (!f.leads)
                x.end = 0; /* that warp brings it */
            multiply_together<C, NT>(acc[0], f, a, x);
        } else if (brings_x) {
            struct supply x = {own.cols.begin, own.cols.end, 0, s.ways, s.slots, {0, 1}};
            while (x.next < x.end)
                bring_column<C, NT>(a, x);
        } else {
            multiply_alone<C, NT>(acc, f, s.slots);
        }
        __syncthreads(); /* rings and x were read */
        finish<C, NT>(a, opaque(pass), acc);
        if (pass + 1 == a.passes)
            break;
#if HAS_BULK_COPY
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* copies come behind this */
#endif
        __syncthreads();
    }
}

/* ---- launch ---- */

/* Up to so many rows warps are faster by themselves. */
#define ALONE_ROWS 16

/* Whether warps work in teams: it is Hopper, and the code of its own instructions is there. */
static bool teams(const struct nbi_stream *s, const struct nbi_op_linear *a)
{
    return s->cuda->cc == 90 && strstr(NIBBLE_ARCH, "90a") &&
           (a->batch_invariant || a->N > ALONE_ROWS);
}

/* Columns of x that there is room for, and attention (attend_few.cu) beside them. */
template <bool WG> static int slots_for(const struct nbi_stream *s, int n_tiles)
{
    using C = crew<WG>;
    int room = s->cuda->smem_per_cta - C::HEAD_BYTES - C::RINGS - (WG ? BESIDE_BYTES : 0);
    int n = room / (n_tiles * X16_BYTES);
    return n < SLOTS_MAX ? n : SLOTS_MAX;
}

template <int NT, bool WG> static enum nb_status launch(struct nbi_stream *s, struct product &a)
{
    using C = crew<WG>;
    int64_t sums = C::WARPS * C::EACH * NT * 512, useful = ceil_div(a.tile_cols, a.slices);
    a.slots = slots_for<WG>(s, NT);
    useful = ceil_div(useful, a.ways) * a.ways;
    a.slots = (int)(useful < a.slots ? useful : a.slots);
    int64_t data = C::RINGS + a.slots * NT * X16_BYTES,
            bytes = C::HEAD_BYTES + (data > sums ? data : sums);
    NBI_BUG_IF(a.slots < a.ways || a.ways < 1 || bytes > s->cuda->smem_per_cta);
    NBI_BUG_IF(WG && a.slots < 2 * a.ways && useful > a.ways); /* who brings x would wait for it */
    dim3 grid((unsigned)(a.lines * a.slices), (unsigned)ceil_div(a.n_tiles, NT));
    /* Of the kernel, so of all its users. */
    CU_TRY(cudaFuncSetAttribute(k_linear_few<NT, WG>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                s->cuda->smem_per_cta));
    CU_TRY(pdl_launch(s, k_linear_few<NT, WG>, grid, C::THREADS, (int)bytes, a));
    return NB_OK;
}

/* As many rows of x at once as there are, where shared memory allows it. */
template <bool WG> static enum nb_status launch_for(struct nbi_stream *s, struct product &a)
{
    bool large = s->cuda->smem_per_cta >= (160 << 10);
    a.ways = slots_for<WG>(s, large ? 8 : 4);
    a.ways = a.ways < crew<WG>::WAYS ? a.ways : crew<WG>::WAYS;
    return a.n_tiles <= 1             ? launch<1, WG>(s, a)
           : a.n_tiles <= 2           ? launch<2, WG>(s, a)
           : a.n_tiles <= 4 || !large ? launch<4, WG>(s, a)
                                      : launch<8, WG>(s, a);
}

/* With act, x is of a norm, and gives_act(a). */
static enum nb_status multiply(struct nbi_stream *s, const struct nbi_op_linear *a,
                               const struct x16 &x, bool act)
{
    const bool together = teams(s, a);
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
    p.x = (const uint8_t *)x.out;
    p.x_scale = x.scale;
    p.parts = (float *)s->workspace;
    p.N = (int)a->N;
    p.n_tiles = (int)ceil_div(a->N, 8);
    p.add = a->add;
    p.slices = 1;
    if (act) {
        p.gated = true;
        p.act = act16_of(s, a->N, a->w[0].rows);
    }
    if (a->add && a->count == 1) { /* few, since someone has to add them up; whatever N is */
        int64_t room = NBI_WORKSPACE_BYTES / (NBI_DECODE_LINEAR_ROWS * 4 * a->w[0].rows);
        int rows = together ? (int)ceil_div(p.tile_rows, crew<true>::GROUP) : p.tile_rows;
        p.slices = choose_split_k(rows, p.tile_cols, s->cuda->sms,
                                  (int)(room < SLICES_MAX ? room : SLICES_MAX), false);
    }
    int rows = p.tile_rows >> p.gated, lines = s->cuda->sms / p.slices;
    p.lines = rows < lines ? rows : lines;
    p.row_cut = {rows / p.lines, rows % p.lines};
    p.col_cut = {p.tile_cols / p.slices, p.tile_cols % p.slices};
    p.passes = (int)ceil_div(ceil_div(rows, p.lines) << p.gated,
                             together ? crew<true>::PASS : crew<false>::PASS);
    NBI_BUG_IF(p.tile_cols * (int64_t)crew<true>::WAYS > 100000);
    if (!a->batch_invariant && nbi_cuda_whole_fits(s, &p))
        NBI_TRY(nbi_cuda_linear_whole(s, &p));
    else
        NBI_TRY(together ? launch_for<true>(s, p) : launch_for<false>(s, p));
    if (p.slices > 1)
        s->pending = {p.y[0], p.parts, p.slices, a->N, a->w[0].rows};
    if (act)
        s->acted = {at<float>(a->act), a->N, a->w[0].rows};
    return NB_OK;
}

bool nbi_cuda_is_decode_linear(const struct nbi_op_linear *a)
{
    bool nvfp4 = true;
    for (int i = 0; i < a->count; i++)
        nvfp4 = nvfp4 && a->w[i].dtype == NBI_NVFP4;
    return !a->exact && nvfp4 && a->N <= NBI_DECODE_LINEAR_ROWS;
}

enum nb_status nbi_cuda_linear_decode(struct nbi_stream *s, const struct nbi_op_linear *a,
                                      bool ready)
{
    if (!ready)
        NBI_TRY(nbi_cuda_x_of_rows(s, a));
    return multiply(s, a, x16_of(s, a->N, a->K), false);
}

enum nb_status nbi_cuda_norm_linear(struct nbi_stream *s, const struct nbi_op_rmsnorm *norm,
                                    const struct nbi_op_linear *a)
{
    struct splitk_partials p = s->pending;
    bool few = !norm->rstd.at && nbi_cuda_is_decode_linear(a);
    if (!few || p.y != at<float>(norm->x) || p.N != norm->N || p.C != norm->C || s->rope.N > 0) {
        CU_HERE(s); /* which settles what is pending */
        p = {};
    }
    if (!few && !norm->rstd.at && nbi_cuda_is_cublaslt_linear(s, a))
        return nbi_cuda_norm_linear_cublaslt(s, norm, a);
    if (!few) {
        NBI_TRY(nbi_cuda_rmsnorm(s, norm));
        return nbi_cuda_linear(s, a);
    }
    CU_TRY(cudaSetDevice(s->cuda->index));
    s->pending = {};
    clear_handoff(s);
    NBI_TRY(nbi_cuda_x_of_norm(s, norm, a, &p));
    return multiply(s, a, x16_of(s, a->N, a->K), gives_act(a));
}

enum nb_status nbi_cuda_swiglu_linear(struct nbi_stream *s, const struct nbi_op_swiglu *act,
                                      const struct nbi_op_linear *a)
{
    struct packed_x acted = s->acted;
    CU_HERE(s);
    if (acted.x && acted.x == at<float>(act->y) && acted.N == act->N && acted.K == act->F) {
        NBI_BUG_IF(!nbi_cuda_is_decode_linear(a));
        return multiply(s, a, act16_of(s, a->N, a->K), false);
    }
    if (nbi_cuda_is_decode_linear(a)) {
        NBI_TRY(nbi_cuda_x_of_swiglu(s, act, a));
        return multiply(s, a, x16_of(s, a->N, a->K), false);
    }
    if (nbi_cuda_is_cublaslt_linear(s, a))
        return nbi_cuda_swiglu_linear_cublaslt(s, act, a);
    NBI_TRY(nbi_cuda_swiglu(s, act));
    return nbi_cuda_linear(s, a);
}
