/* test_optimizer.c - AdamW against double precision, with decoders of its own for stored moments;
 * bits that depend on neither threads, chunks nor instruction sets; gradient statistics; weights
 * requantized from their masters. */
#include <float.h>
#include <math.h>

#include "backend/backend.h"
#include "base/rng.h"
#include "support.h"
#include "tensor/half.h"
#include "tensor/nvfp4.h"

#include "guarded_backend.h"
#include "on_devices.h"

#define MOMENT_TYPES 4

static const int64_t sizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000, 4099};

#define SIZES ((int)(sizeof sizes / sizeof *sizes))

static float normal(uint64_t at, uint64_t what)
{
    float out[4];
    nbi_philox_normal4(out, 7, at / 4, what);
    return out[at % 4];
}

/* ---- the backend under test ---- */

static struct nbi_backend *gpu; /* NULL: the CPU, opened for each rig */

static void begin_on(const char *device)
{
    if (strcmp(device, "cpu") == 0)
        return;
    need_gpu();
    assert_ok(nbi_backend_open(&gpu, &(struct nbi_backend_opts){.device = device}));
}

static void end_on(void)
{
    if (gpu)
        gpu->close(gpu);
    gpu = NULL;
}

static struct nbi_backend *on_cpu(int threads, enum nbi_simd level)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){"cpu", threads, level}));
    return be;
}

/* The device under test; on the CPU, with that many threads. */
static struct nbi_backend *tested(int threads)
{
    return gpu ? gpu : on_cpu(threads, nbi_simd_level());
}

/* ---- a tensor with its states, on a backend ---- */

struct rig {
    struct nbi_backend *be;
    struct nbi_stream *s;
    int64_t n;
    struct nbi_op_adamw a;
    struct nbi_update_record record;
    struct nbi_update_control control;
};

static struct nbi_ptr alloc_zeroed(const struct rig *t, int64_t bytes)
{
    struct nbi_ptr p;
    assert_ok(t->be->alloc(t->be, "test", bytes > 0 ? bytes : 1, &p));
    assert_ok(t->be->clear(t->s, p, bytes));
    return p;
}

static struct nbi_moment moment(const struct rig *t, enum nb_moment_type kind)
{
    int64_t scales, values = nbi_moment_bytes(kind, t->n, &scales);
    return (struct nbi_moment){kind, alloc_zeroed(t, values), alloc_zeroed(t, scales)};
}

static void rig_on(struct rig *t, struct nbi_backend *be, int64_t n, enum nb_moment_type kind,
                   enum nbi_dtype dtype)
{
    *t = (struct rig){.be = be, .n = n};
    assert_ok(be->stream_new(be, &(struct nbi_stream_limits){.N = 1, .K = 16, .D = 2}, &t->s));
    t->a = (struct nbi_op_adamw){.master = alloc_zeroed(t, (int64_t)nbi_dtype_bytes(dtype, n)),
                                 .dtype = dtype,
                                 .grad = alloc_zeroed(t, n * 4),
                                 .m = moment(t, kind),
                                 .v = moment(t, kind),
                                 .control = alloc_zeroed(t, sizeof t->control),
                                 .record = alloc_zeroed(t, sizeof t->record),
                                 .count = n,
                                 .lr = 1e-2f,
                                 .beta1 = 0.9f,
                                 .beta2 = 0.99f,
                                 .eps = 1e-8f,
                                 .decay = 0.1f,
                                 .max_update = 5,
                                 .seed = 99,
                                 .tensor = 3};
    t->record = (struct nbi_update_record){.m_scale = {0, 0x1p-8f}, .v_scale = {0, 0x1p-6f}};
    t->control = (struct nbi_update_control){.grad_scale = 0.5f};
}

static void rig_begin(struct rig *t, int64_t n, enum nb_moment_type kind, enum nbi_dtype dtype)
{
    rig_on(t, tested(1), n, kind, dtype);
}

static void rig_end(struct rig *t)
{
    const struct nbi_ptr all[] = {t->a.master,   t->a.grad,     t->a.m.values, t->a.m.scales,
                                  t->a.v.values, t->a.v.scales, t->a.record,   t->a.control};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        t->be->free(t->be, all[i]);
    t->be->stream_free(t->s);
    if (t->be != gpu)
        t->be->close(t->be);
}

static void send(const struct rig *t, struct nbi_ptr to, const void *from, int64_t bytes)
{
    assert_ok(t->be->upload(t->s, to, from, bytes));
}

static void fetch(const struct rig *t, void *to, struct nbi_ptr from, int64_t bytes)
{
    assert_ok(t->be->download(t->s, to, from, bytes));
    assert_ok(t->be->sync(t->s));
}

/* The next step, in pieces of this many elements. */
static void step_in_pieces(struct rig *t, int64_t piece)
{
    need_op(t->be, adamw);
    t->a.step++;
    t->a.correct1 = (float)(1 - pow((double)t->a.beta1, t->a.step));
    t->a.correct2 = (float)(1 - pow((double)t->a.beta2, t->a.step));
    send(t, t->a.control, &t->control, sizeof t->control);
    send(t, t->a.record, &t->record, sizeof t->record);
    for (t->a.first = 0; t->a.first < t->n; t->a.first += piece) {
        t->a.count = t->n - t->a.first < piece ? t->n - t->a.first : piece;
        assert_ok(t->be->adamw(t->s, &t->a));
    }
    fetch(t, &t->record, t->a.record, sizeof t->record);
    t->record.m_scale[0] = t->record.m_scale[1];
    t->record.v_scale[0] = t->record.v_scale[1];
}

