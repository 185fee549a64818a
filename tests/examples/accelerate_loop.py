"""A loop of Accelerate's around a model and an optimizer of fp8cfg: python tests/examples/accelerate_loop.py [OVERRIDES]"""

from __future__ import annotations

import sys

from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fp8cfg
from fp8cfg.training.data import run_data


def train(recipe: fp8cfg.Recipe) -> list[float]:
    job, t = fp8cfg.build(recipe), recipe.trainer
    samples = run_data(recipe)[0].rows(0, t.max_steps * t.global_batch_size)  # or data of yours
    loader = DataLoader(TensorDataset(*samples), batch_size=t.micro_batch_size)
    parts = t.global_batch_size // t.micro_batch_size

    # "no": precision is the job's. Nor does one call accelerator.clip_grad_norm_: the job's optimizer clips.
    accelerator = Accelerator(mixed_precision="no", cpu=job.device.type == "cpu", gradient_accumulation_steps=parts)
    model, optimizer, loader, scheduler = accelerator.prepare(job.model, job.optimizer, loader, job.scheduler())
    losses, mean = [], 0.0
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            with job.autocast():
                loss = model(tokens, targets)
                accelerator.backward(job.scaled(loss))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean += loss.item() / parts
        if accelerator.sync_gradients:
            if not losses:
                print(job.prove())  # stops here where FP8 did not run as planned
            losses.append(mean)
            print(f"step {len(losses)}: loss {mean:.4f}")
            mean = 0.0
    return losses


if __name__ == "__main__":
    train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
