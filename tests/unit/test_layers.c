/* test_layers.c - layers and head of a pass in one call, against the operations of ops.h one by
 * one: the same bits where nothing is rounded in another way, else within what rounding explains.
 */
#include "backend/layers.h"
#include "ops_lab.h"
#include "stored.h"

#define LAYERS    2
#define MAX_ROWS  96
#define MAX_PAGES 256

/* ---- two layers, a head and a pass ---- */

enum {
    INPUT_NORM,
    POST_NORM,
    Q_NORM,
    K_NORM,
    Q,
    K,
    V,
    O,
    GATE,
    UP,
    DOWN,
    FINAL_NORM,
    HEAD,
    COUNTS
};

/* Rows alternate between the sequences. */
struct layers_shape {
    int64_t N, C, F, NH, NKV, D, V;
    int64_t sequences, decode_rows;
    int64_t M; /* rows of logits: the last M; N: all */
    enum nbi_dtype kv, attention_type, mlp_type, down_type;
    bool paged, one_row_per_sequence;
};

/* Both layers have the same weights, but each has a KV cache of its own. Each sequence takes whole
 * pages of it, which are permuted if the pass is paged. */
struct layers_case {
    struct layers_shape s;
    enum nbi_matmul matmul;
    bool batch_invariant;
    struct host_weight w[COUNTS];
    float *x, *cos, *sin;
    int64_t cache_rows, kv_bytes; /* kv_bytes: of keys or values of a layer */
    uint8_t *k[LAYERS], *v[LAYERS];
    int32_t kv_rows[MAX_ROWS], first[MAX_ROWS], last[MAX_ROWS], tables[MAX_ROWS], rows[MAX_ROWS];
    int32_t pages[MAX_PAGES];
    int64_t page_count, max_keys;
};

static void new_weights(struct layers_case *c)
{
    const struct {
        int64_t rows, cols;
        enum nbi_dtype dtype;
    } shapes[COUNTS] = {[INPUT_NORM] = {c->s.C, 0, NBI_BF16},
                        [POST_NORM] = {c->s.C, 0, NBI_F32},
                        [Q_NORM] = {c->s.D, 0, NBI_BF16},
                        [K_NORM] = {c->s.D, 0, NBI_F32},
                        [Q] = {c->s.NH * c->s.D, c->s.C, c->s.attention_type},
                        [K] = {c->s.NKV * c->s.D, c->s.C, c->s.attention_type},
                        [V] = {c->s.NKV * c->s.D, c->s.C, c->s.attention_type},
                        [O] = {c->s.C, c->s.NH * c->s.D, c->s.attention_type},
                        [GATE] = {c->s.F, c->s.C, c->s.mlp_type},
                        [UP] = {c->s.F, c->s.C, c->s.mlp_type},
                        [DOWN] = {c->s.C, c->s.F, c->s.down_type},
                        [FINAL_NORM] = {c->s.C, 0, NBI_BF16},
                        [HEAD] = {c->s.V, c->s.C, c->s.mlp_type}};
    for (int i = 0; i < COUNTS; i++)
        host_weight_new(&c->w[i], shapes[i].dtype, shapes[i].rows, shapes[i].cols);
}

/* Rows [0, count) of a sequence that begins at page `from`. */
static void fill_cache(struct layers_case *c, int64_t from, int64_t count)
{
    for (int64_t r = 0; r < count; r++) {
        int64_t at =
            ((int64_t)c->pages[from + r / NBI_PAGE] * NBI_PAGE + r % NBI_PAGE) * c->s.NKV * c->s.D;
        for (int64_t i = 0; i < c->s.NKV * c->s.D; i++)
            for (int layer = 0; layer < LAYERS; layer++) {
                put_as(c->k[layer], c->s.kv, at + i, 2 * uniform());
                put_as(c->v[layer], c->s.kv, at + i, 2 * uniform());
            }
    }
}

