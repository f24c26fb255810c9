/* nibble.h - the public interface of libnibble, all of it.
 *
 * Each header may be included by itself. core.h is where to begin; its first comment has the rules
 * that hold for all functions. */
#pragma once

#include "nibble/core.h"
#include "nibble/data.h"
#include "nibble/eval.h"
#include "nibble/files.h"
#include "nibble/identity.h"
#include "nibble/text.h"
#include "nibble/tools.h"
