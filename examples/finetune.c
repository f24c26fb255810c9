/* finetune.c - trains every parameter of a model, with a progress line of its own.
 * Run it with models/nib data.tsv tuned.dat; examples/README.md says how to build it. */
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>

static void show(void *ctx, const struct nb_train_progress *p)
{
    (void)ctx;
    printf("step %lld of %lld: loss %.4f, %.0f tokens/s\n", (long long)p->step, (long long)p->steps,
           p->loss, p->tokens_per_s);
    fflush(stdout);
}

static void warn(void *ctx, const char *text)
{
    (void)ctx;
    fprintf(stderr, "warning: %s\n", text);
}

int main(int argc, char **argv)
{
    struct nb_train_opts opts;
    struct nb_train_result result = {0};
    if (argc != 4)
        return fprintf(stderr, "usage: finetune MODEL DATA OUT\n"), 2;
    const char *const data[] = {argv[2], NULL};
    nb_train_defaults(&opts); /* AdamW's; everything else is zero */
    opts.model = argv[1];
    opts.data = data;
    opts.out = argv[3];
    opts.epochs = 1;
    opts.seq_len = 128;
    opts.batch_size = 4;
    opts.grad_accum = 1;
    opts.lr = 1e-4;
    opts.precision = NB_PRECISION_NVFP4; /* four bits in the forward pass */
    opts.bf16_master = true;
    opts.moment_type = NB_MOMENT_INT8;
    opts.progress = show;
    opts.warn = warn;
    if (nb_train(&opts, &result) != NB_OK) {
        fprintf(stderr, "%s\n", nb_last_error());
        return 1;
    }
    printf("%s: %lld steps on %s, last loss %.4f\n", argv[3], (long long)result.last.step,
           result.device, result.last.loss);
    return 0;
}
