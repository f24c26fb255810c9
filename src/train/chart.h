/* chart.h - line charts as SVG text, to stand inside a page. */
#pragma once

#include "base/str.h"

/* Points a line is drawn with at most; of more, the extremes of each stretch are kept. */
#define NBI_CHART_POINTS 1000
#define NBI_CHART_DOTS   200

struct nbi_chart_series {
    const char *style; /* its CSS class */
    const char *label;
    const double *x, *y; /* x ascending */
    size_t count;
    bool dots; /* points, each with its own title, in place of a line */
};

struct nbi_chart {
    const char *title;  /* what it shows, for those who do not see it */
    const char *x_name; /* of an x in the hover titles: "step" */
    bool log_scale;     /* of y; values that are not positive are left out */
    bool from_zero;     /* show y = 0 even where no value is near */
    const struct nbi_chart_series *series;
    size_t series_count;
};

/* Appends <svg>...</svg>. Values that are not finite, or beyond 1e100, are left out; a chart
 * without any says so. Colours come from the page: classes axis, grid, hover and the styles. */
void nbi_chart_svg(struct nbi_str *out, const struct nbi_chart *c);

/* Which points a line of at most max (4 or more) points keeps: indices in ascending order into
 * keep, which has room for max; their number. Exposed for tests. */
size_t nbi_chart_decimate(const struct nbi_chart_series *s, bool log_scale, size_t *keep,
                          size_t max);
