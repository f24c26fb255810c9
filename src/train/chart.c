/* chart.c - axes with round numbers, and lines decimated to what can be seen. */
#include "train/chart.h"

#include <math.h>
#include <string.h>

#include "base/html.h"

enum { WIDTH = 720, HEIGHT = 250, LEFT = 66, RIGHT = 24, TOP = 10, BOTTOM = 26 };
#define VALUE_MAX 1e100
#define BANDS     60 /* intervals of a line with a hover title */
#define TICKS_MAX 12

/* ---- decimation ---- */

static bool usable(double v, bool log_scale)
{
    return fabs(v) <= VALUE_MAX && (!log_scale || v >= 1 / VALUE_MAX);
}

/* The first usable point in [i, end); end if there is none. */
static size_t next_usable(const struct nbi_chart_series *s, bool log_scale, size_t i, size_t end)
{
    while (i < end && !(usable(s->y[i], log_scale) && usable(s->x[i], false)))
        i++;
    return i;
}

/* Keeps the lowest and the highest point of [first, end), in their order. */
static size_t keep_extremes(const struct nbi_chart_series *s, bool log_scale, size_t first,
                            size_t end, size_t *keep)
{
    size_t low = next_usable(s, log_scale, first, end), high = low;
    if (low == end)
        return 0;
    for (size_t i = low; i < end; i = next_usable(s, log_scale, i + 1, end)) {
        low = s->y[i] < s->y[low] ? i : low;
        high = s->y[i] > s->y[high] ? i : high;
    }
    keep[0] = low < high ? low : high;
    keep[1] = low < high ? high : low;
    return low == high ? 1 : 2;
}

size_t nbi_chart_decimate(const struct nbi_chart_series *s, bool log_scale, size_t *keep,
                          size_t max)
{
    size_t n = 0, total = 0, buckets = (max - 2) / 2;
    for (size_t i = 0; (i = next_usable(s, log_scale, i, s->count)) < s->count; i++) {
        if (total < max)
            keep[total] = i;
        total++;
    }
    if (total <= max)
        return total;
    size_t first = keep[0] + 1, last = s->count - 1;
    while (next_usable(s, log_scale, last, last + 1) > last)
        last--;
    n = 1;
    for (size_t b = 0; b < buckets; b++) {
        size_t from = first + (size_t)((double)(last - first) * (double)b / (double)buckets);
        size_t to = first + (size_t)((double)(last - first) * (double)(b + 1) / (double)buckets);
        n += keep_extremes(s, log_scale, from, to, keep + n);
    }
    keep[n++] = last;
    return n;
}

/* ---- scales ---- */

struct scale {
    double low, high; /* of the values, or of their logarithms */
    bool is_log;
    double at_low, at_high; /* coordinates in the picture */
};

static double coordinate(const struct scale *s, double v)
{
    double t = s->is_log ? log10(v) : v;
    return s->at_low + (t - s->low) / (s->high - s->low) * (s->at_high - s->at_low);
}

static void include(struct scale *s, double v)
{
    double t = s->is_log ? log10(v) : v;
    s->low = t < s->low ? t : s->low;
    s->high = t > s->high ? t : s->high;
}

/* Adds a margin, a fraction of the range; a range of a single value is extended first. */
static void add_margin(struct scale *s, double fraction)
{
    double size = fmax(fabs(s->low), fabs(s->high)), range = s->high - s->low;
    if (range <= 1e-9 * size || range == 0)
        range = s->is_log || size == 0 ? 1 : 0.1 * size, fraction = 0.5;
    s->low -= fraction * range;
    s->high += fraction * range;
}

/* 1, 2 or 5 times a power of ten, so that about `wanted` steps fit into the range. */
static double nice_step(double range, int wanted)
{
    double raw = range / wanted, power = pow(10, floor(log10(raw))), times = raw / power;
    return power * (times <= 1 ? 1 : times <= 2 ? 2 : times <= 5 ? 5 : 10);
}

/* Round values within [low, high]; returns their number. */
static int linear_ticks(double low, double high, int wanted, double *ticks)
{
    double step = nice_step(high - low, wanted), first = ceil(low / step);
    int n = 0;
    for (int i = 0; i < TICKS_MAX; i++) {
        double t = (first + i) * step;
        if (t <= high + 1e-9 * step)
            ticks[n++] = fabs(t) < 1e-9 * step ? 0 : t;
    }
    return n;
}

static int log_ticks(const struct scale *s, double *ticks)
{
    static const double times[] = {1, 2, 5};
    double range = s->high - s->low;
    int n = 0, per = range < 3 ? 3 : 1, every = (int)fmax(1, ceil(range / 8));
    for (int k = (int)floor(s->low); k <= (int)s->high && n < TICKS_MAX; k += every)
        for (int i = 0; i < per && n < TICKS_MAX; i++) {
            double t = k + log10(times[i]);
            if (t >= s->low && t <= s->high)
                ticks[n++] = times[i] * pow(10, k);
        }
    return n > 1 ? n : linear_ticks(pow(10, s->low), pow(10, s->high), 4, ticks);
}

/* ---- drawing ---- */

static void draw_axes(struct nbi_str *out, const struct scale *x, const struct scale *y)
{
    double ticks[TICKS_MAX];
    int n = y->is_log ? log_ticks(y, ticks) : linear_ticks(y->low, y->high, 5, ticks);
    for (int i = 0; i < n; i++)
        nbi_str_printf(out,
                       "<path class=\"grid\" d=\"M%d %.1fH%d\"/>"
                       "<text class=\"axis y\" x=\"%d\" y=\"%.1f\">%.6g</text>\n",
                       LEFT, coordinate(y, ticks[i]), WIDTH - RIGHT, LEFT - 6,
                       coordinate(y, ticks[i]) + 4, ticks[i]);
    n = linear_ticks(x->low, x->high, 8, ticks);
    for (int i = 0; i < n; i++)
        nbi_str_printf(out,
                       "<path class=\"grid\" d=\"M%.1f %dV%d\"/>"
                       "<text class=\"axis x\" x=\"%.1f\" y=\"%d\">%.10g</text>\n",
                       coordinate(x, ticks[i]), TOP, HEIGHT - BOTTOM, coordinate(x, ticks[i]),
                       HEIGHT - 8, ticks[i]);
}