static void step(struct rig *t)
{
    step_in_pieces(t, t->n);
}

/* Gradients of one step, in groups of very different magnitude. */
static void draw_grad(float *g, int64_t n, uint64_t at_step)
{
    for (int64_t i = 0; i < n; i++)
        g[i] = normal((uint64_t)i, at_step) * ldexpf(1, -(int)(i / 16 % 7));
}

/* As f32 or as bf16. */
static void send_grad(const struct rig *t, const float *g, bool bf16)
{
    uint16_t *half = malloc((size_t)t->n * sizeof *half);
    assert_non_null(half);
    for (int64_t i = 0; i < t->n; i++)
        half[i] = nbi_f32_to_bf16(g[i]);
    send(t, t->a.grad, bf16 ? (const void *)half : g, t->n * (bf16 ? 2 : 4));
    free(half);
}

static void random_step(struct rig *t, uint64_t at_step)
{
    float *g = malloc((size_t)t->n * sizeof *g);
    assert_non_null(g);
    draw_grad(g, t->n, at_step);
    send(t, t->a.grad, g, t->n * 4);
    step(t);
    free(g);
}

/* ---- decoders, written independently of the encoders ---- */

static double e4m3(uint8_t c)
{
    return c < 8 ? ldexp(c, -9) : ldexp(8 + c % 8, c / 8 - 10);
}

static double f16(uint16_t h)
{
    return h < 0x400 ? ldexp(h, -24) : ldexp(0x400 + (h & 0x3FF), (h >> 10) - 25);
}

/* Element i of m, or the root of element i of v; *unit is the largest distance between neighbouring
 * codes in its group. */
struct decoded {
    double value, unit;
};

static struct decoded decode(const struct nbi_moment *s, bool is_v, double S, const uint8_t *values,
                             const uint8_t *scales, int64_t i)
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    float f;
    uint16_t half;
    if (s->kind == NB_MOMENT_F32) {
        memcpy(&f, values + 4 * i, 4);
        return (struct decoded){is_v ? sqrt((double)f) : (double)f, 0};
    }
    if (s->kind == NB_MOMENT_BF16) {
        memcpy(&half, values + 2 * i, 2);
        double x = (double)nbi_bf16_to_f32(half);
        return (struct decoded){is_v ? sqrt(x) : x, fabs(is_v ? sqrt(x) : x) / 64};
    }
    if (s->kind == NB_MOMENT_INT8) {
        memcpy(&half, scales + i / 32 * 2, 2);
        double y = (double)(int8_t)values[i] / 127, unit = f16(half);
        if (is_v)
            return (struct decoded){values[i] / 255.0 * unit, unit / 255};
        return (struct decoded){y / (2 - fabs(y)) * unit, unit * (1 - 126.0 / 128)};
    }
    int code = i & 1 ? values[i / 2] >> 4 : values[i / 2] & 15;
    double unit = e4m3(scales[i / 16]) * S;
    if (is_v)
        return (struct decoded){(code + 1) / 16.0 * unit, unit / 16};
    return (struct decoded){(code & 8 ? -1 : 1) * e2m1[code & 7] * unit, 2 * unit};
}

static void read_moment(const struct rig *t, bool is_v, struct decoded *out)
{
    const struct nbi_moment *s = is_v ? &t->a.v : &t->a.m;
    int64_t scale_bytes, bytes = nbi_moment_bytes(s->kind, t->n, &scale_bytes);
    uint8_t *values = malloc((size_t)bytes), *scales = malloc((size_t)scale_bytes + 1);
    assert_true(values && scales);
    fetch(t, values, s->values, bytes);
    fetch(t, scales, s->scales, scale_bytes);
    double S = (double)(is_v ? t->record.v_scale[0] : t->record.m_scale[0]);
    for (int64_t i = 0; i < t->n; i++)
        out[i] = decode(s, is_v, S, values, scales, i);
    free(values);
    free(scales);
}

/* ---- the step ---- */

/* Against the textbook equations in double. */
static void check_f32_follows_the_equations(void)
{
    enum { N = 1003, STEPS = 50 };
    static double w[N], m[N], v[N];
    static float g[N], start[N], got[N];
    struct rig t;
    rig_begin(&t, N, NB_MOMENT_F32, NBI_F32);
    for (int i = 0; i < N; i++) {
        start[i] = normal((uint64_t)i, 1000);
        w[i] = (double)start[i];
        m[i] = v[i] = 0;
    }
    send(&t, t.a.master, start, sizeof start);
    const struct nbi_op_adamw a = t.a;
    double beta1 = (double)a.beta1, beta2 = (double)a.beta2, lr = (double)a.lr, max_error = 0;
    for (int k = 1; k <= STEPS; k++) {
        draw_grad(g, N, (uint64_t)k);
        send(&t, t.a.grad, g, sizeof g);
        step(&t);
        for (int i = 0; i < N; i++) {
            double d = 0.5 * (double)g[i];
            m[i] = beta1 * m[i] + (1 - beta1) * d;
            v[i] = beta2 * v[i] + (1 - beta2) * d * d;
            double u = m[i] / (1 - pow(beta1, k)) / (sqrt(v[i] / (1 - pow(beta2, k))) + 1e-8);
            w[i] -= lr * (double)a.decay * w[i] + lr * fmin(fmax(u, -5), 5);
        }
    }
    fetch(&t, got, t.a.master, sizeof got);
    for (int i = 0; i < N; i++)
        max_error = fmax(max_error, fabs((double)got[i] - w[i]) / fmax(fabs(w[i]), 1));
    assert_true(max_error < 1e-6);
    struct decoded x[N];
    const float running_max[2] = {t.record.m_max, t.record.v_max};
    for (int is_v = 0; is_v < 2; is_v++) {
        read_moment(&t, is_v, x);
        for (int i = 0; i < N; i++) {
            double want = is_v ? sqrt(v[i]) : m[i];
            assert_true(fabs(x[i].value - want) <= 2e-6 * fmax(fabs(want), 1e-2));
            assert_true(fabs(x[i].value) <= (double)running_max[is_v] * (1 + 1e-7));
        }
    }
    rig_end(&t);
}

