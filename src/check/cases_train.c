/* cases_train.c - losses, and gradients of what works row by row. */
#include <math.h>

#include "backend/ops_train.h"
#include "check/kernel_cases.h"

#define ROWS_MAX 256
#define REF_MAX  8

/* ---- losses ---- */

static const char loss_shapes_letters[] = "N V";
static const int64_t loss_shapes[][NBI_CASE_DIMS] = {{1, 64}, {5, 333}, {9, 4096}};

/* Targets of N rows of V logits, and a reference model's probabilities. */
struct loss_inputs {
    int32_t targets[ROWS_MAX], ids[ROWS_MAX * REF_MAX];
    float p[ROWS_MAX * REF_MAX];
};

/* Every third row has no target, and the last row no reference. */
static void draw_loss(struct nbi_kernel_run *r, struct loss_inputs *x, int64_t N, int64_t V)
{
    for (int64_t n = 0; n < N; n++) {
        x->targets[n] = n % 3 == 2 ? -1 : (int32_t)(nbi_run_bits(r) % (uint32_t)V);
        for (int64_t k = 0; k < REF_MAX; k++) {
            x->ids[n * REF_MAX + k] = n > 0 && n == N - 1 ? -1 : (int32_t)((n * 31 + k * 7) % V);
            x->p[n * REF_MAX + k] = ldexpf(0.9f, -1 - (int)k);
        }
    }
}

/* With `add` also the divergence from a reference, and a weight for each row. */
static struct nbi_op_xent new_xent(struct nbi_kernel_run *r, struct nbi_ptr logits)
{
    int64_t N = r->shape[0], V = r->shape[1];
    struct loss_inputs x;
    draw_loss(r, &x, N, V);
    struct nbi_op_xent op = {.loss = nbi_run_out_floats(r, "loss", N),
                             .logits = logits,
                             .targets = nbi_run_ints(r, x.targets, N),
                             .scale = 0.125f,
                             .N = N,
                             .V = V,
                             .bf16 = nbi_run_acts(r) == NBI_BF16};
    if (r->c->add) {
        op.kl = nbi_run_out_floats(r, "kl", N);
        op.ref_ids = nbi_run_ints(r, x.ids, N * REF_MAX);
        op.ref_p = nbi_run_bytes(r, x.p, N * REF_MAX * (int64_t)sizeof *x.p);
        op.kl_scale = 0.25f;
        op.ref_k = REF_MAX;
        op.weight = nbi_run_floats(r, N, 1);
    }
    return op;
}

/* dlogits replace the logits. */
static enum nb_status xent(struct nbi_kernel_run *r)
{
    struct nbi_op_xent op = new_xent(r, nbi_run_rows(r, r->shape[0], r->shape[1], 0, 6));
    op.dlogits = op.logits;
    nbi_run_result(r, "dlogits", op.dlogits, nbi_run_acts(r), op.N, op.V, 0);
    NBI_TRY(r->rc);
    return r->be->xent(r->s, &op);
}

/* The gradient of the middle half of the ids, after a loss over all of them. */
static enum nb_status xent_slice(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], V = r->shape[1], first = V / 4, count = V / 2;
    struct nbi_op_xent op = new_xent(r, nbi_run_rows(r, N, V, 0, 6));
    struct nbi_ptr slice = nbi_run_rows(r, N, count, 0, 0);
    int64_t size = (int64_t)nbi_dtype_bytes(nbi_run_acts(r), 1);
    nbi_run_result(r, "dlogits", slice, nbi_run_acts(r), N, count, 0);
    op.kept = nbi_run_zeros(r, N * (int64_t)sizeof(struct nbi_xent_kept));
    NBI_TRY(r->rc);
    for (int64_t n = 0; n < N; n++)
        NBI_TRY(r->be->copy(r->s, nbi_ptr_add(slice, n * count * size),
                            nbi_ptr_add(op.logits, (n * V + first) * size), count * size));
    NBI_TRY(r->be->xent(r->s, &op));
    return r->be->xent_slice(r->s, &(struct nbi_op_xent_slice){.dlogits = slice,
                                                               .logits = slice,
                                                               .targets = op.targets,
                                                               .kept = op.kept,
                                                               .scale = op.scale,
                                                               .ref_ids = op.ref_ids,
                                                               .ref_p = op.ref_p,
                                                               .kl_scale = op.kl_scale,
                                                               .weight = op.weight,
                                                               .ref_k = op.ref_k,
                                                               .N = N,
                                                               .first = first,
                                                               .count = count,
                                                               .bf16 = op.bf16});
}

static enum nb_status l1(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], C = r->shape[1];
    float weight[ROWS_MAX];
    for (int64_t n = 0; n < N; n++)
        weight[n] = n % 4 != 3;
    const struct nbi_op_l1 op = {.loss = nbi_run_out_floats(r, "loss", N),
                                 .dx = nbi_run_out_rows(r, "dx", N, C, 0),
                                 .x = nbi_run_rows(r, N, C, 0, 2),
                                 .target = nbi_run_rows(r, N, C, 0, 2),
                                 .weight = nbi_run_bytes(r, weight, N * (int64_t)sizeof *weight),
                                 .scale = 0.5f,
                                 .N = N,
                                 .C = C,
                                 .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->l1(r->s, &op);
}

