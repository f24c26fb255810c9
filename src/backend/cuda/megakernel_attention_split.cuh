/* megakernel_attention_split.cuh - the kernel of token.cu: attention of one token over many rows.
 *
 * Blocks share the rows of a store. Some warps of a block have room for sixteen keys and their
 * values in shared memory: the first ones are asked for in the layer before, the others as soon as
 * there is room. The products are on tensor cores, keys or values times all heads of the block: of
 * the eight columns of an operand the first four are heads rounded to 16 bits, the others what that
 * leaves over, so that the sum of both has twice the digits. What blocks make of their rows
 * goes to those that need it with a tag. */
#pragma once

#include "backend/cuda/megakernel_attention.cuh"

#define BOX_BYTES 2048 /* 128 of each of sixteen keys or values, which is what a copy brings */
#define OVER      4    /* columns from a head to what rounding leaves over of it */
#define LIFT      4.1f /* the largest weight is about e^LIFT: small ones keep their digits */

template <enum nbi_dtype T> struct many {
    static constexpr bool BF = T == NBI_BF16;
    static constexpr enum nbi_dtype OPERAND = BF ? NBI_BF16 : NBI_F16;
    static constexpr int ROW = HEAD * (T == NBI_E4M3 ? 1 : 2); /* bytes of a key or value */
    static constexpr int BOXES = ROW / 128;
    static constexpr int SLOT = BOXES * BOX_BYTES;
};

/* Where a chunk of 16 bytes of a row is in its slot: eight rows of a matrix are in all banks. */
__device__ static inline uint32_t chunk_at(int row, int chunk)
{
    return chunk / 8 * BOX_BYTES + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

/* ---- keys and values on their way ---- */

/* What a warp has for keys, and behind it the same for values: slot and barrier. */
struct slot {
    uint32_t at, bar;
};

__device__ static inline struct slot slot_of(const struct context &c, int values)
{
    return {smem_addr(c.rows() + c.warp * c.m.slot_pair) + values * (c.m.slot_pair / 2),
            smem_addr(c.arrived() + 2 * c.warp + values)};
}

/* The first of the sixteen rows that a slot has for `row` on: the last ones of a block begin
 * earlier, since what is behind its end may not be there. */
__device__ static inline int tile_begin(const struct rows_part &p, int row)
{
    return min(row, p.end - TILE_KEYS);
}

/* Asks for rows `row` to row + 15 of keys or values, if there are any. */
template <enum nbi_dtype T>
__device__ static inline void fetch_slot(const struct context &c, const struct rows_part &p,
                                         int layer, int values, int row)
{
    struct slot to = slot_of(c, values);
    if (row >= p.end)
        return;
    row = tile_begin(p, row);
    copy_expect(to.bar, many<T>::SLOT);
#if HAS_BULK_COPY
#pragma unroll
    for (int i = 0; i < many<T>::BOXES; i++)
        asm volatile("{\n"
                     ".reg .pred one;\n"
                     "elect.sync _|one, 0xFFFFFFFF;\n"
                     "@one cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n"
                     "}" ::"r"(to.at + i * BOX_BYTES),
                     "l"(c.m.maps + 2 * layer + values), "r"(p.kv * HEAD + i * 64), "r"(row),
                     "r"(to.bar)
                     : "memory");
#endif
}

/* Asks for what a layer's attention needs first: a little while each of the two products before it
 * in the layer before is running. More at once, or later, would keep others waiting. */
template <enum nbi_dtype T>
__device__ static inline void ask_early(const struct context &c, int step, int layer,
                                        const struct rows_part &p)
{
    bool first = step == QKV && layer == 0, keys = first || step == GATE_UP,
         values = first || step == DOWN;
    int row = p.begin + c.warp * TILE_KEYS;
    if (step == QKV && threadIdx.x < 8) /* and the norms of queries and keys */
        prefetch(c.m.head_norms + layer * 2 * HEAD + threadIdx.x * 32);
    layer += !first;
    if (!(keys || values) || layer >= c.m.layer_count || c.warp >= c.m.readers || p.split >= p.used)
        return;
#if HAS_BULK_COPY
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* softmaxes were there */
#endif
    if (keys)
        fetch_slot<T>(c, p, layer, 0, row);
    if (values)
        fetch_slot<T>(c, p, layer, 1, row);
}

/* ---- operands ---- */

/* The queries as operand B: word r of lane 4 g + t has two elements of column g of steps r / 2 of
 * sixteen. Which two is as operand A of keys comes out. */
template <enum nbi_dtype T>
__device__ static inline void put_operand(const struct context &c, int head, int d, float v)
{
    using M = struct many<T>;
    int in = d % 16, t = T == NBI_E4M3 ? in / 4 : in % 8 / 2;
    int r = d / 16 % 2 * 2 + (T == NBI_E4M3 ? in % 4 / 2 : in / 8);
    int at = ((d / 32 * 32 + head * 4 + t) * 4 + r) * 2 + d % 2;
    store_f32(c.operands(), at, M::OPERAND, v);
    float left = v - load_f32(c.operands(), at, M::OPERAND);
    store_f32(c.operands(), at + OVER * 4 * 4 * 2, M::OPERAND, left);
}

__device__ static inline void load_turned(uint32_t w[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from)
                 : "memory");
}