static void check_updates_are_clamped_and_nonfinite_accepted(void)
{
    for (int kind = 0; kind < MOMENT_TYPES; kind++)
        for (int limit = 0; limit < 2; limit++) {
            struct rig t;
            float g[40], w[40];
            rig_begin(&t, 40, kind, NBI_F32);
            for (int i = 0; i < 40; i++)
                g[i] = 3;
            t.a.max_update = limit ? 0.25f : 0;
            send(&t, t.a.grad, g, sizeof g);
            step(&t);
            fetch(&t, w, t.a.master, sizeof w);
            for (int i = 0; i < 40; i++)
                assert_true(fabsf(w[i] + t.a.lr * (limit ? 0.25f : 1)) < 1e-7f);
            g[3] = NAN; /* the result is meaningless, but must not fail */
            g[4] = -NAN;
            g[20] = INFINITY;
            g[36] = -INFINITY;
            g[37] = FLT_MAX;
            send(&t, t.a.grad, g, sizeof g);
            step(&t);
            step(&t);
            rig_end(&t);
        }
}

/* What is stored is within one code of what an f32 moment would hold. */
static void check_codes_are_within_one_step(void)
{
    for (int kind = NB_MOMENT_BF16; kind < MOMENT_TYPES; kind++)
        for (int z = 0; z < SIZES; z++) {
            struct rig t, exact;
            int64_t n = sizes[z];
            struct decoded *x = malloc((size_t)n * sizeof *x),
                           *want = malloc((size_t)n * sizeof *x);
            assert_true(x && want);
            rig_begin(&t, n, kind, NBI_F32);
            rig_begin(&exact, n, NB_MOMENT_F32, NBI_F32);
            random_step(&t, 5);
            random_step(&exact, 5);
            for (int is_v = 0; is_v < 2; is_v++) {
                read_moment(&t, is_v, x);
                read_moment(&exact, is_v, want);
                for (int64_t i = 0; i < n; i++) {
                    assert_true(fabs(x[i].value - want[i].value) <= x[i].unit * (1 + 1e-5));
                    assert_true(!is_v || x[i].value > 0);
                    assert_true(is_v || x[i].value * want[i].value >= 0);
                }
            }
            free(x);
            free(want);
            rig_end(&t);
            rig_end(&exact);
        }
}

/* Elements that share a group with one a million times as large, zeros, and groups of zeros. */
static void check_v_never_becomes_zero(void)
{
    for (int kind = NB_MOMENT_INT8; kind < MOMENT_TYPES; kind++) {
        enum { N = 256 };
        struct rig t;
        struct decoded x[N];
        float g[N], w[N];
        rig_begin(&t, N, kind, NBI_F32);
        for (int i = 0; i < N; i++)
            g[i] = i >= 224 || i % 32 == 7 ? 0 : i % 32 == 5 ? 10.0f : ldexpf(1e-5f, -(i / 32) * 3);
        send(&t, t.a.grad, g, sizeof g);
        for (int k = 0; k < 20; k++)
            step(&t);
        read_moment(&t, true, x);
        for (int i = 0; i < N; i++)
            assert_true(g[i] != 0 || kind == NB_MOMENT_NVFP4 ? x[i].value > 0 : x[i].value == 0);
        fetch(&t, w, t.a.master, sizeof w);
        for (int i = 0; i < N; i++)
            assert_true(fabsf(w[i]) <= 20 * 5 * t.a.lr);
        rig_end(&t);
    }
}

/* The random bits of a master are those of the counter that nbi_op_adamw specifies. */
static void check_random_bits_are_those_of_the_contract(void)
{
    enum { N = 300 };
    float w[N];
    uint16_t half[N];
    struct rig t;
    rig_begin(&t, N, NB_MOMENT_F32, NBI_F32);
    random_step(&t, 4);
    fetch(&t, w, t.a.master, sizeof w);
    rig_end(&t);
    rig_begin(&t, N, NB_MOMENT_F32, NBI_BF16);
    random_step(&t, 4);
    fetch(&t, half, t.a.master, sizeof half);
    for (uint64_t e = 0; e < N; e++) {
        struct nbi_philox r = nbi_philox(t.a.seed, e / 8 | (uint64_t)t.a.tensor << 32, t.a.step);
        uint32_t bits = r.v[e % 8 / 2] >> 16 * (e % 2) & 0xFFFF;
        assert_int_equal(half[e], (nbi_f32_bits(w[e]) + bits) >> 16);
    }
    rig_end(&t);
}

/* m, v and the weight after a first step from zero. */
struct outcome {
    double of[3][32];
};

