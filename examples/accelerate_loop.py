"""An Accelerate training loop. Arguments are overrides; torchrun starts several ranks."""

from __future__ import annotations

import sys

# Import this before a process group exists. Otherwise gloo's threads live until Python exits.
import torch.distributed.nn  # noqa: F401
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fp8cfg


def train(recipe: fp8cfg.Recipe) -> list[float]:
    t = recipe.trainer
    # Or your own data.
    samples = fp8cfg.run_data(recipe)[0].rows(0, t.max_steps * t.global_batch_size)
    loader = DataLoader(TensorDataset(*samples), batch_size=t.micro_batch_size)

    # "no" because the job sets the precision. Don't call accelerator.clip_grad_norm_ either: the
    # job's optimizer clips.
    accelerator = Accelerator(mixed_precision="no", cpu=t.accelerator == "cpu")
    ranks = accelerator.num_processes
    parts = t.global_batch_size // (t.micro_batch_size * ranks)
    accelerator.gradient_accumulation_steps = parts
    if recipe.storage.shard == "auto":
        # prepare() reads the optimizer's state_dict(). Under ZeRO each rank has only a shard of it.
        recipe.storage.shard = "none"
    job = fp8cfg.build(recipe)  # after Accelerator, which gives each process its GPU
    optimizer, loader, scheduler = accelerator.prepare(job.optimizer, loader, job.scheduler())
    # evaluation_mode=True because the model must not be wrapped in DistributedDataParallel.
    model = accelerator.prepare_model(job.model, device_placement=False, evaluation_mode=True)
    losses, mean = [], 0.0
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            with job.autocast():
                loss = model(tokens, targets)
                accelerator.backward(job.scaled(loss / ranks))
            if accelerator.sync_gradients:
                job.sum_gradients()  # over the ranks
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean += accelerator.reduce(loss.detach(), "mean").item() / parts
        if accelerator.sync_gradients:
            if not losses:
                accelerator.print(job.prove())  # raises an error if FP8 did not run as planned
            losses.append(mean)
            accelerator.print(f"step {len(losses)}: loss {mean:.4f}")
            mean = 0.0
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # one line and exit code 2 for a mistake
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
