"""Adapters over frozen weights: what is trained, what stays to the bit, what the layers multiply, and what a checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.models.config import adapter_parameters
from fp8cfg.models.lora import adapted_layers
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.layer_plan import adapted_projections as planned_adapters
from fp8cfg.planning.layer_plan import attention_flops, attention_plan, plan_layers
from fp8cfg.planning.layout import layout_violations
from fp8cfg.schema.errors import ConfigError, NotFP8Error
from fp8cfg.training.data import run_data
from fp8cfg.training.memory_measurement import BOUNDS, measure_memory
from fp8cfg.training.runs import train_job
from tests.support import whole_checkpoints
from tests.support.small import small, steps

LORA = ("lora.enabled=true", "optim.lr=0.01", "trainer.max_steps=12")
FP8 = "precision=bf16_fp8"
ROWS: dict[str, tuple[str, ...]] = {
    "bf16": ("precision=bf16",),
    "held in fp8": (FP8, "fp8.params=true"),
    "quantized each pass": (FP8, "fp8.params=false", "lora.dropout=0.1"),
    "blocks": ("precision=bf16_fp8_block", "fp8.params=true", "trainer.micro_batch_size=4"),
    "O2": (FP8, "fp8.params=false", "opt_level=O2"),
    "low-bit moments": (FP8, "storage.exp_avg=fp8_block", "storage.exp_avg_sq=fp8_block"),
    "fp16": ("precision=fp16_fp8", "precision.initial_loss_scale=65536"),
    "recomputed": (
        "precision=bf16",
        "storage.weight=fp8",
        "lora.dropout=0.1",
        "model.recompute_granularity=full",
    ),
    "o_proj alone": (
        "precision=bf16_fp8_current",
        "fp8.high_precision_at_end=0",
        "fp8.high_precision_at_start=0",
        "lora.targets=[layers.1.*.o_proj]",
        "fp8.dot_product_attention=true",
    ),
    "tied": (
        FP8,
        "model.share_embeddings_and_output_weights=true",
        "lora.targets=[lm_head,q_proj,v_proj]",
    ),
}


def stored(job: Job) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in stored_state_dict(job.model).items()}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.fixture(scope="module", params=ROWS.values(), ids=ROWS)
def trained(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A job of 5 steps, what it was made with, and its checkpoint after 2."""
    job = fp8cfg.build(small(*LORA, *request.param))
    found: dict[str, Any] = {
        "words": request.param,
        "job": job,
        "first": stored(job),
        "losses": [s.loss for s in steps(job, 2)],
    }
    found["coverage"] = job.prove()
    found["saved"] = whole_checkpoints.collect(job, run_data(job.recipe)[0], 2)
    found["saved"] = (
        {group: {k: t.clone() for k, t in of.items()} for group, of in found["saved"][0].items()},
        found["saved"][1],
    )
    return found | {"losses": found["losses"] + [s.loss for s in steps(job, 3, first=2)]}


def test_weights_are_untouched_to_the_bit_and_have_no_state(trained: dict[str, Any]) -> None:
    job, first, last = trained["job"], trained["first"], stored(trained["job"])
    moved = {name for name, t in last.items() if not same(t, first[name])}
    adapters = {name for name in last if ".lora." in name}
    assert {n for n in moved if "fp8_scale" not in n and "fp8_amax" not in n} <= adapters, (
        "scales and histories of activations move"
    )
    assert {n for n in adapters if n.endswith("lora_B")} <= moved
    assert all(p.grad is None for n, p in job.model.named_parameters() if n not in adapters)
    assert (
        {n for n, p in job.model.named_parameters() if p.requires_grad}
        == adapters
        == set(job.optimizer.names.values())
    )
    assert all(".lora." in name for name in job.optimizer.state_tensors()) and all(
        ".lora." in name for name in job.prepared.masters
    )
    count = adapter_parameters(planned_adapters(job.recipe), job.recipe.lora.rank)
    assert sum(p.numel() for p in job.model.parameters() if p.requires_grad) == count
    assert trained["losses"][-1] < trained["losses"][0]


