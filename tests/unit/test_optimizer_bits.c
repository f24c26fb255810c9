/* test_optimizer_bits.c - the optimizer's operations give the bits of the scalar CPU code, on every
 * backend: each kind of moment with each type of master and gradient, over whole steps and in
 * pieces; NVFP4 weights of random, tiny, huge and zero blocks; weights made in the same pass. */
#include <math.h>

#include "backend/ops_train.h"
#include "base/rng.h"
#include "tensor/half.h"

#include "ops_lab.h"

#define STEPS 3

static const enum nbi_dtype floats[] = {NBI_F32, NBI_BF16};

/* Elements of the largest tensor: a million where a GPU does the work. */
#define LARGE (EMULATED ? 20011 : (1 << 20) + 11)

static float normal_at(int64_t at, uint64_t what)
{
    float out[4];
    nbi_philox_normal4(out, 11, (uint64_t)at / 4, what);
    return out[at % 4];
}

/* Stores x as f32 or bf16. */
static void store_float(void *to, enum nbi_dtype dtype, int64_t i, float x)
{
    if (dtype == NBI_F32)
        ((float *)to)[i] = x;
    else
        ((uint16_t *)to)[i] = nbi_f32_to_bf16(x);
}

/* ---- AdamW ---- */

struct adamw_case {
    enum nb_moment_type kind;
    enum nbi_dtype master, grad;
    int64_t n, piece;
    /* A weight of n / cols rows, if cols > 0 or it is a vector. */
    bool has_weight;
    enum nbi_dtype weight, round_to;
    int64_t cols;
    bool fused;         /* made by adamw, not by requantize */
    bool grad_by_piece; /* the gradient of each piece at the start of the array */
};

/* All that some steps leave. */
struct adamw_state {
    void *parts[9];
    int64_t bytes[9];
    int count;
};

static void keep(struct lab *l, struct adamw_state *s, struct nbi_ptr p, int64_t bytes)
{
    s->bytes[s->count] = bytes;
    s->parts[s->count] = zeros(bytes + 1, 1);
    fetch(l, s->parts[s->count++], p, bytes);
}

static struct nbi_moment new_moment(struct lab *l, enum nb_moment_type kind, int64_t n)
{
    int64_t scales, values = nbi_moment_bytes(kind, n, &scales);
    uint8_t *zero = zeros(values + scales, 1);
    struct nbi_moment m = {kind, block(l, zero, values), block(l, zero, scales)};
    free(zero);
    return m;
}

/* Groups of very different magnitudes, some of them zero, and in later steps some elements. */
static float draw(int64_t i, int step)
{
    if (i / 48 % 11 == 5 || (step > 1 && i % 7 == 3))
        return 0;
    return normal_at(i, (uint64_t)step) * ldexpf(1, -(int)(i / 16 % 23));
}

static void one_step(struct lab *l, struct nbi_op_adamw *a, const struct adamw_case *c,
                     struct nbi_ptr list)
{
    int64_t bytes = (int64_t)nbi_dtype_bytes(c->grad, c->n);
    void *grad = zeros(c->n, 4);
    a->step++;
    a->correct1 = (float)(1 - pow(0.9, a->step));
    a->correct2 = (float)(1 - pow(0.99, a->step));
    for (int64_t i = 0; i < c->n; i++)
        store_float(grad, c->grad, i, draw(i, (int)a->step));
    assert_ok(l->be->upload(l->s, a->grad, grad, bytes));
    assert_ok(l->be->grad_stats(
        l->s, &(struct nbi_op_grad_stats){
                  .record = a->record, .grad = a->grad, .n = c->n, .bf16 = a->grad_bf16}));
    assert_ok(l->be->update_plan(l->s, &(struct nbi_op_update_plan){.control = a->control,
                                                                    .records = a->record,
                                                                    .tensors = list,
                                                                    .count = 1,
                                                                    .clip = 0.7f,
                                                                    .beta1 = a->beta1,
                                                                    .beta2 = a->beta2}));
    for (a->first = 0; a->first < c->n; a->first += c->piece) {
        a->count = c->n - a->first < c->piece ? c->n - a->first : c->piece;
        if (c->grad_by_piece) {
            a->grad_first = a->first;
            assert_ok(l->be->upload(l->s, a->grad,
                                    (uint8_t *)grad + nbi_dtype_bytes(c->grad, a->first),
                                    (int64_t)nbi_dtype_bytes(c->grad, a->count)));
        }
        assert_ok(l->be->adamw(l->s, a));
    }
    free(grad);
}

