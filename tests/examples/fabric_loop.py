"""A loop of Lightning Fabric's around a model and an optimizer of fp8cfg: python tests/examples/fabric_loop.py [OVERRIDES]"""

from __future__ import annotations

import sys

from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import fp8cfg
from fp8cfg.training.data import run_data


def train(recipe: fp8cfg.Recipe) -> list[float]:
    job, t = fp8cfg.build(recipe), recipe.trainer
    samples = run_data(recipe)[0].rows(0, t.max_steps * t.global_batch_size)  # or data of yours
    parts = t.global_batch_size // t.micro_batch_size

    fabric = Fabric(accelerator=job.device.type, devices=1)  # no `precision`: that is the job's
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples), batch_size=t.micro_batch_size))
    scheduler = job.scheduler()
    losses, mean = [], 0.0
    for done, (tokens, targets) in enumerate(loader, start=1):
        with job.autocast():
            loss = model(tokens, targets)
            fabric.backward(job.scaled(loss) / parts)
        mean += loss.item() / parts
        if done % parts:
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if not losses:
            print(job.prove())  # stops here where FP8 did not run as planned
        losses.append(mean)
        print(f"step {len(losses)}: loss {mean:.4f}")
        mean = 0.0
    return losses


if __name__ == "__main__":
    train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
