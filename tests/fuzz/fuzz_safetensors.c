/* fuzz_safetensors.c - opens arbitrary bytes as .safetensors and reads every entry and value. */
#include "fuzz/store_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_store(NBI_FORMAT_SAFETENSORS, data, size);
}
