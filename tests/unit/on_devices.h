/* on_devices.h - a check as two tests: on the CPU, and on CUDA, which is skipped without a GPU.
 *
 * The file that includes it has begin_on(device) and end_on(), which come before and after each
 * check, and for each NAME a function check_NAME(void). */
#pragma once

#include "support.h"

/* Skips a test of an operation that the backend does not have. */
#define need_op(be, op)                                                                            \
    do {                                                                                           \
        if (!(be)->op)                                                                             \
            skip("%s has no %s", (be)->name, #op);                                                 \
    } while (0)

#define TEST_ON(file, name, device, where)                                                         \
    static void test_##file##__##name##_on_##where(void **state)                                   \
    {                                                                                              \
        (void)state;                                                                               \
        begin_on(device);                                                                          \
        check_##name();                                                                            \
        end_on();                                                                                  \
    }

#define TEST_ON_CPU(file, name)  TEST_ON(file, name, "cpu", the_cpu)
#define TEST_ON_CUDA(file, name) TEST_ON(file, name, "cuda", cuda)
#define TEST_ON_BOTH(file, name)                                                                   \
    TEST_ON_CPU(file, name)                                                                        \
    TEST_ON_CUDA(file, name)

#define ON_CPU(file, name)  cmocka_unit_test(test_##file##__##name##_on_the_cpu),
#define ON_CUDA(file, name) cmocka_unit_test(test_##file##__##name##_on_cuda),
#define ON_BOTH(file, name) ON_CPU(file, name) ON_CUDA(file, name)