/* Sixteen keys as operands A of steps 2 i and 2 i + 1. */
template <enum nbi_dtype T>
__device__ static inline void keys_at(uint32_t a[2][4], uint32_t slot, int i, int lane)
{
    int row = lane % 16;
    if (T != NBI_E4M3) {
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices(a[j], slot + chunk_at(row, 4 * i + 2 * j + lane / 16));
        return;
    }
    uint32_t w[4];
    load_matrices(w, slot + chunk_at(row, 2 * i + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[j / 2][j % 2] = widen_e4m3(w[j] & 0xFFFF);
        a[j / 2][j % 2 + 2] = widen_e4m3(w[j] >> 16);
    }
}

/* Sixteen values as operands A of elements 32 i to 32 i + 31: rows are elements. */
template <enum nbi_dtype T>
__device__ static inline void values_at(uint32_t a[2][4], uint32_t slot, int i, int lane)
{
    if (T != NBI_E4M3) {
        int row = lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_turned(a[j], slot + chunk_at(row, 4 * i + 2 * j + lane / 8 % 2));
        return;
    }
    uint32_t w[4];
    load_turned(w, slot + chunk_at(lane % 16, 2 * i + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t v = __byte_perm(w[j], 0, 0x3120);
        a[j / 2][j % 2 * 2] = widen_e4m3(v & 0xFFFF);
        a[j / 2][j % 2 * 2 + 1] = widen_e4m3(v >> 16);
    }
}

/* Element of row g (or g + 8, if `low`) of operand i of values. */
template <enum nbi_dtype T> __device__ static inline int element_of(int i, int g, int low)
{
    return T == NBI_E4M3 ? 16 * i + 2 * g + low : 16 * i + 8 * low + g;
}

__device__ static inline uint32_t turned(uint32_t matrix)
{
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

/* Two weights as an operand: rounded, or in the upper columns what that leaves over. */
template <enum nbi_dtype T>
__device__ static inline uint32_t weights_of(float a, float b, bool over)
{
    if (many<T>::BF) {
        __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        float2 f = __bfloat1622float2(h);
        if (over)
            h = __floats2bfloat162_rn(a - f.x, b - f.y);
        return turned(*(uint32_t *)&h);
    }
    __half2 h = __floats2half2_rn(a, b);
    float2 f = __half22float2(h);
    if (over)
        h = __floats2half2_rn(a - f.x, b - f.y);
    return turned(*(uint32_t *)&h);
}

/* ---- a warp's rows ---- */

/* Lane 4 g + t has heads 2 t % 4 and the next: of y, rows g and g + 8 of each operand of values;
 * of sum, keys g and g + 8 of each sixteen. */
struct many_softmax {
    float y[HEAD / 16][4], base[2], sum[2];
};

/* Scores of keys g and g + 8 for both heads. */
template <enum nbi_dtype T>
__device__ static inline void score(float s[4], const struct context &c, uint32_t slot)
{
    float part[2][4] = {};
#pragma unroll
    for (int i = 0; i < HEAD / 32; i++) {
        uint32_t a[2][4];
        uint4 q = c.operands()[i * 32 + c.lane];
        keys_at<T>(a, slot, i, c.lane);
        mma<many<T>::BF>(part[0], a[0], q.x, q.y);
        mma<many<T>::BF>(part[1], a[1], q.z, q.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v = part[0][i] + part[1][i];
        s[i] = v + __shfl_xor_sync(0xFFFFFFFF, v, 2);
    }
}

/* Scores to weights; what there is so far is to match. */
__device__ static inline void weigh(struct many_softmax &m, float s[4])
{
    float high[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++)
            high[h] = fmaxf(high[h], __shfl_xor_sync(0xFFFFFFFF, high[h], mask));
    high[0] = fmaxf(m.base[0], high[0] - LIFT);
    high[1] = fmaxf(m.base[1], high[1] - LIFT);
    if (__any_sync(0xFFFFFFFF, high[0] > m.base[0] || high[1] > m.base[1])) {
        float keep[2] = {__expf(m.base[0] - high[0]), __expf(m.base[1] - high[1])};
#pragma unroll
        for (int i = 0; i < HEAD / 16 * 4; i++)
            m.y[i / 4][i % 4] *= keep[i % 2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            m.sum[h] *= keep[h];
            m.base[h] = high[h];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[i] = __expf(s[i] - m.base[i % 2]);
        m.sum[i % 2] += s[i];
    }
}

/* The softmaxes of a warp, to its slots. */
template <enum nbi_dtype T>
__device__ static inline void leave_softmax(const struct context &c, struct many_softmax &m)
{
    float *part = (float *)(c.rows() + c.warp * c.m.slot_pair);
    int g = c.lane / 4, head = c.lane % 2 * 2;
    bool low = c.lane & 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++) {
            float mine = low ? m.y[i][h + 2] : m.y[i][h], other = low ? m.y[i][h] : m.y[i][h + 2];
            mine += __shfl_xor_sync(0xFFFFFFFF, other, 2);
            part[(head + h) * (HEAD + 2) + element_of<T>(i, g, low)] = mine;
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2)
            m.sum[h] += __shfl_xor_sync(0xFFFFFFFF, m.sum[h], mask);
        if (g == 0 && !low)
            *(float2 *)(part + (head + h) * (HEAD + 2) + HEAD) = make_float2(m.base[h], m.sum[h]);
    }
}

template <enum nbi_dtype T>
__device__ static void read_rows(struct context &c, int layer, const struct rows_part &p)
{
    const struct slot keys = slot_of(c, 0), values = slot_of(c, 1);
    const int step = c.m.readers * TILE_KEYS, g = c.lane / 4;
    struct many_softmax m = {};
    m.base[0] = m.base[1] = -1e30f;
#pragma unroll 1
    for (int row = p.begin + c.warp * TILE_KEYS; row < p.end; row += step) {
        int before = row - tile_begin(p, row); /* rows that another tile has */
        float s[4];
        mbarrier_wait(keys.bar, c.rows_parity);
        score<T>(s, c, keys.at);
        __syncwarp();
        fetch_slot<T>(c, p, layer, 0, row + step);
        if (before > 0)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[i] = g + i / 2 * 8 < before ? -INFINITY : s[i];
        weigh(m, s);
        uint32_t first = weights_of<T>(s[0], s[1], c.lane & 2),
                 second = weights_of<T>(s[2], s[3], c.lane & 2);
        mbarrier_wait(values.bar, c.rows_parity);
#pragma unroll
        for (int i = 0; i < HEAD / 32; i++) {
            uint32_t a[2][4];
            values_at<T>(a, values.at, i, c.lane);
            mma<many<T>::BF>(m.y[2 * i], a[0], first, second);
            mma<many<T>::BF>(m.y[2 * i + 1], a[1], first, second);
        }
        __syncwarp();
        fetch_slot<T>(c, p, layer, 1, row + step);
        c.rows_parity ^= 1;
    }
    leave_softmax<T>(c, m);
}

/* ---- a block's rows ---- */

/* Where other blocks look for the softmaxes of a head: values of each, and then, of each, what
 * their weights are relative to and the denominator. */
__device__ static inline uint64_t *shared_parts(const struct context &c, int head)
{
    return c.m.shared + head * SPLITS_MAX * PART_FLOATS;
}

/* The score of this token's own key, by a warp a head. */
template <enum nbi_dtype T, int G> __device__ static inline void score_own(const struct context &c)
{
    int h = WARPS - 1 - c.warp;
    const float *q = c.attend() + h * HEAD, *own = c.attend() + attend_at<G>::key;
    float sum = 0;
    if (h >= G)
        return;
#pragma unroll
    for (int d = c.lane; d < HEAD; d += 32)
        sum += q[d] * load_f32(own, d, T);
    sum = warp_sum(sum);
    if (c.lane == 0)
        c.attend()[attend_at<G>::parts + h] = sum;
}

/* This block's rows for G heads, to the others. */
template <enum nbi_dtype T, int G>
__device__ static void attend_part(struct context &c, int layer, const struct step_args &a,
                                   const struct rows_part &p)
{
    bool last = p.split == p.used - 1; /* which has this token's own row */
    int count = min((p.end - p.begin + TILE_KEYS - 1) / TILE_KEYS, c.m.readers);
    prepare_heads<T, G, true>(c, layer, a, p, p.head % (c.m.NH / c.m.NKV) == 0);
    __syncthreads();
    if (last)
        score_own<T, G>(c);
    if (c.warp < count)
        read_rows<T>(c, layer, p);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < G * HEAD; i += THREADS) {
        int h = i / HEAD, d = i % HEAD;
        uint64_t *out = shared_parts(c, p.head + h), *more = out + SPLITS_MAX * HEAD + 2 * p.split;
        const float *parts = (const float *)c.rows() + h * (HEAD + 2);
        struct joined j = join_parts(parts, c.m.slot_pair / 4, d, 0, 1, count);
        if (last) {
            float own = c.attend()[attend_at<G>::parts + h], top = fmaxf(j.top, own);
            float old = __expf(j.top - top), w = __expf(own - top);
            float v = load_f32(c.attend() + attend_at<G>::value, d, T);
            j = {fmaf(w, v, j.v * old), top, fmaf(j.sum, old, w)};
        }
        give(c, out + p.split * HEAD + d, __float_as_uint(j.v));
        if (d == 0) {
            give(c, more, __float_as_uint(j.top));
            give(c, more + 1, __float_as_uint(j.sum));
        }
    }
}

/* The softmaxes of a head from all blocks that have some of it, as soon as they are there. */
__device__ static inline void take_parts(const struct context &c, int head, int used)
{
    const int EACH = SPLITS_MAX * HEAD / THREADS;
    const uint64_t *from = shared_parts(c, head);
    float *to = c.attend() + attend_at<1>::parts, v[EACH], more;
    int last = used * HEAD - 1, i = threadIdx.x;
    bool there;
    do {
        there = take_one(c, &more, from + (i < 2 * used ? SPLITS_MAX * HEAD + i : min(i, last)));
#pragma unroll
        for (int j = 0; j < EACH; j++)
            there &= take_one(c, &v[j], from + min(i + j * THREADS, last));
    } while (!there);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        int at = i + j * THREADS;
        if (at <= last)
            to[at / HEAD * PART_FLOATS + at % HEAD] = v[j];
    }
    if (i < 2 * used)
        to[i / 2 * PART_FLOATS + HEAD + i % 2] = more;
}

/* Attention, as far as the block's part of o needs it: one head. Over few rows (FEW) each block
 * does that head by itself; over many, blocks share the rows of G heads first. */
template <enum nbi_dtype T, int G, bool FEW>
__device__ static void attention(struct context &c, int layer, const struct step_args &a,
                                 const struct rows_part &p)
{
    int head = (int)blockIdx.x / c.m.each, count = p.used;
    if (!FEW && p.split < p.used)
        attend_part<T, G>(c, layer, a, p);
    if (!FEW)
        __syncthreads(); /* what the softmaxes of others take the place of has been read */
    if (head >= c.m.NH)
        return;
    if (FEW) {
        struct rows_of<T> first = fetch_rows<T>(c, layer, p, p.begin + c.warp * ROWS);
        prepare_heads<T, 1, false>(c, layer, a, p,
                                   head % (c.m.NH / c.m.NKV) == 0 && blockIdx.x % c.m.each == 0);
        __syncthreads();
        attend_rows<T>(c, layer, p, first);
        count = min(p.end - p.begin + ROWS, ROWS * WARPS) / ROWS;
    } else {
        take_parts(c, head, p.used);
    }
    __syncthreads();
    put_head(c, count);
}
