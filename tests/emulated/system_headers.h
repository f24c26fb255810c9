/* system_headers.h - what the emulator needs of the CUDA toolkit and of C++. It is precompiled, as
 * these are most of what the compiler reads of a .cu file. */
#pragma once

#define __DEVICE_LAUNCH_PARAMETERS_H__ /* declares threadIdx and others as constants */

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <functional>
#include <immintrin.h>
#include <math.h>
#include <string.h>
#include <type_traits>
#include <unordered_map>
#include <vector>