/* A hover title such as "step 120, loss 2.31, smoothed 2.4": all lines that share x with first. */
static void put_title(struct nbi_str *out, const struct nbi_chart *c,
                      const struct nbi_chart_series *first, size_t i)
{
    nbi_str_puts(out, "<title>");
    nbi_html_text(out, c->x_name);
    nbi_str_printf(out, " %.10g", first->x[i]);
    for (size_t k = 0; k < c->series_count; k++) {
        const struct nbi_chart_series *s = &c->series[k];
        if ((s != first && (first->dots || s->x != first->x)) || !usable(s->y[i], false))
            continue;
        nbi_str_puts(out, ", ");
        nbi_html_text(out, s->label);
        nbi_str_printf(out, " %.6g", s->y[i]);
    }
    nbi_str_puts(out, "</title>");
}

struct drawing {
    struct nbi_str *out;
    const struct nbi_chart *chart;
    struct scale x, y;
    size_t keep[NBI_CHART_POINTS];
};

static void draw_line(struct drawing *d, const struct nbi_chart_series *s)
{
    size_t n = nbi_chart_decimate(s, d->chart->log_scale, d->keep, NBI_CHART_POINTS);
    nbi_str_printf(d->out, "<polyline class=\"%s\" points=\"", s->style);
    for (size_t k = 0; k < n; k++)
        nbi_str_printf(d->out, "%s%.1f,%.1f", k ? " " : "", coordinate(&d->x, s->x[d->keep[k]]),
                       coordinate(&d->y, s->y[d->keep[k]]));
    nbi_str_puts(d->out, "\"/>\n");
}

static void draw_dots(struct drawing *d, const struct nbi_chart_series *s)
{
    size_t n = nbi_chart_decimate(s, d->chart->log_scale, d->keep, NBI_CHART_DOTS);
    for (size_t k = 0; k < n; k++) {
        size_t i = d->keep[k];
        nbi_str_printf(d->out, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\">", s->style,
                       coordinate(&d->x, s->x[i]), coordinate(&d->y, s->y[i]));
        put_title(d->out, d->chart, s, i);
        nbi_str_puts(d->out, "</circle>\n");
    }
}

/* Invisible rectangles over the first line, each with the title of one of its points. */
static void draw_bands(struct drawing *d)
{
    const struct nbi_chart_series *s = &d->chart->series[0];
    size_t n = nbi_chart_decimate(s, d->chart->log_scale, d->keep, NBI_CHART_POINTS);
    size_t bands = n < BANDS ? n : BANDS;
    double width = (double)(WIDTH - LEFT - RIGHT) / (double)(bands ? bands : 1);
    for (size_t b = 0; b < bands; b++) {
        size_t i = d->keep[bands > 1 ? b * (n - 1) / (bands - 1) : 0];
        double at = coordinate(&d->x, s->x[i]);
        nbi_str_printf(d->out,
                       "<rect class=\"hover\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\">",
                       fmax(at - width / 2, LEFT), TOP, width, HEIGHT - TOP - BOTTOM);
        put_title(d->out, d->chart, s, i);
        nbi_str_puts(d->out, "</rect>\n");
    }
}

/* Sets the ranges of both axes; false: there is nothing to show. */
static bool fit_scales(struct drawing *d)
{
    const struct nbi_chart *c = d->chart;
    d->x = (struct scale){INFINITY, -INFINITY, false, LEFT, WIDTH - RIGHT};
    d->y = (struct scale){INFINITY, -INFINITY, c->log_scale, HEIGHT - BOTTOM, TOP};
    for (size_t k = 0; k < c->series_count; k++) {
        const struct nbi_chart_series *s = &c->series[k];
        for (size_t i = 0; (i = next_usable(s, c->log_scale, i, s->count)) < s->count; i++) {
            include(&d->x, s->x[i]);
            include(&d->y, s->y[i]);
        }
    }
    if (d->x.low > d->x.high)
        return false;
    if (c->from_zero && !c->log_scale)
        include(&d->y, 0);
    add_margin(&d->x, 0);
    add_margin(&d->y, 0.05);
    return true;
}

void nbi_chart_svg(struct nbi_str *out, const struct nbi_chart *c)
{
    struct drawing d = {.out = out, .chart = c};
    nbi_str_printf(out,
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" "
                   "aria-label=\"",
                   WIDTH, HEIGHT);
    nbi_html_text(out, c->title);
    nbi_str_puts(out, "\">\n");
    if (!fit_scales(&d)) {
        nbi_str_printf(out, "<text class=\"axis x\" x=\"%d\" y=\"%d\">nothing to show</text>",
                       WIDTH / 2, HEIGHT / 2);
    } else {
        draw_axes(out, &d.x, &d.y);
        for (size_t k = 0; k < c->series_count; k++)
            if (!c->series[k].dots)
                draw_line(&d, &c->series[k]);
        if (c->series_count > 0 && !c->series[0].dots)
            draw_bands(&d);
        for (size_t k = 0; k < c->series_count; k++)
            if (c->series[k].dots)
                draw_dots(&d, &c->series[k]);
    }
    nbi_str_puts(out, "</svg>\n");
}
