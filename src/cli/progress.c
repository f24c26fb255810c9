/* progress.c - the progress of a long operation, on a stream. */
#include "cli/progress.h"

#include "base/clock.h"
#include "base/str.h"
#include "cli/status_line.h"

#define REDRAW_SECONDS 0.1
#define PLAIN_SECONDS  30.0

void cli_progress_begin(struct cli_progress *p, FILE *out, const char *label,
                        enum cli_progress_unit unit)
{
    double now = nbi_now();
    *p = (struct cli_progress){.out = out,
                               .label = label,
                               .unit = unit,
                               .terminal = out && cli_status_line_works(),
                               .start = now,
                               .last = now};
}

/* ---- the text ---- */

struct texts {
    char percent[16], amount[40], speed[40], left[32], bar[CLI_BAR + 3];
};

static void format_left(char buf[32], double s)
{
    if (s < 60)
        snprintf(buf, 32, "%.0fs left", s);
    else if (s < 3600)
        snprintf(buf, 32, "%d:%02d left", (int)(s / 60), (int)s % 60);
    else
        snprintf(buf, 32, "%d:%02d:%02d left", (int)(s / 3600) % 1000, (int)(s / 60) % 60,
                 (int)s % 60);
}

#define PARTS 6

/* The parts point into t. */
static void format_parts(struct cli_status_part parts[PARTS], struct texts *t,
                         const struct cli_progress *p, double now, uint64_t done, uint64_t total)
{
    char bytes[32];
    total = done > total ? done : total;
    double elapsed = now - p->start, rate = elapsed > 0 ? (double)done / elapsed : 0;
    double share = total ? (double)done / (double)total : 1;
    snprintf(t->percent, sizeof t->percent, "%.0f%%", 100 * share);
    if (p->unit == CLI_UNIT_BYTES) {
        nbi_format_bytes(t->amount, (double)done);
        snprintf(t->speed, sizeof t->speed, "%s/s", nbi_format_bytes(bytes, rate));
    } else {
        snprintf(t->amount, sizeof t->amount, "%llu/%llu", (unsigned long long)done,
                 (unsigned long long)total);
        snprintf(t->speed, sizeof t->speed, "%.4g/s", rate);
    }
    snprintf(t->left, sizeof t->left, "-- left");
    if (rate > 0)
        format_left(t->left, (double)(total - done) / rate);
    parts[0] = (struct cli_status_part){p->label, 0};
    parts[1] = (struct cli_status_part){cli_bar(t->bar, share), 3};
    parts[2] = (struct cli_status_part){t->percent, 1};
    parts[3] = (struct cli_status_part){t->amount, 4};
    parts[4] = (struct cli_status_part){t->speed, 5};
    parts[5] = (struct cli_status_part){t->left, 2};
}

void cli_progress_format(char *buf, size_t size, const struct cli_progress *p, double now,
                         uint64_t done, uint64_t total)
{
    struct cli_status_part parts[PARTS];
    struct texts t;
    format_parts(parts, &t, p, now, done, total);
    snprintf(buf, size, "%s: %s, %s, %s, %s", p->label, t.percent, t.amount, t.speed, t.left);
}

/* ---- the stream ---- */

void cli_progress_update(void *ctx, uint64_t done, uint64_t total)
{
    struct cli_progress *p = ctx;
    struct cli_status_part parts[PARTS];
    struct texts t;
    char line[256];
    double now = nbi_now();
    if (!p->out || now - p->last < (p->terminal ? REDRAW_SECONDS : PLAIN_SECONDS))
        return;
    p->last = now;
    if (p->terminal) {
        format_parts(parts, &t, p, now, done, total);
        cli_status_line_draw(parts, PARTS);
        return;
    }
    cli_progress_format(line, sizeof line, p, now, done, total);
    fprintf(p->out, "%s\n", line);
    fflush(p->out);
}

void cli_progress_end(struct cli_progress *p)
{
    if (!p->out)
        return;
    if (p->terminal)
        cli_status_line_clear();
    double elapsed = nbi_now() - p->start;
    if (elapsed >= 1)
        fprintf(p->out, "%s: done in %.1f s\n", p->label, elapsed);
    fflush(p->out);
    p->out = NULL;
}