static void read_weight(struct lab *l, struct adamw_state *s, const struct nbi_weight *w)
{
    int64_t n = w->rows * (w->cols > 0 ? w->cols : 1);
    s->bytes[s->count] = n * 5;
    uint8_t *data = s->parts[s->count++] = zeros(n * 5, 1);
    if (w->bf16.at)
        assert_ok(l->be->download(l->s, data + n, w->bf16, n * 2));
    assert_ok(l->be->sync(l->s));
    assert_ok(l->be->weight_read(l->be, w, 0, w->rows, data, data + n * 4));
}

static struct adamw_state run_steps(struct nbi_backend *be, const struct adamw_case *c)
{
    struct lab l;
    struct adamw_state s = {0};
    const struct nbi_update_control control = {0};
    const struct nbi_update_record record = {0};
    const int32_t first = 0;
    void *master = zeros(c->n, 4);
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2});
    for (int64_t i = 0; i < c->n; i++)
        store_float(master, c->master, i, normal_at(i, 100) * ldexpf(1, -(int)(i / 16 % 5)));
    struct nbi_op_adamw a = {.control = block(&l, &control, sizeof control),
                             .record = block(&l, &record, sizeof record),
                             .master = block(&l, master, (int64_t)nbi_dtype_bytes(c->master, c->n)),
                             .dtype = c->master,
                             .grad = block(&l, NULL, (int64_t)nbi_dtype_bytes(c->grad, c->n)),
                             .grad_bf16 = c->grad == NBI_BF16,
                             .m = new_moment(&l, c->kind, c->n),
                             .v = new_moment(&l, c->kind, c->n),
                             .lr = 3e-3f,
                             .beta1 = 0.9f,
                             .beta2 = 0.99f,
                             .eps = 1e-8f,
                             .decay = 0.1f,
                             .max_update = 5,
                             .seed = 0x123456789ABCDEFull,
                             .tensor = 7,
                             .round_to = c->round_to};
    struct nbi_ptr list = block(&l, &first, sizeof first);
    struct nbi_weight *w = &l.weights[0];
    if (c->has_weight) {
        int64_t row = c->cols > 0 ? c->cols : 1;
        assert_ok(be->weight_alloc(be, c->weight, c->n / row, c->cols, c->n % 3 == 0, NULL, w));
        l.weight_count = 1;
        a.w = c->fused ? *w : (struct nbi_weight){0};
    }
    for (int k = 0; k < STEPS; k++) {
        one_step(&l, &a, c, list);
        if (c->has_weight && !c->fused)
            assert_ok(be->requantize(
                l.s, &(struct nbi_op_requantize){*w, a.master, c->master, c->round_to}));
    }
    int64_t scales, values = nbi_moment_bytes(c->kind, c->n, &scales);
    keep(&l, &s, a.master, (int64_t)nbi_dtype_bytes(c->master, c->n));
    keep(&l, &s, a.m.values, values);
    keep(&l, &s, a.m.scales, scales);
    keep(&l, &s, a.v.values, values);
    keep(&l, &s, a.v.scales, scales);
    keep(&l, &s, a.record, sizeof record);
    keep(&l, &s, a.control, sizeof control);
    if (c->has_weight)
        read_weight(&l, &s, w);
    free(master);
    lab_end(&l);
    return s;
}