static void first_step(struct rig *t, uint64_t seed, struct outcome *out)
{
    struct decoded x[32];
    float w[32];
    uint16_t half[32];
    for (int is_v = 0; is_v < 2; is_v++) {
        const struct nbi_moment *s = is_v ? &t->a.v : &t->a.m;
        int64_t scale_bytes, bytes = nbi_moment_bytes(s->kind, 32, &scale_bytes);
        assert_ok(t->be->clear(t->s, s->values, bytes));
        assert_ok(t->be->clear(t->s, s->scales, scale_bytes));
    }
    assert_ok(t->be->clear(t->s, t->a.master, (int64_t)nbi_dtype_bytes(t->a.dtype, 32)));
    t->a.step = 0;
    t->a.seed = seed;
    t->record.m_scale[0] = t->record.v_scale[0] = 0;
    step(t);
    for (int is_v = 0; is_v < 2; is_v++) {
        read_moment(t, is_v, x);
        for (int i = 0; i < 32; i++)
            out->of[is_v][i] = is_v ? x[i].value * x[i].value : x[i].value;
    }
    if (t->a.dtype == NBI_F32)
        fetch(t, w, t->a.master, sizeof w);
    else
        fetch(t, half, t->a.master, sizeof half);
    for (int i = 0; i < 32; i++)
        out->of[2][i] = (double)(t->a.dtype == NBI_F32 ? w[i] : nbi_bf16_to_f32(half[i]));
}

/* Over many seeds, the mean of what is stored is exact: of m, of v itself rather than its root, and
 * of w. */
static void check_rounding_keeps_the_mean(void)
{
    enum { N = 32, SEEDS = 3000 };
    for (int kind = NB_MOMENT_BF16; kind < MOMENT_TYPES; kind++) {
        struct outcome want, got, sum = {0}, square = {0};
        struct rig t;
        float g[N];
        for (int i = 0; i < N; i++)
            g[i] = normal((uint64_t)i, 3) + (normal((uint64_t)i, 3) < 0 ? -0.3f : 0.3f);
        rig_begin(&t, N, NB_MOMENT_F32, NBI_F32);
        send(&t, t.a.grad, g, sizeof g);
        first_step(&t, 0, &want);
        rig_end(&t);
        rig_begin(&t, N, kind, NBI_BF16);
        send(&t, t.a.grad, g, sizeof g);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            first_step(&t, seed << 20, &got);
            for (int k = 0; k < 3 * N; k++) {
                double d = got.of[k / N][k % N] - want.of[k / N][k % N];
                sum.of[k / N][k % N] += d;
                square.of[k / N][k % N] += d * d;
            }
        }
        double z[3] = {0};
        for (int k = 0; k < 3 * N; k++) {
            double mean = sum.of[k / N][k % N] / SEEDS;
            double sigma = sqrt(square.of[k / N][k % N]) / SEEDS;
            /* A value next to a code may never have left it, and then shows no sigma. */
            assert_true(fabs(mean) <= 5 * sigma + 1e-4 * fabs(want.of[k / N][k % N]));
            z[k / N] += fabs(mean) < 20 * sigma ? mean / sigma : 0;
        }
        for (int i = 0; i < 3; i++)
            assert_true(fabs(z[i]) < 5 * sqrt(N));
        rig_end(&t);
    }
}

/* Without gradients v decays as beta2^n, though each step is far smaller than a code. */
static void check_v_decays(void)
{
    enum { N = 4096, STEPS = 1000 };
    static struct decoded before[N], after[N];
    static float g[N];
    for (int kind = 0; kind < MOMENT_TYPES; kind++) {
        struct rig t;
        double sums[2] = {0};
        rig_begin(&t, N, kind, NBI_F32);
        t.a.beta2 = 0.999f;
        for (int i = 0; i < N; i++)
            g[i] = 1 + 0.3f * normal((uint64_t)i, 8);
        send(&t, t.a.grad, g, sizeof g);
        step(&t);
        read_moment(&t, true, before);
        assert_ok(t.be->clear(t.s, t.a.grad, sizeof g));
        for (int k = 0; k < STEPS; k++)
            step(&t);
        read_moment(&t, true, after);
        for (int i = 0; i < N; i++) {
            sums[0] += before[i].value * before[i].value;
            sums[1] += after[i].value * after[i].value;
        }
        double want = pow((double)t.a.beta2, STEPS), got = sums[1] / sums[0];
        double bound = kind == NB_MOMENT_NVFP4 ? 0.1 : 0.02;
        assert_true(fabs(got / want - 1) < bound);
        rig_end(&t);
    }
}

/* ---- the same bits ---- */

struct image {
    uint8_t *bytes;
    int64_t size;
};

/* A few steps in chunks of `piece` elements, and everything they leave. Some sizes have gradients
 * in bf16. */
static struct image run(struct nbi_backend *be, enum nb_moment_type kind, enum nbi_dtype dtype,
                        int64_t n, int64_t piece)
{
    struct rig t;
    rig_on(&t, be, n, kind, dtype);
    t.a.grad_bf16 = n % 2;
    for (uint32_t k = 1; k <= 3; k++) {
        float *g = malloc((size_t)n * sizeof *g);
        assert_non_null(g);
        draw_grad(g, n, k);
        send_grad(&t, g, t.a.grad_bf16);
        free(g);
        step_in_pieces(&t, piece);
    }
    int64_t scales, values = nbi_moment_bytes(kind, n, &scales);
    const struct {
        struct nbi_ptr p;
        int64_t bytes;
    } parts[] = {{t.a.master, (int64_t)nbi_dtype_bytes(dtype, n)},
                 {t.a.m.values, values},
                 {t.a.m.scales, scales},
                 {t.a.v.values, values},
                 {t.a.v.scales, scales},
                 {t.a.record, sizeof t.record}};
    struct image out = {calloc(1, (size_t)n * 16 + 128), 0};
    assert_non_null(out.bytes);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        fetch(&t, out.bytes + out.size, parts[i].p, parts[i].bytes);
        out.size += parts[i].bytes;
    }
    rig_end(&t);
    return out;
}

