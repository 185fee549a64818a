"""Context parallelism: sequences split over two and four gloo ranks train as on one, with the same scales, coverage and state."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.models import TransformerConfig, attention
from fp8cfg.models.transformer import Transformer
from fp8cfg.parallel.context import ContextRank, _split_arguments, split_sequences
from fp8cfg.parallel.mesh import device_mesh
from fp8cfg.parallel.process_group import SENT, World
from fp8cfg.schema.training import Strategy
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from fp8cfg.training.step_report import attention_kernels
from tests.support import rank_runs
from tests.support.ranks import on_ranks
from tests.support.small import small

EXACT = "precision=fp32 trainer.gradient_clip_val=0"
FP8 = "precision=bf16_fp8"
SMALL = "model.num_layers=1"
"""Of runs that show something else than what goes from layer to layer."""
RUNS = {  # name -> words, the largest relative difference of a loss from that of one rank
    "fp32": (EXACT, 1e-6),
    "masked": (
        f"{EXACT} {SMALL} data.eod_mask_loss=true",
        1e-6,
    ),  # ranks have unlike numbers of targets
    "zero1": (f"{EXACT} storage.shard=zero1", 1e-6),
    "fsdp": (f"{EXACT} storage.shard=fsdp", 1e-6),
    "recomputed": (f"{EXACT} model.recompute_granularity=full", 1e-6),
    # A rank's share of the gradients of weights, keys and values is rounded to bf16 before it is summed, 1.6e-4 of a loss without FP8.
    # In FP8 the scale of a tensor is that of the tokens which a rank has, in the first step under delayed scaling and in each under
    # current and block scaling; E5M2 has steps of an eighth. Two data-parallel ranks, of which this is as true, differ from one rank by
    # as much: delayed 4.5e-4 (these 8.6e-4), current 4.6e-4 (2.6e-4), MXFP8 2.3e-4 (0.9e-4); gradient norms by 1 to 5 per cent.
    "fp8": (FP8, 2e-3),
    "fp8 zero1": (f"{FP8} storage.shard=zero1", 2e-3),
    "current": (
        f"precision=bf16_fp8_current {SMALL} fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
        2e-3,
    ),
    "mxfp8": (f"precision=bf16_mxfp8 {SMALL}", 2e-3),
    "masters": (f"{FP8} {SMALL} storage.master_weight=fp16_scaled", 2e-3),
}
SAME = {"zero1": "fp32", "fsdp": "fp32", "recomputed": "fp32", "fp8 zero1": "fp8"}
"""Runs that on one rank are another one."""
TWO, MORE, FOUR = (
    ("fp32", "fp8"),
    ("masked", "fsdp", "recomputed", "current", "mxfp8", "masters"),
    ("fp32", "zero1", "fp8 zero1"),
)
"""Runs on two ranks, more of them in `make test-all`, and those on four, there too."""
LONG = {("fp32", 2), ("fp32", 1)}
"""Runs of more steps, by name and ranks."""
Alone = Callable[[str], dict[str, Any]]
NORMS = {"fp8": 0.1, "current": 0.1, "mxfp8": 0.1, "masters": 0.1}


def job_of(words: str, context: int, ranks: int) -> Job:
    micro = 8 if ranks == context else 4
    return fp8cfg.build(
        small(
            *words.split(),
            f"trainer.micro_batch_size={micro}",
            f"trainer.devices={ranks}",
            f"trainer.max_steps={rank_runs.LONG}",
            f"trainer.strategy.context_parallel_size={context}",
        )
    )


def trained(name: str, context: int, world: World, folder: Path | None = None) -> dict[str, Any]:
    """The run of that name, with a checkpoint on the way in `folder`."""
    job, last = (
        job_of(RUNS[name][0], context, world.size),
        rank_runs.LONG if (name, world.size) in LONG else rank_runs.STEPS,
    )
    return (
        rank_runs.saved(job, world, folder, last)
        if folder
        else rank_runs.trained(job, world, 0, last)
    )


def resumed(words: str, context: int, world: World, folder: Path) -> dict[str, Any]:
    """The rest of a run that goes on from the checkpoint in `folder`."""
    return rank_runs.trained(
        rank_runs.resumed(job_of(words, context, world.size), folder), world, rank_runs.SAVED
    )


FAMILIES: dict[str, dict[str, Any]] = {
    "grouped": {"num_query_groups": 2},
    "window": {"sliding_window": 5},
    "long window": {"sliding_window": 21},
    "soft cap": {"attn_logit_softcapping": 3.0, "num_query_groups": 1, "sliding_window": 9},
    "learned": {
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 64,
        "normalization": "LayerNorm",
    },
}
CONFIG = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "head_dim": 16,
    "vocab_size": 96,
    "seq_length": 32,
}


def family(changes: dict[str, Any], mesh: Any, world: World) -> dict[str, float]:
    """Largest differences of loss, logits and gradients of a model over split sequences from those over whole ones."""
    whole, split = (Transformer(TransformerConfig(**{**CONFIG, **changes})) for _ in range(2))
    for model in (whole, split):
        model.init_weights(1)
    split_sequences(split, mesh)
    tokens = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1)
    loss, share = whole(tokens, targets), split(tokens, targets=targets) / world.size
    loss.backward()
    share.backward()
    logits = (split(tokens) - split.context.part(whole(tokens).mT).mT).abs().max().item()
    grads = [
        (world.sum(mine.grad) - want.grad).abs().max().item()
        for mine, want in zip(split.parameters(), whole.parameters(), strict=True)
    ]
    seen = list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        core = split.layers[0].self_attention.core_attention.core
        patch.setattr(core, "forward", lambda q, k, v: seen.append((q.shape[-2], k.shape[-2])) or q)
        split(tokens)
    asked = split.layers[0].self_attention.core_attention.lengths(32)
    assert seen == [asked[number] for number in split.context.chunks], (
        "what sdpa_backends asks for is what runs"
    )
    return {
        "loss": (world.sum(share.detach()) - loss).abs().item(),
        "logits": logits,
        "gradients": max(grads),
    }


def on_two(world: World) -> dict[str, Any]:
    mesh = device_mesh(Strategy(context_parallel_size=2), "cpu")
    found: dict[str, Any] = {
        "families": {name: family(changes, mesh, world) for name, changes in FAMILIES.items()}
    }
    kernels = attention_kernels(job_of(FP8, 2, 2))
    assert kernels == {f"layers.{n}.self_attention.core_attention": "flash" for n in range(2)}, (
        "FSDP2 makes another class of a layer"
    )
    return found | runs(TWO, world) | {"sent": sent(world)}


def more_on_two(folder: Path, world: World) -> dict[str, Any]:
    found = runs(MORE, world) | {"fp8": trained("fp8", 2, world, folder / "two")}
    found["resumed"] = resumed(FP8, 2, world, folder / "two")
    found["from one"] = resumed(EXACT, 2, world, folder / "one")
    found["to data"] = resumed(FP8, 1, world, folder / "two")
    os.environ["WORLD_SIZE"] = "2"
    found["memory"] = {
        words: memory_measurement.measure_memory(job_of(words, 2, 2).recipe) for words in MEASURED
    }
    return found


MEASURED = (
    "precision=fp32 storage.shard=none",
    "precision=fp32 storage.shard=zero1",
    "precision=bf16 storage.shard=zero1",
    "precision=bf16_fp8 model.recompute_granularity=full storage.shard=zero1",
)


def sent(world: World) -> list[int]:
    """Bytes of keys and values that a step counts, and those that are handed to the collectives."""
    job, handed = job_of("precision=bf16 model.recompute_granularity=full", 2, 2), [0]
    whole = ContextRank.gather_sequences

    def counted(here: ContextRank, parts: torch.Tensor) -> torch.Tensor:
        def backward(gradient: torch.Tensor) -> None:
            handed[0] += gradient.nbytes // 2

        handed[0] += parts.nbytes
        every = whole(here, parts)
        if every.requires_grad:
            every.register_hook(backward)  # as large as what is scattered
        return every

    SENT.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextRank, "gather_sequences", counted)
        train_step(job, run_data(job.recipe)[0], 0, world)
    return [SENT.bytes["keys and values"], handed[0]]


def runs(names: tuple[str, ...], world: World) -> dict[str, Any]:
    return {name: trained(name, 2, world) for name in names}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """Runs on one rank, whose microbatch is the global batch; that in float32 leaves a checkpoint in `folder`."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        return trained(name, 1, World(), folder / "one" if name == "fp32" else None)

    return lambda name: run(SAME.get(name, name))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def more(
    alone: Alone, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What ranks have that find a checkpoint of a run on one."""
    alone("fp32")
    return on_ranks(2, functools.partial(more_on_two, folder), tmp_path_factory.mktemp("more"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(4, functools.partial(runs, FOUR), tmp_path_factory.mktemp("four"))


def differences(found: dict[str, Any], want: dict[str, Any]) -> list[float]:
    steps = len(found["losses"])
    return [
        abs(a - b) / b
        for a, b in zip(
            [*found["losses"], *found["val"]], [*want["losses"][:steps], *want["val"]], strict=True
        )
    ]


def as_alone(name: str, ranks: list[dict[str, Any]], want: dict[str, Any]) -> None:
    """Ranks have one loss, which is that of one rank alone, and its coverage."""
    assert all(rank[name]["losses"] == ranks[0][name]["losses"] for rank in ranks)
    assert max(differences(ranks[0][name], want)) <= RUNS[name][1]
    assert ranks[0][name].get("coverage") == want.get("coverage")


def norms_as_alone(name: str, ranks: list[dict[str, Any]], want: dict[str, Any]) -> None:
    norms = ranks[0][name]["norms"]
    assert norms == pytest.approx(want["norms"][: len(norms)], rel=NORMS.get(name, 1e-5))


@pytest.mark.parametrize("name", TWO)
def test_two_context_ranks_train_as_one_rank(
    name: str, two: list[dict[str, Any]], alone: Alone
) -> None:
    as_alone(name, two, alone(name))
    norms_as_alone(name, two, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_context_ranks_recompute_and_train_in_other_scalings(
    name: str, more: list[dict[str, Any]], alone: Alone
) -> None:
    as_alone(name, more, alone(name))
    norms_as_alone(name, more, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_two_times_two_ranks_train_as_one_rank(
    name: str, four: list[dict[str, Any]], alone: Alone
) -> None:
    as_alone(name, four, alone(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_all_families_compute_what_one_rank_does(
    name: str, two: list[dict[str, Any]]
) -> None:
    assert all(max(rank["families"][name].values()) < 1e-6 for rank in two)


@pytest.mark.slow
def test_runs_resume_on_other_layouts(more: list[dict[str, Any]], alone: Alone) -> None:
    found, rest = more[0], slice(rank_runs.SAVED, rank_runs.STEPS)
    assert (
        found["resumed"]["losses"] == found["fp8"]["losses"][rest]
        and found["resumed"]["val"] == found["fp8"]["val"]
    )
    assert found["from one"]["losses"] == pytest.approx(alone("fp32")["losses"][rest], rel=1e-6)
    assert found["to data"]["losses"] == pytest.approx(
        found["fp8"]["losses"][rest], rel=RUNS["fp8"][1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_planned_bytes_are_the_measured_ones(words: str, more: list[dict[str, Any]]) -> None:
    measured = [rank["memory"][words] for rank in more]
    for kind in ("masters", "gradients", "moments", "after forward", "peak"):
        planned = measured[0][kind][0]
        most = max(found[kind][1] for found in measured)
        assert most == pytest.approx(planned, rel=memory_measurement.BOUNDS.get(kind, 0.15)), kind


def test_sent_bytes_are_counted(two: list[dict[str, Any]]) -> None:
    counted, handed = two[0]["sent"]
    layers, samples, tokens, width = 2, 8, 16, 32
    assert counted == handed == layers * 3 * 2 * 2 * samples * tokens * width, (
        "forward twice and backward, keys and values in bf16"
    )


def test_the_bias_of_flash_attention_is_the_mask_that_a_cpu_takes() -> None:
    q, k, v = (torch.randn(2, heads, tokens, 16) for heads, tokens in ((4, 8), (2, 24), (2, 24)))
    attention.prepare_lower_right_bias(8, 24)
    biased = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attention._LOWER_RIGHT[8, 24], enable_gqa=True
    )
    torch.testing.assert_close(biased, attention.CoreAttention()(q, k, v))


def test_chunks_of_a_sequence_are_dealt_out_evenly() -> None:
    ranks = [ContextRank(rank, 3, "") for rank in range(3)]
    assert [rank.chunks for rank in ranks] == [(0, 5), (1, 4), (2, 3)]
    assert ranks[1].part(torch.arange(12)).tolist() == [2, 3, 8, 9]
    assert sorted(c for rank in ranks for c in rank.chunks) == list(range(6))


@pytest.mark.parametrize("length", [2, 6, 7])
def test_sequences_that_do_not_split_evenly_are_refused_on_all_ranks(length: int) -> None:
    """Otherwise some ranks would wait for the others' keys forever."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    for rank in (0, 1):
        model = Transformer(TransformerConfig(1, 32, 48, 2, 2, 16, 64, 16))
        model.context = ContextRank(rank, 2, "")
        model.register_forward_pre_hook(_split_arguments, with_kwargs=True)
        with pytest.raises(ValueError, match="2 context ranks need a multiple of 4 tokens"):
            model(tokens, targets=tokens)
