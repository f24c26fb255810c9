/* log.h - log messages for the user, one line each. The program sets the sink. */
#pragma once

#include "base/status.h"

void nbi_log(enum nb_log_level level, const char *fmt, ...) NBI_PRINTF(2, 3);
