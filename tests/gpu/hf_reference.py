"""Makes random models of several shapes, and what Hugging Face's transformers computes with them.

usage: hf_reference.py FOLDER

As tests/golden/hf/make.py, whose files are small enough to be kept. Needs torch, transformers and
safetensors.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf"))
import make  # noqa: E402
import torch  # noqa: E402

# Rows and tokens of the batch; heads of 128 and 64 as tensor cores like them, and odd ones.
SHAPES = {
    "heads-128": (2, 65, dict(
        hidden_size=256, intermediate_size=544, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=672, rope_theta=1e6, tie_word_embeddings=True)),
    "heads-64": (1, 200, dict(
        hidden_size=336, intermediate_size=1040, num_attention_heads=6, num_key_value_heads=1,
        head_dim=64, vocab_size=1000, rope_theta=1e4, tie_word_embeddings=False)),
    "odd": (3, 23, dict(
        hidden_size=72, intermediate_size=200, num_attention_heads=5, num_key_value_heads=5,
        head_dim=24, vocab_size=301, rope_theta=1e6, tie_word_embeddings=True)),
    "wide": (1, 130, dict(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=2048, rope_theta=1e6, tie_word_embeddings=True)),
}


def main():
    """Makes all of them in a folder."""
    make.HERE = sys.argv[1]
    for i, (name, (rows, tokens, shape)) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(100 + i)
        make.make_model(name, make.COMMON | shape, generator)
        make.compute(name, (rows, tokens), generator)


if __name__ == "__main__":
    main()
