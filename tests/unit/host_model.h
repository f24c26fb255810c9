/* host_model.h - a random model on the host, for tests of whole passes. */
#pragma once

#include "backend/backend.h"
#include "model/execute.h"
#include "support.h"

#include "host_weights.h"

#define MAX_PARAMS 128

struct model {
    struct nbi_config c;
    struct host_weight params[MAX_PARAMS];
    int64_t count;
    bool own_head;  /* the model has a head even if the config ties it */
    bool no_lookup; /* the embedding is loaded without nbi_weight_source.lookup */
};

static inline void fill_param(struct host_weight *w, const struct nbi_param *p, bool fp4)
{
    static const enum nbi_dtype floats[] = {NBI_BF16, NBI_F16, NBI_F32};
    bool projection = nbi_param_is_projection(p->name, p->ndim);
    if (fp4 && p->ndim == 2 && strcmp(p->name, "model.embed_tokens.weight") != 0) {
        host_weight_new(w, NBI_NVFP4, p->shape[0], p->shape[1]);
        return;
    }
    int64_t cols = p->ndim == 2 ? p->shape[1] : 0;
    enum nbi_dtype dtype =
        projection && cols % 16 == 0 && bits32() % 3 != 0 ? NBI_NVFP4 : floats[bits32() % 3];
    host_weight_new(w, dtype, p->shape[0], cols);
}

struct shape {
    int64_t C, F, L, NH, NKV, D, V;
    bool tied, own_head;
    bool fp4; /* all matrices but the embedding are NVFP4 */
};

static inline void model_new(struct model *m, const struct shape *s)
{
    *m = (struct model){.own_head = s->own_head};
    m->c = (struct nbi_config){.vocab_size = s->V,
                               .hidden_size = s->C,
                               .intermediate_size = s->F,
                               .layers = s->L,
                               .heads = s->NH,
                               .kv_heads = s->NKV,
                               .head_dim = s->D,
                               .max_position = 40960,
                               .rms_eps = 1e-6,
                               .rope_theta = 1e4,
                               .tied = s->tied};
    m->count = nbi_param_count(&m->c) + (s->tied && s->own_head);
    assert_true(m->count <= MAX_PARAMS);
    for (int64_t i = 0; i < m->count; i++) {
        struct nbi_param p;
        nbi_param_at(&m->c, i, &p);
        fill_param(&m->params[i], &p, s->fp4);
    }
}

static inline void model_free(struct model *m)
{
    for (int64_t i = 0; i < m->count; i++)
        host_weight_free(&m->params[i]);
}

static inline const struct host_weight *find(const struct model *m, int64_t layer, const char *name)
{
    char full[128];
    snprintf(full, sizeof full, layer < 0 ? "%.0d%s" : "model.layers.%d.%s",
             layer < 0 ? 0 : (int)layer, name);
    struct nbi_param p;
    assert_true(nbi_param_find(&m->c, full, &p));
    assert_in_range(p.index, 0, m->count - 1);
    return &m->params[p.index];
}

static inline enum nb_status take_host(void *ctx, struct nbi_backend *be, const struct nbi_param *p,
                                       struct nbi_weight *out)
{
    struct model *m = ctx;
    if (p->index >= m->count)
        return NB_ENOTFOUND;
    struct host_weight *w = &m->params[p->index];
    struct nbi_weight_source src = source_of(w);
    src.lookup = p->def->flags & NBI_GATHER && m->own_head && !m->no_lookup;
    return be->weight_new(be, &src, out);
}

static inline struct nbi_backend *cpu(enum nbi_simd level, int threads)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){"cpu", threads, level}));
    return be;
}

static inline struct nbi_backend *cuda(void)
{
    struct nbi_backend *be;
    assert_ok(nbi_backend_open(&be, &(struct nbi_backend_opts){.device = "cuda"}));
    return be;
}
