/* train_log.c - writes the training log line by line, and reads it back.
 *
 * The file is locked while it is open: two runs must not write one log. */
#include "train/train_log.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/array.h"
#include "base/file.h"
#include "base/jscan.h"
#include "base/str.h"
#include "base/syscall.h"

#define LOG_MAX  ((size_t)1 << 30)
#define STEP_MAX ((int64_t)1 << 48)

/* ---- lines ---- */

/* Appends a number with the fewest digits that read back as the same double. */
static void put_number(struct nbi_str *s, const char *name, double v)
{
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v)
            break;
    }
    nbi_str_puts(s, ",");
    nbi_jquote(s, name, strlen(name));
    nbi_str_printf(s, ":%s", isfinite(v) ? text : "null");
}

struct line {
    int64_t step;
    size_t at; /* offset in the file */
    struct nbi_jspan object, eval;
};

/* Accepts any object with a step. */
static enum nb_status parse_line(struct line *line, const char *text, size_t len)
{
    NBI_TRY(nbi_jscan(&line->object, text, len));
    line->eval = nbi_jget(line->object, "eval");
    if (!nbi_jint(nbi_jget(line->object, "step"), 0, STEP_MAX, &line->step))
        return nbi_fail(NB_EFORMAT, "it is not an object with a 'step'");
    if (nbi_jtype(line->eval) != NBI_JNONE && nbi_jtype(line->eval) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "'eval' is not an object");
    return NB_OK;
}

/* Whether one of the two is a prefix of the other. */
static bool is_prefix(const char *p, size_t len, const char *text)
{
    size_t n = strlen(text);
    return memcmp(p, text, len < n ? len : n) == 0;
}

/* Whether p may be the beginning of a line that was cut off. */
static bool begins_line(const char *p, size_t len)
{
    static const char first[] = "{\"step\":";
    if (len < sizeof first)
        return is_prefix(p, len, first);
    size_t n = sizeof first - 1;
    while (n < len && p[n] >= '0' && p[n] <= '9')
        n++;
    return is_prefix(p, len, first) &&
           (is_prefix(p + n, len - n, ",\"loss\":") || is_prefix(p + n, len - n, ",\"eval\":{") ||
            is_prefix(p + n, len - n, ",\"event\":\""));
}

typedef enum nb_status (*line_fn)(void *ctx, const struct line *line);

/* Calls fn with each complete line; *end: the offset after the last one. */
static enum nb_status each_line(const char *path, line_fn fn, void *ctx, size_t *end)
{
    char *text = NULL;
    size_t len = 0, number = 1;
    *end = 0;
    NBI_TRY(nbi_file_read(path, LOG_MAX, &text, &len));
    enum nb_status rc = NB_OK;
    for (; rc == NB_OK && *end < len; number++) {
        const char *p = text + *end, *stop = memchr(p, '\n', len - *end);
        struct line line = {.at = *end};
        if (!stop) { /* after complete lines anything may stand here: a crash may have lost it */
            if (*end == 0 && !begins_line(p, len))
                rc = nbi_fail(NB_EFORMAT, "it is not a line of a training log");
            break;
        }
        rc = parse_line(&line, p, (size_t)(stop - p));
        if (rc == NB_OK)
            rc = fn(ctx, &line);
        if (rc != NB_OK)
            break;
        *end += (size_t)(stop - p) + 1;
    }
    free(text);
    return nbi_context(rc, "training log '%s', line %zu", path, number);
}

/* ---- writing ---- */

struct nbi_train_log {
    int fd;
    char *path;
    struct nbi_str line;
};

/* Which lines of a file stay when a run resumes. */
struct kept {
    int64_t resumed;
    bool found; /* a line of a later step was found: */
    size_t at;  /* its offset */
};

