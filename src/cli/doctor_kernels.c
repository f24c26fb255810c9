/* doctor_kernels.c - `nibble doctor --kernels`: the operations of a device against the scalar code.
 */
#include "cli/doctor_kernels.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "cli/model_options.h"

#define MAX_GPUS 16

struct kernel_report {
    const struct cli_kernel_opts *opts;
    json_t *checks; /* NULL: text */
    bool ok;        /* nothing ran out of memory */
    int count, failed;
};

/* Error and bound in the words of their measure. */
static const char *error_text(char text[64], const struct nb_kernel_check *c)
{
    if (c->measure == NB_KERNEL_BITS && c->error == 0)
        snprintf(text, 64, "equal bits");
    else if (c->measure == NB_KERNEL_BITS)
        snprintf(text, 64, "%.0f bytes differ", c->error);
    else if (c->measure == NB_KERNEL_ROUNDING)
        snprintf(text, 64, "%.3f of %.3g roundings", c->error, c->bound);
    else
        snprintf(text, 64, "%.2e of %.2e", c->error, c->bound);
    return text;
}

static json_t *check_json(const struct nb_kernel_check *c)
{
    static const char *const measures[] = {"relative", "roundings", "norm", "bytes"};
    return json_pack("{s:s,s:s,s:s,s:s?,s:s,s:o,s:f,s:s?,s:b,s:f}", "operation", c->operation,
                     "variant", c->variant, "shapes", c->shapes, "result", c->result, "measure",
                     measures[c->measure], "error", cli_json_number(c->error), "bound", c->bound,
                     "problem", c->problem, "passed", c->passed, "seconds", c->seconds);
}

static enum nb_status show(void *ctx, const struct nb_kernel_check *c)
{
    struct kernel_report *r = ctx;
    char text[64];
    r->count++;
    r->failed += !c->passed;
    if (r->checks) {
        nbi_json_append(r->checks, check_json(c), &r->ok);
        return NB_OK;
    }
    printf("%-16s  %-40s  %-24s  %s  %s", c->operation, c->variant,
           c->problem ? "-" : error_text(text, c), c->passed ? "ok  " : "FAIL", c->shapes);
    if (!c->passed && c->result && !c->problem)
        printf("  (%s)", c->result);
    printf(c->problem ? "  (%s)\n" : "\n", c->problem);
    fflush(stdout);
    return cli_check_stdout();
}

/* "cuda:0 (NVIDIA H200, sm_90, driver 580.159)", or "cpu (avx512)". */
static void describe(char text[192], const char *device, const char *simd)
{
    struct nb_gpu_info gpus[MAX_GPUS];
    int gpu, count = nb_gpu_list(gpus, MAX_GPUS);
    if (strcmp(device, "cpu") == 0)
        snprintf(text, 192, "cpu (%s)", simd ? simd : nbi_simd_name(nbi_simd_level()));
    else if (nb_device_parse(device, &gpu) == NB_OK && gpu >= 0 && gpu < count)
        snprintf(text, 192, "%s (%s, sm_%d%d, driver %s)", device, gpus[gpu].name,
                 gpus[gpu].cc_major, gpus[gpu].cc_minor, gpus[gpu].driver);
    else
        snprintf(text, 192, "%s", device);
}

int cli_doctor_kernels(const struct cli_kernel_opts *opts)
{
    char device[NB_DEVICE_NAME], on[192];
    struct kernel_report r = {
        .opts = opts, .checks = opts->common->json ? json_array() : NULL, .ok = true};
    double begin = nbi_now();
    cli_device(device, opts->common);
    describe(on, device, opts->simd);
    const struct nb_kernel_opts check = {.device = device,
                                         .simd = opts->simd,
                                         .threads = (int)opts->common->threads,
                                         .only = opts->only,
                                         .elements = opts->elements};
    if (!opts->common->json)
        printf("nibble %s on %s\n", nb_version(), on);
    enum nb_status rc = nb_check_kernels(&check, show, &r);
    if (rc != NB_OK) {
        json_decref(r.checks);
        return cli_status(rc);
    }
    int code = r.failed ? CLI_EXIT_FAILED : 0;
    if (r.checks) {
        json_t *all =
            json_pack("{s:s,s:s,s:o,s:i,s:f}", "version", nb_version(), "device", on, "kernels",
                      r.checks, "failed", r.failed, "seconds", nbi_now() - begin);
        int printed = cli_print_json(all, r.ok);
        return printed ? printed : code;
    }
    if (r.failed)
        printf("%d of %d FAILED, in %.0f s\n", r.failed, r.count, nbi_now() - begin);
    else
        printf("all %d agree with the scalar code, in %.0f s\n", r.count, nbi_now() - begin);
    return code;
}