static void release(struct adamw_state *s)
{
    for (int i = 0; i < s->count; i++)
        free(s->parts[i]);
}

/* The tested backend against the scalar CPU code, whole and with requantize after adamw. */
static void compare_steps(const struct adamw_case *c)
{
    static const char *const names[] = {"the master",      "m",          "the scales of m", "v",
                                        "the scales of v", "the record", "the control",     "w"};
    struct adamw_case plain = *c;
    plain.piece = c->n;
    plain.fused = plain.grad_by_piece = false;
    snprintf(where, sizeof where,
             "moments %d, master %s, gradient %s, %lld elements in pieces of %lld, %lld columns",
             (int)c->kind, nbi_dtypes[c->master].name, nbi_dtypes[c->grad].name, (long long)c->n,
             (long long)c->piece, (long long)c->cols);
    struct adamw_state want = run_steps(scalar, &plain), is = run_steps(tested, c);
    assert_int_equal(is.count, want.count);
    for (int i = 0; i < is.count; i++)
        same_bytes(names[i], is.parts[i], want.parts[i], want.bytes[i]);
    release(&want);
    release(&is);
}

static void check_adamw(void)
{
    static const int64_t sizes[] = {1, 15, 16, 31, 33, 100, 129, 1000, 4099};
    static const int64_t pieces[] = {32, 96, 1024};
    need_op(tested, adamw);
    for (int kind = NB_MOMENT_F32; kind <= NB_MOMENT_NVFP4; kind++)
        for (int types = 0; types < 4; types++)
            for (int z = 0; z < 9; z++) {
                struct adamw_case c = {.kind = kind,
                                       .master = floats[types / 2],
                                       .grad = floats[types % 2],
                                       .n = sizes[z],
                                       .piece = sizes[z]};
                compare_steps(&c);
                c.piece = pieces[z % 3];
                if (c.n > c.piece)
                    compare_steps(&c);
            }
}

static void check_large_adamw(void)
{
    need_op(tested, adamw);
    for (int kind = NB_MOMENT_F32; kind <= NB_MOMENT_NVFP4; kind++)
        compare_steps(&(struct adamw_case){.kind = kind,
                                           .master = floats[kind / 2],
                                           .grad = floats[kind % 2],
                                           .n = LARGE,
                                           .piece = LARGE});
}

/* Weights made by adamw are those of requantize after it. Columns that are no multiple of 32, rows
 * that are no multiple of a tile's, and pieces of rows. */
static void check_fused(void)
{
    static const struct {
        int64_t rows, cols, piece; /* rows of a piece */
    } shapes[] = {{1, 16, 1},  {2, 48, 2},  {33, 32, 33}, {17, 96, 17},  {35, 64, 16}, {40, 160, 7},
                  {5, 512, 3}, {9, 272, 9}, {19, 48, 2},  {300, 0, 300}, {64, 544, 64}};
    static const enum nbi_dtype types[] = {NBI_NVFP4, NBI_BF16, NBI_F16, NBI_F32};
    need_op(tested, adamw);
    for (int z = 0; z < 11; z++)
        for (int k = 0; k < 16; k++) {
            int64_t row = shapes[z].cols > 0 ? shapes[z].cols : 1;
            enum nbi_dtype weight = k % 2 ? types[k / 2 % 4] : NBI_NVFP4;
            if (shapes[z].cols == 0)
                weight = NBI_F32;
            compare_steps(&(struct adamw_case){.kind = k % 4,
                                               .master = floats[(k / 4 + z) % 2],
                                               .grad = floats[k / 8],
                                               .n = shapes[z].rows * row,
                                               .piece = shapes[z].piece * row,
                                               .has_weight = true,
                                               .weight = weight,
                                               .round_to = k % 3 ? NBI_BF16 : NBI_F32,
                                               .cols = shapes[z].cols,
                                               .fused = true,
                                               .grad_by_piece = k % 5 == 1});
        }
}

