"""Checkpoints that every rank writes its share of: whole for any layout and for torch's own reader, and all or nothing."""

from __future__ import annotations

import errno
import functools
import os
import weakref
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state, load
from fp8cfg.checkpoint import save as checkpoint_save
from fp8cfg.checkpoint.load import load_by_layer, open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint, NoUsableCheckpoint, read_manifest, verify
from fp8cfg.checkpoint.save import CheckpointError, Share, write_checkpoint
from fp8cfg.checkpoint.saver import HostCopies
from fp8cfg.checkpoint.tensor_layout import TensorBox, select_boxes
from fp8cfg.models.weight_init import TensorShard
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.training import trained_model
from fp8cfg.training.data import run_data
from fp8cfg.training.runs import train_job
from fp8cfg.training.step import train_step
from tests.support import sharded_checkpoints, whole_checkpoints
from tests.support.ranks import launch, on_ranks
from tests.support.small import small, small_words

WORDS = (
    "precision=bf16_fp8",
    "fp8.params=false",
    "storage.weight=fp32",
    "model.share_embeddings_and_output_weights=true",
)
TENSOR = (
    "trainer.strategy.tensor_model_parallel_size=2 trainer.devices=2 trainer.micro_batch_size=8"
)
LAYOUTS = {
    "fsdp": "storage.shard=fsdp",
    "tensor": TENSOR,
    "zero1": "storage.shard=zero1",
    "none": "storage.shard=none",
}
GOES_ON = [
    ("fsdp", "tensor"),
    ("tensor", "zero1"),
    ("zero1", "fsdp"),
    ("one", "tensor"),
    ("one", "fsdp"),
    ("tensor", "tensor"),
]
STEP = "step-00000001"
TIED = "output_layer.weight"


def job_of(layout: str) -> Job:
    return fp8cfg.build(small(*WORDS, "trainer.micro_batch_size=4", *LAYOUTS[layout].split()))


def trained(job: Job, world: World) -> Job:
    train_step(job, run_data(job.recipe)[0], 0, world)
    return job


def loaded(job: Job, folder: Path, world: World) -> Job:
    tensors, state = open_checkpoint(RunFiles.at(folder), STEP, world.size)
    tensors.check_sums(world)
    assert job_state.restore(job, tensors, state, run_data(job.recipe)[0]) == 1
    return job