static void assert_same(struct image a, struct image b)
{
    assert_int_equal(a.size, b.size);
    assert_memory_equal(a.bytes, b.bytes, (size_t)a.size);
    free(b.bytes);
}

/* Those of the scalar CPU code, on every instruction set, with any number of threads and on a GPU.
 */
static void check_bits_are_the_same_everywhere(void)
{
    for (int kind = 0; kind < MOMENT_TYPES; kind++)
        for (int z = 0; z <= SIZES; z++) {
            enum nbi_dtype dtype = (kind + z) % 2 ? NBI_F32 : NBI_BF16;
            int64_t n = z < SIZES ? sizes[z] : 100003;
            struct image want = run(on_cpu(1, NBI_SIMD_SCALAR), kind, dtype, n, n);
            static const int64_t pieces[] = {32, 96, 160, 1024};
            for (int i = 0; i < 4 && n <= 5000; i++)
                assert_same(want,
                            run(gpu ? gpu : on_cpu(1, NBI_SIMD_SCALAR), kind, dtype, n, pieces[i]));
            if (gpu)
                assert_same(want, run(gpu, kind, dtype, n, n));
            for (int level = NBI_SIMD_SCALAR; level <= (int)nbi_simd_level() && !gpu; level++)
                for (int threads = 1; threads <= 4; threads++)
                    assert_same(want, run(on_cpu(threads, level), kind, dtype, n, n));
            free(want.bytes);
        }
}

/* ---- convergence ---- */

/* Logistic regression with noisy labels: returns the final loss, and checks that nothing is
 * infinite. */
static double fitted_loss(enum nb_moment_type kind, enum nbi_dtype dtype)
{
    enum { N = 48, ROWS = 256, STEPS = 300 };
    static float x[ROWS][N];
    float g[N], w[N];
    uint16_t half[N];
    double loss = 0;
    struct rig t;
    rig_begin(&t, N, kind, dtype);
    t.a.lr = 0.02f;
    t.control.grad_scale = 1;
    t.a.decay = 0.01f;
    t.record.v_scale[1] = t.record.m_scale[1] = 0x1p-8f;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++)
            x[r][i] = normal((uint64_t)(r * N + i), 20) * ldexpf(1, -(i % 5));
    for (int k = 0; k <= STEPS; k++) {
        fetch(&t, half, t.a.master, sizeof half);
        if (dtype == NBI_F32)
            fetch(&t, w, t.a.master, sizeof w);
        else
            for (int i = 0; i < N; i++)
                w[i] = nbi_bf16_to_f32(half[i]);
        memset(g, 0, sizeof g);
        loss = 0;
        for (int r = 0; r < ROWS; r++) {
            double dot = 0, truth = 0;
            for (int i = 0; i < N; i++) {
                dot += (double)(x[r][i] * w[i]);
                truth += (double)x[r][i] * (i % 3 - 1);
            }
            double y = truth + 0.5 * (double)normal((uint64_t)r, 21) > 0 ? 1 : 0;
            double p = 1 / (1 + exp(-dot));
            loss -= (y > 0 ? log(p) : log(1 - p)) / ROWS;
            for (int i = 0; i < N; i++)
                g[i] += (float)((p - y) / ROWS) * x[r][i];
        }
        send(&t, t.a.grad, g, sizeof g);
        step(&t);
    }
    rig_end(&t);
    return loss;
}

static void check_converges(void)
{
    double want = fitted_loss(NB_MOMENT_F32, NBI_F32);
    assert_true(want < 0.3);
    for (int kind = 0; kind < MOMENT_TYPES; kind++)
        for (int wide = 0; wide < 2; wide++) {
            double got = fitted_loss(kind, wide ? NBI_F32 : NBI_BF16);
            assert_true(isfinite(got) && fabs(got - want) < 0.02);
        }
}

/* ---- statistics ---- */

static void grad_stats_on(struct nbi_backend *be, const float *g, int64_t n, bool bf16,
                          double out[3])
{
    struct rig t;
    need_op(be, grad_stats);
    rig_on(&t, be, n + 1, NB_MOMENT_F32, NBI_F32);
    send_grad(&t, g, bf16);
    assert_ok(be->grad_stats(
        t.s,
        &(struct nbi_op_grad_stats){.record = t.a.record, .grad = t.a.grad, .n = n, .bf16 = bf16}));
    fetch(&t, out, t.a.record, 3 * (int64_t)sizeof *out);
    rig_end(&t);
}

