/* lr_schedule.c - warm-up, then one of four shapes. */
#include "train/lr_schedule.h"

#include <math.h>

#define WSD_DECAY 0.2 /* fraction of the steps after the warm-up */

double nbi_learning_rate(const struct nbi_lr_schedule_opts *o, int64_t step)
{
    if (step < o->warmup)
        return o->lr * (double)(step + 1) / (double)o->warmup;
    double span = (double)(o->steps - 1 - o->warmup), low = o->lr * o->final_frac;
    double at = span > 0 ? (double)(step - o->warmup) / span : 0; /* progress, 0 to 1 */
    at = at > 1 ? 1 : at;
    switch (o->kind) {
    case NB_SCHEDULE_LINEAR:
        return o->lr + (low - o->lr) * at;
    case NB_SCHEDULE_COSINE:
        return low + (o->lr - low) * 0.5 * (1 + cos(M_PI * at));
    case NB_SCHEDULE_WSD:
        return at <= 1 - WSD_DECAY ? o->lr
                                   : o->lr + (low - o->lr) * (at - 1 + WSD_DECAY) / WSD_DECAY;
    default:
        return o->lr;
    }
}