static void new_cache(struct layers_case *c)
{
    static const int64_t pasts[] = {0, 1, 63, 64, 65, 130};
    int64_t at[MAX_ROWS], start[MAX_ROWS], pages = 1;
    for (int64_t i = 0; i < c->s.sequences; i++) {
        at[i] = pasts[bits32() % 6];
        start[i] = pages;
        pages += (at[i] + (c->s.N + c->s.sequences - 1) / c->s.sequences) / NBI_PAGE + 1;
    }
    assert_true(pages <= MAX_PAGES && c->s.N <= MAX_ROWS);
    for (int64_t i = 0; i < pages; i++) {
        int64_t j = c->s.paged ? bits32() % (i + 1) : i;
        c->pages[i] = c->pages[j];
        c->pages[j] = (int32_t)i;
    }
    c->page_count = pages;
    c->cache_rows = pages * NBI_PAGE;
    c->kv_bytes = (int64_t)nbi_dtype_bytes(c->s.kv, c->cache_rows * c->s.NKV * c->s.D);
    for (int i = 0; i < LAYERS; i++) {
        c->k[i] = memset(zeros(c->kv_bytes, 1), 0xFF, (size_t)c->kv_bytes);
        c->v[i] = memset(zeros(c->kv_bytes, 1), 0xFF, (size_t)c->kv_bytes);
    }
    for (int64_t i = 0; i < c->s.sequences; i++)
        fill_cache(c, start[i], at[i]);
    c->max_keys = 1;
    for (int64_t n = 0; n < c->s.N; n++) {
        int64_t i = n % c->s.sequences, last = at[i]++;
        c->tables[n] = (int32_t)start[i];
        c->first[n] = c->s.paged ? 0 : (int32_t)(start[i] * NBI_PAGE);
        c->last[n] = c->first[n] + (int32_t)last;
        c->kv_rows[n] =
            (int32_t)(c->pages[start[i] + last / NBI_PAGE] * NBI_PAGE + last % NBI_PAGE);
        c->max_keys = last >= c->max_keys ? last + 1 : c->max_keys;
    }
}

static void new_pass(struct layers_case *c)
{
    new_cache(c);
    c->x = random_floats(c->s.N * c->s.C, 2);
    c->cos = random_floats(c->s.N * c->s.D / 2, 1);
    c->sin = random_floats(c->s.N * c->s.D / 2, 1);
    for (int64_t i = 0; i < c->s.M; i++)
        c->rows[i] = (int32_t)(c->s.N - c->s.M + i);
}

static void free_pass(struct layers_case *c)
{
    for (int i = 0; i < LAYERS; i++) {
        free(c->k[i]);
        free(c->v[i]);
    }
    free(c->x);
    free(c->cos);
    free(c->sin);
}

static void free_weights(struct layers_case *c)
{
    for (int i = 0; i < COUNTS; i++)
        host_weight_free(&c->w[i]);
}

/* Row n of a case with one row per sequence, as a pass of its own. */
static struct layers_case one_row(const struct layers_case *c, int64_t n)
{
    struct layers_case one = *c;
    one.s.N = one.s.M = one.s.sequences = 1;
    one.s.decode_rows = c->s.decode_rows > 0;
    one.x = c->x + n * c->s.C;
    one.cos = c->cos + n * c->s.D / 2;
    one.sin = c->sin + n * c->s.D / 2;
    one.kv_rows[0] = c->kv_rows[n];
    one.first[0] = c->first[n];
    one.last[0] = c->last[n];
    one.tables[0] = c->tables[n];
    one.rows[0] = 0;
    one.max_keys = one.last[0] - one.first[0] + 1;
    return one;
}

/* ---- a pass on a backend ---- */

struct result {
    float *x, *logits;
    uint8_t *cache; /* k and v of all layers */
};

static struct result result_new(const struct layers_case *c)
{
    return (struct result){zeros(c->s.N * c->s.C, 4), zeros(c->s.M * c->s.V, 4),
                           zeros(2 * LAYERS * c->kv_bytes, 1)};
}

static void result_free(struct result *r)
{
    free(r->x);
    free(r->logits);
    free(r->cache);
}

