"""Weights split over two ranks by FSDP2: the bits of runs that are not split, and of a loop written by hand with torchao."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fp8cfg
from fp8cfg.config.hugging_face import of_model
from fp8cfg.config.storage import gathered
from fp8cfg.job import Job
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.models import hf, hf_export
from fp8cfg.models.weight_init import BLOCK
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.optim.low_bit.shards import local
from fp8cfg.training import memory_measurement
from fp8cfg.training.checkpoint import checkpoint, job_state, resume_rules
from fp8cfg.training.compiled_gradients import compare
from fp8cfg.training.data import run_data, validation_batches
from fp8cfg.training.distributed import fsdp
from fp8cfg.training.distributed.world import SENT, World
from fp8cfg.training.metrics import read
from fp8cfg.training.train_step import evaluate, train_step
from tests.support import rank_runs, sharded_checkpoints
from tests.support.ranks import launch, on_ranks
from tests.support.small import SMALL, small

FSDP, WHOLE, PLAIN = "storage.shard=fsdp", "storage.shard=none", "fp8.params=false"
EVERYWHERE = "fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
CURRENT = f"precision=bf16_fp8_current {PLAIN} {EVERYWHERE}"
TORCHAO = f"{CURRENT} backend=torchao"
NATIVE = {
    "fp32": "precision=fp32", "bf16": "precision=bf16", "bf16 sums": "precision=bf16 storage.comm=bf16", "fp16": "precision=fp16 precision.initial_loss_scale=1024 storage.weight_grad=fp32 storage.comm=fp32",
    "delayed": f"precision=bf16_fp8 {PLAIN}", "current": CURRENT, "block": f"precision=bf16_fp8_block {PLAIN}",
    "FP8 weights": "precision=bf16_fp8", "FP8 weights, current": f"precision=bf16_fp8_current {EVERYWHERE} fp8.params=true", "FP8 weights, block": "precision=bf16_fp8_block fp8.params=true",
    "FP8 weights, mxfp8": "precision=bf16_mxfp8",
    "moments": "precision=bf16 storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "stored gradients": "precision=bf16 storage.weight_grad=fp8",
    "sgd": "precision=bf16 optim.name=sgd", "adam": "precision=bf16 optim.name=adam", "recomputed": f"{CURRENT} model.recompute_granularity=full",
}
WITH_TORCHAO = {
    "torchao, bf16": f"{TORCHAO} storage.gather=bf16", "torchao, row": f"{TORCHAO} fp8.granularity=row", "torchao, mxfp8": f"precision=bf16_mxfp8 {PLAIN} backend=torchao",
    "torchao, fp8": TORCHAO, "torchao, fp8, recomputed": f"{TORCHAO} model.recompute_granularity=full",
    "torchao, fp8, tied": f"{TORCHAO} model.share_embeddings_and_output_weights=true fp8.output_layer=true",
}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
ROWS = NATIVE | (WITH_TORCHAO if HAS_TORCHAO else {})
SAME = [row for row in ROWS if not row.startswith(("torchao, fp8", "FP8 weights"))]
"""Rows whose products read the same operands as those of the run that is not split."""
HELD = [row for row in ROWS if row.startswith("FP8 weights")]
"""Rows that gather what the run that is not split holds in FP8; their weight gradients have the dtype of what is gathered, bf16."""
RESUMED = [row for row in ("fp32", "delayed", "FP8 weights", "sgd", "torchao, fp8", "torchao, fp8, tied") if row in ROWS]
SAVED, STEPS = 1, 3
"""Steps of a run before it is saved, and in all."""
NOT_CLIPPED = "trainer.gradient_clip_val=0"  # norms are added up in another order, and nothing else is


def job_of(*words: str) -> Job:
    return fp8cfg.build(small("trainer.micro_batch_size=4", *" ".join(words).split()))


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [[s.loss, s.grad_norm] for s in (train_step(job, batches, step, world) for step in range(first, last))]


def held_out(job: Job, world: World) -> float:
    return evaluate(job, validation_batches(job.recipe, run_data(job.recipe)[1], world), world)


def save(job: Job, world: World, path: Path) -> None:
    sharded_checkpoints.saved(job, world, path, SAVED)


def load(job: Job, path: Path) -> Job:
    return rank_runs.resumed(job, path, SAVED)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(local(t).nbytes for t in tensors)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes handed to torch's own all-gather and reduce-scatter."""
    found = {"all_gather": 0, "reduce_scatter": 0}
    names = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    if not hasattr(dist, "all_gather_single"):
        names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in names.items():
            patch.setattr(dist, name, functools.partial(_counted, found, kind, getattr(dist, name)))
        yield found


