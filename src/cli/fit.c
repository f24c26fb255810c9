/* fit.c - settings of a training run that fit into a given amount of memory. */
#include "cli/fit.h"

#include <string.h>

#include "base/str.h"

static const char *const moment_types[] = {NB_MOMENT_TYPE_LIST(NB_ENUM_NAME)};
static const char *const stores[] = {NB_WEIGHT_STORE_LIST(NB_ENUM_NAME)};

const char *cli_fit_text(char text[CLI_FIT_TEXT], const struct nb_train_fit *f)
{
    bool store = f->weight_store != NB_WEIGHT_STORE_AUTO;
    snprintf(text, CLI_FIT_TEXT,
             "--recompute %s --optimizer-state-mode %s --master-dtype %s --batch-size %lld "
             "--grad-accum %lld%s%s%s%s%s",
             f->recompute ? "block" : "none", moment_types[f->moment_type],
             f->bf16_master ? "bf16" : "f32", (long long)f->batch_size, (long long)f->grad_accum,
             store ? " --weight-store " : "", store ? stores[f->weight_store] : "",
             f->bf16_gradients ? " --grad-dtype bf16" : "", f->fused_step ? " --fused-step" : "",
             f->head_slices ? " --head-slices" : "");
    return text;
}

json_t *cli_fit_json(const struct nb_train_fit *f)
{
    return json_pack("{s:I,s:s,s:s,s:s,s:s,s:s,s:b,s:b,s:I,s:I}", "total", (json_int_t)f->total,
                     "recompute", f->recompute ? "block" : "none", "optimizer_state_mode",
                     moment_types[f->moment_type], "master_dtype", f->bf16_master ? "bf16" : "f32",
                     "weight_store", stores[f->weight_store], "grad_dtype",
                     f->bf16_gradients ? "bf16" : "f32", "fused_step", f->fused_step, "head_slices",
                     f->head_slices, "batch_size", (json_int_t)f->batch_size, "grad_accum",
                     (json_int_t)f->grad_accum);
}

void cli_nothing_fits(double gib, const struct nb_train_fit *smallest)
{
    char bytes[32], text[CLI_FIT_TEXT];
    fflush(stdout);
    fprintf(stderr, "nibble: nothing fits %g GiB; the smallest takes %s: %s\n", gib,
            nbi_format_bytes(bytes, (double)smallest->total), cli_fit_text(text, smallest));
}

/* The settings whose options were given. */
static unsigned given_settings(const struct cli_command *command, const struct cli_common *common)
{
    static const char *const names[] = {NB_FIT_LIST(NB_ENUM_NAME)};
    unsigned set = 0;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < command->option_count && k < CLI_MAX_OPTIONS; k++)
            if (common->given[k] && strcmp(command->options[k].name, names[i]) == 0)
                set |= 1u << i;
    return set;
}

int cli_fit(struct nb_train_opts *opts, double gib, const struct cli_command *command,
            const struct cli_common *common)
{
    struct nb_train_fit best, smallest;
    char bytes[32], text[CLI_FIT_TEXT];
    int count = 1;
    if (!(gib > 0))
        return 0;
    enum nb_status rc =
        nb_train_fit(opts, gib, given_settings(command, common), &best, &count, &smallest);
    if (rc != NB_OK)
        return cli_status(rc);
    if (count == 0) {
        cli_nothing_fits(gib, &smallest);
        return CLI_EXIT_FAILED;
    }
    nb_train_fit_use(opts, &best);
    if (!common->quiet)
        fprintf(stderr, "nibble: --fit %g takes %s: %s\n", gib,
                nbi_format_bytes(bytes, (double)best.total), cli_fit_text(text, &best));
    return 0;
}
