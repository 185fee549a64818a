"""FSDP2 on one rank, in this process: the steps of a run that is not split, and what a split model is not to be used for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8cfg
from fp8cfg.checkpoint import resume_rules
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import World
from fp8cfg.training import memory_measurement
from fp8cfg.training.compile import compare
from fp8cfg.training.data import run_data
from tests.support import sharded_checkpoints
from tests.support.fsdp_runs import (
    CURRENT,
    EVERYWHERE,
    FSDP,
    HAS_TORCHAO,
    NOT_CLIPPED,
    SAVED,
    STEPS,
    TORCHAO,
    WHOLE,
    held_out,
    job_of,
    load,
    run,
    save,
)
from tests.support.small import small


def test_one_rank_reads_the_weights_that_it_would_gather() -> None:
    words = f"precision=bf16_fp8_block fp8.format=e4m3 fp8.params=true {EVERYWHERE} trainer.micro_batch_size=8"
    alone, whole = (
        run(job_of(words, shard, NOT_CLIPPED), World(), 0, 2) for shard in (FSDP, WHOLE)
    )
    assert alone[0][0] == whole[0][0] and alone[1][0] == pytest.approx(
        whole[1][0], rel=1e-4
    )  # gradients of what is gathered are bfloat16


def test_a_step_that_was_broken_off_is_refused_where_torch_cannot_drop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(
        "torch.distributed.fsdp.FSDPModule.reset_iter_state"
    )  # as before torch 2.13
    job = job_of("precision=bf16", FSDP)
    run(job, World(), 0, 1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("fp8cfg.training.step.sum_gradients", lambda *_: 1 // 0)
        run(job, World(), 1, 2)
    with pytest.raises(
        RuntimeError, match=r"before torch 2.13 FSDP2 cannot discard its state; build a new job"
    ):
        run(job, World(), 1, 2)


def test_one_rank_alone_has_a_group_of_its_own() -> None:
    job, whole = (
        job_of("precision=bf16 trainer.micro_batch_size=8", shard, NOT_CLIPPED)
        for shard in (FSDP, "")
    )
    assert (
        dist.get_world_size() == 1
        and not memory_measurement.persistent_tensors(job)["masters"]
        and memory_measurement.persistent_tensors(whole)["masters"]
    )
    assert [loss for loss, _ in run(job, World(), 0, 3)] == [
        loss for loss, _ in run(whole, World(), 0, 3)
    ]
    assert held_out(job, World()) == held_out(whole, World())


@pytest.mark.parametrize("codec", ["fp8", "fp8_block"])
def test_shards_of_gradients_add_up_in_their_codec(codec: str) -> None:
    """storage.accumulate=stored, over four microbatches: the sums of the run that is not split, each rounded again."""
    words = f"precision=bf16 storage.weight_grad={codec} storage.accumulate=stored trainer.micro_batch_size=2 model.hidden_size=128"
    losses = [loss for loss, _ in run(job_of(words, FSDP, NOT_CLIPPED), World(), 0, 3)]
    assert losses != [
        loss
        for loss, _ in run(
            job_of(words.replace("stored", "wide"), FSDP, NOT_CLIPPED), World(), 0, 3
        )
    ]
    if codec == "fp8":  # which is sent as well
        assert losses == [
            loss
            for loss, _ in run(
                job_of(f"{words} storage.comm={codec}", WHOLE, NOT_CLIPPED), World(), 0, 3
            )
        ]


def test_split_layers_are_not_exchanged() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"convert_back: FSDP2 has sharded the model, .*; a checkpoint has whole weights \(model.safetensors\)",
    ):
        fp8cfg.convert_back(job_of(CURRENT, FSDP).model)


@pytest.mark.parametrize("words", ["precision=bf16", *([TORCHAO] if HAS_TORCHAO else [])])
def test_a_split_model_is_not_copied_and_what_is_said_instead_works(words: str) -> None:
    job = job_of(words, FSDP)
    for what, said in (
        (job.model, "the model cannot be copied:"),
        (job, "a Job cannot be copied, nor its model:"),
    ):
        with pytest.raises(
            TypeError, match=f"{said} storage.shard=fsdp: each rank has shards; for an average"
        ):
            copy.deepcopy(what)
    average = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    before = {name: t.full_tensor().clone() for name, t in average.items()}
    run(job, World(), 0, 1)
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            average[name].lerp_(p, 0.5)
    now, after = (
        {name: local(t) for name, t in named.items()}
        for named in (dict(job.model.named_parameters()), average)
    )  # of one rank
    assert all(torch.allclose(t, (before[name] + now[name]) / 2) for name, t in after.items())
    assert not torch.equal(
        before["layers.1.mlp.linear_fc1.weight"], now["layers.1.mlp.linear_fc1.weight"]
    )


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16",
        f"precision=bf16_fp8 {EVERYWHERE} storage.exp_avg=bf16",
        f"precision=bf16_mxfp8 {EVERYWHERE}",
    ],
)
def test_a_run_goes_on_split_and_whole_again(words: str, tmp_path: Path) -> None:
    """Float32 shards are taken for masters and masters for shards; weights are made from them again, the same."""
    recipes = [
        small("trainer.micro_batch_size=8", *words.split(), *NOT_CLIPPED.split(), shard)
        for shard in (WHOLE, FSDP, WHOLE)
    ]
    jobs, world = [fp8cfg.build(recipe) for recipe in recipes], World()
    run(jobs[0], world, 0, SAVED)
    for before, after, folder in zip(jobs, jobs[1:], ("whole", "split"), strict=False):
        resume_rules.refuse_changes(before.recipe, after.recipe, [])
        save(before, world, tmp_path / folder)
        load(after, tmp_path / folder)
    there, _, again = (
        {
            (group, name): sharded_checkpoints.flat(t).tobytes()
            for group, named in sharded_checkpoints.whole(job, world).items()
            for name, t in named.items()
        }
        for job in jobs
    )
    assert again == there
    losses = [[loss for loss, _ in run(job, world, SAVED, STEPS)] for job in jobs]
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_layers_are_compiled_one_by_one() -> None:
    """Compiled sums round differently, and FP8 passes that on: losses are equal to 1e-3."""
    job, eager = (
        job_of(
            TORCHAO,
            FSDP,
            "model.num_layers=1 trainer.micro_batch_size=8 fp8.include=['*linear_qkv','*linear_fc2']",
        )
        for _ in range(2)
    )
    batches, _ = run_data(job.recipe)
    assert compare(job, batches, 0, World()) < 0.2
    losses = [loss for loss, _ in run(job, World(), 0, 3)]
    job.prove()
    assert losses == pytest.approx([loss for loss, _ in run(eager, World(), 0, 3)], abs=1e-3)
    assert job.compiled and [*stored_state_dict(job.model)] == [*stored_state_dict(eager.model)]


def test_layers_that_gather_in_a_codec_have_multiplied_nothing_before_the_first_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.use_deterministic_algorithms(True)  # new memory is filled with the largest numbers
    try:
        job = job_of("precision=bf16 storage.weight=fp8 storage.shard=zero2")
    finally:
        torch.use_deterministic_algorithms(False)
        dist.destroy_process_group()
    layers = [*fp8_linears(job.model)]
    assert layers and not any(layer.gemms_ran.any() for layer in layers)


def test_a_gradient_that_is_not_stored_keeps_no_more_memory_than_its_own() -> None:
    job = job_of("precision=bf16 storage.weight_grad=fp8 storage.accumulate=stored", FSDP)
    job.backward(job.model(*run_data(job.recipe)[0].batch(0, 0, 1, 0, 2)))
    grads = [local(p.grad) for p in job.model.parameters() if p.grad is not None]
    assert grads and all(g.untyped_storage().nbytes() == g.nbytes for g in grads), (
        "not that of the layer's sum"
    )
