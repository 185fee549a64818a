"""Safetensors files of boxes: their bytes, what other readers make of them, and what is damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8cfg.checkpoint.load import OFFSETS, SHAPE, SHARDING, StoredGroup, TensorFiles, read_index
from fp8cfg.checkpoint.manifest import DamagedCheckpoint, FileEntry
from fp8cfg.checkpoint.save import split_files, write_tensor_file
from fp8cfg.checkpoint.tensor_layout import TensorBox, whole_boxes
from fp8cfg.run_folder.files import RunFiles


def group_of(folder: Path) -> StoredGroup:
    """The group of tensors `g`, whose files are in a folder of that name."""
    names = [f"g/{file.name}" for file in sorted((folder / "g").iterdir())]
    return read_index(TensorFiles(RunFiles.at(folder)), names)["g"]


def write_places(folder: Path, *places: Any, sizes: tuple[int, ...] = (2, 2)) -> None:
    """A file of one box of the tensor w for each place in the header."""
    (folder / "g").mkdir()
    for number, place in enumerate(places):
        header = {SHARDING: json.dumps({"w": place})}
        file = folder / "g" / f"{number}.safetensors"
        save_file({"w": torch.full(sizes, float(number))}, file, header)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ((3, 2), [(0, 0), (1, 0)]),  # an overlap
        ((4, 2), [(0, 0), (1, 0)]),  # an overlap, and as many elements as the whole
        ((4, 4), [(0, 0), (0, 2), (2, 0), (1, 2)]),
        ((5, 2), [(0, 0), (3, 0)]),  # a gap
        ((4, 3), [(0, 0), (2, 1)]),
        ((4, 2), [(0, 0)]),  # a part is missing at the end
    ],
)
def test_parts_that_make_no_whole_are_damage(
    shape: tuple[int, ...], offsets: list[tuple[int, ...]], tmp_path: Path
) -> None:
    write_places(tmp_path, *[{OFFSETS: start, SHAPE: shape} for start in offsets])
    with pytest.raises(DamagedCheckpoint, match="the parts of w do not make a whole"):
        group_of(tmp_path)


def test_a_copy_is_no_damage(tmp_path: Path) -> None:
    write_places(tmp_path, *[{OFFSETS: (0, 0), SHAPE: (2, 2)}] * 2)
    assert group_of(tmp_path)["w"].tolist() == [[0, 0], [0, 0]]


def test_a_box_is_read_from_the_parts_that_it_meets(tmp_path: Path) -> None:
    offsets = [(0, 0), (0, 2), (2, 0), (2, 2)]
    write_places(tmp_path, *[{OFFSETS: start, SHAPE: (4, 4)} for start in offsets])
    group = group_of(tmp_path)
    assert group.shape("w") == (4, 4)
    assert group.read("w", (1, 1), (2, 2)).tolist() == [[0, 1], [2, 3]]
    assert group.read("w", (2, 0), (2, 1)).tolist() == [[2], [2]]
    assert group.read("w", (0, 0), (0, 4)).shape == (0, 4)
    for place in (((3, 0), (2, 4)), ((0, 0), (4, 4, 1)), ((-1, 0), (1, 1))):
        with pytest.raises(ValueError, match="w: no box"):
            group.read("w", *place)


@pytest.mark.parametrize(
    "place",
    [
        "null",
        "[0, 0]",
        '{"saved_offsets": [0, 0]}',
        '{"saved_offsets": [0], "shape": [2, 2]}',
        '{"saved_offsets": [-1, 0], "shape": [2, 2]}',
        '{"saved_offsets": [0.0, 0], "shape": [2, 2]}',
        '{"saved_offsets": [true, 0], "shape": [3, 2]}',
        '{"saved_offsets": [1, 0], "shape": [2, 2]}',
        '{"saved_offsets": [0, 0], "shape": [2]}',
    ],
)
def test_places_are_checked(place: str, tmp_path: Path) -> None:
    write_places(tmp_path, json.loads(place))
    with pytest.raises(DamagedCheckpoint, match=r"g/0\.safetensors: cannot be read .*of w"):
        group_of(tmp_path)


@pytest.mark.parametrize("places", ["[]", "3", '"w"', "true", "NaN", "{"])
def test_places_that_are_no_json_object_are_damage(places: str, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "g" / "0.safetensors", {SHARDING: places})
    with pytest.raises(DamagedCheckpoint, match=r"g/0\.safetensors: cannot be read"):
        group_of(tmp_path)


def test_parts_of_one_tensor_have_one_dtype_and_shape(tmp_path: Path) -> None:
    write_places(tmp_path, {OFFSETS: (0, 0), SHAPE: (4, 2)}, {OFFSETS: (2, 0), SHAPE: (5, 2)})
    with pytest.raises(DamagedCheckpoint, match="w has parts of other dtypes or shapes"):
        group_of(tmp_path)


@pytest.mark.parametrize("tied", [{"v": "u"}, {"w": "w"}])
def test_tied_names_lead_to_stored_tensors(tied: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    places = {"w": {OFFSETS: (0,), SHAPE: (2,)}}
    header = {SHARDING: json.dumps(places), **tied}
    save_file({"w": torch.zeros(2)}, tmp_path / "g" / "0.safetensors", header)
    with pytest.raises(DamagedCheckpoint, match="is tied to"):
        group_of(tmp_path)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_bytes_are_those_that_the_library_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    limit = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, limit, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    whole = bits.view(dtype)
    tensors = {
        "full": whole,
        "t": whole.t(),
        "rows": whole[2:4],
        "scalar": whole[0, 0],
        "empty": whole[:0],
        "tied": whole,
    }
    (tmp_path / "g").mkdir()
    file = tmp_path / "g" / "rank-00000-1.safetensors"
    boxes = whole_boxes(tensors)
    entry = write_tensor_file(RunFiles.at(tmp_path), f"g/{file.name}", boxes)
    data = file.read_bytes()
    assert entry == FileEntry(len(data), hashlib.sha256(data).hexdigest())
    by_library = load_file(file)
    by_library["tied"] = by_library["full"]
    for loaded in (by_library, group_of(tmp_path)):
        assert loaded.keys() == tensors.keys()
        for name, t in tensors.items():
            assert loaded[name].dtype == dtype and torch.equal(bytes_of(loaded[name]), bytes_of(t))
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt" and metadata["tied"] == "full"


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def test_tensors_of_a_file_are_aligned(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, dtype=torch.int8),
        "b": torch.zeros(3),
        "c": torch.zeros(1).double(),
    }
    write_tensor_file(RunFiles.at(tmp_path), "g.safetensors", whole_boxes(tensors))
    data = (tmp_path / "g.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0


def test_files_are_opened_once_and_closed_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8cfg.checkpoint import load

    opened = []
    real = load.safe_open

    def count(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return real(path, framework=framework)

    monkeypatch.setattr(load, "safe_open", count)
    tensors = {f"{number}": torch.full((2,), float(number)) for number in range(20)}
    write_tensor_file(RunFiles.at(tmp_path), "g.safetensors", whole_boxes(tensors))
    files = TensorFiles(RunFiles.at(tmp_path))
    group = read_index(files, ["g.safetensors"])["g"]
    for name, tensor in tensors.items():
        assert torch.equal(group[name], tensor)
    assert opened == ["g.safetensors"]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    files.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(group["3"], tensors["3"]) and len(opened) == 2


def test_a_file_has_each_name_once() -> None:
    boxes = [
        TensorBox(name, (12,), (start,), torch.zeros(4))
        for name, start in (("a", 0), ("a", 4), ("b", 0), ("c", 0), ("c", 4), ("a", 8))
    ]
    files = [[(box.name, box.offsets[0]) for box in file] for file in split_files(boxes)]
    assert files == [[("a", 0), ("b", 0), ("c", 0)], [("a", 4), ("c", 4)], [("a", 8)]]
