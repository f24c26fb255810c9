/* test_weight_store.c - NVFP4 weights that keep codes, codes and a copy in bf16, or block scales
 * only: the same bits in what is read back, in products and in their gradients, after requantize
 * and after an update that makes the weight. What is read back is compared with the codec. */
#include "backend/ops_train.h"
#include "ops_lab.h"
#include "tensor/nvfp4.h"

#define MOST 3

struct store_case {
    int count; /* matrices that share x; their outputs are columns of the same rows */
    int64_t N, K, O[MOST];
    enum nbi_dtype master;
    float tensor_scale;
    bool bf16, exact, updated;
};

/* Results: codes and scales of each matrix, y of all, dx. */
struct results {
    uint8_t *codes[MOST], *scales[MOST];
    uint8_t *y, *dx, *rows; /* rows: y of some rows of a single matrix */
};

#define ROWS_FROM NBI_ROWS_AT

/* How many rows `rows` has. */
static int64_t rows_of(const struct store_case *c)
{
    return c->count == 1 && c->O[0] > ROWS_FROM ? c->O[0] - ROWS_FROM - 1 : 0;
}

static int64_t outputs(const struct store_case *c)
{
    int64_t all = 0;
    for (int i = 0; i < c->count; i++)
        all += c->O[i];
    return all;
}

static float value_at(int64_t i, uint64_t stream)
{
    float v[4];
    nbi_philox_normal4(v, 77, (uint64_t)i / 4, stream);
    return v[i % 4];
}

/* A block of n random activations or masters. */
static struct nbi_ptr floats(struct lab *l, enum nbi_dtype dtype, int64_t n, uint64_t stream,
                             float scale)
{
    uint8_t *p = zeros(n, 4);
    for (int64_t i = 0; i < n; i++) {
        float v = value_at(i, stream) * scale;
        uint16_t half = nbi_f32_to_bf16(v);
        memcpy(p + i * nbi_dtypes[dtype].bytes, dtype == NBI_BF16 ? (void *)&half : (void *)&v,
               (size_t)nbi_dtypes[dtype].bytes);
    }
    struct nbi_ptr at = block(l, p, n * nbi_dtypes[dtype].bytes);
    free(p);
    return at;
}

static void update(struct lab *l, struct nbi_weight *w, int64_t n)
{
    const struct nbi_update_control control = {.grad_scale = 1};
    const struct nbi_update_record record = {0};
    void *none = zeros(n, 4);
    const struct nbi_op_adamw a = {.control = block(l, &control, sizeof control),
                                   .record = block(l, &record, sizeof record),
                                   .master = w->master,
                                   .dtype = w->master_dtype,
                                   .grad = floats(l, NBI_F32, n, 9, 1),
                                   .m = {NB_MOMENT_F32, block(l, none, n * 4), {0}},
                                   .v = {NB_MOMENT_F32, block(l, none, n * 4), {0}},
                                   .count = n,
                                   .lr = 1e-2f,
                                   .beta1 = 0.9f,
                                   .beta2 = 0.99f,
                                   .eps = 1e-8f,
                                   .correct1 = 0.1f,
                                   .correct2 = 0.01f,
                                   .seed = 3,
                                   .step = 1,
                                   .w = *w,
                                   .round_to = NBI_F32};
    assert_ok(l->be->adamw(l->s, &a));
    free(none);
}

static struct nbi_weight make_weight(struct lab *l, const struct store_case *c, int i,
                                     enum nb_weight_store store)
{
    int64_t n = c->O[i] * c->K;
    struct nbi_weight *w = &l->weights[l->weight_count++];
    assert_ok(l->be->weight_alloc(l->be, NBI_NVFP4, c->O[i], c->K, store, NULL, w));
    assert_int_equal(w->layout == NBI_WEIGHT_SCALES, store == NB_WEIGHT_STORE_SCALES);
    assert_int_equal(w->bf16.at != 0, store == NB_WEIGHT_STORE_BF16);
    w->tensor_scale = c->tensor_scale * (float)(1 << i);
    w->master = floats(l, c->master, n, (uint64_t)i, c->tensor_scale * 40);
    w->master_dtype = c->master;
    if (c->updated)
        update(l, w, n);
    else
        assert_ok(l->be->requantize(
            l->s, &(struct nbi_op_requantize){*w, w->master, c->master, NBI_F32}));
    return *w;
}