def _counted(found: dict[str, int], kind: str, torchs: Any, *args: Any, **options: Any) -> Any:
    found[kind] += (args[1] if len(args) > 1 else options["input"]).nbytes
    return torchs(*args, **options)


def first_weight(job: Job) -> Tensor:
    """A weight of the first layer as its product reads it."""
    layer = job.model.layers[0]
    layer.unshard()
    weight = layer.mlp.linear_fc1.weight
    layer.reshard()
    return weight


def on_two(folder: Path, world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row, its in ROWS.items():
        job = job_of(its, FSDP, NOT_CLIPPED)
        losses = run(job, world, 0, SAVED)
        if row in RESUMED:
            save(job, world, folder / row)
        SENT.clear()
        with counted() as handed:
            losses += run(job, world, SAVED, SAVED + 1)
        sent = dict(SENT.bytes)
        if job.recipe.fp8.enabled:
            job.prove()
        validation = held_out(job, world)
        losses += run(job, world, SAVED + 1, STEPS)
        kept = {kind: nbytes(tensors) for kind, tensors in (*memory_measurement.stored(job).items(), ("gradients", memory_measurement.gradients(job)))}
        whole = job_of(its.partition(" storage.gather")[0], WHOLE, NOT_CLIPPED) if row in SAME or row in HELD else None
        found[row] = {"losses": losses, "sent": sent, "handed": [handed["all_gather"], handed["reduce_scatter"]], "kept": kept, "validation": validation,
                      "whole": run(whole, world, 0, STEPS) if whole else [], "elements": sum(p.numel() for p in job.model.parameters()),
                      "weight": type(first_weight(job)).__name__ + " " + str(getattr(first_weight(job), "_data", first_weight(job)).dtype)}
    for row in RESUMED:
        job = load(job_of(ROWS[row], FSDP, NOT_CLIPPED), folder / row)
        found[row]["resumed"] = run(job, world, SAVED, STEPS)
    found["unsplit"] = run(load(job_of(ROWS["fp32"], WHOLE, NOT_CLIPPED), folder / "fp32"), world, SAVED, STEPS)
    job = job_of(ROWS["bf16"], FSDP, NOT_CLIPPED, "trainer.micro_batch_size=2")
    found["microbatches"] = run(job, world, 0, STEPS)
    job = job_of("precision=fp16 precision.initial_loss_scale=1e30 precision.hysteresis=1", FSDP)
    before = local(job.model.final_layernorm.weight).clone()
    skipped = train_step(job, run_data(job.recipe)[0], 0, world)
    found["skipped"] = [skipped.stepped, torch.equal(before, local(job.model.final_layernorm.weight)), job.loss_scaler.scale]
    if HAS_TORCHAO:
        found["ours"] = [[loss for loss, _ in run(job_of(TORCHAO, FSDP, *words.split()), world, 0, STEPS)] for words in BY_HAND]
        found["by hand"] = [by_hand(words, world) for words in BY_HAND]
    return found


BY_HAND = ("", "precision.compute=fp32", "fp8.format=e4m3 storage.comm=bf16", "fp8.override_linear_precision.wgrad=true")


def by_hand(words: str, world: World) -> list[float]:
    """The run without us: torchao's conversion, FSDP2, torch's AdamW, a loop."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
    from torchao.float8.config import CastConfig, ScalingType

    recipe, plain = small(*TORCHAO.split(), *words.split()), job_of("precision=fp32", WHOLE)
    gradient = torch.float8_e4m3fn if recipe.fp8.format == "e4m3" else torch.float8_e5m2
    high = {"cast_config_input_for_grad_weight": CastConfig(ScalingType.DISABLED),
            "cast_config_grad_output_for_grad_weight": CastConfig(ScalingType.DISABLED, target_dtype=gradient)}
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True, cast_config_grad_output=CastConfig(target_dtype=gradient),
                                **(high if recipe.fp8.override_linear_precision.wgrad else {}))
    model = convert_to_float8_training(plain.model, module_filter_fn=lambda _, name: name.startswith("layers."), config=config)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": torch.float32}
    policy = MixedPrecisionPolicy(dtypes[recipe.precision.compute], dtypes[recipe.storage.comm], cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not average
    o, (batches, _) = recipe.optim, run_data(recipe)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    losses = []
    for step in range(STEPS):
        tokens, targets = batches.batch(step, world.rank, world.size, 0, 1)
        loss = model(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), recipe.trainer.gradient_clip_val, norm)
        plain.schedule.apply(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world.size)
    return losses


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_split_run_has_the_bits_of_one_that_is_not(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (found[row] for found in two[1])
    assert first["losses"] == second["losses"] and first["validation"] == second["validation"]
    losses = [loss for loss, _ in first["losses"]]
    assert losses[-1] < losses[0]
    if row in SAME:
        assert losses == [loss for loss, _ in first["whole"]]
        assert [norm for _, norm in first["losses"]] == pytest.approx([norm for _, norm in first["whole"]], rel=1e-5)
    if row in HELD:
        whole = [loss for loss, _ in first["whole"]]
        assert losses == pytest.approx(whole, rel=2e-4) and (losses[0] == whole[0] or row.endswith(("mxfp8", "block")))  # gathered in bf16, in part


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_torchaos_fp8_gather_equals_a_loop_written_by_hand(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = two[1]
    assert first["ours"] == first["by hand"] == second["ours"] == second["by hand"]
    assert len({tuple(losses) for losses in first["ours"]}) == len(BY_HAND)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_rank_keeps_half_and_sends_what_is_counted(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (found[row] for found in two[1])
    elements = first["elements"]
    for kind, each in (("weights", 4), ("moments", 4 if row in ("sgd", "moments") else 8), ("gradients", 4), ("masters", 0)):
        if kind == "gradients" and row == "stored gradients":  # of linear layers
            assert elements / 2 < first["kept"][kind] == second["kept"][kind] < elements * 1.5
            continue
        assert first["kept"][kind] == second["kept"][kind] == elements * each / 2
    gathered, reduced = first["handed"]
    assert first["sent"] == second["sent"] == {"weights": gathered, "gradients": reduced / 2}
    assert reduced == elements * (2 if row == "bf16 sums" else 4)


@pytest.mark.slow
def test_weights_are_gathered_in_their_codec(two: tuple[Path, list[dict[str, Any]]]) -> None:
    found = two[1][0]
    fp8 = [row for row in ROWS if row.startswith("torchao, fp8")]
    assert {row: found[row]["weight"] for row in fp8} == dict.fromkeys(fp8, "Float8TrainingTensor torch.float8_e4m3fn")
    gathered = [row for row in HELD if not row.endswith("mxfp8")]
    assert {row: found[row]["weight"] for row in gathered} == dict.fromkeys(gathered, "GatheredWeight torch.float8_e4m3fn")
    assert found["FP8 weights, mxfp8"]["weight"] == "Parameter torch.bfloat16" and found["FP8 weights"]["sent"]["weights"] < found["delayed"]["sent"]["weights"]
    wide = {"fp32": "Parameter torch.float32", "fp16": "Parameter torch.float16"}
    assert {row: found[row]["weight"] for row in SAME} == {row: wide.get(row, "Parameter torch.bfloat16") for row in SAME}
    if fp8:
        narrow, sent = found["torchao, fp8"]["sent"]["weights"], found["torchao, bf16"]["sent"]["weights"]
        layers = 2 * sum(p.numel() for n, p in fp8cfg.build(small("precision=fp32")).model.named_parameters() if "layers" in n and p.dim() > 1) // 2
        assert sent - narrow == layers, "a byte less for each element of linear layers, forward and backward, from half of them"


@pytest.mark.slow
@pytest.mark.parametrize("row", RESUMED)
def test_two_ranks_resume_bit_for_bit(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in two[1]:
        assert found[row]["resumed"] == found[row]["losses"][SAVED:]


@pytest.mark.slow
@pytest.mark.parametrize("row", RESUMED)
def test_one_rank_goes_on_from_whole_tensors(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    tensors, _ = checkpoint.load(folder / row / f"step-{SAVED:08d}")
    job = load(job_of(ROWS[row], FSDP, NOT_CLIPPED, "trainer.micro_batch_size=8"), folder / row)
    again, _ = job_state.collect(job, run_data(job.recipe)[0], SAVED)
    for group in tensors.keys() - {"rng"}:
        assert again[group].keys() == tensors[group].keys()
        assert all(type(t) is Tensor and torch.equal(t, tensors[group][name]) and t.dtype == tensors[group][name].dtype for name, t in again[group].items())
    whole = fp8cfg.build(small(*ROWS[row].split(), "storage.weight=fp32"))
    assert {n: t.shape for n, t in stored_state_dict(whole.model).items()} == {n: t.shape for n, t in {**tensors["model"], **tensors.get("fp8", {})}.items()}
    want = [loss for loss, _ in ranks[0][row]["losses"][SAVED:]]
    assert [loss for loss, _ in run(job, World(), SAVED, STEPS)] == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
def test_a_run_in_float32_goes_on_without_being_split(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first = two[1][0]
    assert [loss for loss, _ in first["unsplit"]] == [loss for loss, _ in first["fp32"]["losses"][SAVED:]]


@pytest.mark.slow
def test_microbatches_add_up_in_float32(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first = two[1][0]
    assert [loss for loss, _ in first["microbatches"]] == pytest.approx([loss for loss, _ in first["bf16"]["losses"]], abs=1e-3)


@pytest.mark.slow
def test_a_step_is_skipped_on_all_ranks(two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [found["skipped"] for found in two[1]] == [[False, True, 5e29]] * 2


# On one rank, in this process.


def test_one_rank_reads_the_weights_that_it_would_gather() -> None:
    words = f"precision=bf16_fp8_block fp8.format=e4m3 fp8.params=true {EVERYWHERE} trainer.micro_batch_size=8"
    alone, whole = (run(job_of(words, shard, NOT_CLIPPED), World(), 0, 2) for shard in (FSDP, WHOLE))
    assert alone[0][0] == whole[0][0] and alone[1][0] == pytest.approx(whole[1][0], rel=1e-4)  # gradients of what is gathered are bfloat16


def test_a_step_that_was_broken_off_is_refused_where_torch_cannot_drop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")  # as before torch 2.13
    job = job_of("precision=bf16", FSDP)
    run(job, World(), 0, 1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("fp8cfg.training.train_step.sum_gradients", lambda *_: 1 // 0)
        run(job, World(), 1, 2)
    with pytest.raises(RuntimeError, match=r"before torch 2.13 FSDP2 does not drop what it left: build another job"):
        run(job, World(), 1, 2)


def test_one_rank_alone_has_a_group_of_its_own() -> None:
    job, whole = (job_of("precision=bf16 trainer.micro_batch_size=8", shard, NOT_CLIPPED) for shard in (FSDP, ""))
    assert dist.get_world_size() == 1 and not memory_measurement.stored(job)["masters"] and memory_measurement.stored(whole)["masters"]
    assert [loss for loss, _ in run(job, World(), 0, 3)] == [loss for loss, _ in run(whole, World(), 0, 3)]
    assert held_out(job, World()) == held_out(whole, World())


@pytest.mark.parametrize("codec", ["fp8", "fp8_block"])
def test_shards_of_gradients_add_up_in_their_codec(codec: str) -> None:
    """storage.accumulate=stored, over four microbatches: the sums of the run that is not split, each rounded again."""
    words = f"precision=bf16 storage.weight_grad={codec} storage.accumulate=stored trainer.micro_batch_size=2 model.hidden_size=128"
    losses = [loss for loss, _ in run(job_of(words, FSDP, NOT_CLIPPED), World(), 0, 3)]
    assert losses != [loss for loss, _ in run(job_of(words.replace("stored", "wide"), FSDP, NOT_CLIPPED), World(), 0, 3)]
    if codec == "fp8":  # which is sent as well
        assert losses == [loss for loss, _ in run(job_of(f"{words} storage.comm={codec}", WHOLE, NOT_CLIPPED), World(), 0, 3)]


def test_split_layers_are_not_exchanged() -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"convert_back: FSDP2 has split the model, .*; a checkpoint has whole weights \(model.safetensors\)"):
        fp8cfg.convert_back(job_of(CURRENT, FSDP).model)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("words", ["precision=bf16", CURRENT, "precision=bf16_fp8", *([f"{TORCHAO} storage.gather=bf16", TORCHAO] if HAS_TORCHAO else [])])
def test_the_plan_is_what_is_measured(words: str, recompute: str) -> None:
    found = memory_measurement.measure(fp8cfg.compose(["recipe=llama_tiny", "data=tiny", *words.split(), FSDP, "trainer.micro_batch_size=4", f"model.recompute_granularity={recompute}"]))
    peak, here = found.pop("peak")
    assert peak == pytest.approx(here, rel=0.03)
    for kind, (planned, here) in found.items():
        assert here == pytest.approx(planned, rel=0.02, abs=1 << 17), kind


@pytest.mark.parametrize("words", ["precision=bf16", *([TORCHAO] if HAS_TORCHAO else [])])
def test_a_split_model_is_not_copied_and_what_is_said_instead_works(words: str) -> None:
    job = job_of(words, FSDP)
    for what, said in ((job.model, "the model cannot be copied: under"), (job, "a Job cannot be copied, nor its model: under")):
        with pytest.raises(TypeError, match=f"{said} storage.shard=fsdp a rank has parts of it; for an average"):
            copy.deepcopy(what)
    average = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    before = {name: t.full_tensor().clone() for name, t in average.items()}
    run(job, World(), 0, 1)
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            average[name].lerp_(p, 0.5)
    now, after = ({name: local(t) for name, t in named.items()} for named in (dict(job.model.named_parameters()), average))  # of one rank
    assert all(torch.allclose(t, (before[name] + now[name]) / 2) for name, t in after.items())
    assert not torch.equal(before["layers.1.mlp.linear_fc1.weight"], now["layers.1.mlp.linear_fc1.weight"])


@pytest.mark.parametrize(("words", "more", "cure"), [
    ("precision=bf16", "storage.shard=none", "its weights are float32: resume it with storage.weight=fp32 --allow storage.weight, or start a new run"),
    (CURRENT, "storage.shard=none", "its weights are float32: resume it with storage.weight=fp32 --allow storage.weight, or start a new run"),
    ("precision=bf16", "storage.shard=zero2", "its weights are float32: resume it with storage.weight=fp32 --allow storage.weight, or start a new run"), ("precision=bf16", "storage.shard=none storage.weight=bf16", "start a new run"),
])
def test_a_run_goes_on_whole_with_the_key_that_is_named(words: str, more: str, cure: str, tmp_path: Path) -> None:
    split, whole = (small("trainer.micro_batch_size=8", *words.split(), *NOT_CLIPPED.split(), *shard.split()) for shard in (FSDP, more))
    with pytest.raises(fp8cfg.ConfigError) as e:
        resume_rules.refuse_changes(split, whole, ["storage.weight"])
    assert f"{more.split()[0]}: this run was started with fsdp; {cure}" in e.value.problems
    if "--allow" in cure:
        whole.storage.weight = "fp32"
        resume_rules.refuse_changes(split, whole, ["storage.weight"])
        job = fp8cfg.build(split)
        run(job, World(), 0, SAVED)
        save(job, World(), tmp_path)
        losses = run(job, World(), SAVED, STEPS)
        again = run(load(fp8cfg.build(whole), tmp_path), World(), SAVED, STEPS)
        assert [loss for loss, _ in again] == pytest.approx([loss for loss, _ in losses], abs=2e-3), "embedding and norms are read in float32 now"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_layers_are_compiled_one_by_one() -> None:
    """Compiled sums round differently, and FP8 passes that on: losses are equal to 1e-3."""
    job, eager = (job_of(TORCHAO, FSDP, "model.num_layers=1 trainer.micro_batch_size=8 fp8.include=['*linear_qkv','*linear_fc2']") for _ in range(2))
    assert compare(job) == 0
    job.compile_model()
    losses = [loss for loss, _ in run(job, World(), 0, 3)]
    job.prove()
    assert losses == pytest.approx([loss for loss, _ in run(eager, World(), 0, 3)], abs=1e-3)
    assert job.compiled and [*stored_state_dict(job.model)] == [*stored_state_dict(eager.model)]


ZERO2 = "or storage.shard=zero2"


@pytest.mark.parametrize(("words", "line"), [
    ("storage.gather=bf16", "storage.gather=bf16: has no effect, storage.shard=auto keeps whole weights on every rank; drop it or write storage.shard=fsdp"),
    (f"{FSDP} opt_level=O2 precision=bf16_fp8", f"opt_level=O2: storage.shard=fsdp keeps float32 weights; drop it, {ZERO2}"),
    (f"{FSDP} backend=msamp precision=bf16_fp8 {PLAIN}", f"backend=msamp: storage.shard=fsdp keeps float32 weights; drop it, {ZERO2}"),
    (f"{FSDP} storage.weight=bf16", f"storage.weight=bf16: storage.shard=fsdp has fp32 there; write that, {ZERO2}"),
    (f"{FSDP} storage.master_weight=fp32", f"storage.master_weight=fp32: storage.shard=fsdp has none there; write that, {ZERO2}"),
    (f"{FSDP} storage.weight_grad=bf16", f"storage.weight_grad=bf16: storage.shard=fsdp has fp32 there; write that, {ZERO2}"),
    (f"{FSDP} storage.accumulate=stored", "storage.accumulate=stored: needs storage.weight_grad in FP8, not fp32; drop it or write fp8"),
    (f"{FSDP} storage.master_weight=bf16", f"storage.master_weight=bf16: storage.shard=fsdp has none there; write that, {ZERO2}"),
    (f"{FSDP} storage.comm=fp8", f"storage.comm=fp8: FSDP2 sums gradients in fp32 or bf16; write one of them, {ZERO2}"),
    (f"{FSDP} precision=fp16 storage.comm=fp8", f"storage.comm=fp8: FSDP2 sums gradients in fp32 or bf16 or fp16; write one of them, {ZERO2}"),
    (f"{FSDP} storage.rounding=stochastic", "storage.rounding=stochastic: has no effect, weights are float32; drop it"),
    (f"{FSDP} precision=fp16 storage.gather=bf16", "storage.gather=bf16: FSDP2 gathers weights in precision.compute=fp16; write auto, or fp8"),
    (f"{FSDP} storage.gather=fp8", "storage.gather=fp8: precision.compute=bf16 runs no FP8; write precision=bf16_fp8_current, or drop it"),
    (f"{FSDP} precision=bf16_fp8 {PLAIN} storage.gather=fp8", "storage.gather=fp8: needs fp8.scaling=current, not delayed; write that, or storage.gather=auto"),
    (f"{FSDP} {TORCHAO} fp8.granularity=row storage.gather=fp8", "storage.gather=fp8: needs fp8.granularity=tensor, not row; write that, or storage.gather=auto"),
    (f"{FSDP} {TORCHAO} fp8.use_power_2_scales=true storage.gather=fp8",
     "storage.gather=fp8: torchao does not round the scales of weights that it gathers; write fp8.use_power_2_scales=false, or storage.gather=auto"),
    (f"{FSDP} {TORCHAO} fp8.override_linear_precision.dgrad=true storage.gather=fp8",
     "storage.gather=fp8: needs fp8.override_linear_precision.dgrad=false, which reads the weight; write that, or storage.gather=auto"),
    (f"{FSDP} {CURRENT} backend=native storage.gather=fp8",
     "storage.gather=fp8: backend=native gathers the FP8 weights of fp8.params; write fp8.params=true, or storage.gather=auto"),
    (f"{FSDP} precision=bf16_mxfp8 backend=native storage.gather=fp8",
     "storage.gather=fp8: fp8.scaling=mxfp8 needs two matrices of a weight, which take as many bytes as bf16; write storage.gather=auto"),
])
def test_what_cannot_be_is_refused_in_one_line(words: str, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        small(*words.split())
    assert line in e.value.problems


@pytest.mark.parametrize(("words", "backend", "gather"), [
    (CURRENT, "native", "bf16"), (CURRENT, "torchao", "fp8"),  (f"{CURRENT} fp8.use_power_2_scales=true", "torchao", "bf16"), (f"{CURRENT} fp8.override_linear_precision.wgrad=true", "torchao", "fp8"),
    (f"{CURRENT} precision.compute=fp32", "native", "fp32"), (f"{CURRENT} storage.gather=bf16", "torchao", "bf16"), ("precision=fp16", "native", "fp16"),
    ("precision=bf16_fp8", "native", "fp8"), ("precision=bf16_fp8_block fp8.params=true", "native", "fp8"), ("precision=bf16_mxfp8", "native", "bf16"),
    ("precision=bf16_fp8_current fp8.params=true fp8.granularity=row", "native", "bf16"),
])
def test_what_auto_comes_to(words: str, backend: str, gather: str) -> None:
    assert gathered(small(*words.split(), FSDP).precision, backend) == gather


def test_an_fp8_gather_wants_equal_parts() -> None:
    recipe = small(*TORCHAO.split(), FSDP)
    fsdp.refuse_uneven(plan(recipe), recipe.precision, "torchao", 2)
    fsdp.refuse_uneven(plan(recipe), recipe.precision, "native", 3)
    with pytest.raises(fp8cfg.ConfigError, match=r"storage.gather=fp8: layers.0.self_attention.linear_qkv has out_features=128, which 3 ranks do not divide; write storage.gather=bf16"):
        fsdp.refuse_uneven(plan(recipe), recipe.precision, "torchao", 3)


def on_three(folder: Path, world: World) -> dict[str, Any]:
    three = "trainer.global_batch_size=6 trainer.micro_batch_size=2"
    padded = [run(job_of(ROWS["FP8 weights"], shard, NOT_CLIPPED, three), world, 0, 3) for shard in (FSDP, "storage.shard=none")]
    split, whole = (job_of(ROWS["bf16"], shard, NOT_CLIPPED, "trainer.global_batch_size=6 trainer.micro_batch_size=2") for shard in (FSDP, WHOLE))
    found = {"split": run(split, world, 0, 2), "whole": run(whole, world, 0, 2)}
    return {**found, "padded": padded, "tensors": sharded_checkpoints.whole(split, world)["model"], "want": stored_state_dict(whole.model)}


@pytest.mark.slow
def test_parts_of_other_sizes_make_the_same_whole(tmp_path: Path) -> None:
    first = on_ranks(3, functools.partial(on_three, tmp_path), tmp_path)[0]
    assert [loss for loss, _ in first["split"]] == [loss for loss, _ in first["whole"]]
    assert all(torch.equal(t.bfloat16(), first["want"][name]) for name, t in first["tensors"].items())
    (one, *more), whole = ([loss for loss, _ in losses] for losses in first["padded"])
    assert one == whole[0] and more == pytest.approx(whole[1:], rel=2e-4)


def test_an_fp8_gather_picks_the_backend_that_has_it() -> None:
    pytest.importorskip("torchao", minversion="0.18")
    job = job_of(CURRENT, FSDP, "storage.gather=fp8")
    assert job.choice.backend == "torchao" and "native: storage.gather=fp8" in str(job.choice.passed_over)


def test_a_model_of_ones_own_is_for_torchs_own_call() -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"storage.shard=fsdp: splits the Transformer of a recipe, not a model of your own; write fp8cfg.convert_model"):
        fp8cfg.build(small("precision=bf16", FSDP), model=nn.Sequential(nn.Linear(64, 64)))


def test_the_planned_memory_is_a_part_and_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.report import plan_report as planned
    from fp8cfg.report.gpus import named
    from fp8cfg.report.memory.layout import parts
    from fp8cfg.report.memory.nearest_fit import refuse_if_too_large
    from fp8cfg.report.memory.peak import linears_of, memory, memory_table, widest
    from fp8cfg.report.memory.sharded_pass import ShardedPass

    recipe = fp8cfg.compose(["recipe=llama_8b", "precision=bf16", FSDP, "trainer.strategy.context_parallel_size=1"])
    one = memory(recipe, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "8")
    eight = memory(recipe, "cuda")
    assert all(eight[kind] * 8 == one[kind] for kind in ("weights", "gradients", "moments")) and eight["masters"] == 0 and "accumulation" not in eight
    layer, root = 218112000, 2 * 128256 * 4096 + 4096
    assert eight["gathered"] == one["gathered"] + 2 * layer == 2 * root + 2 * layer, "beside logits; one rank gathers nothing ahead"
    assert "whole: embedding, output, two layers" in memory_table(recipe, "cuda")
    part = widest(recipe, "cuda", 8)
    sharded = ShardedPass(recipe, "cuda", part, linears_of(recipe, part), "native", 2)
    assert sharded.back(1) == 2 * root + 2 * 2 * layer + 2 * 128256 * 4096 + 4 * layer, "weights, the output layer's gradient, what was sent"
    assert sharded.summing(1) == 2 * root + 2 * layer + 2 * 128256 * 4096 + (2 + 4) * layer
    assert sharded.summing(32) == (2 + 4) * root
    if HAS_TORCHAO:
        auto = fp8cfg.compose(["recipe=llama_8b", *CURRENT.split(), FSDP, "model.vocab_size=1024"])
        fp8, high = (planned.make(auto, 8, gpu).widest for gpu in (named("h100"), None))
        linears = linears_of(auto, fp8.part)
        cast, plain = (ShardedPass(auto, "cuda", fp8.part, linears, backend, 2).back(1) for backend in ("torchao", "native"))
        assert plain - cast == 2 * (layer - 2 * 4096), "all but the norms of two layers, in a byte less"
        assert "FP8 copies" not in {k for k, n in fp8.memory.items() if n} and high.memory["FP8 copies"]
    stages = [memory(large, "cuda", part) for large in [fp8cfg.compose(["recipe=llama31_70b", "precision=bf16", FSDP])] for part in parts(large, 64)]
    assert all(0 < kinds["gathered"] < 10e9 for kinds in stages) and stages[0]["gathered"] > stages[1]["gathered"]
    short = fp8cfg.compose(["recipe=llama_8b", "precision=bf16", FSDP, "model.seq_length=128", "trainer.micro_batch_size=2"])
    kinds = memory(short, "cuda")
    assert sum(kinds.values()) < 4 * (32 * layer + root), "no rank makes the model before it is split"
    split = {kind: n for kind, n in memory(fp8cfg.compose(["recipe=llama_8b", "precision=bf16", "storage.shard=none"]), "cuda").items() if n}
    assert "to start" not in kinds and "to start" not in split
    with pytest.raises(fp8cfg.ConfigError, match=r"needs [\d.]+ GiB, .*; nearest that fit: model.num_layers=\d+"):
        refuse_if_too_large(short, "cuda", sum(kinds.values()) * 2 // 3)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is Tensor and not made.is_meta:
            self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return made


@pytest.mark.parametrize("words", ["precision=bf16", *([TORCHAO] if HAS_TORCHAO else []), f"precision=bf16_fp8 {PLAIN} fp8.dot_product_attention=true", "weights"])
def test_a_rank_makes_its_parts_alone(words: str, tmp_path: Path) -> None:
    """The last of 5 ranks, which do not divide the layers evenly."""
    rank, wide = 4, "model.hidden_size=320 model.ffn_hidden_size=480 model.num_attention_heads=5 model.num_query_groups=5"
    if words == "weights":
        drawn, family = job_of("precision=fp32 trainer.seed=7", WHOLE, wide), of_model(small().model)
        hf_export.write(tmp_path, transformer_config(drawn.recipe), family.write(drawn.recipe.model), hf.Layout(hf.LLAMA), lambda name: (drawn.model.state_dict()[name], None))
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
        assert torch.equal(local(p), whole[name][rank * rows:(rank + 1) * rows]), name
    ranks = 1 if "model.weights" in words else 5  # one whole tensor at a time is read
    assert made.elements <= max(BLOCK, *(-(-len(p) // ranks) * p[0].numel() for p in whole.values()))
    assert all(b.isfinite().all() and not b.is_meta for b in job.model.buffers())


def test_layers_that_gather_in_a_codec_have_multiplied_nothing_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_a_run_of_two_ranks_says_what_it_sends_and_goes_on_with_one(tmp_path: Path) -> None:
    words = (f"{CURRENT} {FSDP} trainer.max_steps=4 checkpoint.keep=2 trainer.micro_batch_size=4 log.dir={tmp_path}").split()
    done = launch(2, *SMALL, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "weights are split over the ranks and gathered in bf16\n" in done.stdout
    said = " ".join(done.stdout.split())
    assert re.search(r"sent in a step by the first rank: weights [\d.]+ KiB in 5 messages, gradients [\d.]+ KiB in 3 messages", said)
    folder, = tmp_path.iterdir()
    lines = [line for line in read(folder / "metrics.jsonl") if "loss" in line]
    assert len({line["sent_bytes"] for line in lines}) == 1, "validation in between changes nothing"
    (folder / "checkpoints/step-00000004/MANIFEST.json").unlink()
    one = launch(1, "resume", str(folder))
    assert one.returncode == 0 and "from step-00000002" in one.stdout, one.stderr
    assert [line["loss"] for line in read(folder / "metrics.jsonl") if "loss" in line] == pytest.approx([line["loss"] for line in lines], abs=2e-3)