static void check_skipped(void)
{
    need_op(tested, adamw);
    for (int fused = 0; fused < 2; fused++) {
        struct lab l;
        uint8_t before[512], after[512];
        const struct nbi_update_control control = {.nonfinite = 1, .grad_scale = 1, .skip = 1};
        memset(before, 0x3A, sizeof before);
        lab_begin(&l, tested, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2});
        struct nbi_op_adamw a = {
            .control = block(&l, &control, sizeof control),
            .record = block(&l, before, sizeof(struct nbi_update_record)),
            .master = block(&l, before, 512),
            .dtype = NBI_F32,
            .grad = block(&l, before, 512),
            .m = {NB_MOMENT_INT8, block(&l, before, 128), block(&l, before, 8)},
            .v = {NB_MOMENT_INT8, block(&l, before, 128), block(&l, before, 8)},
            .count = 128,
            .lr = 1,
            .correct1 = 1,
            .correct2 = 1,
            .round_to = NBI_F32};
        if (fused) {
            assert_ok(tested->weight_alloc(tested, NBI_NVFP4, 4, 32, false, NULL, &l.weights[0]));
            l.weight_count = 1;
            a.w = l.weights[0];
        }
        assert_ok(tested->adamw(l.s, &a));
        const struct nbi_ptr all[] = {a.record,   a.master,   a.m.values,
                                      a.m.scales, a.v.values, a.v.scales};
        const int64_t bytes[] = {sizeof(struct nbi_update_record), 512, 128, 8, 128, 8};
        for (int i = 0; i < 6; i++) {
            fetch(&l, after, all[i], bytes[i]);
            assert_memory_equal(after, before, (size_t)bytes[i]);
        }
        lab_end(&l);
    }
}

/* ---- statistics ---- */

static void check_grad_stats(void)
{
    static const int64_t lengths[] = {0, 1, 17, 4096, 4097, 8192, 100003, LARGE * 3};
    need_op(tested, grad_stats);
    for (int z = 0; z < 16; z++) {
        int64_t n = lengths[z / 2];
        enum nbi_dtype dtype = floats[z % 2];
        struct nbi_update_record out[2];
        void *grad = zeros(n + 1, 4);
        for (int64_t i = 0; i < n; i++) {
            float x = ldexpf(normal_at(i, 50), (int)(i % 37) - 60);
            store_float(grad, dtype, i, i % 4999 == 4000 ? (i % 2 ? NAN : -INFINITY) : x);
        }
        snprintf(where, sizeof where, "%lld gradients of %s", (long long)n, nbi_dtypes[dtype].name);
        for (int k = 0; k < 2; k++) {
            struct lab l;
            lab_begin(&l, k ? scalar : tested,
                      &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2});
            const struct nbi_op_grad_stats a = {
                .record = block(&l, NULL, sizeof *out),
                .grad = block(&l, grad, (int64_t)nbi_dtype_bytes(dtype, n)),
                .n = n,
                .bf16 = dtype == NBI_BF16};
            assert_ok(l.be->grad_stats(l.s, &a));
            fetch(&l, &out[k], a.record, sizeof *out);
            lab_end(&l);
        }
        same_bytes("the record", &out[0], &out[1], sizeof *out);
        free(grad);
    }
}

/* ---- requantize ---- */