/* Any order of the sum is accurate enough, but all are the same. */
static void check_grad_stats(void)
{
    static const int64_t lengths[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100003, 2500000};
    for (int z = 0; z < 20; z++) {
        int64_t n = lengths[z / 2];
        bool bf16 = z % 2;
        float *g = calloc((size_t)n + 1, sizeof *g);
        long double squares = 0;
        double amax = 0, nonfinite = 0, want[3], out[3];
        assert_non_null(g);
        for (int64_t i = 0; i < n; i++) {
            uint32_t r = nbi_philox(1, (uint64_t)i, 5).v[0];
            g[i] = ldexpf((float)(int32_t)r, (int)(r % 40) - 60);
            if (r % 5000 == 17)
                g[i] = r & 1 << 20 ? NAN : r & 1 << 21 ? INFINITY : -INFINITY;
            if (bf16)
                g[i] = nbi_bf16_to_f32(nbi_f32_to_bf16(g[i]));
            nonfinite += !isfinite(g[i]);
            squares += isfinite(g[i]) ? (long double)g[i] * (long double)g[i] : 0;
            amax = isfinite(g[i]) ? fmax(amax, fabs((double)g[i])) : amax;
        }
        grad_stats_on(on_cpu(1, NBI_SIMD_SCALAR), g, n, false, want);
        assert_true(fabsl((long double)want[0] - squares) <= 1e-13L * squares);
        assert_true(want[1] == amax && want[2] == nonfinite);
        for (int way = 0; way < (gpu ? 2 : 4 * ((int)nbi_simd_level() + 1)); way++) {
            grad_stats_on(gpu ? gpu : on_cpu(way % 4 + 1, way / 4), g, n, bf16, out);
            assert_memory_equal(want, out, sizeof out);
        }
        free(g);
    }
}

/* ---- the plan of an update ---- */

enum { RECORDS = 7 };

/* The records of all tensors and the control, of which the update takes `count` tensors. */
struct planned {
    struct nbi_update_record records[RECORDS];
    struct nbi_update_control control;
};

static void plan_on(struct nbi_backend *be, struct planned *p, int64_t count, float clip)
{
    static const int32_t tensors[RECORDS] = {3, 0, 6, 2, 5, 1, 4};
    struct rig t;
    need_op(be, update_plan);
    rig_on(&t, be, 32, NB_MOMENT_F32, NBI_F32);
    struct nbi_op_update_plan op = {.control = t.a.control,
                                    .records = alloc_zeroed(&t, sizeof p->records),
                                    .tensors = alloc_zeroed(&t, sizeof tensors),
                                    .count = count,
                                    .clip = clip,
                                    .beta1 = 0.9f,
                                    .beta2 = 0.95f};
    send(&t, op.records, p->records, sizeof p->records);
    send(&t, op.tensors, tensors, sizeof tensors);
    assert_ok(be->update_plan(t.s, &op));
    fetch(&t, p->records, op.records, sizeof p->records);
    fetch(&t, &p->control, op.control, sizeof p->control);
    be->free(be, op.records);
    be->free(be, op.tensors);
    rig_end(&t);
}

/* New scales bound the new moments; a gradient that is not finite changes nothing. */
static void check_update_plan(void)
{
    for (int round = 0; round < 60; round++) {
        struct planned before = {0}, want, is;
        int64_t count = 1 + round % RECORDS;
        float clip = round % 3 ? (float)(round % 3) * 0.7f : 0;
        for (int i = 0; i < RECORDS; i++) {
            uint64_t at = (uint64_t)(round * RECORDS + i) * 4;
            double amax = fabs((double)normal(at, 40));
            before.records[i] =
                (struct nbi_update_record){.squares = amax * amax * (1 + i),
                                           .amax = amax,
                                           .nonfinite = round % 10 == 9 && i == 3,
                                           .m_max = fabsf(normal(at + 1, 40)),
                                           .v_max = fabsf(normal(at + 2, 40)),
                                           .m_scale = {1, fabsf(normal(at + 3, 40))},
                                           .v_scale = {1, 2}};
        }
        want = is = before;
        plan_on(on_cpu(1, NBI_SIMD_SCALAR), &want, count, clip);
        plan_on(tested(2), &is, count, clip);
        assert_memory_equal(&is, &want, sizeof want);
        double norm = sqrt(want.control.squares);
        assert_int_equal(want.control.skip, round % 10 == 9);
        assert_true(want.control.grad_scale ==
                    (clip > 0 && norm > (double)clip ? (float)((double)clip / norm) : 1));
        const struct nbi_update_record *a = &before.records[3], *b = &want.records[3];
        if (want.control.skip) {
            assert_memory_equal(a, b, sizeof *a);
            continue;
        }
        double g = a->amax * (double)want.control.grad_scale;
        assert_true(b->m_scale[0] == a->m_scale[1] && b->v_scale[0] == a->v_scale[1]);
        assert_true(b->m_max == 0 && b->v_max == 0);
        assert_true((double)b->m_scale[1] * 6 * 448 >= 0.9 * (double)a->m_max + 0.1 * g);
        assert_true((double)b->v_scale[1] * 448 >=
                    sqrt(0.95 * (double)a->v_max * (double)a->v_max + 0.05 * g * g));
    }
}

/* ---- weights ---- */

/* A master of this type with values of many magnitudes; *wide is the same as f32. */
static void *make_master(enum nbi_dtype dtype, int64_t n, float *wide)
{
    uint8_t *master = malloc((size_t)n * 4);
    assert_non_null(master);
    for (int64_t i = 0; i < n; i++) {
        wide[i] = normal((uint64_t)i, 30) * ldexpf(1, -(int)(i / 16 % 9));
        uint16_t half = nbi_f32_to_bf16(wide[i]);
        if (dtype == NBI_BF16) {
            wide[i] = nbi_bf16_to_f32(half);
            memcpy(master + 2 * i, &half, 2);
        } else {
            memcpy(master + 4 * i, wide + i, 4);
        }
    }
    return master;
}

