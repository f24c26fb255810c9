/* analyzer.h - tells clang's analyzer what status.c does, which it cannot see from another file.
 *
 * run.sh includes it in front of every file but status.c. Without it, "return nbi_fail(...)" might
 * be a success to the analyzer, and it then follows paths that do not exist. */
#pragma once

#include "base/status.h"

#define nbi_fail(status, ...)        (nbi_fail(status, __VA_ARGS__), (status))
#define nbi_fail_memory(what, bytes) (nbi_fail_memory(what, bytes), NB_ENOMEM)
