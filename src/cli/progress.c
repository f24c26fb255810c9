/* progress.c - drawing of progress lines. */
#include "cli/progress.h"

#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/str.h"

#define BAR            24
#define REDRAW_SECONDS 0.1
#define PLAIN_SECONDS  5.0

void cli_progress_begin(struct cli_progress *p, FILE *out, const char *label,
                        enum cli_progress_unit unit)
{
    double now = nbi_now();
    *p = (struct cli_progress){.out = out,
                               .label = label,
                               .unit = unit,
                               .terminal = out && isatty(fileno(out)),
                               .start = now,
                               .last = now};
}

static void format_seconds(char buf[16], double s)
{
    if (s < 60)
        snprintf(buf, 16, "%.0fs", s);
    else if (s < 3600)
        snprintf(buf, 16, "%d:%02d", (int)(s / 60), (int)s % 60);
    else
        snprintf(buf, 16, "%d:%02d:%02d", (int)(s / 3600) % 1000, (int)(s / 60) % 60, (int)s % 60);
}

void cli_progress_format(char *buf, size_t size, const struct cli_progress *p, double now,
                         uint64_t done, uint64_t total)
{
    if (done > total)
        total = done;
    double share = total ? (double)done / (double)total : 1;
    double elapsed = now - p->start;
    double rate = elapsed > 0 ? (double)done / elapsed : 0;
    char amount[32], speed[32], left[16] = "--";
    if (p->unit == CLI_UNIT_BYTES) {
        nbi_format_bytes(amount, (double)done);
        nbi_format_bytes(speed, rate);
    } else {
        snprintf(amount, sizeof amount, "%llu/%llu", (unsigned long long)done,
                 (unsigned long long)total);
        snprintf(speed, sizeof speed, "%.4g", rate);
    }
    if (rate > 0)
        format_seconds(left, (double)(total - done) / rate);
    if (p->terminal) {
        char bar[BAR + 1];
        int full = (int)(share * BAR);
        memset(bar, '#', (size_t)full);
        memset(bar + full, '.', (size_t)(BAR - full));
        bar[BAR] = 0;
        snprintf(buf, size, "%s [%s] %3.0f%%  %s  %s/s  %s left", p->label, bar, 100 * share,
                 amount, speed, left);
    } else {
        snprintf(buf, size, "%s: %.0f%%, %s, %s/s, %s left", p->label, 100 * share, amount, speed,
                 left);
    }
}

void cli_progress_update(void *ctx, uint64_t done, uint64_t total)
{
    struct cli_progress *p = ctx;
    double now = nbi_now();
    if (!p->out || now - p->last < (p->terminal ? REDRAW_SECONDS : PLAIN_SECONDS))
        return;
    p->last = now;
    char line[256];
    cli_progress_format(line, sizeof line, p, now, done, total);
    if (p->terminal) {
        int width = (int)strlen(line);
        fprintf(p->out, "\r%s%*s", line, p->width > width ? p->width - width : 0, "");
        p->width = width;
    } else {
        fprintf(p->out, "%s\n", line);
    }
    fflush(p->out);
}

void cli_progress_end(struct cli_progress *p)
{
    if (!p->out)
        return;
    if (p->terminal && p->width)
        fprintf(p->out, "\r%*s\r", p->width, "");
    double elapsed = nbi_now() - p->start;
    if (elapsed >= 1)
        fprintf(p->out, "%s: done in %.1f s\n", p->label, elapsed);
    fflush(p->out);
    p->out = NULL;
}
