/* kernel_cases.h - the tables of cases that kernels.c goes through, one for each kind of operation.
 */
#pragma once

#include "check/kernel_run.h"

struct nbi_kernel_cases {
    const struct nbi_kernel_case *cases;
    int count;
};

extern const struct nbi_kernel_cases nbi_cases_rowwise, nbi_cases_linear, nbi_cases_attention,
    nbi_cases_train, nbi_cases_optimizer, nbi_cases_model;

#define NBI_COUNT_OF(a) ((int)(sizeof(a) / sizeof *(a)))

/* The shapes of a case: the array NAME, and NAME_letters. */
#define NBI_SHAPES(name)                                                                           \
    .letters = name##_letters, .shapes = name, .shape_count = NBI_COUNT_OF(name)

/* A case of training, with activations in f32 or bf16. */
#define NBI_TRAINING   .training = true, .caps = NBI_CAP_TRAIN
#define NBI_TRAIN_BF16 .bf16 = true, .training = true, .caps = NBI_CAP_TRAIN | NBI_CAP_BF16
