/* perplexity.h - how unlikely a token was. */
#pragma once

#include "base/status.h"

/* -log softmax(logits)[target], in nats; not finite if a logit is not. */
double nbi_token_nll(const float *logits, int64_t V, int32_t target);

/* KL(a || b) of the distributions that two rows of logits stand for, in nats. */
double nbi_token_kl(const float *a, const float *b, int64_t V);
