/* fuzz_safetensors.c - arbitrary bytes as a .safetensors file: open, look at everything, read all.
 */
#include "fuzz/store_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_store(NBI_FORMAT_SAFETENSORS, data, size);
}
