/* cmd_guard.c - a command under a memory limit.
 *
 * The guard is the subreaper of everything below it, so a process that leaves its parent or its
 * group becomes the guard's child and stays visible. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/str.h"
#include "cli/cli.h"
#include "cli/process_tree.h"

#define EXIT_GUARDED    124
#define EXIT_CANNOT_RUN 126
#define EXIT_NOT_FOUND  127
#define KILL_WAIT_SECS  10 /* for processes that not even SIGKILL ends at once */
#define TICK_SECS       0.02
#define SHOW_EVERY      5 /* readings, with --verbose */

struct guard_opts {
    struct cli_common common;
    double limit_gb, over_secs, poll_secs, grace_secs;
};

static const struct cli_opt options[] = {
    {"limit-gb", 'l', CLI_FLOAT, offsetof(struct guard_opts, limit_gb), "X", NULL, 1e-3, 1e6,
     "limit in GiB, for host memory and for GPU memory separately", "gpu-limit-gb"},
    {"over-secs", 'o', CLI_FLOAT, offsetof(struct guard_opts, over_secs), "S", "0", 0, 1e6,
     "seconds that the limit may be exceeded", "gpu-over-secs"},
    {"poll-secs", 'p', CLI_FLOAT, offsetof(struct guard_opts, poll_secs), "S", "0.5", 0.05, 3600,
     "seconds between measurements", "gpu-poll-secs"},
    {"grace-secs", 0, CLI_FLOAT, offsetof(struct guard_opts, grace_secs), "S", "2", 0, 3600,
     "seconds between SIGTERM and SIGKILL", NULL},
};

struct guard {
    const struct guard_opts *opts;
    uint64_t limit;
    sigset_t signals; /* those we wait for; blocked meanwhile */
    sigset_t before;  /* what was blocked when we came */
    pid_t child;
    bool own_group; /* the command leads a process group */
    bool ended;     /* the command, with this status */
    int status;
    struct nb_gpu_watch *gpu; /* NULL: none */
    struct cli_process *tree; /* as last seen */
    size_t tree_count;
    uint64_t host, on_gpu;
    double over_since; /* 0: it is not over */
    int readings;
};

/* ---- starting the command ---- */

/* In the foreground of a terminal the command stays in our process group, and Ctrl-C and Ctrl-Z
 * reach both. Otherwise it gets its own group, and we forward signals to it, once. */
static bool at_terminal(void)
{
    return isatty(STDIN_FILENO) && tcgetpgrp(STDIN_FILENO) == getpgrp();
}

_Noreturn static void run_child(const struct guard *g, char **argv, int report)
{
    if (g->own_group)
        setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* without its guard it is to end */
    sigprocmask(SIG_SETMASK, &g->before, NULL);
    execvp(argv[0], argv);
    int reason = errno;
    ssize_t n = write(report, &reason, sizeof reason);
    _exit(n == sizeof reason ? EXIT_NOT_FOUND : EXIT_CANNOT_RUN);
}

/* 0, or an exit code after having said why. */
static int start(struct guard *g, char **argv)
{
    int ends[2], reason = 0;
    if (pipe2(ends, O_CLOEXEC) != 0 || (g->child = fork()) < 0) {
        fprintf(stderr, "nibble guard: cannot start a process: %s\n", strerror(errno));
        return CLI_EXIT_FAILED;
    }
    if (g->child == 0)
        run_child(g, argv, ends[1]);
    if (g->own_group)
        setpgid(g->child, g->child); /* whoever of us comes first */
    close(ends[1]);
    ssize_t n = read(ends[0], &reason, sizeof reason); /* nothing once it runs */
    close(ends[0]);
    if (n != sizeof reason)
        return 0;
    waitpid(g->child, NULL, 0);
    fprintf(stderr, "nibble guard: cannot run '%s': %s\n", argv[0], strerror(reason));
    return reason == ENOENT ? EXIT_NOT_FOUND : EXIT_CANNOT_RUN;
}

/* ---- signals and exits ---- */

/* Reaps all processes that have ended, the command included. */
static void reap(struct guard *g)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == g->child) {
            g->ended = true;
            g->status = status;
        }
}

