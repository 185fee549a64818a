"""Sequence parallelism on two gloo ranks: an FP8 layer keeps its rank's tokens of a gathered input, and no bit changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.fp8_linear import LinearFunction
from fp8cfg.parallel.process_group import World
from tests.support.rank_runs import trained
from tests.support.ranks import on_ranks
from tests.support.small import small

SP = (
    "trainer.strategy.tensor_model_parallel_size=2",
    "trainer.strategy.sequence_parallel=true",
    "trainer.devices=2",
    "trainer.micro_batch_size=2",
)
SCALINGS = {
    "delayed": "precision=bf16_fp8 fp8.output_layer=true model.vocab_size=512",
    "current": "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "rows": "precision=bf16_fp8_current fp8.granularity=row fp8.high_precision_at_start=0"
    " fp8.high_precision_at_end=0",
    "blocks": "precision=bf16_fp8_block model.hidden_size=256 model.ffn_hidden_size=768",
    "mx": "precision=bf16_mxfp8",
    "fp32 compute": "precision=bf16_fp8 precision.compute=fp32",
    "wgrad in high precision": "precision=bf16_fp8 fp8.override_linear_precision.wgrad=true",
}
WIDTH = ("model.ffn_hidden_size=192",)
"""The part of the MLP that a rank has is not as wide as the residual stream, by which column-parallel layers are told."""
KEEP_ALL = ("wgrad in high precision",)
RUNS = [(name, recompute) for name in SCALINGS for recompute in ("none", "selective")]


def job_of(name: str, recompute: str) -> Job:
    return fp8cfg.build(
        small(*WIDTH, *SCALINGS[name].split(), *SP, f"model.recompute_granularity={recompute}")
    )


def kept_tokens(job: Job) -> list[int]:
    """Tokens of the input that each pass of a column-parallel layer saves, made again or not."""
    hidden, counts = job.recipe.model.hidden_size, list[int]()
    forward = LinearFunction.forward

    def recording(ctx: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        output: torch.Tensor = forward(ctx, x, *arguments)
        operand, source = ctx.to_save[0], ctx.to_save[-2]
        kept = operand if operand is not None else source
        # Row-parallel layers have all tokens, and a part of the channels.
        if x.shape[-1] == hidden and kept is not None:
            counts.append(kept.numel() // hidden)
        return output

    tokens = torch.zeros(2, job.recipe.model.seq_length, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch, job.autocast():
        patch.setattr(LinearFunction, "forward", staticmethod(recording))
        job.model(tokens, tokens)
    return counts


def on_two(world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for name, recompute in RUNS:
        job = job_of(name, recompute)
        whole = job_of(name, recompute)
        for layer in fp8_linears(whole.model):
            layer.token_shard, layer.keeps_input = None, False
        found[f"{name} {recompute}"] = {
            "shards": trained(job, world, 0, 3),
            "whole": trained(whole, world, 0, 3),
            "kept": kept_tokens(job),
            "kept whole": kept_tokens(whole),
        }
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), RUNS)
def test_no_bit_changes(name: str, recompute: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        shards, whole = (rank[f"{name} {recompute}"][key] for key in ("shards", "whole"))
        for key in ("losses", "norms", "val", "coverage"):
            assert shards[key] == whole[key], key
        for key, scale in whole["scales"].items():
            assert torch.equal(scale, shards["scales"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), RUNS)
def test_a_rank_keeps_its_own_tokens(name: str, recompute: str, two: list[dict[str, Any]]) -> None:
    tokens = 2 * 32
    for rank in two:
        found = rank[f"{name} {recompute}"]
        assert set(found["kept whole"]) == {tokens}
        # Selective recomputation makes inputs again that one scale does not cover.
        again = recompute == "selective" and name in ("rows", "blocks", "mx")
        is_all = again or name in KEEP_ALL
        assert set(found["kept"]) == {tokens if is_all else tokens // 2}
