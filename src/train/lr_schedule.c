/* lr_schedule.c - warm-up, then one of four shapes. */
#include "train/lr_schedule.h"

#include <math.h>

#define WSD_DECAY    0.2 /* fraction of the steps after the warm-up */
#define WARMUP_SHARE 20
#define WARMUP_MAX   100

int64_t nbi_default_warmup(enum nb_lr_schedule kind, int64_t steps)
{
    if (kind == NB_SCHEDULE_CONSTANT)
        return 0;
    return steps / WARMUP_SHARE < WARMUP_MAX ? steps / WARMUP_SHARE : WARMUP_MAX;
}

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