static struct nbi_op_layers layers_op(struct lab *l, struct layers_case *c,
                                      struct nbi_layer_weights *w, struct nbi_kv_view *kv)
{
    int64_t q = c->s.N * c->s.NH * c->s.D * 4, k = c->s.N * c->s.NKV * c->s.D * 4, n = c->s.N * 4,
            angles = c->s.N * c->s.D / 2 * 4;
    struct nbi_weight on[COUNTS];
    for (int i = 0; i < COUNTS; i++)
        on[i] = weight(l, &c->w[i]);
    for (int i = 0; i < LAYERS; i++) {
        w[i] = (struct nbi_layer_weights){on[INPUT_NORM], on[POST_NORM], on[Q_NORM], on[K_NORM],
                                          on[Q],          on[K],         on[V],      on[O],
                                          on[GATE],       on[UP],        on[DOWN]};
        kv[i] = (struct nbi_kv_view){block(l, c->k[i], c->kv_bytes), block(l, c->v[i], c->kv_bytes),
                                     c->s.kv};
    }
    struct nbi_op_layers op = {.x = block(l, c->x, c->s.N * c->s.C * 4),
                               .w = w,
                               .kv = kv,
                               .count = LAYERS,
                               .head = {.logits = block(l, NULL, c->s.M * c->s.V * 4),
                                        .final = block(l, NULL, c->s.M * c->s.C * 4),
                                        .norm = on[FINAL_NORM],
                                        .w = on[HEAD],
                                        .M = c->s.M},
                               .scratch = {.norm1 = block(l, NULL, c->s.N * c->s.C * 4),
                                           .norm2 = block(l, NULL, c->s.N * c->s.C * 4),
                                           .q = block(l, NULL, q),
                                           .att = block(l, NULL, q),
                                           .k = block(l, NULL, k),
                                           .v = block(l, NULL, k),
                                           .gate = block(l, NULL, c->s.N * c->s.F * 4),
                                           .up = block(l, NULL, c->s.N * c->s.F * 4)},
                               .cos = block(l, c->cos, angles),
                               .sin = block(l, c->sin, angles),
                               .kv_rows = block(l, c->kv_rows, n),
                               .first = block(l, c->first, n),
                               .last = block(l, c->last, n),
                               .decode_rows = c->s.decode_rows,
                               .max_keys = {c->max_keys, c->max_keys},
                               .eps = 1e-6f,
                               .N = c->s.N,
                               .C = c->s.C,
                               .F = c->s.F,
                               .NH = c->s.NH,
                               .NKV = c->s.NKV,
                               .D = c->s.D,
                               .matmul = c->matmul,
                               .batch_invariant = c->batch_invariant,
                               .one_row_per_sequence = c->s.one_row_per_sequence};
    op.scratch.q_rot = op.scratch.q;
    op.scratch.act = op.scratch.gate;
    if (c->s.M < c->s.N)
        op.head.rows = block(l, c->rows, c->s.M * 4);
    if (c->s.paged) {
        op.pages = block(l, c->pages, c->page_count * 4);
        op.tables = block(l, c->tables, n);
    }
    return op;
}

/* ---- the same, one operation at a time ---- */

static enum nb_status norm_and_products(struct lab *l, const struct nbi_op_layers *a,
                                        const struct nbi_op_rmsnorm *norm, struct nbi_op_linear p)
{
    p.x = norm->y;
    p.N = norm->N;
    p.K = norm->C;
    p.matmul = a->matmul;
    p.batch_invariant = a->batch_invariant;
    NBI_TRY(l->be->rmsnorm(l->s, norm));
    return l->be->linear(l->s, &p);
}

/* x = x + from w^T */
static enum nb_status add_product(struct lab *l, const struct nbi_op_layers *a, struct nbi_ptr from,
                                  int64_t width, const struct nbi_weight *w)
{
    return l->be->linear(l->s, &(struct nbi_op_linear){.count = 1,
                                                       .y = {a->x},
                                                       .w = {*w},
                                                       .x = from,
                                                       .N = a->N,
                                                       .K = width,
                                                       .add = true,
                                                       .matmul = a->matmul,
                                                       .batch_invariant = a->batch_invariant});
}