/* What is read back, in two pieces, and what the codec makes of the master. */
static void check_codes(struct lab *l, const struct nbi_weight *w, uint8_t *codes, uint8_t *scales)
{
    int64_t n = w->rows * w->cols, first = w->rows / 3;
    float *x = zeros(n, 4);
    uint8_t *master = zeros(n, 4), *want = zeros(n, 1);
    assert_ok(l->be->sync(l->s));
    assert_ok(l->be->weight_read(l->be, w, 0, first, codes, scales));
    assert_ok(l->be->weight_read(l->be, w, first, w->rows - first, codes + first * w->cols / 2,
                                 scales + first * w->cols / 16));
    fetch(l, master, w->master, (int64_t)nbi_dtype_bytes(w->master_dtype, n));
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(x + i, master + 4 * i, w->master_dtype == NBI_F32 ? 4 : 0);
        memcpy(&half, master + 2 * i, 2);
        x[i] = w->master_dtype == NBI_F32 ? x[i] : nbi_bf16_to_f32(half);
    }
    nbi_nvfp4_quantize(want, want + n / 2, x, n / 16, NB_QUANT_SWEEP, w->tensor_scale);
    same_bytes("the codes", codes, want, n / 2);
    same_bytes("the scales", scales, want + n / 2, n / 16);
    free(x);
    free(master);
    free(want);
}

/* The same product with a part of the matrix. */
static void run_rows(struct lab *l, const struct store_case *c, const struct nbi_op_linear *whole,
                     uint8_t *out)
{
    struct nbi_op_linear part = *whole;
    int64_t rows = rows_of(c), size = c->bf16 ? 2 : 4;
    part.w[0] = l->be->weight_rows(&whole->w[0], ROWS_FROM, rows);
    part.y[0] = block(l, NULL, c->N * rows * size);
    part.ldy[0] = 0;
    assert_true(part.w[0].borrowed);
    assert_ok(l->be->linear(l->s, &part));
    fetch(l, out, part.y[0], c->N * rows * size);
}

static struct results run_store(struct nbi_backend *be, const struct store_case *c,
                                enum nb_weight_store store)
{
    struct results r = {0};
    struct lab l;
    int64_t O = outputs(c), size = c->bf16 ? 2 : 4, K = c->K > O ? c->K : O, at = 0;
    lab_begin(&l, be,
              &(struct nbi_stream_limits){
                  .N = c->N, .K = K, .D = 2, .heads = 1, .training = true, .bf16 = c->bf16});
    enum nbi_dtype act = c->bf16 ? NBI_BF16 : NBI_F32;
    struct nbi_op_linear y = {.count = c->count,
                              .x = floats(&l, act, c->N * c->K, 20, 1),
                              .N = c->N,
                              .K = c->K,
                              .matmul = c->exact ? NBI_MATMUL_F32 : NBI_MATMUL_FAST,
                              .bf16 = c->bf16};
    struct nbi_op_linear_bwd dx = {.count = c->count,
                                   .dx = block(&l, NULL, c->N * c->K * size),
                                   .N = c->N,
                                   .K = c->K,
                                   .bf16 = c->bf16};
    struct nbi_ptr out = block(&l, NULL, c->N * O * size), in = floats(&l, act, c->N * O, 21, 1);
    for (int i = 0; i < c->count; at += c->O[i++]) {
        y.w[i] = dx.w[i] = make_weight(&l, c, i, store);
        y.ldy[i] = dx.ldy[i] = O;
        y.y[i] = nbi_ptr_add(out, at * size);
        dx.dy[i] = nbi_ptr_add(in, at * size);
        r.codes[i] = zeros(c->O[i] * c->K, 1);
        r.scales[i] = zeros(c->O[i] * c->K, 1);
        check_codes(&l, &y.w[i], r.codes[i], r.scales[i]);
    }
    assert_ok(be->linear(l.s, &y));
    assert_ok(be->linear_bwd(l.s, &dx));
    r.y = zeros(c->N * O, 4);
    r.dx = zeros(c->N * c->K, 4);
    fetch(&l, r.y, out, c->N * O * size);
    fetch(&l, r.dx, dx.dx, c->N * c->K * size);
    r.rows = zeros(c->N * rows_of(c), 4);
    if (rows_of(c) > 0)
        run_rows(&l, c, &y, r.rows);
    lab_end(&l);
    return r;
}

static void release(struct results *r)
{
    for (int i = 0; i < MOST; i++) {
        free(r->codes[i]);
        free(r->scales[i]);
    }
    free(r->y);
    free(r->dx);
    free(r->rows);
}

/* Some rows of a matrix give those columns of y: on the CPU the same bits, on a GPU, which may
 * choose another algorithm, up to rounding. */
