/* windows.h - the windows in which perplexity reads a long text.
 *
 * Each window is a sequence of its own and starts at position 0, so its first token has no
 * context and is never predicted. Windows overlap if stride < context; then a window predicts
 * only the tokens that no earlier window has predicted. Each other token is predicted once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct nbi_windows {
    int64_t count;   /* tokens of the text */
    int64_t context; /* tokens of a window, at least 2 */
    int64_t stride;  /* from the start of a window to that of the next; 1 to context */
    /* Zero before the first call: */
    int64_t begin, predicted;
    bool done;
};

struct nbi_window {
    int64_t begin, end; /* tokens [begin, end) */
    int64_t predicted;  /* of which [predicted, end), not empty, are predicted here */
};

/* The next window that predicts a token; false: there are no more. */
static inline bool nbi_windows_next(struct nbi_windows *w, struct nbi_window *out)
{
    while (!w->done) {
        int64_t left = w->count - w->begin;
        out->begin = w->begin;
        out->end = w->begin + (left < w->context ? left : w->context);
        out->predicted = w->predicted == w->begin ? w->begin + 1 : w->predicted;
        w->done = out->end == w->count;
        w->begin += w->stride;
        w->predicted = out->end;
        if (out->predicted < out->end)
            return true;
    }
    return false;
}