static enum nb_status attend(struct lab *l, const struct nbi_op_layers *a,
                             const struct nbi_kv_view *kv, int64_t from, int64_t to)
{
    int64_t values = from * a->NH * a->D * 4, ints = from * 4;
    struct nbi_op_attention op = {.y = nbi_ptr_add(a->scratch.att, values),
                                  .q = nbi_ptr_add(a->scratch.q_rot, values),
                                  .kv = *kv,
                                  .first = nbi_ptr_add(a->first, ints),
                                  .last = nbi_ptr_add(a->last, ints),
                                  .pages = a->pages,
                                  .max_keys = a->max_keys[from > 0],
                                  .N = to - from,
                                  .NH = a->NH,
                                  .NKV = a->NKV,
                                  .D = a->D,
                                  .matmul = a->matmul,
                                  .kv_unshared = to == a->decode_rows,
                                  .batch_invariant = a->batch_invariant};
    if (a->pages.at)
        op.tables = nbi_ptr_add(a->tables, ints);
    return op.N > 0 ? l->be->attention(l->s, &op) : NB_OK;
}

static enum nb_status layer_by_operations(struct lab *l, const struct nbi_op_layers *a,
                                          const struct nbi_layer_weights *w,
                                          const struct nbi_kv_view *kv)
{
    const struct nbi_layer_scratch *t = &a->scratch;
    NBI_TRY(norm_and_products(
        l, a,
        &(struct nbi_op_rmsnorm){
            .y = t->norm1, .x = a->x, .w = w->input_norm, .eps = a->eps, .N = a->N, .C = a->C},
        (struct nbi_op_linear){.count = 3, .y = {t->q, t->k, t->v}, .w = {w->q, w->k, w->v}}));
    NBI_TRY(l->be->qkv_rope(l->s, &(struct nbi_op_qkv_rope){.q_out = t->q_rot,
                                                            .kv = *kv,
                                                            .kv_rows = a->kv_rows,
                                                            .q = t->q,
                                                            .k = t->k,
                                                            .v = t->v,
                                                            .q_norm = w->q_norm,
                                                            .k_norm = w->k_norm,
                                                            .cos = a->cos,
                                                            .sin = a->sin,
                                                            .eps = a->eps,
                                                            .N = a->N,
                                                            .NH = a->NH,
                                                            .NKV = a->NKV,
                                                            .D = a->D}));
    NBI_TRY(attend(l, a, kv, 0, a->decode_rows));
    NBI_TRY(attend(l, a, kv, a->decode_rows, a->N));
    NBI_TRY(add_product(l, a, t->att, a->NH * a->D, &w->o));
    NBI_TRY(norm_and_products(
        l, a,
        &(struct nbi_op_rmsnorm){
            .y = t->norm2, .x = a->x, .w = w->post_norm, .eps = a->eps, .N = a->N, .C = a->C},
        (struct nbi_op_linear){.count = 2, .y = {t->gate, t->up}, .w = {w->gate, w->up}}));
    NBI_TRY(l->be->swiglu(
        l->s,
        &(struct nbi_op_swiglu){.y = t->act, .gate = t->gate, .up = t->up, .N = a->N, .F = a->F}));
    return add_product(l, a, t->act, a->F, &w->down);
}

static enum nb_status layers_by_operations(struct lab *l, const struct nbi_op_layers *a)
{
    const struct nbi_head *h = &a->head;
    struct nbi_ptr from = a->x;
    for (int64_t i = 0; i < a->count; i++)
        NBI_TRY(layer_by_operations(l, a, &a->w[i], &a->kv[i]));
    if (h->rows.at) {
        from = h->final;
        NBI_TRY(l->be->gather(
            l->s,
            &(struct nbi_op_gather){.y = from, .x = a->x, .rows = h->rows, .M = h->M, .C = a->C}));
    }
    return norm_and_products(
        l, a,
        &(struct nbi_op_rmsnorm){
            .y = h->final, .x = from, .w = h->norm, .eps = a->eps, .N = h->M, .C = a->C},
        (struct nbi_op_linear){.count = 1, .y = {h->logits}, .w = {h->w}});
}

/* How the layers and the head are called. */
enum way {
    OPERATIONS, /* one by one */
    ONE_CALL,
    CALL_PER_LAYER /* and one for the head, as passes with a hook do */
};