/* ---- gradients ---- */

static const char embed_shapes_letters[] = "N C V";
static const int64_t embed_shapes[][NBI_CASE_DIMS] = {{1, 64, 7}, {50, 333, 9}, {200, 64, 50}};

/* As many as `elements` asks for, up to what the stream is for. */
static int64_t columns_of(const struct nbi_kernel_run *r)
{
    int64_t C = r->elements / r->shape[0];
    return C > 4096 ? 4096 : C > r->shape[1] ? C : r->shape[1];
}

/* Many rows of the same id, which are added in order: the bits are defined. With `add` only for the
 * last two thirds of the ids. */
static enum nb_status embed_bwd(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], V = r->shape[2], C = columns_of(r), at = 0;
    int32_t ids[ROWS_MAX], order[ROWS_MAX];
    for (int64_t n = 0; n < N; n++)
        ids[n] =
            nbi_run_bits(r) % 3 == 0 ? (int32_t)(V - 1) : (int32_t)(nbi_run_bits(r) % (uint32_t)V);
    for (int32_t id = 0; id < V; id++)
        for (int32_t n = 0; n < N; n++)
            if (ids[n] == id)
                order[at++] = n;
    int64_t first = r->c->add ? V / 3 : 0, count = r->c->add ? V - first : 0;
    const struct nbi_op_embed_bwd op = {.dtable = nbi_run_floats(r, (V - first) * C, 1),
                                        .first = first,
                                        .count = count,
                                        .ids = nbi_run_ints(r, ids, N),
                                        .order = nbi_run_ints(r, order, N),
                                        .dx = nbi_run_rows(r, N, C, 0, 1),
                                        .N = N,
                                        .C = C,
                                        .bf16 = nbi_run_acts(r) == NBI_BF16};
    nbi_run_result(r, "dtable", op.dtable, NBI_F32, V - first, C, 0);
    NBI_TRY(r->rc);
    return r->be->embed_bwd(r->s, &op);
}

static const char norm_shapes_letters[] = "N C";
static const int64_t norm_shapes[][NBI_CASE_DIMS] = {{1, 64}, {5, 333}, {70, 1024}};

static enum nb_status rmsnorm_bwd(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], C = r->shape[1];
    const struct nbi_weight w = nbi_run_weight(r, NBI_F32, C, 0);
    const struct nbi_op_rmsnorm forward = {.y = nbi_run_rows(r, N, C, 0, 0),
                                           .rstd = nbi_run_floats(r, N, 0),
                                           .x = nbi_run_rows(r, N, C, 0, 3),
                                           .w = w,
                                           .eps = 1e-6f,
                                           .N = N,
                                           .C = C,
                                           .bf16 = nbi_run_acts(r) == NBI_BF16};
    const struct nbi_op_rmsnorm_bwd op = {.dx = nbi_run_rows(r, N, C, 0, 1),
                                          .dw = nbi_run_floats(r, C, 1),
                                          .dy = nbi_run_rows(r, N, C, 0, 1),
                                          .x = forward.x,
                                          .rstd = forward.rstd,
                                          .w = w,
                                          .N = N,
                                          .C = C,
                                          .bf16 = forward.bf16};
    nbi_run_result(r, "dx", op.dx, nbi_run_acts(r), N, C, 0);
    nbi_run_result(r, "dw", op.dw, NBI_F32, 1, C, 0);
    NBI_TRY(r->rc);
    NBI_TRY(r->be->rmsnorm(r->s, &forward));
    return r->be->rmsnorm_bwd(r->s, &op);
}

static const char heads_shapes_letters[] = "N NH NKV D";
static const int64_t heads_shapes[][NBI_CASE_DIMS] = {
    {1, 4, 2, 128}, {5, 3, 1, 24}, {70, 8, 2, 64}, {9, 2, 2, 80}};

static enum nb_status qkv_rope_bwd(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], NH = r->shape[1], NKV = r->shape[2], D = r->shape[3],
            ld = r->c->strided ? (NH + NKV) * D + 8 : 0;
    const struct nbi_op_qkv_rope_bwd op = {.dq = nbi_run_rows(r, N, NH * D, ld, 1),
                                           .dk = nbi_run_rows(r, N, NKV * D, ld, 1),
                                           .dq_norm = nbi_run_floats(r, D, 1),
                                           .dk_norm = nbi_run_floats(r, D, 1),
                                           .q = nbi_run_rows(r, N, NH * D, ld, 3),
                                           .k = nbi_run_rows(r, N, NKV * D, ld, 3),
                                           .rstd_q = nbi_run_floats(r, N * NH, 1),
                                           .rstd_k = nbi_run_floats(r, N * NKV, 1),
                                           .q_norm = nbi_run_weight(r, NBI_F32, D, 0),
                                           .k_norm = nbi_run_weight(r, NBI_F32, D, 0),
                                           .cos = nbi_run_floats(r, N * D / 2, 1),
                                           .sin = nbi_run_floats(r, N * D / 2, 1),
                                           .N = N,
                                           .NH = NH,
                                           .NKV = NKV,
                                           .D = D,
                                           .ld = ld,
                                           .bf16 = nbi_run_acts(r) == NBI_BF16};
    nbi_run_result(r, "dq", op.dq, nbi_run_acts(r), N, NH * D, ld);
    nbi_run_result(r, "dk", op.dk, nbi_run_acts(r), N, NKV * D, ld);
    nbi_run_result(r, "dq_norm", op.dq_norm, NBI_F32, 1, D, 0);
    nbi_run_result(r, "dk_norm", op.dk_norm, NBI_F32, 1, D, 0);
    NBI_TRY(r->rc);
    return r->be->qkv_rope_bwd(r->s, &op);
}

