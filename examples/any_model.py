"""A model of transformers, made FP8, in a loop of one's own: python examples/any_model.py [OVERRIDES]"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8cfg


def llama(recipe: fp8cfg.Recipe) -> LlamaForCausalLM:
    """A small Llama with random weights; LlamaForCausalLM.from_pretrained(...) in your own script."""
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
    job = fp8cfg.build(
        recipe, model=llama(recipe)
    )  # in place: FP8 layers, the recipe's precision and optimizer
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
            print(job.prove())  # stops here where FP8 did not run as planned
        print(f"step {step + 1}: loss {loss.item():.4f}")
        losses.append(loss.item())
    # To save: job.model.save_pretrained(folder), which others read, or torch.save(job.model.state_dict(), file).
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # a mistake is a line and exit code 2, as of the command
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
