/* perplexity.h - negative log-likelihood and KL divergence computed from logits. */
#pragma once

#include "base/status.h"
#include "nibble/eval.h"

/* -log softmax(logits)[target] in nats; non-finite if a logit is. */
double nbi_token_nll(const float *logits, int64_t V, int32_t target);

/* KL(softmax(a) || softmax(b)) in nats. */
double nbi_token_kl(const float *a, const float *b, int64_t V);
