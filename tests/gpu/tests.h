/* tests.h - the mains of the unit tests that gpu_tests is made of; GPU_TESTS is X(NAME) for each
 * (tests/CMakeLists.txt). */
#pragma once

#define X(name) int name(void);
GPU_TESTS
#undef X