/* What a weight of this type must hold. */
static void expect_rows(uint8_t *data, uint8_t *scales, enum nbi_dtype dtype, const float *x,
                        int64_t n)
{
    if (dtype == NBI_NVFP4) {
        nbi_nvfp4_quantize(data, scales, x, n / 16, NB_QUANT_SWEEP, 0x1p-11f);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = dtype == NBI_BF16 ? nbi_f32_to_bf16(x[i]) : nbi_f32_to_f16(x[i]);
        if (dtype == NBI_F32)
            memcpy(data + 4 * i, x + i, 4);
        else
            memcpy(data + 2 * i, &half, 2);
    }
}

/* The copy of an NVFP4 matrix in bf16: its values without the tensor scale, exactly. */
static void check_bf16_copy(const struct rig *t, const struct nbi_weight *w, const uint8_t *codes,
                            const uint8_t *scales)
{
    int64_t n = w->rows * w->cols;
    uint16_t *copy = malloc((size_t)n * sizeof *copy);
    assert_non_null(copy);
    fetch(t, copy, w->bf16, n * 2);
    for (int64_t i = 0; i < n; i++)
        assert_true(nbi_bf16_to_f32(copy[i]) ==
                    nbi_e2m1_to_f32(i & 1 ? codes[i / 2] >> 4 : codes[i / 2] & 15) *
                        nbi_e4m3_to_f32(scales[i / 16]));
    free(copy);
}

static void requantize_case(struct nbi_backend *be, enum nbi_dtype dtype, enum nbi_dtype from,
                            int64_t rows, int64_t cols)
{
    struct rig t;
    struct nbi_weight w;
    need_op(be, requantize);
    int64_t wide = cols ? cols : 1, n = rows * wide;
    float *x = malloc((size_t)n * 4);
    uint8_t *want = malloc((size_t)n * 5), *got = malloc((size_t)n * 5);
    assert_true(x && want && got);
    void *master = make_master(from, n, x);
    rig_on(&t, be, n, NB_MOMENT_F32, from);
    send(&t, t.a.master, master, (int64_t)nbi_dtype_bytes(from, n));
    assert_ok(be->weight_alloc(be, dtype, rows, cols, dtype == NBI_NVFP4 && rows % 2, NULL, &w));
    w.tensor_scale = dtype == NBI_NVFP4 ? 0x1p-11f : 1;
    assert_ok(be->requantize(t.s, &(struct nbi_op_requantize){w, t.a.master, from, NBI_F32}));
    assert_ok(be->sync(t.s));
    expect_rows(want, want + n * 4, dtype, x, n);
    if (w.bf16.at)
        check_bf16_copy(&t, &w, want, want + n * 4);
    int64_t bytes = dtype == NBI_NVFP4 ? wide / 2 : (int64_t)nbi_dtype_bytes(dtype, wide);
    for (int64_t first = 0; first < rows; first += 1 + rows / 3)
        for (int64_t count = 1; count <= rows - first; count += 1 + rows / 4) {
            assert_ok(be->weight_read(be, &w, first, count, got, got + n * 4));
            assert_memory_equal(got, want + first * bytes, (size_t)(count * bytes));
            if (dtype == NBI_NVFP4)
                assert_memory_equal(got + n * 4, want + n * 4 + first * wide / 16,
                                    (size_t)(count * wide / 16));
        }
    be->weight_free(be, &w);
    free(x);
    free(want);
    free(got);
    free(master);
    rig_end(&t);
}

static void check_requantize(void)
{
    static const struct {
        int64_t rows, cols;
    } shapes[] = {{1, 16}, {16, 32}, {17, 48}, {33, 512}, {40, 1056}, {5, 1040}, {64, 528}};
    static const enum nbi_dtype types[] = {NBI_NVFP4, NBI_BF16, NBI_F16, NBI_F32};
    for (int z = 0; z < 7; z++)
        for (int i = 0; i < 8; i++)
            for (int threads = 1; threads <= (gpu ? 1 : 3); threads += 2)
                requantize_case(tested(threads), types[i / 2], i % 2 ? NBI_F32 : NBI_BF16,
                                shapes[z].rows, shapes[z].cols);
    for (int wide = 0; wide < 2; wide++)
        requantize_case(gpu ? gpu : on_cpu(1, NBI_SIMD_SCALAR), NBI_F32, wide ? NBI_F32 : NBI_BF16,
                        77, 0);
}

static void check_amax(void)
{
    static const int64_t lengths[] = {0, 1, 511, 512, 513, 100003};
    for (int way = 0; way < 24; way++) {
        struct nbi_backend *be = tested(1 + way / 12 * 2);
        struct rig t;
        need_op(be, amax);
        int64_t n = lengths[way % 6];
        enum nbi_dtype dtype = way / 6 % 2 ? NBI_F32 : NBI_BF16;
        float *x = malloc((size_t)n * 4 + 4), want = 0, got;
        assert_non_null(x);
        void *master = make_master(dtype, n + 1, x);
        for (int64_t i = 0; i < n; i++)
            want = fmaxf(want, fabsf(x[i]));
        rig_on(&t, be, n + 1, NB_MOMENT_F32, dtype);
        send(&t, t.a.master, master, (int64_t)nbi_dtype_bytes(dtype, n + 1));
        assert_ok(be->amax(t.s, &(struct nbi_op_amax){t.a.grad, t.a.master, dtype, n}));
        fetch(&t, &got, t.a.grad, sizeof got);
        assert_true(got == want);
        if (n > 0 && dtype == NBI_F32) {
            x[n - 1] = -INFINITY;
            send(&t, t.a.master, x, n * 4);
            assert_ok(be->amax(t.s, &(struct nbi_op_amax){t.a.grad, t.a.master, dtype, n}));
            fetch(&t, &got, t.a.grad, sizeof got);
            assert_true(isinf(got) && got > 0);
        }
        free(x);
        free(master);
        rig_end(&t);
    }
}

