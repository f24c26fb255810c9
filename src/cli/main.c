/* main.c - the command table, signals, help; the only file that turns a status into an exit code.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/str.h"
#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/pages.h"
#include "cli/status_line.h"

const struct cli_command *const cli_commands[] = {
    &cli_generate,   &cli_chat,    &cli_train,    &cli_plan,    &cli_whoami, &cli_data,
    &cli_tokenizer,  &cli_convert, &cli_quantize, &cli_inspect, &cli_synth,  &cli_tokenize,
    &cli_detokenize, &cli_render,  &cli_eval,     &cli_bench,   &cli_doctor, &cli_parity,
    &cli_stress,     &cli_debug,   &cli_guard,    NULL,
};

static struct nb_cancel stop; /* set by signals; everything that the program does obeys it */
static volatile sig_atomic_t ended_by; /* SIGTERM or SIGHUP, whichever came first; 0: neither */

/* ---- what the commands share ---- */

static const char *in_place; /* what the command has written; NULL: nothing yet */

void cli_in_place(const char *target)
{
    in_place = target;
}

int cli_status(enum nb_status status)
{
    if (status == NB_OK)
        return 0;
    bool unchanged =
        status == NB_EINTERRUPTED && strcmp(nb_last_error(), nb_status_text(status)) == 0;
    cli_status_line_clear();
    fprintf(stderr, "nibble: %s%s\n", nb_last_error(), unchanged ? "; nothing was changed" : "");
    return status == NB_EINTERRUPTED ? cli_interrupted() : CLI_EXIT_FAILED;
}

static const char stdout_failed[] = "cannot write to standard output";

enum nb_status cli_check_stdout(void)
{
    if (!ferror(stdout))
        return NB_OK;
    NBI_TRY(nbi_check_interrupt()); /* the signal ended the write, which is not repeated */
    return nbi_fail(NB_EIO, "%s", stdout_failed);
}

int cli_print_json(json_t *value, bool ok)
{
    char *text = NULL;
    enum nb_status rc = nbi_json_text(ok ? value : NULL, &text);
    json_decref(value);
    if (rc == NB_OK)
        puts(text);
    free(text);
    return cli_status(in_place ? nbi_in_place(rc, in_place) : rc);
}

json_t *cli_json_number(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

json_t *cli_json_path(const char *path)
{
    char text[4096];
    nbi_printable_copy(text, sizeof text, path, strlen(path));
    return json_string(text);
}

void cli_progress_start(struct cli_progress *p, const struct cli_common *common, const char *label)
{
    cli_progress_begin(p, common->quiet ? NULL : stderr, label, CLI_UNIT_BYTES);
}

/* ---- help ---- */

static void print_overview(FILE *out)
{
    fprintf(out,
            "nibble %s: Qwen3 language models in four bits\n\n"
            "usage: nibble COMMAND [options]\n",
            nb_version());
    const char *group = "";
    for (size_t i = 0; cli_commands[i]; i++) {
        const struct cli_command *c = cli_commands[i];
        if (strcmp(group, c->group) != 0)
            fprintf(out, "\n%s:\n", c->group);
        group = c->group;
        fprintf(out, "  %-10s  %s\n", c->name, c->summary);
    }
    fprintf(out,
            "\nmore:\n  help [COMMAND]  list the commands, or describe one\n"
            "  --version       print the version\n"
            "\nThe predecessor's options work too: docs/FROM-THE-PREDECESSOR.md lists them.\n");
}

static const struct cli_command *find_command(const char *name)
{
    for (size_t i = 0; cli_commands[i]; i++)
        if (strcmp(cli_commands[i]->name, name) == 0)
            return cli_commands[i];
    return NULL;
}

static int unknown_command(const char *name)
{
    const char *names[32];
    size_t n = 0;
    for (size_t i = 0; cli_commands[i]; i++)
        names[n++] = cli_commands[i]->name;
    names[n++] = "help";
    const char *near = cli_nearest(name, names, n);
    fprintf(stderr, "nibble: unknown command '%s'", name);
    if (near)
        fprintf(stderr, " (did you mean '%s'?)", near);
    fprintf(stderr, "; see 'nibble help'\n");
    return CLI_EXIT_USAGE;
}

/* Files made from the table of commands; NULL: no such option. */
typedef enum nb_status (*write_fn)(const char *dir);

static write_fn writer_of(const char *option)
{
    return strcmp(option, "--write-docs") == 0          ? cli_write_docs
           : strcmp(option, "--write-man") == 0         ? cli_write_man
           : strcmp(option, "--write-completions") == 0 ? cli_write_completions
                                                        : NULL;
}

static int help(int argc, char **argv)
{
    if (argc == 0) {
        print_overview(stdout);
        return 0;
    }
    if (argc == 2 && writer_of(argv[0]))
        return cli_status(writer_of(argv[0])(argv[1]));
    const struct cli_command *c = find_command(argv[0]);
    if (!c)
        return unknown_command(argv[0]);
    if (argc > 1) {
        fprintf(stderr, "nibble help: unexpected argument '%s'\n", argv[1]);
        return CLI_EXIT_USAGE;
    }
    cli_print_help(c, stdout);
    return 0;
}

/* ---- running a command ---- */

#define TOGETHER_MS 300

static _Atomic(const char *) note; /* said once at the first signal */

static void on_signal(int sig)
{
    int before = errno;
    const char *text = atomic_exchange(&note, NULL);
    if (sig != SIGINT && !ended_by)
        ended_by = sig;
    nb_cancel_set(&stop);
    if (text)
        cli_status_line_interrupt(text);
    errno = before;
}

/* Signals within a short time count as one: timeout(1) signals the process and its group. A later
 * second signal ends the process at once. */
static void on_signal_once(int sig)
{
    static volatile sig_atomic_t seen;
    static struct timespec first;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (seen) {
        int64_t ms = (now.tv_sec - first.tv_sec) * 1000 + (now.tv_nsec - first.tv_nsec) / 1000000;
        if (ms < TOGETHER_MS)
            return;
        signal(sig, SIG_DFL);
        raise(sig); /* when this returns */
        return;
    }
    first = now;
    seen = 1;
    on_signal(sig);
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal_once}, before;
    sigemptyset(&action.sa_mask);
    sigaddset(&action.sa_mask, SIGINT);
    sigaddset(&action.sa_mask, SIGTERM);
    sigaddset(&action.sa_mask, SIGHUP);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    /* A terminal that closes may send several hangups, so none of them ends the process at once.
     * If it is ignored, as under nohup(1), it stays ignored. */
    action.sa_handler = on_signal;
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
}

