"""Your own training loop around a job, with microbatches.

Usage:
    python examples/own_loop.py [OVERRIDES]
"""

from __future__ import annotations

import sys

import fp8cfg


def train(recipe: fp8cfg.Recipe) -> list[float]:
    job = fp8cfg.build(recipe)
    batches, _ = fp8cfg.run_data(recipe)  # or your own data: int64 [batch, seq_length]
    parts = recipe.trainer.global_batch_size // recipe.trainer.micro_batch_size
    losses = []
    for step in range(recipe.trainer.max_steps):
        mean = 0.0
        for part in range(parts):
            tokens, targets = (
                t.to(job.device) for t in batches.batch(step, micro=part, num_micro=parts)
            )
            with job.autocast():
                loss = job.model(tokens, targets)
                job.backward(loss, parts)  # loss / parts, times the loss scale under fp16
            mean += loss.item() / parts
        job.schedule.apply(job.optimizer, job.optimizer.steps)
        # Unscales, clips and updates. Returns False if gradients were not finite: nothing changed.
        job.optimizer.step()
        job.optimizer.zero_grad()
        if step == 0:
            print(job.prove())  # raises an error if FP8 did not run as planned
        print(f"step {step + 1}: loss {mean:.4f}")
        losses.append(mean)
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # one line and exit code 2 for a mistake
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