static const char swiglu_shapes_letters[] = "N F";
static const int64_t swiglu_shapes[][NBI_CASE_DIMS] = {{1, 96}, {5, 333}, {33, 544}};

static enum nb_status swiglu_bwd(struct nbi_kernel_run *r)
{
    int64_t N = r->shape[0], F = r->shape[1], ld = r->c->strided ? 2 * F + 8 : 0;
    const struct nbi_op_swiglu_bwd op = {.dgate = nbi_run_out_rows(r, "dgate", N, F, ld),
                                         .dup = nbi_run_out_rows(r, "dup", N, F, ld),
                                         .dy = nbi_run_rows(r, N, F, 0, 1),
                                         .gate = nbi_run_rows(r, N, F, ld, 6),
                                         .up = nbi_run_rows(r, N, F, ld, 2),
                                         .N = N,
                                         .F = F,
                                         .ld = ld,
                                         .bf16 = nbi_run_acts(r) == NBI_BF16};
    NBI_TRY(r->rc);
    return r->be->swiglu_bwd(r->s, &op);
}

/* ---- the table ---- */

static const struct nbi_kernel_case cases[] = {
    {"xent", "f32", xent, NBI_SHAPES(loss_shapes), NBI_TRAINING},
    {"xent", "f32, reference", xent, NBI_SHAPES(loss_shapes), .add = true, NBI_TRAINING},
    {"xent", "bf16", xent, NBI_SHAPES(loss_shapes), NBI_TRAIN_BF16},
    {"xent", "bf16, reference", xent, NBI_SHAPES(loss_shapes), .add = true, NBI_TRAIN_BF16},
    {"xent_slice", "f32", xent_slice, NBI_SHAPES(loss_shapes), NBI_TRAINING},
    {"xent_slice", "f32, reference", xent_slice, NBI_SHAPES(loss_shapes), .add = true,
     NBI_TRAINING},
    {"xent_slice", "bf16, reference", xent_slice, NBI_SHAPES(loss_shapes), .add = true,
     NBI_TRAIN_BF16},
    {"l1", "f32", l1, NBI_SHAPES(norm_shapes), NBI_TRAINING},
    {"l1", "bf16", l1, NBI_SHAPES(norm_shapes), NBI_TRAIN_BF16},
    {"embed_bwd", "f32", embed_bwd, NBI_SHAPES(embed_shapes), .exact = true, NBI_TRAINING},
    {"embed_bwd", "bf16", embed_bwd, NBI_SHAPES(embed_shapes), .exact = true, NBI_TRAIN_BF16},
    {"embed_bwd", "bf16, some ids", embed_bwd, NBI_SHAPES(embed_shapes), .exact = true, .add = true,
     NBI_TRAIN_BF16},
    {"rmsnorm_bwd", "f32", rmsnorm_bwd, NBI_SHAPES(norm_shapes), NBI_TRAINING},
    {"rmsnorm_bwd", "bf16", rmsnorm_bwd, NBI_SHAPES(norm_shapes), NBI_TRAIN_BF16},
    {"qkv_rope_bwd", "f32", qkv_rope_bwd, NBI_SHAPES(heads_shapes), NBI_TRAINING},
    {"qkv_rope_bwd", "bf16", qkv_rope_bwd, NBI_SHAPES(heads_shapes), NBI_TRAIN_BF16},
    {"qkv_rope_bwd", "bf16, rows apart", qkv_rope_bwd, NBI_SHAPES(heads_shapes), .strided = true,
     NBI_TRAIN_BF16},
    {"swiglu_bwd", "f32", swiglu_bwd, NBI_SHAPES(swiglu_shapes), NBI_TRAINING},
    {"swiglu_bwd", "bf16", swiglu_bwd, NBI_SHAPES(swiglu_shapes), NBI_TRAIN_BF16},
    {"swiglu_bwd", "bf16, rows apart", swiglu_bwd, NBI_SHAPES(swiglu_shapes), .strided = true,
     NBI_TRAIN_BF16},
};

const struct nbi_kernel_cases nbi_cases_train = {cases, NBI_COUNT_OF(cases)};