static enum nb_status call(struct lab *l, struct nbi_op_layers a, enum way way)
{
    if (way == OPERATIONS)
        return layers_by_operations(l, &a);
    if (way == ONE_CALL)
        return l->be->layers(l->s, &a);
    const struct nbi_head head = a.head;
    a.count = 1;
    a.head.M = 0;
    for (int i = 0; i < LAYERS; i++, a.w++, a.kv++)
        NBI_TRY(l->be->layers(l->s, &a));
    a.count = 0;
    a.head = head;
    return l->be->layers(l->s, &a);
}

static struct nbi_stream_limits limits_of(const struct layers_case *c)
{
    int64_t width = c->s.F > c->s.C ? c->s.F : c->s.C;
    return (struct nbi_stream_limits){.N = c->s.N,
                                      .K = c->s.NH * c->s.D > width ? c->s.NH * c->s.D : width,
                                      .D = c->s.D,
                                      .heads = c->s.NH};
}

static struct result run(struct nbi_backend *be, struct layers_case *c, enum way way)
{
    const struct nbi_stream_limits limits = limits_of(c);
    struct nbi_layer_weights w[LAYERS];
    struct nbi_kv_view kv[LAYERS];
    struct result r = result_new(c);
    struct lab l;
    lab_begin(&l, be, &limits);
    const struct nbi_op_layers op = layers_op(&l, c, w, kv);
    assert_ok(call(&l, op, way));
    fetch(&l, r.x, op.x, c->s.N * c->s.C * 4);
    fetch(&l, r.logits, op.head.logits, c->s.M * c->s.V * 4);
    for (int i = 0; i < LAYERS; i++) {
        fetch(&l, r.cache + 2 * i * c->kv_bytes, kv[i].k, c->kv_bytes);
        fetch(&l, r.cache + (2 * i + 1) * c->kv_bytes, kv[i].v, c->kv_bytes);
    }
    lab_end(&l);
    return r;
}

/* ---- comparing ---- */

static void same_result(const struct layers_case *c, const struct result *is,
                        const struct result *want)
{
    same_bytes("x", is->x, want->x, c->s.N * c->s.C * 4);
    same_bytes("logits", is->logits, want->logits, c->s.M * c->s.V * 4);
    same_bytes("the cache", is->cache, want->cache, 2 * LAYERS * c->kv_bytes);
}

/* Off by at most `bound` times the largest value. */
static void close_relative(const char *what, const float *is, const float *want, int64_t n,
                           double bound)
{
    double amax = 0;
    for (int64_t i = 0; i < n; i++)
        amax = fabs((double)want[i]) > amax ? fabs((double)want[i]) : amax;
    close_to(what, is, want, n, 0, bound * amax);
}

/* Activations are rounded to 11 bits or, on a GPU with many rows, to 8; in e4m3 a key or value that
 * rounds to the other side changes by 2^-4. */
static void close_result(const struct layers_case *c, const struct result *is,
                         const struct result *want)
{
    double bound = c->s.kv == NBI_E4M3                                 ? 1e-1
                   : c->matmul == NBI_MATMUL_F32 && c->s.kv == NBI_F32 ? 2e-5
                                                                       : 2e-2;
    close_relative("x", is->x, want->x, c->s.N * c->s.C, bound);
    close_relative("logits", is->logits, want->logits, c->s.M * c->s.V, bound);
}

/* Whether the call rounds as the operations do. The decode kernels do not: SwiGLU of gate and up is
 * packed with a scale that is known before it is, and so is the result of attention. */
static bool rounds_alike(const struct layers_case *c)
{
    if (c->matmul == NBI_MATMUL_F32 || c->s.N > 64)
        return true;
    bool gated = c->s.mlp_type == NBI_NVFP4 && c->s.down_type == NBI_NVFP4;
    bool packs = (c->s.kv == NBI_F16 || c->s.kv == NBI_E4M3) && c->s.attention_type == NBI_NVFP4 &&
                 (c->s.D == 64 || c->s.D == 128) && !c->batch_invariant;
    return !gated && !packs;
}

