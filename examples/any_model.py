"""A transformers model in FP8 in your own training loop.

Usage:
    python examples/any_model.py [OVERRIDES]
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8cfg


def llama(recipe: fp8cfg.Recipe) -> LlamaForCausalLM:
    """Returns a small Llama with random weights. Your script has from_pretrained(...) here."""
    m = recipe.model
    torch.manual_seed(recipe.trainer.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=m.vocab_size,
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.num_query_groups,
            use_cache=False,
        )
    )


def train(recipe: fp8cfg.Recipe) -> list[float]:
    # Converts the model in place and adds the recipe's optimizer.
    job = fp8cfg.build(recipe, model=llama(recipe))
    batches, _ = fp8cfg.run_data(recipe)
    losses = []
    for step in range(recipe.trainer.max_steps):
        tokens = batches.batch(step)[0].to(job.device)
        with job.autocast():
            loss = job.model(input_ids=tokens, labels=tokens).loss
            job.backward(loss)
        job.schedule.apply(job.optimizer, job.optimizer.steps)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step == 0:
            print(job.prove())  # raises an error if FP8 did not run as planned
        print(f"step {step + 1}: loss {loss.item():.4f}")
        losses.append(loss.item())
    # To save the weights for other tools: job.model.save_pretrained(folder), or
    # torch.save(job.model.state_dict(), file).
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # one line and exit code 2 for a mistake
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
