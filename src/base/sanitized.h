/* sanitized.h - whether a build has sanitizers: it is slow then, and freed memory stays with them
 * for a while. */
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
