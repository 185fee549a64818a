"""Files of a share: what torch.distributed.checkpoint writes and reads of boxes, and what of a file is damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8cfg.checkpoint import distributed_save, load
from fp8cfg.checkpoint.manifest import DamagedCheckpoint, FileEntry
from fp8cfg.checkpoint.tensor_layout import TensorBox
from fp8cfg.run_folder.files import RunFiles


def files(folder: Path, *places: tuple[int, ...], shape: tuple[int, ...] = (2, 2)) -> RunFiles:
    for number, offsets in enumerate(places):
        header = {load.SHARDING: json.dumps({"w": {load.OFFSETS: offsets}})}
        save_file({"w": torch.full(shape, float(number))}, folder / f"{number}.safetensors", header)
    return RunFiles.at(folder)


@pytest.mark.parametrize(
    "places", [[(0, 0)] * 2, [(0, 0), (1, 0)], [(0, 0), (3, 0)], [(0, 0), (2, 1)]]
)
def test_parts_that_make_no_whole_are_damage(places: list[tuple[int, ...]], tmp_path: Path) -> None:
    folder = files(tmp_path, *places)
    if places[0] == places[1]:  # a copy, which says nothing new
        assert load.SavedTensors(folder, folder.names()).shape("w") == (2, 2)
        return
    with pytest.raises(DamagedCheckpoint, match="the parts of w do not make a whole"):
        load.SavedTensors(folder, folder.names())


@pytest.mark.parametrize("said", ["[0]", "[-1, 0]", "[0.0, 0]", "null", '{"a": 1}', "[true, 0]"])
def test_places_are_checked(said: str, tmp_path: Path) -> None:
    save_file(
        {"w": torch.zeros(2, 2)},
        tmp_path / "w.safetensors",
        {load.SHARDING: json.dumps({"w": {load.OFFSETS: json.loads(said)}})},
    )
    with pytest.raises(DamagedCheckpoint, match=r"w\.safetensors: cannot be read"):
        load.SavedTensors(RunFiles.at(tmp_path), ["w.safetensors"])


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_written_bytes_are_those_that_the_library_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 256, (6, 4 * dtype.itemsize), dtype=torch.uint8
    )
    whole = bits.view(dtype)
    there = {
        "full": whole,
        "t": whole.t(),
        "rows": whole[2:4],
        "scalar": whole[0, 0],
        "empty": whole[:0],
    }
    (tmp_path / "g").mkdir()
    writer = distributed_save.ShareWriter(tmp_path, "g", 0)
    boxes = [TensorBox(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in there.items()]
    dcp.save({}, storage_writer=writer, planner=distributed_save.SharePlanner(boxes), no_dist=True)
    file = tmp_path / "g" / "rank-00000-1.safetensors"
    data = file.read_bytes()
    assert writer.entries == {
        "g/rank-00000-1.safetensors": FileEntry(len(data), hashlib.sha256(data).hexdigest())
    }
    back = load.SavedTensors(RunFiles.at(tmp_path / "g"), [file.name])
    for found in (load_file(file), back):
        assert found.keys() == there.keys()
        for name, t in there.items():
            assert found[name].dtype == dtype and torch.equal(bytes_of(found[name]), bytes_of(t))


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def test_a_name_stands_in_a_file_once_and_files_are_bounded() -> None:
    boxes = [
        TensorBox(name, (8,), (at,), torch.zeros(4))
        for name, at in (("a", 0), ("a", 4), ("b", 0), ("c", 0), ("c", 4))
    ]
    items = distributed_save.SharePlanner(boxes).create_local_plan().items
    assert [
        [(i.index.fqn, i.index.offset) for i in file]
        for file in distributed_save.files_of(items, 32)
    ] == [[("a", (0,)), ("b", (0,))], [("a", (4,)), ("c", (0,))], [("c", (4,))]]


def test_a_box_that_is_larger_than_a_file_is_written_in_parts() -> None:
    t = torch.arange(14.0).view(7, 2)
    found = distributed_save.parts(TensorBox("w", (20, 6), (8, 2), t), limit=24)
    assert [(part.offsets, part.shape) for part in found] == [
        ((8, 2), (20, 6)),
        ((11, 2), (20, 6)),
        ((14, 2), (20, 6)),
    ]
    assert torch.equal(torch.cat([part.tensor for part in found]), t)
    assert [
        len(part.tensor)
        for part in distributed_save.parts(TensorBox("w", (7, 2), (0, 0), t), limit=1)
    ] == [1] * 7
