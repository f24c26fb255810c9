/* fuzz_gguf.c - arbitrary bytes as a .gguf file: open, look at everything, read every value. */
#include "fuzz/store_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return fuzz_store(NBI_FORMAT_GGUF, data, size);
}
