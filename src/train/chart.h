/* chart.h - line charts as SVG text for an HTML page. */
#pragma once

#include "base/str.h"

/* Limits of what is drawn. Longer series are decimated: of each interval the extremes are kept. */
#define NBI_CHART_POINTS 1000 /* of a line */
#define NBI_CHART_DOTS   200

struct nbi_chart_series {
    const char *style; /* its CSS class */
    const char *label;
    const double *x, *y; /* x ascending */
    size_t count;
    bool dots; /* draw points with a title each, not a line */
};

struct nbi_chart {
    const char *title;  /* for screen readers */
    const char *x_name; /* name of x in hover titles, such as "step" */
    bool log_scale;     /* of y; omits values that are not positive */
    bool from_zero;     /* always include y = 0 */
    const struct nbi_chart_series *series;
    size_t series_count;
};

/* Appends <svg>...</svg>. Omits values that are not finite or beyond 1e100; a chart without values
 * says so. Colours come from the page's CSS: classes axis, grid, hover and the series' styles. */
void nbi_chart_svg(struct nbi_str *out, const struct nbi_chart *c);

/* Chooses at most max points (at least 4) of a series: writes their indices in ascending order to
 * keep[max] and returns their number. Exposed for tests. */
size_t nbi_chart_decimate(const struct nbi_chart_series *s, bool log_scale, size_t *keep,
                          size_t max);
