/* cases_optimizer.c - gradient statistics, AdamW and the weights made from masters. All of them
 * have bits that are defined. */
#include <math.h>

#include "backend/ops_train.h"
#include "check/kernel_cases.h"

#define STEPS   2
#define TENSORS 3

static const char update_shapes_letters[] = "O K";
static const int64_t update_shapes[][NBI_CASE_DIMS] = {{5, 48}, {130, 160}};
static const char vector_shapes_letters[] = "n";
static const int64_t vector_shapes[][NBI_CASE_DIMS] = {{7}, {1029}, {20011}};

static int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- values ---- */

/* Values of very different magnitudes; every eleventh group of 48 is zero. */
static float spread(struct nbi_kernel_run *r, int64_t i)
{
    float x = nbi_run_uniform(r) * ldexpf(1, -(int)(i / 16 % 23));
    return i / 48 % 11 == 5 ? 0 : x;
}

/* Writes n such values as `dtype`. */
static enum nb_status refill(struct nbi_kernel_run *r, struct nbi_ptr at, enum nbi_dtype dtype,
                             int64_t n)
{
    void *p = malloc((size_t)n * sizeof(float));
    if (!p)
        return nbi_fail_memory("checking kernels", (size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        nbi_run_store(p, dtype, i, spread(r, i));
    enum nb_status rc = r->be->upload(r->s, at, p, (int64_t)nbi_dtype_bytes(dtype, n));
    free(p);
    return rc;
}

static struct nbi_ptr new_values(struct nbi_kernel_run *r, enum nbi_dtype dtype, int64_t n)
{
    struct nbi_ptr p = nbi_run_zeros(r, (int64_t)nbi_dtype_bytes(dtype, n));
    if (r->rc == NB_OK)
        r->rc = refill(r, p, dtype, n);
    return p;
}

/* What weight_read and the copy in bf16 give, as a result. */
static enum nb_status read_weight(struct nbi_kernel_run *r, const struct nbi_weight *w)
{
    int64_t n = w->rows * max(w->cols, 1), values = n * 4, scales = values + n, bytes = scales + n;
    uint8_t *p = calloc((size_t)(bytes + n * 2) + 1, 1);
    if (!p)
        return nbi_fail_memory("checking kernels", (size_t)bytes);
    enum nb_status rc = r->be->sync(r->s);
    if (rc == NB_OK)
        rc = r->be->weight_read(r->be, w, 0, w->rows, p, p + values);
    if (rc == NB_OK && w->bf16.at)
        rc = r->be->download(r->s, p + bytes, w->bf16, n * 2);
    if (rc == NB_OK)
        rc = r->be->sync(r->s);
    nbi_run_host_result(r, "w", p, bytes + n * 2);
    return rc;
}

/* ---- grad_stats, amax, draw ---- */

static enum nb_status grad_stats(struct nbi_kernel_run *r)
{
    int64_t n = r->elements > 0 ? r->elements : r->shape[0];
    const struct nbi_op_grad_stats op = {
        .record = nbi_run_zeros(r, (int64_t)sizeof(struct nbi_update_record)),
        .grad = new_values(r, r->c->grad, n),
        .n = n,
        .bf16 = r->c->grad == NBI_BF16};
    const float bad[2] = {NAN, INFINITY};
    nbi_run_result(r, "record", op.record, NBI_U8, 1, (int64_t)sizeof(struct nbi_update_record), 0);
    NBI_TRY(r->rc);
    if (r->c->add && r->c->grad == NBI_F32)
        NBI_TRY(r->be->upload(r->s, op.grad, bad, n > 1 ? 8 : 4));
    return r->be->grad_stats(r->s, &op);
}

static enum nb_status amax(struct nbi_kernel_run *r)
{
    int64_t n = r->elements > 0 ? r->elements : r->shape[0];
    const struct nbi_op_amax op = {.out = nbi_run_out_bytes(r, "amax", 4),
                                   .x = new_values(r, r->c->master, n),
                                   .dtype = r->c->master,
                                   .n = n};
    NBI_TRY(r->rc);
    return r->be->amax(r->s, &op);
}

static enum nb_status draw(struct nbi_kernel_run *r)
{
    int64_t n = r->elements > 0 ? r->elements : r->shape[0];
    const int64_t bytes = (int64_t)nbi_dtype_bytes(r->c->master, n);
    const struct nbi_op_draw op = {.out = nbi_run_out_bytes(r, "values", bytes),
                                   .dtype = r->c->master,
                                   .n = n,
                                   .deviation = 0.02f,
                                   .seed = 0x123456789,
                                   .stream = 7};
    NBI_TRY(r->rc);
    return r->be->draw(r->s, &op);
}

/* ---- requantize ---- */

/* A weight that is made from the master. */
static struct nbi_weight weight_of(struct nbi_kernel_run *r, struct nbi_ptr master, int64_t O,
                                   int64_t K)
{
    struct nbi_weight w = nbi_run_weight_alloc(r, r->c->dtype, O, K);
    if (r->c->dtype == NBI_NVFP4)
        w.tensor_scale = 0x1p-9f;
    if (r->c->store == NB_WEIGHT_STORE_SCALES) {
        w.master = master;
        w.master_dtype = r->c->master;
    }
    return w;
}

static enum nb_status requantize(struct nbi_kernel_run *r)
{
    int64_t K = r->shape[1], O = max(r->elements / K, r->shape[0]);
    struct nbi_ptr master = new_values(r, r->c->master, O * K);
    const struct nbi_op_requantize op = {.w = weight_of(r, master, O, K),
                                         .master = master,
                                         .dtype = r->c->master,
                                         .round_to =
                                             r->c->dtype == NBI_NVFP4 ? NBI_BF16 : r->c->dtype};
    NBI_TRY(r->rc);
    NBI_TRY(r->be->requantize(r->s, &op));
    return read_weight(r, &op.w);
}

/* ---- AdamW ---- */

static struct nbi_moment new_moment(struct nbi_kernel_run *r, const char *values_name,
                                    const char *scales_name, int64_t n)
{
    int64_t scales, values = nbi_moment_bytes(r->c->moment, n, &scales);
    struct nbi_moment m = {.kind = r->c->moment, .values = nbi_run_zeros(r, values)};
    nbi_run_result(r, values_name, m.values, NBI_U8, 1, values, 0);
    if (scales > 0) {
        m.scales = nbi_run_zeros(r, scales);
        nbi_run_result(r, scales_name, m.scales, NBI_U8, 1, scales, 0);
    }
    return m;
}

/* A step: a gradient, its statistics, the plan and the update, in two pieces. */
static enum nb_status one_step(struct nbi_kernel_run *r, struct nbi_op_adamw *a,
                               const struct nbi_op_update_plan *plan, int64_t O, int64_t K)
{
    const int64_t ends[] = {O / 64 * 32 * K, O * K};
    a->step++;
    a->correct1 = (float)(1 - pow(0.9, a->step));
    a->correct2 = (float)(1 - pow(0.99, a->step));
    NBI_TRY(refill(r, a->grad, r->c->grad, O * K));
    NBI_TRY(r->be->grad_stats(
        r->s, &(struct nbi_op_grad_stats){
                  .record = a->record, .grad = a->grad, .n = O * K, .bf16 = a->grad_bf16}));
    NBI_TRY(r->be->update_plan(r->s, plan));
    a->first = 0;
    for (int i = 0; i < 2; i++) {
        a->count = ends[i] - a->first;
        if (a->count > 0)
            NBI_TRY(r->be->adamw(r->s, a));
        a->first = ends[i];
    }
    return NB_OK;
}

/* With a `dtype` of NVFP4 the weight is made in the same pass. */
static enum nb_status adamw(struct nbi_kernel_run *r)
{
    int64_t K = r->shape[1], O = max(r->elements / K, r->shape[0]), n = O * K;
    const int32_t first = 0;
    struct nbi_op_adamw a = {.control =
                                 nbi_run_zeros(r, (int64_t)sizeof(struct nbi_update_control)),
                             .record = nbi_run_zeros(r, (int64_t)sizeof(struct nbi_update_record)),
                             .master = new_values(r, r->c->master, n),
                             .dtype = r->c->master,
                             .grad = nbi_run_zeros(r, n * 4),
                             .grad_bf16 = r->c->grad == NBI_BF16,
                             .m = new_moment(r, "m", "scales of m", n),
                             .v = new_moment(r, "v", "scales of v", n),
                             .lr = 3e-3f,
                             .beta1 = 0.9f,
                             .beta2 = 0.99f,
                             .eps = 1e-8f,
                             .decay = 0.1f,
                             .max_update = 5,
                             .seed = 0x123456789ABCDEFu,
                             .tensor = 7,
                             .round_to = NBI_BF16};
    const struct nbi_op_update_plan plan = {.control = a.control,
                                            .records = a.record,
                                            .tensors = nbi_run_ints(r, &first, 1),
                                            .count = 1,
                                            .clip = 0.7f,
                                            .beta1 = a.beta1,
                                            .beta2 = a.beta2};
    nbi_run_result(r, "master", a.master, NBI_U8, 1, (int64_t)nbi_dtype_bytes(r->c->master, n), 0);
    nbi_run_result(r, "record", a.record, NBI_U8, 1, (int64_t)sizeof(struct nbi_update_record), 0);
    nbi_run_result(r, "control", a.control, NBI_U8, 1, (int64_t)sizeof(struct nbi_update_control),
                   0);
    if (r->c->add)
        a.w = weight_of(r, a.master, O, K);
    NBI_TRY(r->rc);
    for (int i = 0; i < STEPS; i++)
        NBI_TRY(one_step(r, &a, &plan, O, K));
    return r->c->add ? read_weight(r, &a.w) : NB_OK;
}

/* Statistics of several tensors, one of them with an infinity: the update is skipped. */
static enum nb_status update_plan(struct nbi_kernel_run *r)
{
    int64_t n = r->shape[0], records = TENSORS * (int64_t)sizeof(struct nbi_update_record);
    const int32_t order[TENSORS] = {2, 0, 1};
    const struct nbi_op_update_plan op = {
        .control = nbi_run_zeros(r, (int64_t)sizeof(struct nbi_update_control)),
        .records = nbi_run_zeros(r, records),
        .tensors = nbi_run_ints(r, order, TENSORS),
        .count = TENSORS,
        .clip = 1,
        .beta1 = 0.9f,
        .beta2 = 0.999f};
    nbi_run_result(r, "records", op.records, NBI_U8, 1, records, 0);
    nbi_run_result(r, "control", op.control, NBI_U8, 1, (int64_t)sizeof(struct nbi_update_control),
                   0);
    for (int i = 0; i < TENSORS; i++) {
        const float bad = INFINITY;
        const struct nbi_op_grad_stats stats = {
            .record = nbi_ptr_add(op.records, i * (int64_t)sizeof(struct nbi_update_record)),
            .grad = new_values(r, NBI_F32, n),
            .n = n};
        NBI_TRY(r->rc);
        if (i == 1 && r->c->add)
            NBI_TRY(r->be->upload(r->s, stats.grad, &bad, sizeof bad));
        NBI_TRY(r->be->grad_stats(r->s, &stats));
    }
    return r->be->update_plan(r->s, &op);
}

/* ---- the table ---- */

#define BITS .exact = true, .training = true, .caps = NBI_CAP_TRAIN

/* Both masters with both gradients, of one kind of moment. */
#define ADAMW(name, kind)                                                                          \
    {"adamw",        name ", f32 master", adamw,          NBI_SHAPES(update_shapes), BITS,         \
     .moment = kind, .master = NBI_F32,   .grad = NBI_F32},                                        \
        {"adamw",        name ", bf16 master", adamw,          NBI_SHAPES(update_shapes), BITS,    \
         .moment = kind, .master = NBI_BF16,   .grad = NBI_F32},                                   \
        {"adamw",                                                                                  \
         name ", bf16 master, bf16 gradient",                                                      \
         adamw,                                                                                    \
         NBI_SHAPES(update_shapes),                                                                \
         BITS,                                                                                     \
         .moment = kind,                                                                           \
         .master = NBI_BF16,                                                                       \
         .grad = NBI_BF16},                                                                        \
        {"adamw",                                                                                  \
         name ", f32 master, nvfp4 weight",                                                        \
         adamw,                                                                                    \
         NBI_SHAPES(update_shapes),                                                                \
         BITS,                                                                                     \
         .moment = kind,                                                                           \
         .master = NBI_F32,                                                                        \
         .grad = NBI_BF16,                                                                         \
         .add = true,                                                                              \
         .dtype = NBI_NVFP4},                                                                      \
    {                                                                                              \
        "adamw", name ", bf16 master, nvfp4 weight and copy", adamw, NBI_SHAPES(update_shapes),    \
            BITS, .moment = kind, .master = NBI_BF16, .grad = NBI_F32, .add = true,                \
                  .store = NB_WEIGHT_STORE_BF16, .dtype = NBI_NVFP4                                \
    }

static const struct nbi_kernel_case cases[] = {
    {"grad_stats", "f32", grad_stats, NBI_SHAPES(vector_shapes), BITS, .grad = NBI_F32},
    {"grad_stats", "bf16", grad_stats, NBI_SHAPES(vector_shapes), BITS, .grad = NBI_BF16},
    {"grad_stats", "f32, not finite", grad_stats, NBI_SHAPES(vector_shapes), BITS, .grad = NBI_F32,
     .add = true},
    {"update_plan", "finite", update_plan, NBI_SHAPES(vector_shapes), BITS},
    {"update_plan", "not finite", update_plan, NBI_SHAPES(vector_shapes), BITS, .add = true},
    {"amax", "f32", amax, NBI_SHAPES(vector_shapes), BITS, .master = NBI_F32},
    {"amax", "bf16", amax, NBI_SHAPES(vector_shapes), BITS, .master = NBI_BF16},
    {"draw", "f32", draw, NBI_SHAPES(vector_shapes), BITS, .master = NBI_F32},
    {"draw", "bf16", draw, NBI_SHAPES(vector_shapes), BITS, .master = NBI_BF16},
    {"requantize", "nvfp4 of f32", requantize, NBI_SHAPES(update_shapes), BITS, .dtype = NBI_NVFP4,
     .master = NBI_F32},
    {"requantize", "nvfp4 and copy of bf16", requantize, NBI_SHAPES(update_shapes), BITS,
     .dtype = NBI_NVFP4, .master = NBI_BF16, .store = NB_WEIGHT_STORE_BF16},
    {"requantize", "nvfp4 scales of f32", requantize, NBI_SHAPES(update_shapes), BITS,
     .dtype = NBI_NVFP4, .master = NBI_F32, .store = NB_WEIGHT_STORE_SCALES},
    {"requantize", "bf16 of f32", requantize, NBI_SHAPES(update_shapes), BITS, .dtype = NBI_BF16,
     .master = NBI_F32},
    {"requantize", "f16 of bf16", requantize, NBI_SHAPES(update_shapes), BITS, .dtype = NBI_F16,
     .master = NBI_BF16},
    ADAMW("f32 moments", NB_MOMENT_F32),
    ADAMW("bf16 moments", NB_MOMENT_BF16),
    ADAMW("int8 moments", NB_MOMENT_INT8),
    ADAMW("nvfp4 moments", NB_MOMENT_NVFP4),
    {"adamw", "int8 moments, bf16 master, nvfp4 scales", adamw, NBI_SHAPES(update_shapes), BITS,
     .moment = NB_MOMENT_INT8, .master = NBI_BF16, .grad = NBI_BF16, .add = true,
     .dtype = NBI_NVFP4, .store = NB_WEIGHT_STORE_SCALES},
};

const struct nbi_kernel_cases nbi_cases_optimizer = {cases, NBI_COUNT_OF(cases)};
