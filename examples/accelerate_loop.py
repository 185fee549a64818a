"""A loop of Accelerate's around a model and an optimizer of fp8cfg: python examples/accelerate_loop.py [OVERRIDES],
or, on several ranks, torchrun --nproc-per-node 2 examples/accelerate_loop.py [OVERRIDES]."""

from __future__ import annotations

import sys

import torch.distributed.nn  # noqa: F401  imported after a process group is made, it keeps gloo's threads to the interpreter's end
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fp8cfg


def train(recipe: fp8cfg.Recipe) -> list[float]:
    t = recipe.trainer
    samples = fp8cfg.run_data(recipe)[0].rows(
        0, t.max_steps * t.global_batch_size
    )  # or data of yours
    loader = DataLoader(TensorDataset(*samples), batch_size=t.micro_batch_size)

    # "no": precision is the job's. Nor does one call accelerator.clip_grad_norm_: the job's optimizer clips.
    accelerator = Accelerator(mixed_precision="no", cpu=t.accelerator == "cpu")
    ranks = accelerator.num_processes
    accelerator.gradient_accumulation_steps = parts = t.global_batch_size // (
        t.micro_batch_size * ranks
    )
    if recipe.storage.shard == "auto":
        recipe.storage.shard = "none"  # prepare() reads the optimizer's state_dict(), of which a rank has a part under ZeRO
    job = fp8cfg.build(recipe)  # after Accelerator, which gives each process its GPU
    optimizer, loader, scheduler = accelerator.prepare(job.optimizer, loader, job.scheduler())
    model = accelerator.prepare_model(
        job.model, device_placement=False, evaluation_mode=True
    )  # in no DistributedDataParallel
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
                accelerator.print(job.prove())  # stops here where FP8 did not run as planned
            losses.append(mean)
            accelerator.print(f"step {len(losses)}: loss {mean:.4f}")
            mean = 0.0
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    with fp8cfg.exit_codes():  # a mistake is a line and exit code 2, as of the command
        train(fp8cfg.compose(["recipe=llama_tiny", "precision=bf16_fp8", *sys.argv[1:]]))
