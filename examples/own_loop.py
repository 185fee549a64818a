"""A loop of one's own: python examples/own_loop.py [OVERRIDES]"""

from __future__ import annotations

import sys

import fp8cfg


def train(recipe: fp8cfg.Recipe) -> list[float]:
    job = fp8cfg.build(recipe)
    batches, _ = fp8cfg.run_data(recipe)  # or data of yours: int64 [batch, seq_length]
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
        job.optimizer.step()  # unscales, clips, updates; False where gradients were not finite and nothing was done
        job.optimizer.zero_grad()
        if step == 0:
            print(job.prove())  # stops here where FP8 did not run as planned
        print(f"step {step + 1}: loss {mean:.4f}")
        losses.append(mean)
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # a mistake is a line and exit code 2, as of the command
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
