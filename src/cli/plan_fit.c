/* plan_fit.c - settings that fit, as options to copy. */
#include "cli/plan_fit.h"

#include "base/str.h"

#define MOST 10

static const char *const moment_types[] = {NB_MOMENT_TYPE_LIST(NB_ENUM_NAME)};

static json_t *fit_json(const struct nb_train_fit *f)
{
    return json_pack("{s:I,s:s,s:s,s:s,s:b,s:I,s:I}", "total", (json_int_t)f->total, "recompute",
                     f->recompute ? "block" : "none", "optimizer_state_mode",
                     moment_types[f->moment_type], "master_dtype", f->bf16_master ? "bf16" : "f32",
                     "fused_step", f->fused_step, "batch_size", (json_int_t)f->batch_size,
                     "grad_accum", (json_int_t)f->grad_accum);
}

static void print_fit(FILE *out, const struct nb_train_fit *f)
{
    fprintf(out,
            "--recompute %s --optimizer-state-mode %s --master-dtype %s --batch-size %lld "
            "--grad-accum %lld%s\n",
            f->recompute ? "block" : "none", moment_types[f->moment_type],
            f->bf16_master ? "bf16" : "f32", (long long)f->batch_size, (long long)f->grad_accum,
            f->fused_step ? " --fused-step" : "");
}

struct fits {
    struct nb_train_fit list[MOST], smallest;
    int count;
};

static enum nb_status find_fits(struct fits *f, const struct nb_train_opts *opts, double gib)
{
    f->count = MOST;
    return nb_train_fit(opts, (int64_t)(gib * 0x1p30), f->list, &f->count, &f->smallest);
}

int cli_plan_fit_json(const struct nb_train_opts *opts, double gib, json_t *plan)
{
    struct fits f;
    bool ok = true;
    enum nb_status rc = find_fits(&f, opts, gib);
    if (rc != NB_OK) {
        json_decref(plan);
        return cli_status(rc);
    }
    json_t *list = json_array();
    for (int i = 0; i < f.count; i++)
        nbi_json_append(list, fit_json(&f.list[i]), &ok);
    nbi_json_set(plan, "fits", list, &ok);
    nbi_json_set(plan, "smallest", fit_json(&f.smallest), &ok);
    int code = cli_print_json(plan, ok);
    return code || f.count > 0 ? code : CLI_EXIT_FAILED;
}

int cli_plan_fit(const struct nb_train_opts *opts, double gib)
{
    struct fits f;
    char text[32];
    enum nb_status rc = find_fits(&f, opts, gib);
    if (rc != NB_OK)
        return cli_status(rc);
    if (f.count == 0) {
        fflush(stdout);
        fprintf(stderr, "nibble: nothing fits %g GiB; the smallest takes %s: ", gib,
                nbi_format_bytes(text, (double)f.smallest.total));
        print_fit(stderr, &f.smallest);
        return CLI_EXIT_FAILED;
    }
    printf("\nwhat fits %g GiB, the fastest first, then the most precise:\n", gib);
    for (int i = 0; i < f.count; i++) {
        printf("%12s  ", nbi_format_bytes(text, (double)f.list[i].total));
        print_fit(stdout, &f.list[i]);
    }
    return 0;
}