/* Forwards a signal, unless it came from the terminal, which sent it to the command too. */
static void pass_on(const struct guard *g, const siginfo_t *info)
{
    if (g->ended || (!g->own_group && info->si_code == SI_KERNEL))
        return;
    if (!g->own_group || kill(-g->child, info->si_signo) != 0)
        kill(g->child, info->si_signo);
}

/* Waits for a signal for up to `seconds`, and handles it. */
static void wait_a_while(struct guard *g, double seconds)
{
    siginfo_t info;
    double left = seconds, end = nbi_now() + seconds;
    while (left > 0 && !g->ended) {
        const struct timespec t = {(time_t)left, (long)(1e9 * (left - (double)(time_t)left))};
        int sig = sigtimedwait(&g->signals, &info, &t);
        if (sig == SIGCHLD)
            reap(g);
        else if (sig > 0)
            pass_on(g, &info);
        left = end - nbi_now();
    }
    reap(g);
}

/* ---- memory ---- */

static enum nb_status look_at_tree(struct guard *g)
{
    free(g->tree);
    return cli_process_descendants((int)getpid(), &g->tree, &g->tree_count);
}

static uint64_t gpu_bytes(const struct guard *g)
{
    int pids[1024];
    size_t n = 0;
    if (!g->gpu)
        return 0;
    for (; n < g->tree_count && n < 1024; n++)
        pids[n] = g->tree[n].pid;
    return nb_gpu_watch_bytes(g->gpu, pids, n);
}

/* Shared pages are divided only when the sum nears the limit. A process that ends between two
 * readings leaves its share to the others, and the sum is too large once. */
static enum nb_status measure(struct guard *g)
{
    NBI_TRY(look_at_tree(g));
    g->host = cli_process_bytes(g->tree, g->tree_count, false);
    for (int i = 0; i < 3 && g->host > g->limit; i++)
        g->host = cli_process_bytes(g->tree, g->tree_count, true);
    g->on_gpu = gpu_bytes(g);
    double now = nbi_now();
    if (g->host <= g->limit && g->on_gpu <= g->limit)
        g->over_since = 0;
    else if (g->over_since == 0)
        g->over_since = now;
    char a[32], b[32];
    if (g->opts->common.verbose && g->readings++ % SHOW_EVERY == 0)
        fprintf(stderr, "nibble guard: %zu process%s, host memory %s, GPU memory %s\n",
                g->tree_count, g->tree_count == 1 ? "" : "es", nbi_format_bytes(a, (double)g->host),
                nbi_format_bytes(b, (double)g->on_gpu));
    return NB_OK;
}

static bool is_over(const struct guard *g)
{
    return g->over_since > 0 && nbi_now() - g->over_since >= g->opts->over_secs;
}

/* ---- acting ---- */

static void say_why(const struct guard *g)
{
    const struct cli_process *largest = NULL;
    char used[32], limit[32], held[32];
    bool host = g->host > g->limit;
    for (size_t i = 0; i < g->tree_count; i++)
        if (!largest || g->tree[i].bytes > largest->bytes)
            largest = &g->tree[i];
    fprintf(stderr, "nibble guard: %s memory of %s is over the limit of %s", host ? "host" : "GPU",
            nbi_format_bytes(used, (double)(host ? g->host : g->on_gpu)),
            nbi_format_bytes(limit, (double)g->limit));
    if (g->opts->over_secs > 0)
        fprintf(stderr, " for %.1f s", nbi_now() - g->over_since);
    if (largest)
        fprintf(stderr, "; the largest is process %d (%s) with %s on the host", largest->pid,
                largest->name, nbi_format_bytes(held, (double)largest->bytes));
    fprintf(stderr, "; ending %zu process%s\n", g->tree_count, g->tree_count == 1 ? "" : "es");
}

static void signal_tree(const struct guard *g, int sig)
{
    for (size_t i = 0; i < g->tree_count; i++)
        kill(g->tree[i].pid, sig);
}