/* Block b of a matrix. Each has values of another character. */
static float draw_weight(int64_t i)
{
    int64_t b = i / 16;
    float x = normal_at(i, 60);
    switch (b % 12) {
    case 0:
        return b % 24 ? 0.0f : -0.0f;
    case 1:
        return ldexpf(x, -140); /* subnormal */
    case 2:
        return ldexpf(x, -21); /* below the smallest scale */
    case 3:
        return ldexpf(x, 120);
    case 4:
        return i % 16 == 5 ? x : 0;
    case 5:
        return ldexpf((float)(i % 7) * 0.25f, (int)(b % 5)); /* ties */
    case 6:
        return x < 0 ? -6.0f : 6.0f;
    case 7:
        return i % 16 == 3 ? 3e38f : ldexpf(x, -30);
    case 8:
        return ldexpf(x, (int)(i % 9) - 4);
    case 9:
        return ldexpf(x, -17 + (int)(b % 20)); /* scales from subnormal to normal */
    case 10:
        return ldexpf(roundf(x * 4) / 4, 9); /* near the largest scale */
    default:
        return x;
    }
}

static void requantize_on(struct nbi_backend *be, struct adamw_state *s, enum nbi_dtype master,
                          const int64_t shape[2], float tensor_scale)
{
    struct lab l;
    int64_t n = shape[0] * shape[1];
    void *values = zeros(n, 4);
    for (int64_t i = 0; i < n; i++)
        store_float(values, master, i, draw_weight(i));
    lab_begin(&l, be, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2});
    struct nbi_weight *w = &l.weights[l.weight_count++];
    assert_ok(be->weight_alloc(be, NBI_NVFP4, shape[0], shape[1], true, NULL, w));
    w->tensor_scale = tensor_scale;
    struct nbi_ptr from = block(&l, values, (int64_t)nbi_dtype_bytes(master, n));
    assert_ok(be->requantize(l.s, &(struct nbi_op_requantize){*w, from, master, NBI_F32}));
    read_weight(&l, s, w);
    free(values);
    lab_end(&l);
}

static void check_requantize(void)
{
    static const int64_t shapes[][2] = {{1, 16}, {3, 48}, {16, 128}, {33, 272}, {50, 1040}};
    static const float scales[] = {1, 0x1p-11f, 0x1p20f, 0.3f, 0x1p-120f};
    need_op(tested, requantize);
    for (int z = 0; z < 5; z++)
        for (int k = 0; k < 10; k++) {
            struct adamw_state want = {0}, is = {0};
            snprintf(where, sizeof where, "%lld x %lld, master %s, tensor scale %g",
                     (long long)shapes[z][0], (long long)shapes[z][1],
                     nbi_dtypes[floats[k % 2]].name, (double)scales[k / 2]);
            requantize_on(scalar, &want, floats[k % 2], shapes[z], scales[k / 2]);
            requantize_on(tested, &is, floats[k % 2], shapes[z], scales[k / 2]);
            same_bytes("codes, bf16 copy and scales", is.parts[0], want.parts[0], want.bytes[0]);
            release(&want);
            release(&is);
        }
}

/* The scalar codec is the definition: the CPU's requantize with every instruction set gives its
 * bytes. So does the tested backend, by what stands above. */
static void check_large_requantize(void)
{
    const int64_t shape[2] = {LARGE / 1024, 1024};
    struct adamw_state want = {0}, is = {0};
    need_op(tested, requantize);
    snprintf(where, sizeof where, "a large matrix");
    requantize_on(scalar, &want, NBI_F32, shape, 1);
    requantize_on(tested, &is, NBI_F32, shape, 1);
    same_bytes("codes, bf16 copy and scales", is.parts[0], want.parts[0], want.bytes[0]);
    release(&want);
    release(&is);
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(adamw)                                                                                       \
    X(large_adamw)                                                                                 \
    X(fused)                                                                                       \
    X(skipped)                                                                                     \
    X(grad_stats)                                                                                  \
    X(requantize)                                                                                  \
    X(large_requantize)

#define X(name) TEST_ON_BOTH(optimizer_bits, name)
CHECKS(X)
#undef X

int main(void)
{
#define X(name) ON_BOTH(optimizer_bits, name)
    const struct CMUnitTest tests[] = {CHECKS(X)};
#undef X
    return cmocka_run_group_tests(tests, NULL, NULL);
}
