/* tiny_model.h - a random model of two layers with a tokenizer, in the folder of a test. */
#pragma once

#include "base/file.h"
#include "unit/support.h"

#define TINY_VOCAB 648

static const char *const tiny_config =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"head_dim\": 16,"
    " \"hidden_act\": \"silu\", \"hidden_size\": 64, \"intermediate_size\": 64,"
    " \"max_position_embeddings\": 512, \"num_attention_heads\": 4, \"num_hidden_layers\": 2,"
    " \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"eos_token_id\": 602,"
    " \"vocab_size\": 648}";

/* Makes test_path("model"). */
static inline void make_tiny_model(void)
{
    char *bytes;
    size_t len;
    put("config.json", tiny_config);
    const struct nb_synth_opts synth = {.config = test_path("config.json"),
                                        .dst = test_path("model"),
                                        .seed = 3,
                                        .sigma = 0.05F,
                                        .threads = 2};
    assert_ok(nb_synth(&synth));
    assert_ok(nbi_file_read(NB_TEST_SOURCE "/golden/tokenizer/qwen/tokenizer.json", 1 << 20, &bytes,
                            &len));
    assert_ok(nbi_file_write(test_path("model/tokenizer.json"), bytes, len));
    free(bytes);
}