static void describe(const struct layers_case *c)
{
    snprintf(
        where, sizeof where,
        "N %lld (%lld decode) of %lld%s, C %lld, F %lld, heads %lld %lld of %lld, %s, %s %s %s%s%s",
        (long long)c->s.N, (long long)c->s.decode_rows, (long long)c->s.sequences,
        c->s.paged ? " paged" : "", (long long)c->s.C, (long long)c->s.F, (long long)c->s.NH,
        (long long)c->s.NKV, (long long)c->s.D, nbi_dtypes[c->s.kv].name,
        nbi_dtypes[c->s.attention_type].name, nbi_dtypes[c->s.mlp_type].name,
        nbi_dtypes[c->s.down_type].name, c->batch_invariant ? ", invariant" : "",
        c->matmul == NBI_MATMUL_F32 ? ", f32" : "");
}

/* In one call, in several and by operations, on one backend; and against the definition. */
static void check_ways(struct layers_case *c, bool against_definition)
{
    describe(c);
    struct result operations = run(tested, c, OPERATIONS), definition = {0};
    if (against_definition) {
        struct layers_case f32 = *c;
        f32.matmul = NBI_MATMUL_F32;
        definition = run(scalar, &f32, OPERATIONS);
        close_result(c, &operations, &definition);
    }
    if (nbi_backend_has(tested, NBI_CAP_LAYERS)) {
        struct result one = run(tested, c, ONE_CALL), several = run(tested, c, CALL_PER_LAYER);
        same_result(c, &several, &one);
        if (rounds_alike(c))
            same_result(c, &one, &operations);
        else
            close_result(c, &one, &operations);
        if (against_definition)
            close_result(c, &one, &definition);
        result_free(&one);
        result_free(&several);
    }
    result_free(&definition);
    result_free(&operations);
}

/* Rope fused into attention gives the bits of rope before it; a row has the bits that it has alone
 * if the pass is batch-invariant. */
static void check_decode(struct layers_case *c)
{
    describe(c);
    c->s.one_row_per_sequence = false;
    struct result separate = run(tested, c, ONE_CALL);
    c->s.one_row_per_sequence = true;
    struct result fused = run(tested, c, ONE_CALL);
    same_result(c, &fused, &separate);
    for (int64_t n = 0; n < c->s.N && c->batch_invariant && c->s.M == c->s.N; n += 1 + c->s.N / 3) {
        struct layers_case one = one_row(c, n);
        struct result alone = run(tested, &one, ONE_CALL);
        same_bytes("x alone", alone.x, fused.x + n * c->s.C, c->s.C * 4);
        same_bytes("logits alone", alone.logits, fused.logits + n * c->s.V, c->s.V * 4);
        result_free(&alone);
    }
    result_free(&separate);
    result_free(&fused);
}

/* ---- cases ---- */

#define NV NBI_NVFP4

static const struct layers_shape shapes[] = {
    /* decode steps */
    {1, 64, 96, 4, 2, 64, 50, 1, 0, 1, NBI_F16, NV, NV, NV, false, true},
    {9, 144, 80, 2, 1, 128, 129, 9, 9, 9, NBI_E4M3, NV, NV, NV, true, true},
    {20, 64, 272, 2, 2, 64, 40, 20, 20, 7, NBI_BF16, NV, NV, NV, true, true},
    {5, 64, 96, 2, 1, 64, 40, 5, 5, 5, NBI_BF16, NV, NV, NBI_BF16, false, true},
    {3, 48, 96, 8, 1, 64, 40, 3, 3, 3, NBI_F16, NBI_BF16, NV, NV, true, true},
    /* decode rows and a prompt; a prompt; heads of a size without decode kernels */
    {33, 64, 96, 4, 2, 64, 40, 3, 2, 3, NBI_F16, NV, NV, NV, true, false},
    {17, 64, 96, 4, 2, 64, 40, 1, 0, 17, NBI_BF16, NV, NBI_F32, NV, false, false},
    {11, 96, 48, 4, 4, 24, 33, 2, 0, 1, NBI_F32, NV, NBI_BF16, NV, false, false},
    /* more rows than the decode kernels take */
    {70, 64, 96, 2, 1, 64, 40, 2, 0, 1, NBI_F16, NV, NV, NV, false, false},
    {80, 64, 96, 2, 1, 64, 40, 70, 68, 80, NBI_BF16, NBI_BF16, NV, NBI_F32, true, false},
};

