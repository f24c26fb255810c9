/* base.h - macros that the other public headers share. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NB_MUST_CHECK __attribute__((warn_unused_result))

/* The lists below are macros with rows (enumerator, text). These two make the enum and an array of
 * the texts. */
#define NB_ENUMERATOR(id, name) id,
#define NB_ENUM_NAME(id, name)  name,

/* Room for the name of a device: "cpu" or "cuda:N". */
#define NB_DEVICE_NAME 16
