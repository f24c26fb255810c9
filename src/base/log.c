/* log.c - one process-wide sink, set before threads start and read-only afterwards. */
#include "base/log.h"

#include <stdarg.h>

static nb_log_fn sink;
static void *sink_ctx;

void nb_log_set_sink(nb_log_fn fn, void *ctx)
{
    sink = fn;
    sink_ctx = ctx;
}

void nbi_log(enum nb_log_level level, const char *fmt, ...)
{
    if (!sink)
        return;
    char line[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    for (char *s = line; *s; s++)
        if ((unsigned char)*s < 0x20)
            *s = '?';
    sink(sink_ctx, level, line);
}