static void compare_rows(const struct store_case *c, const struct results *r)
{
    int64_t rows = rows_of(c), O = outputs(c), size = c->bf16 ? 2 : 4;
    bool on_cpu = !nbi_backend_has(tested, NBI_CAP_OWN_MEMORY);
    for (int64_t i = 0; i < c->N * rows; i++) {
        const uint8_t *is = r->rows + i * size,
                      *want = r->y + (i / rows * O + ROWS_FROM + i % rows) * size;
        float a = 0, b = 0;
        memcpy((uint8_t *)&a + 4 - size, is, (size_t)size);
        memcpy((uint8_t *)&b + 4 - size, want, (size_t)size);
        assert_true(on_cpu ? memcmp(is, want, (size_t)size) == 0
                           : fabsf(a - b) <= (c->bf16 ? 0x1p-7f : 1e-5f) * fmaxf(fabsf(b), 1));
    }
}

/* The copies in bf16 are not one block here, so a GPU takes the matrices one by one then. */
static bool same_products(const struct store_case *c, enum nb_weight_store store)
{
    return !nbi_backend_has(tested, NBI_CAP_OWN_MEMORY) || c->count == 1 ||
           store != NB_WEIGHT_STORE_BF16;
}

static void compare_stores(const struct store_case *c)
{
    static const char *const names[] = {NB_WEIGHT_STORE_LIST(NB_ENUM_NAME)};
    struct results want = run_store(tested, c, NB_WEIGHT_STORE_CODES);
    int64_t size = c->bf16 ? 2 : 4;
    compare_rows(c, &want);
    for (int store = NB_WEIGHT_STORE_BF16; store <= NB_WEIGHT_STORE_SCALES; store++) {
        if (store == NB_WEIGHT_STORE_CODES)
            continue;
        snprintf(where, sizeof where,
                 "%s, %d of %lld x %lld, %lld rows, master %s, tensor scale %g%s%s%s", names[store],
                 c->count, (long long)c->O[0], (long long)c->K, (long long)c->N,
                 nbi_dtypes[c->master].name, (double)c->tensor_scale, c->bf16 ? ", bf16" : "",
                 c->exact ? ", exact" : "", c->updated ? ", updated" : "");
        struct results is = run_store(tested, c, (enum nb_weight_store)store);
        for (int i = 0; i < c->count; i++) {
            same_bytes("the codes", is.codes[i], want.codes[i], c->O[i] * c->K / 2);
            same_bytes("the scales", is.scales[i], want.scales[i], c->O[i] * c->K / 16);
        }
        if (same_products(c, (enum nb_weight_store)store)) {
            same_bytes("y", is.y, want.y, c->N * outputs(c) * size);
            same_bytes("dx", is.dx, want.dx, c->N * c->K * size);
            same_bytes("y of some rows", is.rows, want.rows, c->N * rows_of(c) * size);
        }
        release(&is);
    }
    release(&want);
}

/* Odd rows, columns that fill no tile, one matrix and several. */
static const struct store_case shapes[] = {{.count = 1, .N = 1, .K = 16, .O = {1}},
                                           {.count = 1, .N = 5, .K = 48, .O = {19}},
                                           {.count = 1, .N = 33, .K = 544, .O = {40}},
                                           {.count = 3, .N = 9, .K = 160, .O = {48, 16, 24}},
                                           {.count = 2, .N = 30, .K = 64, .O = {17, 5}}};

static void check_products(void)
{
    static const float scales[] = {1, 0x1p-9f, 0.37f};
    for (size_t z = 0; z < sizeof shapes / sizeof *shapes; z++)
        for (int way = 0; way < 6; way++) {
            struct store_case c = shapes[z];
            c.master = way % 2 ? NBI_F32 : NBI_BF16;
            c.tensor_scale = scales[((int)z + way) % 3];
            c.bf16 = way / 2 == 1;
            c.exact = way / 2 == 2;
            compare_stores(&c);
        }
}

/* Rows of 32 or more columns are made by the update itself on a GPU; others after it. */
static void check_updates(void)
{
    for (int z = 0; z < 3; z++)
        for (int way = 0; way < 2; way++) {
            struct store_case c = shapes[z];
            c.master = way ? NBI_F32 : NBI_BF16;
            c.tensor_scale = 0x1p-9f;
            c.bf16 = c.updated = true;
            compare_stores(&c);
        }
}

#define CHECKS(X)                                                                                  \
    X(products)                                                                                    \
    X(updates)

#define X(name) TEST_ON_BOTH(weight_store, name)
CHECKS(X)
#undef X

int main(void)
{
#define X(name) ON_BOTH(weight_store, name)
    const struct CMUnitTest tests[] = {CHECKS(X)};
#undef X
    return cmocka_run_group_tests(tests, NULL, NULL);
}
