"""Memory under FSDP2: planned bytes are those of a part and of what is gathered, and no rank makes a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fp8cfg
from fp8cfg.models import hf_checkpoint, hf_export
from fp8cfg.models.weight_init import BLOCK
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.hugging_face import family_of_model
from fp8cfg.training import memory_measurement
from tests.support.fsdp_runs import CURRENT, FSDP, HAS_TORCHAO, PLAIN, TORCHAO, WHOLE, job_of
from tests.support.small import small


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16",
        CURRENT,
        "precision=bf16_fp8",
        *([f"{TORCHAO} storage.gather=bf16", TORCHAO] if HAS_TORCHAO else []),
    ],
)
def test_the_plan_is_what_is_measured(words: str, recompute: str) -> None:
    found = memory_measurement.measure_memory(
        fp8cfg.compose(
            [
                "recipe=llama_tiny",
                "data=tiny",
                "model.num_layers=3",
                *words.split(),
                FSDP,
                "trainer.micro_batch_size=2",
                f"model.recompute_granularity={recompute}",
            ]
        )
    )
    peak, here = found.pop("peak")
    assert peak == pytest.approx(here, rel=0.03)
    for kind, (planned, here) in found.items():
        assert here == pytest.approx(planned, rel=0.02, abs=1 << 17), kind


def test_the_planned_memory_is_a_part_and_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.planning import plan_recipe as planned
    from fp8cfg.planning.fit_search import check_memory
    from fp8cfg.planning.fsdp_memory import FsdpSchedule
    from fp8cfg.planning.hardware import find_gpu
    from fp8cfg.planning.layout import checked_parts
    from fp8cfg.planning.peak_memory import memory_table, part_linears, plan_memory, widest_part

    recipe = fp8cfg.compose(
        ["recipe=llama_8b", "precision=bf16", FSDP, "trainer.strategy.context_parallel_size=1"]
    )
    one = plan_memory(recipe, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "8")
    eight = plan_memory(recipe, "cuda")
    assert (
        all(eight[kind] * 8 == one[kind] for kind in ("weights", "gradients", "moments"))
        and eight["masters"] == 0
        and "accumulation" not in eight
    )
    layer, root = 218112000, 2 * 128256 * 4096 + 4096
    assert eight["gathered"] == one["gathered"] + 2 * layer == 2 * root + 2 * layer, (
        "beside logits; one rank gathers nothing ahead"
    )
    assert "whole: embedding, output, two layers" in memory_table(recipe, "cuda")
    part = widest_part(recipe, "cuda", 8)
    sharded = FsdpSchedule(recipe, "cuda", part, part_linears(recipe, part), "native", 2)
    assert sharded.during_backward(1) == 2 * root + 2 * 2 * layer + 2 * 128256 * 4096 + 4 * layer, (
        "weights, the output layer's gradient, what was sent"
    )
    assert sharded.during_reduction(1) == 2 * root + 2 * layer + 2 * 128256 * 4096 + (2 + 4) * layer
    assert sharded.during_reduction(32) == (2 + 4) * root
    if HAS_TORCHAO:
        auto = fp8cfg.compose(["recipe=llama_8b", *CURRENT.split(), FSDP, "model.vocab_size=1024"])
        fp8, high = (planned.report_plan(auto, 8, gpu).widest for gpu in (find_gpu("h100"), None))
        linears = part_linears(auto, fp8.part)
        cast, plain = (
            FsdpSchedule(auto, "cuda", fp8.part, linears, backend, 2).during_backward(1)
            for backend in ("torchao", "native")
        )
        assert plain - cast == 2 * (layer - 2 * 4096), (
            "all but the norms of two layers, in a byte less"
        )
        assert (
            "FP8 copies" not in {k for k, n in fp8.memory.items() if n}
            and high.memory["FP8 copies"]
        )
    stages = [
        plan_memory(large, "cuda", part)
        for large in [fp8cfg.compose(["recipe=llama31_70b", "precision=bf16", FSDP])]
        for part in checked_parts(large, 64)
    ]
    assert (
        all(0 < kinds["gathered"] < 10e9 for kinds in stages)
        and stages[0]["gathered"] > stages[1]["gathered"]
    )
    short = fp8cfg.compose(
        [
            "recipe=llama_8b",
            "precision=bf16",
            FSDP,
            "model.seq_length=128",
            "trainer.micro_batch_size=2",
        ]
    )
    kinds = plan_memory(short, "cuda")
    assert sum(kinds.values()) < 4 * (32 * layer + root), (
        "no rank makes the model before it is split"
    )
    split = {
        kind: n
        for kind, n in plan_memory(
            fp8cfg.compose(["recipe=llama_8b", "precision=bf16", "storage.shard=none"]), "cuda"
        ).items()
        if n
    }
    assert "to start" not in kinds and "to start" not in split
    with pytest.raises(fp8cfg.ConfigError, match=r"needs [\d.]+ GiB, .*; nearest that fit: "):
        check_memory(short, "cuda", sum(kinds.values()) * 2 // 3)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is Tensor and not made.is_meta:
            self.elements = max(
                self.elements, made.untyped_storage().nbytes() // made.element_size()
            )
        return made


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16",
        *([TORCHAO] if HAS_TORCHAO else []),
        f"precision=bf16_fp8 {PLAIN} fp8.dot_product_attention=true",
        "weights",
    ],
)
def test_a_rank_makes_its_parts_alone(words: str, tmp_path: Path) -> None:
    """The last of 5 ranks, which do not divide the layers evenly."""
    rank, wide = (
        4,
        "model.hidden_size=320 model.ffn_hidden_size=480 model.num_attention_heads=5 model.num_query_groups=5",
    )
    if words == "weights":
        drawn, family = (
            job_of("precision=fp32 trainer.seed=7", WHOLE, wide),
            family_of_model(small().model),
        )
        hf_export.write_model(
            tmp_path,
            transformer_config(drawn.recipe),
            family.write(drawn.recipe.model),
            hf_checkpoint.Layout(hf_checkpoint.LLAMA),
            lambda name: (drawn.model.state_dict()[name], None),
        )
        words = f"precision=bf16 model.weights={tmp_path}"
    plain = "precision=fp32" if "fp8" in words else f"{words} precision.compute=fp32"
    whole = dict(job_of(plain, WHOLE, wide).model.named_parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=5)
    try:
        with _Largest() as made:
            job = job_of(words, wide, FSDP)
    finally:
        dist.destroy_process_group()
    for name, p in job.model.named_parameters():
        rows = -(-len(whole[name]) // 5)
        assert torch.equal(local(p), whole[name][rank * rows : (rank + 1) * rows]), name
    ranks = 1 if "model.weights" in words else 5  # one whole tensor at a time is read
    assert made.elements <= max(
        BLOCK, *(-(-len(p) // ranks) * p[0].numel() for p in whole.values())
    )
    assert all(b.isfinite().all() and not b.is_meta for b in job.model.buffers())
