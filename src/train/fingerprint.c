/* fingerprint.c - checksums of what a resumed run depends on and its checkpoint does not hold: the
 * model's config and types, parameters that are not trained, the reference of --kl-base, held-out
 * data. */
#include <string.h>

#include "base/crc.h"
#include "train/run.h"

#define CHUNK ((int64_t)1 << 18) /* elements per read */

static enum nb_status add_config(uint32_t *sum, const struct nbi_config *c)
{
    json_t *j = NULL;
    NBI_TRY(nbi_config_to_json(c, &j));
    char *text;
    enum nb_status rc = nbi_json_dump(j, JSON_SORT_KEYS | JSON_COMPACT, &text);
    json_decref(j);
    NBI_TRY(rc);
    *sum = nbi_crc32c(*sum, text, strlen(text));
    free(text);
    return NB_OK;
}

/* The types a parameter is computed with and written in. */
static void add_types(uint32_t *sum, const struct nbi_train_param *x)
{
    const int32_t v[] = {x->trained, (int32_t)x->dtype, (int32_t)x->float_type,
                         (int32_t)x->weight->dtype};
    *sum = nbi_crc32c(*sum, v, sizeof v);
}

/* The bits of a weight as the forward pass uses it. */
static enum nb_status add_weight(uint32_t *sum, struct nbi_run *r, const struct nbi_train_param *x)
{
    const struct nbi_weight *w = x->weight;
    bool quantized = w->dtype == NBI_NVFP4;
    int64_t cols = x->param.ndim == 2 ? x->param.shape[1] : 1, rows = x->count / cols;
    int64_t step = CHUNK / cols > 0 ? CHUNK / cols : 1;
    uint8_t *buf = malloc((size_t)(step * cols * 4)); /* f32 is the largest type */
    enum nb_status rc = buf ? NB_OK : nbi_fail_memory(x->param.name, (size_t)(step * cols * 4));
    for (int64_t i = 0; i < rows && rc == NB_OK; i += step) {
        int64_t n = rows - i < step ? rows - i : step, count = n * cols;
        size_t bytes =
            quantized ? (size_t)(count / 2 + count / 16) : (size_t)nbi_dtype_bytes(w->dtype, count);
        rc = r->be->weight_read(r->be, w, i, n, buf, quantized ? buf + count / 2 : NULL);
        if (rc == NB_OK)
            *sum = nbi_crc32c(*sum, buf, bytes);
    }
    *sum = nbi_crc32c(*sum, &w->tensor_scale, sizeof w->tensor_scale);
    free(buf);
    return rc;
}

static enum nb_status add_master(uint32_t *sum, struct nbi_run *r, const struct nbi_train_param *x)
{
    int64_t bytes = (int64_t)nbi_dtype_bytes(x->dtype, x->count), step = CHUNK * 4;
    uint8_t *buf = malloc((size_t)step);
    enum nb_status rc = buf ? NB_OK : nbi_fail_memory(x->param.name, (size_t)step);
    for (int64_t i = 0; i < bytes && rc == NB_OK; i += step) {
        int64_t n = bytes - i < step ? bytes - i : step;
        rc = r->be->download(r->stream, buf, nbi_ptr_add(x->master, i), n);
        if (rc == NB_OK)
            rc = r->be->sync(r->stream);
        if (rc == NB_OK)
            *sum = nbi_crc32c(*sum, buf, (size_t)n);
    }
    free(buf);
    return rc;
}

/* Only with --stop-if-ppl-rises do evaluations affect the run. */
static void add_held_out(uint32_t *sum, const struct nbi_eval_set *set)
{
    const uint32_t samples = set->data ? nbi_dataset_stats(set->data)->crc : 0;
    *sum = nbi_crc32c(0, &samples, sizeof samples);
    for (int i = 0; i < set->text_count; i++)
        *sum = nbi_crc32c(*sum, set->texts[i].ids,
                          (size_t)set->texts[i].count * sizeof *set->texts[i].ids);
}

enum nb_status nbi_run_fingerprint(struct nbi_run *r)
{
    struct nbi_fingerprint *s = &r->fingerprint;
    *s = (struct nbi_fingerprint){0};
    NBI_TRY(r->be->sync(r->stream));
    NBI_TRY(add_config(&s->model, &r->config));
    for (int64_t i = 0; i < r->params.count; i++) {
        const struct nbi_train_param *x = &r->params.tensors[i];
        add_types(&s->model, x);
        if (!x->trained)
            NBI_TRY(add_weight(&s->frozen, r, x));
        else if (r->opts->kl_base > 0 && !x->tied_to)
            NBI_TRY(add_master(&s->model, r, x));
        NBI_TRY(nbi_check_interrupt());
    }
    if (r->opts->stop_if_ppl_rises > 0)
        add_held_out(&s->eval, &r->eval);
    return NB_OK;
}