def on_two(folder: Path, world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for layout in ("fsdp", "tensor", "zero1"):
        job = trained(job_of(layout), world)
        sharded_checkpoints.saved(job, world, folder / layout, 1)
        found[layout] = sharded_checkpoints.whole(job, world)
    for before, now in GOES_ON:
        found[f"{before} {now}"] = sharded_checkpoints.whole(
            loaded(job_of(now), folder / before, world), world
        )
    job = job_of("fsdp")
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(checkpoint_save, "write_all", full)
        with pytest.raises(CheckpointError) as failed:
            sharded_checkpoints.saved(job, world, folder / "full", 1)
    found["full"] = str(failed.value)
    found["errors"] = [failure(world, folder, error) for error in (MemoryError, SafetensorError)]
    found["overlap"] = overlap(world, folder)
    with pytest.raises(DamagedCheckpoint) as damaged:
        tensors, _ = open_checkpoint(RunFiles.at(damage(folder, world)), STEP, 2)
        tensors.check_sums(world)
    found["damaged"] = str(damaged.value)
    with pytest.raises(NoUsableCheckpoint) as unlike:
        train_job(job, None, ({}, {"step": 4 - 2 * world.rank}), world)
    found["unlike"] = str(unlike.value)
    return found


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failure(world: World, folder: Path, error: type[Exception]) -> str:
    """What a save says whose second rank fails with `error`."""

    def fail(*_: Any) -> None:
        raise error("it\nbroke")

    box = TensorBox("w", (2,), (world.rank,), torch.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(checkpoint_save, "write_all", fail)
        return save_error(world, folder, box)


def overlap(world: World, folder: Path) -> str:
    """What a save says whose ranks write the same rows."""
    return save_error(world, folder, TensorBox("w", (4,), (world.rank,), torch.zeros(2)))


def save_error(world: World, folder: Path, box: TensorBox) -> str:
    root = folder / "full"
    share = Share({"g": [box]}, {}, {})
    with pytest.raises(CheckpointError) as failed:
        write_checkpoint(root if world.first else None, 1, share, None, world)
    return str(failed.value)


def damage(folder: Path, world: World) -> Path:
    """A checkpoint in which a byte of what the second rank wrote is another."""
    job = fp8cfg.build(small("precision=fp32", "trainer.micro_batch_size=4"))
    path = sharded_checkpoints.saved(job, world, folder / "damaged", 1)
    if world.first:
        file = path / "model" / "rank-00001-1.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    world.any(False)
    return folder / "damaged"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    sharded_checkpoints.saved(trained(job_of("none"), World()), World(), folder / "one", 1)
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


def same(found: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> bool:
    assert {group: sorted(named) for group, named in found.items()} == {
        group: sorted(want[group]) for group in found
    }
    return all(
        torch.equal(t, want[group][name]) and t.dtype == want[group][name].dtype
        for group, named in found.items()
        for name, t in named.items()
    )


@pytest.mark.parametrize("layout", ["fsdp", "tensor", "zero1"])
def test_shares_of_two_ranks_make_the_whole(
    layout: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, ranks = two
    path = folder / layout / STEP
    manifest = verify(path)
    assert manifest.world_size == 2 and not list((folder / layout).glob("*.tmp-*"))
    written = {
        rank: sum(
            entry.size for name, entry in manifest.files.items() if f"/rank-{rank:05d}-" in name
        )
        for rank in (0, 1)
    }
    assert 0.75 < written[0] / written[1] < 1.33, "each rank writes about half"
    tensors, _ = whole_checkpoints.load(path)
    assert same(ranks[0][layout], tensors) and same(ranks[1][layout], tensors)
    assert tensors["model"]["output_layer.weight"] is tensors["model"]["embedding.weight"]
    assert sum(entry.size for entry in manifest.files.values()) < 1.1 * sum(
        entry.size for entry in read_manifest(folder / "one" / STEP).files.values()
    ), "nothing is written twice"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "zero1", "one"])
def test_torchs_reader_reads_them(layout: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    tensors, _ = whole_checkpoints.load(two[0] / layout / STEP)
    for group in ("model", "optimizer"):
        want = tensors[group]
        # Another name of the embedding is in the metadata, which torch does not read.
        state = {name: torch.zeros_like(t) for name, t in want.items() if name != TIED}
        # One rank has no folder for each group.
        folder = two[0] / layout / STEP / ("" if layout == "one" else group)
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        assert all(torch.equal(t, want[name]) for name, t in state.items())


def test_safetensors_reads_the_model_of_one_rank(two: tuple[Path, list[dict[str, Any]]]) -> None:
    path = two[0] / "one" / STEP
    assert sorted(file.name for file in path.iterdir()) == [
        "MANIFEST.json",
        "fp8.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    want = whole_checkpoints.load(path)[0]["model"]
    del want[TIED]
    assert same({"model": load_file(path / "model.safetensors")}, {"model": want})


@pytest.mark.parametrize(("before", "now"), GOES_ON)
def test_another_layout_goes_on_with_the_same_state(
    before: str, now: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, ranks = two
    want, _ = whole_checkpoints.load(folder / before / STEP)
    for rank in ranks:
        assert same(rank[f"{before} {now}"], want)


@pytest.mark.parametrize("before", ["fsdp", "tensor", "zero1"])
def test_one_rank_goes_on_with_the_same_state(
    before: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    job = loaded(job_of("none"), two[0] / before, World())
    assert same(sharded_checkpoints.whole(job, World()), two[1][0][before])


def test_what_one_rank_cannot_write_is_saved_by_none(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = two
    assert [rank["full"] for rank in ranks] == [
        f"step 1 was not saved in {folder / 'full'}: rank 1: [Errno 28] No space left on device"
    ] * 2
    start = f"step 1 was not saved in {folder / 'full'}: "
    for rank in ranks:
        assert rank["errors"] == [f"{start}rank 1: it broke"] * 2
        assert rank["overlap"].startswith(f"{start}rank 0: ")
        assert rank["overlap"].endswith("the parts of w do not make a whole")
    assert not list((folder / "full").iterdir())


def test_what_one_rank_finds_damaged_no_rank_goes_on_with(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in two[1]:
        assert rank["damaged"].endswith(
            "model/rank-00001-1.safetensors: its sha256 is not the one in the manifest"
        )


def test_ranks_that_read_unlike_checkpoints_do_not_go_on(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    """As where one sees another file system, or passed over the newest by itself: they trained, and the first ended well."""
    said = "rank 0 would resume from step 4, but rank 1 from step 2 of another checkpoint; "
    assert all(rank["unlike"].startswith(said) for rank in two[1])


def test_a_rank_reads_what_it_keeps_alone(
    two: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _ = open_checkpoint(RunFiles.at(two[0] / "fsdp"), STEP)
    name, read = "layers.0.mlp.linear_fc1.weight", list[int]()
    real = load._intersection

    def count(*places: Any) -> Any:
        common = real(*places)
        read.append(prod(common[1]) if common else 0)
        return common

    monkeypatch.setattr(load, "_intersection", count)
    shape = tensors["model"].shape(name)
    part = tensors["model"].read(
        name, (shape[0] // 2 - 2, 1), (4, 3)
    )  # over the border between two ranks' rows
    assert torch.equal(part, tensors["model"][name][shape[0] // 2 - 2 : shape[0] // 2 + 2, 1:4])
    assert read[:2] == [6, 6]


def test_a_model_is_loaded_a_layer_at_a_time(
    two: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `export hf`, `sample` and `evaluate` do."""
    tensors, _ = open_checkpoint(RunFiles.at(two[0] / "tensor"), STEP)
    model, real = job_of("none").model, load.StoredGroup.read
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    together: set[str] = set()

    def read(group: Any, name: str, *place: Any) -> Tensor:
        t = real(group, name, *place)
        alive.append((name, weakref.ref(t)))
        there = {
            ".".join(n.split(".")[:2])
            for n, ref in alive
            if ref() is not None and n.startswith("layers.")
        }
        together.add(" ".join(sorted(there)))
        return t

    monkeypatch.setattr(load.StoredGroup, "read", read)
    load_by_layer(model, tensors)
    assert together == {"", "layers.0", "layers.1"}
    assert all(
        torch.equal(p, two[1][0]["tensor"]["model"][name]) for name, p in model.named_parameters()
    )
    with pytest.raises(
        RuntimeError,
        match=r"1 tensors are missing, the first is layers\.1\.mlp\.linear_fc2\.weight",
    ):
        load_by_layer(
            model,
            {
                "model": {
                    k: t
                    for k, t in tensors["model"].items()
                    if k != "layers.1.mlp.linear_fc2.weight"
                }
            },
        )
    with pytest.raises(RuntimeError, match="1 tensors are unexpected, the first is other"):
        load_by_layer(model, {"model": {**tensors["model"], "other": torch.zeros(1)}})


def test_copies_are_written_once_and_shared_out() -> None:
    made = [
        [TensorBox(f"{n}", (n,), (0,), torch.zeros(n), copy, 3) for n in (8, 5, 4, 3, 1)]
        for copy in range(3)
    ]
    kept = [[box.name for box in select_boxes({"g": boxes})["g"]] for boxes in made]
    assert sorted(name for names in kept for name in names) == ["1", "3", "4", "5", "8"] and all(
        kept
    )


def test_as_many_copies_along_either_axis_of_a_mesh_are_written_once() -> None:
    """Of two by two ranks, scales that data ranks share, and norms that tensor ranks share."""
    kept = []
    for data, tensor in product(range(2), repeat=2):
        scales = [
            TensorBox(f"scales {n} of {tensor}", (n,), (0,), torch.zeros(n), data, 2, ("data",))
            for n in (8, 3)
        ]
        norms = [
            TensorBox(f"norm {n} of {data}", (n,), (0,), torch.zeros(n), tensor, 2, ("tensor",))
            for n in (6, 5, 1)
        ]
        kept += [box.name for box in select_boxes({"g": [*norms, *scales]})["g"]]
    assert len(kept) == len(set(kept)) == 10


def test_copies_in_the_host_s_memory_are_those_of_one_save_and_take_no_more_for_the_next() -> None:
    said, tied = list[str](), torch.arange(6.0)
    tensors = [
        tied,
        tied,
        torch.arange(12).view(3, 4).t(),
        torch.ones(5, dtype=torch.bool),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.randn(3).to(torch.float8_e4m3fn),
    ]
    groups = {
        "g": [TensorBox(f"{n}", tuple(t.shape), (0,) * t.dim(), t) for n, t in enumerate(tensors)],
        "none": [],
    }
    want = [t.clone() for t in tensors]
    copies = HostCopies(said.append)
    for _ in range(2):
        found = copies.copy(groups)
        copies.wait()
        tied.fill_(9)  # a step
        for box, t in zip(found["g"], want, strict=True):
            assert (
                box.tensor.dtype == t.dtype
                and box.tensor.is_contiguous()
                and torch.equal(box.tensor.float(), t.float())
            )
        assert found["g"][0].tensor is found["g"][1].tensor and found["none"] == [] == said
        starts = [box.tensor.data_ptr() for box in found["g"] if box.tensor.numel()]
        tied.copy_(want[0])
    assert (
        starts
        == [
            box.tensor.data_ptr()
            for box in copies.copy({"g": groups["g"][:6]})["g"]
            if box.tensor.numel()
        ]
        + starts[-1:]
    )


def test_boxes_of_gate_and_up_are_apart() -> None:
    """Part 1 of 2 of a matrix of two pieces, of which FSDP2 leaves this rank rows 1 and 2 of 4."""
    from fp8cfg.checkpoint.tensor_layout import Place, TensorLayout

    layout = TensorLayout.__new__(TensorLayout)
    places = list(layout._places((4, 3), (4, 3), None, TensorShard(1, 2, 0, pieces=2)))
    assert places == [Place((0, 0), (2, 0), (2, 3)), Place((2, 0), (6, 0), (2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["shard:4", "manifest", "rename", "renamed"])
def test_a_rank_that_is_killed_leaves_the_newest_whole_checkpoint(
    point: str, tmp_path: Path
) -> None:
    words = small_words(
        *WORDS,
        "storage.shard=fsdp",
        "trainer.max_steps=2",
        "checkpoint.every_n_steps=1",
        "trainer.micro_batch_size=4",
        f"log.folder={tmp_path / 'run'}",
        "optim.warmup_steps=0",
        "trainer.val_check_interval=0",
        "trainer.compile=off",
    )
    assert launch(2, *words, FP8CFG_FAILPOINT=point).returncode
    found = whole_checkpoints.newest(tmp_path / "run" / "checkpoints", print)
    assert (found is not None) == (point == "renamed")
    done = launch(2, "resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert trained_model.load(tmp_path / "run", print).step == 2
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp-*"))
    if point != "renamed":  # what is damaged is looked at once
        return
    file = next((tmp_path / "run" / "checkpoints" / "step-00000002" / "model").glob("rank-00001-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = launch(2, "resume", str(tmp_path / "run"), "trainer.max_steps=3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "skipped damaged checkpoint" in done.stdout and "sha256" in done.stdout
    assert trained_model.load(tmp_path / "run", print).step == 3