/* Sends SIGTERM; SIGKILL when the grace period is over, or if memory still grows. */
static enum nb_status end_tree(struct guard *g)
{
    double start = nbi_now(), hard = start + g->opts->grace_secs;
    uint64_t enough = cli_process_bytes(g->tree, g->tree_count, false) + g->limit / 20;
    if (g->opts->grace_secs > 0)
        signal_tree(g, SIGTERM);
    for (;;) {
        reap(g);
        NBI_TRY(look_at_tree(g));
        if (g->tree_count == 0)
            return NB_OK;
        if (nbi_now() >= hard || cli_process_bytes(g->tree, g->tree_count, false) > enough) {
            hard = hard < nbi_now() ? hard : nbi_now();
            signal_tree(g, SIGKILL);
        }
        if (nbi_now() > hard + KILL_WAIT_SECS)
            return nbi_fail(NB_EIO, "process %d (%s) does not end", g->tree[0].pid,
                            g->tree[0].name);
        const struct timespec tick = {0, (long)(1e9 * TICK_SECS)};
        sigtimedwait(&g->signals, NULL, &tick);
    }
}

/* ---- running the command ---- */

/* Processes that outlive the command keep running, as they would without a guard. */
static int exit_code(struct guard *g)
{
    if (look_at_tree(g) == NB_OK && g->tree_count > 0 && !g->opts->common.quiet)
        fprintf(stderr,
                "nibble guard: the command has ended; %zu process%s of it %s on unguarded\n",
                g->tree_count, g->tree_count == 1 ? "" : "es", g->tree_count == 1 ? "goes" : "go");
    return WIFSIGNALED(g->status) ? 128 + WTERMSIG(g->status) : WEXITSTATUS(g->status);
}

static int watch(struct guard *g)
{
    for (;;) {
        enum nb_status rc = measure(g);
        if (rc == NB_OK && !g->ended && is_over(g)) {
            say_why(g);
            rc = end_tree(g);
            return rc == NB_OK ? EXIT_GUARDED : cli_status(rc);
        }
        if (g->ended)
            return exit_code(g);
        if (rc != NB_OK) { /* blind: better to end it than to let it go on */
            kill(g->child, SIGTERM);
            return cli_status(rc);
        }
        wait_a_while(g, g->opts->poll_secs);
    }
}

static void take_signals(struct guard *g)
{
    static const int wanted[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigemptyset(&g->signals);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        sigaddset(&g->signals, wanted[i]);
    signal(SIGCHLD, SIG_DFL); /* ignored, it would take the command's status with it */
    sigprocmask(SIG_BLOCK, &g->signals, &g->before);
}

static int run(void *opts)
{
    struct guard_opts *o = opts;
    struct guard g = {.opts = o, .limit = (uint64_t)(o->limit_gb * 0x1p30)};
    if (o->limit_gb == 0 || o->common.json) {
        fprintf(stderr, "nibble guard: %s; see 'nibble help guard'\n",
                o->common.json ? "--json is not supported" : "--limit-gb X is missing");
        return CLI_EXIT_USAGE;
    }
    g.own_group = !at_terminal();
    g.gpu = nb_gpu_watch_open();
    take_signals(&g);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int code = start(&g, o->common.rest);
    if (code == 0)
        code = watch(&g);
    free(g.tree);
    nb_gpu_watch_close(g.gpu);
    return code;
}

const struct cli_command cli_guard = {
    .name = "guard",
    .group = "diagnose",
    .positional = "COMMAND...",
    .summary = "run a command with a memory limit",
    .text = "Runs COMMAND (put -- in front of it) and ends it, with all processes that it has\n"
            "started, if together they exceed the limit of host memory or of GPU memory for\n"
            "--over-secs. They get SIGTERM first, and SIGKILL --grace-secs later, or at once if\n"
            "their memory still grows. Processes that detach themselves are found too. A line on\n"
            "standard error reports the memory in use and the process that held most of it.\n"
            "\n"
            "Host memory is resident memory; pages shared between the processes count once. GPU\n"
            "memory is read from the NVIDIA driver. Where the driver cannot tell processes apart\n"
            "(in a container, or if CPU and GPU share their memory), all GPU memory taken since\n"
            "the start counts, whichever process took it.\n"
            "\n"
            "Exit code: 124 if guard ended the command, otherwise the command's own, or 128 plus\n"
            "the signal that ended it; 127 if the command was not found, 126 if it could not be\n"
            "run. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on. If guard is killed, the\n"
            "command gets SIGTERM.",
    .examples = "  nibble guard --limit-gb 100 -- nibble generate -m Qwen3-4B -p hi\n"
                "  nibble guard --limit-gb 24 --over-secs 5 --poll-secs 0.1 -- python3 train.py\n",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .opts_size = sizeof(struct guard_opts),
    .run = run,
};
