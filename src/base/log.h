/* log.h - lines for the person who watches; the sink belongs to the program. */
#pragma once

#include "base/status.h"

void nbi_log(enum nb_log_level level, const char *fmt, ...) NBI_PRINTF(2, 3);
