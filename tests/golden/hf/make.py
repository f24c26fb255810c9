"""Makes tiny random Qwen3 models, and what Hugging Face's transformers computes with them.

usage: make.py [NAME...]

Writes NAME/config.json, NAME/model.safetensors (bf16) and NAME.golden.safetensors (f32) beside this
file. Needs torch, transformers and safetensors of PyPI; README.md says which versions made the
files that are here.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 3  # of AdamW
GREEDY_PROMPT, GREEDY_TOKENS = 8, 48

COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
    "initializer_range": 0.06, "max_position_embeddings": 4096, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "sliding_window": None,
}
# Rows and tokens of the batch, and how the models differ: tied or not, heads that share keys or not.
MODELS = {
    "tied": (2, 31, dict(
        hidden_size=48, intermediate_size=112, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=160, rope_theta=1e6, tie_word_embeddings=True)),
    "untied": (3, 17, dict(
        hidden_size=32, intermediate_size=80, num_attention_heads=3, num_key_value_heads=3,
        head_dim=32, vocab_size=112, rope_theta=5e6, tie_word_embeddings=False)),
}


def make_model(name, config, generator):
    """Writes random weights, norms included, in bf16."""
    os.makedirs(os.path.join(HERE, name), exist_ok=True)
    with open(os.path.join(HERE, name, "config.json"), "w", encoding="ascii") as file:
        json.dump(config, file, indent=1)
        file.write("\n")
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    tensors = {}
    for key, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        tensors[key] = (1 + 0.1 * noise if p.ndim == 1 else 0.1 * noise).to(torch.bfloat16)
    save_file(tensors, os.path.join(HERE, name, "model.safetensors"), {"format": "pt"})


def loss_of(model, ids, labels):
    """The mean over the labels, in float64; transformers' own computes it in f32."""
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return logits, loss


def greedy(model, prompt):
    """The best token of each step, and how much better it was than the second."""
    ids, margins = prompt, []
    for _ in range(GREEDY_TOKENS):
        best = model(input_ids=ids[None]).logits[0, -1].topk(2)
        ids = torch.cat([ids, best.indices[:1]])
        margins.append(best.values[0] - best.values[1])
    return ids, torch.stack(margins)


def compute(name, batch, generator):
    """Everything that is compared, from the weights as they were stored."""
    path = os.path.join(HERE, name)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double().train()
    ids = torch.randint(2, model.config.vocab_size, batch, generator=generator)
    labels = torch.where(torch.rand(batch, generator=generator) < 0.2, -100, ids)
    with torch.no_grad():
        greedy_ids, margin = greedy(model, ids[0, :GREEDY_PROMPT])
    out = {"input_ids": ids.int(), "labels": labels.int(), "greedy.ids": greedy_ids.int(),
           "greedy.margin": margin}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                                  weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits, loss = loss_of(model, ids, labels)
        loss.backward()
        if step == 0:
            out["logits"], out["loss"] = logits.detach(), loss.detach().reshape(1)
            out |= {f"grad.{key}": p.grad.clone() for key, p in model.named_parameters()}
        losses.append(loss.detach())
        optimizer.step()
    out["adamw3.losses"] = torch.stack(losses)
    out |= {f"adamw3.{key}": p.detach() for key, p in model.named_parameters()}
    save_file({key: (t.float() if t.is_floating_point() else t).contiguous()
               for key, t in out.items()}, path + ".golden.safetensors")
    print(f"{name}: smallest margin {margin.min():.3g}, losses {losses}")


def main():
    """Makes the models that are named, or all."""
    for name in sys.argv[1:] or MODELS:
        rows, tokens, shape = MODELS[name]
        generator = torch.Generator().manual_seed(1 + list(MODELS).index(name))
        make_model(name, COMMON | shape, generator)
        compute(name, (rows, tokens), generator)


if __name__ == "__main__":
    main()
