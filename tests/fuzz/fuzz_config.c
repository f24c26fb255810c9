/* fuzz_config.c - parses arbitrary bytes as config.json. An accepted config must survive a round
 * trip through our writer. */
#include <string.h>

#include "base/json.h"
#include "model/params.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *json = NULL, *again = NULL;
    struct nbi_config a, b;
    if (nbi_json_parse(&json, (const char *)data, size) == NB_OK &&
        nbi_config_parse(&a, json) == NB_OK) {
        struct nbi_param p;
        nbi_param_at(&a, nbi_param_count(&a) - 1, &p);
        if (nbi_config_to_json(&a, &again) != NB_OK || nbi_config_parse(&b, again) != NB_OK)
            abort();
        if (a.layers != b.layers || a.vocab_size != b.vocab_size || a.head_dim != b.head_dim ||
            a.rope_theta != b.rope_theta || a.yarn_factor != b.yarn_factor ||
            a.eos_count != b.eos_count)
            abort();
    }
    json_decref(again);
    json_decref(json);
    return 0;
}