static void check_draw(void)
{
    static const int64_t lengths[] = {0, 1, 3, 4, 1027, 200001};
    for (int way = 0; way < 24; way++) {
        struct nbi_backend *be = tested(1 + way / 12 * 2);
        struct rig t;
        need_op(be, draw);
        const int64_t n = lengths[way % 6];
        const enum nbi_dtype dtype = way / 6 % 2 ? NBI_F32 : NBI_BF16;
        const struct nbi_op_draw op = {
            .dtype = dtype, .n = n, .deviation = 0.5f, .seed = 0x500000009, .stream = 3};
        const uint16_t guard = 0x4321;
        double sum = 0, squares = 0;
        uint8_t *got = malloc((size_t)n * 4 + 4);
        assert_non_null(got);
        rig_on(&t, be, n + 1, NB_MOMENT_F32, dtype);
        send(&t, nbi_ptr_add(t.a.master, (int64_t)nbi_dtype_bytes(dtype, n)), &guard, sizeof guard);
        struct nbi_op_draw a = op;
        a.out = t.a.master;
        assert_ok(be->draw(t.s, &a));
        fetch(&t, got, t.a.master, (int64_t)nbi_dtype_bytes(dtype, n) + 2);
        assert_memory_equal(got + nbi_dtype_bytes(dtype, n), &guard, sizeof guard);
        for (int64_t i = 0; i < n; i++) {
            const struct nbi_philox r = nbi_philox(op.seed, (uint64_t)i / 4, op.stream);
            int bytes = -510;
            for (int k = 0; k < 4; k++)
                bytes += (int)(r.v[i % 4] >> 8 * k & 255);
            const float want = (float)bytes * (op.deviation / 147.80054f);
            if (dtype == NBI_F32)
                assert_memory_equal(got + 4 * i, &want, 4);
            else
                assert_int_equal(((uint16_t *)(void *)got)[i], nbi_f32_to_bf16(want));
            sum += (double)want;
            squares += (double)want * (double)want;
        }
        if (n > 100000) {
            assert_true(fabs(sum / (double)n) < 4 * 0.5 / sqrt((double)n));
            assert_true(fabs(sqrt(squares / (double)n) - 0.5) < 0.005);
        }
        free(got);
        rig_end(&t);
    }
}

/* A weight that is its own master is left alone. */
static void check_requantize_leaves_aliases_alone(void)
{
    struct rig t;
    float before[32], after[32];
    rig_begin(&t, 32, NB_MOMENT_F32, NBI_F32);
    need_op(t.be, requantize);
    for (int i = 0; i < 32; i++)
        before[i] = (float)i;
    send(&t, t.a.master, before, sizeof before);
    const struct nbi_weight w = {.dtype = NBI_F32,
                                 .rows = 2,
                                 .cols = 16,
                                 .data = t.a.master,
                                 .tensor_scale = 1,
                                 .borrowed = true};
    assert_ok(t.be->requantize(t.s, &(struct nbi_op_requantize){w, t.a.master, NBI_F32, NBI_F32}));
    fetch(&t, after, t.a.master, sizeof after);
    assert_memory_equal(before, after, sizeof before);
    rig_end(&t);
}

/* The host never touches the backend's memory. */
static void check_host_never_touches_device_memory(void)
{
    for (int kind = 0; kind < MOMENT_TYPES; kind++) {
        struct rig t;
        rig_on(&t, guarded_open(on_cpu(2, nbi_simd_level())), 1000, kind, NBI_BF16);
        random_step(&t, 1);
        assert_ok(t.be->grad_stats(
            t.s, &(struct nbi_op_grad_stats){.record = t.a.record, .grad = t.a.grad, .n = 1000}));
        rig_end(&t);
        assert_int_equal(guarded.count, 0);
        requantize_case(guarded_open(on_cpu(2, nbi_simd_level())), kind % 2 ? NBI_NVFP4 : NBI_BF16,
                        NBI_F32, 20, 48);
        assert_int_equal(guarded.count, 0);
    }
}

/* ---- all of them, on both ---- */

#define CHECKS(X)                                                                                  \
    X(f32_follows_the_equations)                                                                   \
    X(updates_are_clamped_and_nonfinite_accepted)                                                  \
    X(codes_are_within_one_step)                                                                   \
    X(v_never_becomes_zero)                                                                        \
    X(random_bits_are_those_of_the_contract)                                                       \
    X(rounding_keeps_the_mean)                                                                     \
    X(v_decays)                                                                                    \
    X(bits_are_the_same_everywhere)                                                                \
    X(converges)                                                                                   \
    X(grad_stats)                                                                                  \
    X(update_plan)                                                                                 \
    X(requantize)                                                                                  \
    X(requantize_leaves_aliases_alone)                                                             \
    X(amax)                                                                                        \
    X(draw)

#define X(check) TEST_ON_BOTH(optimizer, check)
CHECKS(X)
#undef X
TEST_ON_CPU(optimizer, host_never_touches_device_memory)

int main(void)
{
#define X(check) ON_BOTH(optimizer, check)
    const struct CMUnitTest tests[] = {CHECKS(X)
                                           ON_CPU(optimizer, host_never_touches_device_memory)};
#undef X
    return cmocka_run_group_tests(tests, NULL, NULL);
}
