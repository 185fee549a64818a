"""A loop of one's own, and a model of one's own, with the types that they have: what a type checker passes."""

from typing import assert_type

import torch

import fp8cfg
from fp8cfg import Recipe, build


def own_loop(recipe: Recipe) -> None:
    job = build(recipe)
    assert_type(job, fp8cfg.Job)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with job.autocast():
        loss = job.model(tokens, tokens)
        job.backward(loss)
    job.schedule.apply(job.optimizer, 0)
    job.optimizer.step()
    job.optimizer.zero_grad()
    assert_type(fp8cfg.fit(job).loss, float | None)
    print(fp8cfg.coverage(job.model))


def own_model(recipe: Recipe) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    converted = fp8cfg.convert_model(model, recipe)
    with converted.autocast():
        converted.model(torch.zeros(16, 64)).sum().backward()
    converted.step()
    assert_type(fp8cfg.has_fp8_layers(model), bool)
