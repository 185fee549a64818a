"""A Lightning Fabric training loop. Arguments are overrides; torchrun starts several ranks."""

from __future__ import annotations

import os
import sys

from lightning_fabric import Fabric
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

import fp8cfg


def train(recipe: fp8cfg.Recipe) -> list[float]:
    t = recipe.trainer
    # Or your own data.
    samples = fp8cfg.run_data(recipe)[0].rows(0, t.max_steps * t.global_batch_size)

    # Without `precision` because the job sets it.
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fabric = Fabric(accelerator=t.accelerator, devices=local_ranks)
    fabric.launch()
    parts = t.global_batch_size // (t.micro_batch_size * fabric.world_size)
    job = fp8cfg.build(recipe)  # after launch(), which gives each process its GPU
    # Don't pass the model to fabric.setup: it must not be wrapped in DistributedDataParallel.
    optimizer = fabric.setup_optimizers(job.optimizer)
    loader = DataLoader(TensorDataset(*samples), batch_size=t.micro_batch_size)
    loader = fabric.setup_dataloaders(loader)
    scheduler = job.scheduler()
    losses, mean = [], 0.0
    for done, (tokens, targets) in enumerate(loader, start=1):
        with job.autocast():
            loss = job.model(tokens, targets)
            fabric.backward(job.scaled(loss) / (parts * fabric.world_size))
        mean += fabric.all_reduce(loss.detach(), reduce_op="mean").item() / parts
        if done % parts:
            continue
        job.sum_gradients()  # over the ranks
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if not losses:
            fabric.print(job.prove())  # raises an error if FP8 did not run as planned
        losses.append(mean)
        fabric.print(f"step {len(losses)}: loss {mean:.4f}")
        mean = 0.0
    if fabric.world_size > 1:
        fabric.barrier()
        distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # one line and exit code 2 for a mistake
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