/* Checks that a line is one of ours, so that the log of another program is never cut. */
static enum nb_status keep_line(void *ctx, const struct line *line)
{
    struct kept *k = ctx;
    bool step = nbi_jtype(nbi_jget(line->object, "loss")) != NBI_JNONE &&
                nbi_jtype(nbi_jget(line->object, "lr")) != NBI_JNONE &&
                nbi_jtype(nbi_jget(line->object, "tokens_per_s")) != NBI_JNONE;
    bool event = nbi_jtype(nbi_jget(line->object, "event")) == NBI_JSTRING;
    if (!step && !event && nbi_jtype(line->eval) != NBI_JOBJECT)
        return nbi_fail(NB_EFORMAT, "it is not a line of a training log");
    if (!k->found && line->step > k->resumed)
        *k = (struct kept){k->resumed, true, line->at};
    return NB_OK;
}

/* Finds where the run continues the file. Checks every line: only a log may be replaced. */
static enum nb_status find_end(const char *path, int64_t resumed, size_t *end)
{
    struct kept k = {.resumed = resumed};
    NBI_TRY(each_line(path, keep_line, &k, end));
    if (k.found)
        *end = k.at;
    return NB_OK;
}

/* On file systems without locks, two writers are not detected. */
static enum nb_status lock_log(int fd, const char *path)
{
    if (nbi_sys_flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return nbi_fail(
            NB_EIO, "another run is writing the log '%s': wait for its end, or use another file",
            path);
    return NB_OK;
}

static enum nb_status cut_log(int fd, const char *path, int64_t resumed)
{
    size_t end;
    NBI_TRY(lock_log(fd, path));
    NBI_TRY(find_end(path, resumed, &end));
    if (nbi_sys_ftruncate(fd, (off_t)end) != 0)
        return nbi_fail(NB_EIO, "cannot write '%s': %s", path, strerror(errno));
    return NB_OK;
}

enum nb_status nbi_train_log_open(struct nbi_train_log **out, const char *path, int64_t resumed)
{
    *out = NULL;
    int fd = nbi_sys_open(path, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK, 0666);
    if (fd < 0)
        return nbi_fail(NB_EIO, "cannot write '%s': %s", path, strerror(errno));
    struct nbi_train_log *log = calloc(1, sizeof *log);
    char *copy = strdup(path);
    enum nb_status rc =
        log && copy ? cut_log(fd, path, resumed) : nbi_fail_memory("training log", sizeof *log);
    if (rc != NB_OK) {
        free(log);
        free(copy);
        close(fd);
        return rc;
    }
    *log = (struct nbi_train_log){.fd = fd, .path = copy};
    *out = log;
    return NB_OK;
}

void nbi_train_log_close(struct nbi_train_log *log)
{
    if (!log)
        return;
    close(log->fd);
    nbi_str_release(&log->line);
    free(log->path);
    free(log);
}

/* Completes the line and writes it. */
static enum nb_status write_line(struct nbi_train_log *log)
{
    nbi_str_puts(&log->line, "}\n");
    enum nb_status rc = nbi_str_status(&log->line);
    const char *p = log->line.p;
    size_t left = log->line.len;
    log->line.len = 0;
    while (rc == NB_OK && left) {
        ssize_t n = write(log->fd, p, left);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return nbi_fail(NB_EIO, "cannot write '%s': %s", log->path, strerror(errno));
        p += n;
        left -= (size_t)n;
    }
    return rc;
}

enum nb_status nbi_train_log_step(struct nbi_train_log *log, const struct nbi_log_step *s,
                                  const struct nbi_log_extra *extra, size_t extra_count)
{
    struct nbi_str *line = &log->line;
    nbi_str_printf(line, "{\"step\":%lld", (long long)s->step);
    put_number(line, "loss", s->loss);
    put_number(line, "lr", s->lr);
    put_number(line, "grad_norm", s->grad_norm);
    nbi_str_printf(line, ",\"tokens\":%lld", (long long)s->tokens);
    put_number(line, "tokens_per_s", s->tokens_per_s);
    put_number(line, "seconds", s->seconds);
    nbi_str_printf(line, ",\"resident_bytes\":%llu", (unsigned long long)s->resident_bytes);
    if (s->device_bytes > 0)
        nbi_str_printf(line, ",\"device_bytes\":%llu", (unsigned long long)s->device_bytes);
    for (size_t i = 0; i < extra_count; i++)
        put_number(line, extra[i].name, extra[i].value);
    return write_line(log);
}

enum nb_status nbi_train_log_eval(struct nbi_train_log *log, const struct nbi_log_eval *e)
{
    struct nbi_str *line = &log->line;
    nbi_str_printf(line, "{\"step\":%lld,\"eval\":{\"tokens\":%lld", (long long)e->step,
                   (long long)e->tokens);
    put_number(line, "loss", e->loss);
    put_number(line, "ppl", e->ppl);
    nbi_str_puts(line, "}");
    return write_line(log);
}

/* ---- reading ---- */

static double get_number(struct nbi_jspan object, const char *name)
{
    struct nbi_jspan v = nbi_jget(object, name);
    char text[64];
    if (nbi_jtype(v) != NBI_JNUMBER || v.len >= sizeof text)
        return NAN;
    memcpy(text, v.p, v.len);
    text[v.len] = 0;
    return strtod(text, NULL);
}

static int64_t get_count(struct nbi_jspan object, const char *name)
{
    int64_t v;
    return nbi_jint(nbi_jget(object, name), 0, INT64_MAX, &v) ? v : 0;
}

enum nb_status nbi_history_add_step(struct nbi_history *h, const struct nbi_log_step *line)
{
    NBI_TRY(NBI_ARRAY_RESERVE(h->steps, h->step_capacity, h->step_count + 1, "training log"));
    h->steps[h->step_count++] = *line;
    return NB_OK;
}

enum nb_status nbi_history_add_eval(struct nbi_history *h, const struct nbi_log_eval *line)
{
    NBI_TRY(NBI_ARRAY_RESERVE(h->evals, h->eval_capacity, h->eval_count + 1, "training log"));
    h->evals[h->eval_count++] = *line;
    return NB_OK;
}

static enum nb_status take_eval(struct nbi_history *h, const struct line *line)
{
    return nbi_history_add_eval(h,
                                &(struct nbi_log_eval){.step = line->step,
                                                       .loss = get_number(line->eval, "loss"),
                                                       .ppl = get_number(line->eval, "ppl"),
                                                       .tokens = get_count(line->eval, "tokens")});
}

static enum nb_status take_line(void *ctx, const struct line *line)
{
    struct nbi_history *h = ctx;
    struct nbi_jspan o = line->object;
    if (nbi_jtype(line->eval) == NBI_JOBJECT)
        return take_eval(h, line);
    if (nbi_jtype(nbi_jget(o, "loss")) == NBI_JNONE)
        return NB_OK; /* an event */
    const struct nbi_log_step step = {
        .step = line->step,
        .loss = get_number(o, "loss"),
        .lr = get_number(o, "lr"),
        .grad_norm = get_number(o, "grad_norm"),
        .tokens = get_count(o, "tokens"),
        .tokens_per_s = get_number(o, "tokens_per_s"),
        .seconds = get_number(o, "seconds"),
        .resident_bytes = (uint64_t)get_count(o, "resident_bytes"),
        .device_bytes = (uint64_t)get_count(o, "device_bytes"),
    };
    return nbi_history_add_step(h, &step);
}

enum nb_status nbi_history_read(struct nbi_history *h, const char *path)
{
    size_t end;
    *h = (struct nbi_history){0};
    enum nb_status rc = each_line(path, take_line, h, &end);
    if (rc != NB_OK)
        nbi_history_release(h);
    return rc;
}

void nbi_history_release(struct nbi_history *h)
{
    free(h->steps);
    free(h->evals);
    *h = (struct nbi_history){0};
}