static void check_passes_match_their_operations(void)
{
    for (int64_t i = 0; i < COUNT(shapes) * 3; i += EMULATED ? 2 : 1) {
        struct layers_case c = {.s = shapes[i / 3],
                                .batch_invariant = i % 3 == 1,
                                .matmul = i % 3 == 2 ? NBI_MATMUL_F32 : NBI_MATMUL_FAST};
        new_weights(&c);
        new_pass(&c);
        check_ways(&c, true);
        free_pass(&c);
        free_weights(&c);
    }
}

static struct layers_case decode_step(int64_t N, enum nbi_dtype kv)
{
    struct layers_case c = {.s = shapes[1]};
    c.s.N = c.s.M = c.s.sequences = c.s.decode_rows = N;
    c.s.kv = kv;
    return c;
}

/* Sizes of the MLP that reach every division of the work of its products; those of a GPU would take
 * minutes on the host. */
static void check_sizes_of_the_mlp(void)
{
#if EMULATED
    static const int64_t sizes[][2] = {{16, 16}, {208, 272}, {16, 1088}, {80, 608}},
                         counts[] = {1, 40};
#else
    static const int64_t sizes[][2] = {{16, 16},    {1008, 1072}, {640, 9728},
                                       {16, 17408}, {80, 9728},   {272, 34000}},
                         counts[] = {1, 8, 16, 17, 40, 64};
#endif
    for (int64_t i = 0; i < COUNT(sizes); i++) {
        struct layers_case c = decode_step(1, NBI_BF16);
        c.s.C = sizes[i][0];
        c.s.F = sizes[i][1];
        new_weights(&c);
        for (int64_t j = 0; j < COUNT(counts); j++) {
            c.s.N = c.s.M = c.s.sequences = c.s.decode_rows = counts[j];
            new_pass(&c);
            c.batch_invariant = false;
            check_ways(&c, false);
            c.batch_invariant = true;
            check_decode(&c);
            free_pass(&c);
        }
        free_weights(&c);
    }
}

static void check_rope_is_fused_with_attention(void)
{
    static const int64_t counts[] = {1, 7, 20, 64}, groups[] = {4, 1, 8, 2};
    static const enum nbi_dtype types[] = {NBI_F16, NBI_BF16, NBI_E4M3};
    for (int i = 0; i < 2 * 3 * 4; i += EMULATED ? 5 : 1) {
        struct layers_case c = decode_step(counts[i % 4], types[i / 8]);
        c.s.C = 64;
        c.s.D = i / 4 % 2 ? 64 : 128;
        c.s.NKV = 1 + i % 3;
        c.s.NH = c.s.NKV * groups[(i + i / 4) % 4];
        c.s.paged = i % 5 > 0;
        new_weights(&c);
        for (int batch_invariant = 0; batch_invariant < 2; batch_invariant++) {
            c.batch_invariant = batch_invariant;
            new_pass(&c);
            check_decode(&c);
            free_pass(&c);
        }
        free_weights(&c);
    }
}

/* A little of everything, for compute-sanitizer, which slows kernels a thousandfold. */
static void check_short_selection(void)
{
    for (int i = 0; i < 3; i++) {
        struct layers_case c = {.s = shapes[i < 2 ? i : 5]};
        new_weights(&c);
        new_pass(&c);
        check_ways(&c, true);
        free_pass(&c);
        free_weights(&c);
    }
}

/* ---- all checks ---- */

TEST_ON_BOTH(layers, passes_match_their_operations)
TEST_ON_CUDA(layers, sizes_of_the_mlp)
TEST_ON_CUDA(layers, rope_is_fused_with_attention)
TEST_ON_CUDA(layers, short_selection)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_BOTH(layers, passes_match_their_operations) ON_CUDA(layers, sizes_of_the_mlp)
            ON_CUDA(layers, rope_is_fused_with_attention) ON_CUDA(layers, short_selection)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