def test_frozen_layers_multiply_forward_and_backward_and_make_no_weight_gradient(
    trained: dict[str, Any],
) -> None:
    job = trained["job"]
    if not job.recipe.fp8.enabled:
        assert job.prepared.model.layers[0].mlp.linear_fc1.weight.dtype == torch.bfloat16
        return
    reached, with_adapters = False, {name for name, *_ in adapted_layers(job.model)}
    for linear in trained["coverage"].data()["linears"]:
        fp8, name = linear["fprop"] != job.recipe.precision.compute, linear["name"]
        assert linear["wgrad"] == "none" and (linear["dgrad"] == "none") == (not reached), name
        assert fp8 == (not reached or linear["dgrad"] != job.recipe.precision.compute)
        reached = reached or name in with_adapters
    observed = {p.name: p for p in fp8cfg.coverage(job.model).linears}
    assert all(observed[p.name].gemms[2] is None for p in job.plan)


def test_a_run_comes_back_bit_for_bit_from_adapters_alone(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    tensors, state = trained["saved"]
    assert all(".lora." in name for name in tensors["model"])
    assert {name.rpartition(".")[2] for name in tensors.get("fp8", {})} <= {
        "fp8_scale",
        "fp8_amax_history",
    }
    assert state["base"] == {"weights": None, "sha256": None}
    path = whole_checkpoints.save(tmp_path, 2, tensors, state, keep=2)
    job = fp8cfg.build(small(*LORA, *trained["words"]))
    torch.manual_seed(99)  # dropout goes on from the generator that was saved
    assert job_state.restore(job, *whole_checkpoints.load(path), run_data(job.recipe)[0]) == 2
    assert [s.loss for s in steps(job, 3, first=2)] == trained["losses"][2:]
    want = stored(trained["job"])
    assert [name for name, t in stored(job).items() if not same(t, want[name])] == []


def test_dropout_is_that_of_the_seed() -> None:
    """Whatever the process drew before."""
    recipe = small(
        *LORA,
        "precision=bf16",
        "lora.dropout=0.3",
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
    )

    def ends_with() -> float | None:
        torch.rand(3)
        return train_job(fp8cfg.build(recipe), say=lambda _: None).loss

    assert ends_with() == ends_with()


def test_a_weight_gradient_that_ran_is_not_what_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = fp8cfg.build(small(*LORA, FP8))
    list(steps(job, 1))
    job.model.layers[1].mlp.linear_fc1.ran_backward[2] = job.model.layers[
        1
    ].mlp.linear_fc1.ran_backward[1]
    with pytest.raises(
        NotFP8Error,
        match=r"layers.1.mlp.linear_fc1 wgrad: planned not to run, its weight is frozen; ran e5m2 x e4m3",
    ):
        job.prove()


def test_attention_before_the_first_adapter_has_no_backward_pass() -> None:
    recipe = small(*LORA, *ROWS["o_proj alone"])
    first, second = attention_plan(recipe)
    assert first.gemms[2:] == second.gemms[2:] == (None,) * 4 and first.fp8_share == 1.0, (
        "o_proj stands behind layer 1's attention"
    )
    recipe.lora.targets = ("layers.1.*.v_proj",)
    assert [p.left_out == () for p in attention_plan(recipe)] == [False, True]


def test_attention_without_a_backward_pass_counts_its_two_forward_products() -> None:
    words = ["precision=bf16_fp8", "fp8.dot_product_attention=true", *LORA]
    plain = small(*words[:2])
    recipe = small(*words, "lora.targets=[layers.1.*.v_proj]")
    assert attention_flops(recipe) == pytest.approx(attention_flops(plain) * (2 + 6) / (6 + 6))
    coverage = planned_coverage(recipe, plan_layers(recipe))
    table = coverage.blocks()[0]
    rows = [line.split() for line in table.splitlines() if " attention " in line]
    assert [row[-2:] for row in rows] == [["e4m3xe4m3", "-"], ["e4m3xe4m3", "e5m2xe4m3"]]
    shares = [float(row[2].rstrip("%")) for row in rows]
    assert shares[1] == pytest.approx(3 * shares[0], abs=0.2)


@pytest.mark.parametrize("row", ["bf16", "held in fp8", "blocks", "low-bit moments"])
def test_planned_bytes_are_the_measured_ones(row: str) -> None:
    found = measure_memory(small(*LORA, *ROWS[row], "model.num_layers=3"))
    off = {
        kind: found[kind]
        for kind, bound in BOUNDS.items()
        if abs(found[kind][0] - found[kind][1]) > bound * found[kind][1]
    }
    assert not off, "kind: planned, measured"
    assert found["after forward"][0] == pytest.approx(found["after forward"][1], rel=0.1)


def test_a_plan_has_no_masters_of_frozen_weights() -> None:
    def bytes_of(*words: str) -> Any:
        return fp8cfg.plan(
            fp8cfg.compose(
                ["recipe=llama_8b", FP8, "trainer.strategy.context_parallel_size=1", *words]
            ),
            gpus=1,
            gpu="h100",
        )

    lora, held = bytes_of("task=lora", "fp8.params=false"), bytes_of("task=lora", "fp8.params=true")
    assert (
        lora.parameters - bytes_of().parameters
        == adapter_parameters(planned_adapters(lora.recipe), 8)
        == 20971520
    )
    for plan in (lora, held):
        kinds = plan.widest.memory
        assert (
            kinds["masters"] == kinds["gradients"] == 4 * 20971520
            and kinds["moments"] == 8 * 20971520
        )
    assert (
        held.widest.memory["weights"] < 0.6 * lora.widest.memory["weights"]
        and held.widest.total < 30 * 2**30
    )
    assert held.data()["coverage"]["linears"][4]["wgrad"] == "none"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("task=lora", FP8, "backend=te"),
            "backend=te: does not support LoRA adapters; set backend=native",
        ),
        (
            ("task=lora", "backend=msamp", FP8),
            "backend=msamp: does not support LoRA adapters; set backend=native",
        ),
        (
            ("task=lora", "backend=torchao", "precision=bf16_fp8_current"),
            "backend=torchao: does not support LoRA adapters; set backend=native",
        ),
        (
            ("task=lora", FP8, "log.fp8_stats_every_n_steps=2"),
            "log.fp8_stats_every_n_steps=2: measures gradients of weights, but lora.enabled=true freezes them; remove it",
        ),
        (
            ("task=lora", "lora.targets=[]"),
            "lora.targets=[]: adds no adapter; set it to [q_proj,v_proj] or remove it",
        ),
        (("lora.rank=4",), "lora.rank=4: has no effect with lora.enabled=false; set task=lora"),
        (
            ("task=sft", "lora.alpha=4"),
            "lora.alpha=4.0: has no effect with lora.enabled=false; set task=lora",
        ),
    ],
)
def test_refusals(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as e:
        fp8cfg.compose(words)
    assert any(problem.startswith(line) for problem in e.value.problems), e.value.problems


def test_adapters_of_split_matrices_have_no_dropout() -> None:
    split = (*LORA, "trainer.strategy.tensor_model_parallel_size=2", "trainer.devices=2")
    assert not layout_violations(small(*split, "lora.dropout=0"), 2)
    (violation,) = layout_violations(small(*split, "lora.dropout=0.1"), 2)
    line = str(violation)
    assert line.startswith("lora.dropout=0.1: ") and line.endswith("of their shards; set it to 0")


def test_a_pattern_that_names_no_layer_and_a_model_of_ones_own_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"lora.targets=q_prj: matches no linear layer; did you mean 'q_proj'\?"
    ):
        fp8cfg.build(small(*LORA, "lora.targets=[q_prj]"))
    with pytest.raises(
        ConfigError, match=r"lora\.enabled=true: its adapters only fit the Transformer of a recipe"
    ):
        fp8cfg.build(small(*LORA), model=torch.nn.Sequential(torch.nn.Linear(16, 16)))


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("[q_proj,v_proj]", 4),
        ("[linear_qkv]", 6),
        ("[layers.0.*]", 7),
        ("['layers.*.mlp.linear_fc1']", 4),
        ("['*_proj']", 14),
        ("[lm_head]", 1),
    ],
)
def test_targets_name_layers_and_projections(targets: str, found: int) -> None:
    assert len(planned_adapters(small(*LORA, f"lora.targets={targets}"))) == found


def test_the_checkpoint_of_a_whole_run_is_small(tmp_path: Path) -> None:
    job = fp8cfg.build(
        small(
            *LORA,
            "precision=bf16",
            "model.vocab_size=2048",
            f"log.dir={tmp_path}",
            "trainer.max_steps=2",
            "lora.rank=2",
            "trainer.val_check_interval=2",
        )
    )
    result = fp8cfg.fit(job, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert (
        sum(f.stat().st_size for f in newest.glob("*.safetensors") if f.name != "rng.safetensors")
        < job.model.embedding.weight.nbytes
    )
    assert json.loads((newest / "state.json").read_text())["base"] == {
        "weights": None,
        "sha256": None,
    }
    assert result is not None