void cli_say_when_interrupted(const char *text)
{
    note = text;
}

int cli_interrupted(void)
{
    return ended_by ? 128 + ended_by : CLI_EXIT_INTERRUPTED;
}

void cli_survive_interrupts(void)
{
    /* SA_RESTART: writes continue; waits for input use poll(), which returns. */
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

bool cli_resume(void)
{
    if (!ended_by)
        nb_cancel_clear(&stop);
    return !ended_by;
}

static enum nb_log_level log_limit = NB_LOG_WARN;

static void log_line(void *ctx, enum nb_log_level level, const char *line)
{
    (void)ctx;
    if (level > log_limit)
        return;
    cli_status_line_clear();
    fprintf(stderr, "nibble: %s%s\n", level == NB_LOG_WARN ? "warning: " : "", line);
}

int cli_cpu_only(const struct cli_common *common, const char *what)
{
    if (strcmp(common->device, "auto") == 0 || strcmp(common->device, "cpu") == 0)
        return 0;
    fprintf(stderr, "nibble: '%s' runs on the CPU only; leave out --device %s\n", what,
            common->device);
    return CLI_EXIT_FAILED;
}

/* Refuses an explicit device that cannot be used, or that the command does not run on. */
static int check_device(const struct cli_command *c, const struct cli_common *common)
{
    int gpu = -1;
    if (strcmp(common->device, "auto") != 0 && nb_device_parse(common->device, &gpu) != NB_OK) {
        fprintf(stderr, "nibble %s: --device takes auto, cpu, cuda or cuda:N, not '%s'\n", c->name,
                common->device);
        return CLI_EXIT_USAGE;
    }
    enum nb_status rc = gpu < 0 || c->absent_device ? NB_OK : nb_gpu_check(gpu);
    if (rc != NB_OK || c->any_device || c->absent_device)
        return cli_status(rc);
    return cli_cpu_only(common, c->name);
}

static int run_command(const struct cli_command *c, int argc, char **argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            cli_print_help(c, stdout);
            return 0;
        }
    void *opts = calloc(1, c->opts_size);
    if (!opts) {
        fprintf(stderr, "nibble: out of memory\n");
        return CLI_EXIT_FAILED;
    }
    struct cli_common *common = opts;
    int rc = cli_parse(c, argc, argv, opts);
    if (rc == 0)
        rc = check_device(c, common);
    if (rc == 0) {
        log_limit = common->quiet ? NB_LOG_ERROR : common->verbose ? NB_LOG_DEBUG : NB_LOG_INFO;
        nb_log_set_sink(log_line, NULL);
        rc = c->run(opts);
    }
    free(opts);
    return rc;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        print_overview(stderr);
        return CLI_EXIT_USAGE;
    }
    const char *name = argv[1];
    if ((strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) && argc == 2) {
        printf("nibble %s\n", nb_version());
        return 0;
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return help(argc - 2, argv + 2);
    const struct cli_command *c = find_command(name);
    return c ? run_command(c, argc - 2, argv + 2) : unknown_command(name);
}

/* If descriptor 0, 1 or 2 is closed, the next file opened would get its number: a model would be
 * read as user input, or an answer written into a log. Opens substitutes: standard input is at its
 * end, and writing to standard output fails. */
static void fill_standard_streams(void)
{
    static const int flags[] = {O_RDONLY, O_RDONLY, O_WRONLY};
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", flags[fd]) != fd)
            _exit(CLI_EXIT_FAILED); /* there is nobody to tell */
}

/* Flushes standard output; the exit code. */
static int end(int rc)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    if (rc != 0 && strstr(nb_last_error(), stdout_failed)) /* the command has said so */
        return rc;
    enum nb_status why = cli_check_stdout();
    if (rc != 0 && why == NB_EINTERRUPTED)
        return rc;
    return cli_status(in_place ? nbi_in_place(why, in_place) : why);
}

int main(int argc, char **argv)
{
    fill_standard_streams();
    catch_signals();
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(&stop);
    return end(dispatch(argc, argv));
}
