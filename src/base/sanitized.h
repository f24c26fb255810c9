/* sanitized.h - SANITIZED: whether this build uses sanitizers, which are slow and delay the release
 * of freed memory. */
#pragma once

#ifdef __has_feature
#define HAS(feature) __has_feature(feature)
#else
#define HAS(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || HAS(address_sanitizer) ||     \
    HAS(thread_sanitizer) || HAS(memory_sanitizer)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif
