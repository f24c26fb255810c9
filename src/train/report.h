/* report.h - the report of a training run, as one self-contained HTML page.
 *
 * The page is also well-formed XML. It has no scripts and loads nothing, which its content policy
 * enforces. Charts are inline SVG; colours follow the reader's light or dark setting. */
#pragma once

#include "base/str.h"
#include "train/train_log.h"

struct nbi_report_pair {
    const char *key, *value;
};

/* A prompt and its answers; a NULL answer is left empty. */
struct nbi_report_sample {
    const char *prompt, *before, *after;
};

/* All borrowed; every count may be 0. Texts are escaped. */
struct nbi_report {
    const char *title;
    const struct nbi_log_step *steps; /* in ascending order */
    size_t step_count;
    const struct nbi_log_eval *evals;
    size_t eval_count;
    const struct nbi_report_pair *settings;
    size_t setting_count;
    const struct nbi_report_sample *samples;
    size_t sample_count;
    const char *const *notes;
    size_t note_count;
};

enum nb_status nbi_report_html(struct nbi_str *out, const struct nbi_report *r);

/* The same as a file, which appears complete or not at all. */
enum nb_status nbi_report_write(const char *path, const struct nbi_report *r);
