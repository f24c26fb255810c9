/* version.c - the version line; the build passes both parts. */
#include "nibble.h"

const char *nb_version(void)
{
    return NIBBLE_VERSION " (" NIBBLE_COMMIT ")";
}
