"""Checkpoints: bitwise there and back, refused where they would not be, and the newest whole ones kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fp8cfg.checkpoint.save import CheckpointError, Share, write_checkpoint
from fp8cfg.checkpoint.tensor_layout import TensorBox
from fp8cfg.parallel.process_group import World
from tests.support.small_checkpoints import content, flip, names, put, step_of
from tests.support.whole_checkpoints import load, newest, save

FLOATS = [
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_bitwise(tmp_path: Path, dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    bits = torch.randint(
        0, 256, (6, 4 * kind.itemsize), dtype=torch.uint8
    )  # NaNs with payloads among them
    full = bits.view(kind)
    there = {
        "full": full,
        "scalar": full[0, 0],
        "empty": full[:0],
        "t": full.t(),
        "strided": full[::2, 1:3],
    }
    tensors, _ = load(save(tmp_path, 1, {"g": there}, {}, keep=1))
    assert tensors["g"].keys() == there.keys()
    for name, tensor in there.items():
        back = tensors["g"][name]
        assert (back.dtype, back.shape) == (kind, tensor.shape)
        assert torch.equal(flat_bits(back), flat_bits(tensor))


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_tied_tensors_stay_tied_and_overlapping_ones_apart(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 300))
    flat = torch.arange(8.0)
    # Before or after what they overlap, views must neither be refused nor take each other's place.
    views = {
        "head": flat[:5],
        "flat": flat,
        "tail": flat[3:],
        "half": flat.view(torch.bfloat16),
        "none": flat[4:4],
    }
    path = save(tmp_path, 1, {"m": {"embed": weight, "head.weight": weight, **views}}, {}, keep=1)
    assert (path / "m.safetensors").stat().st_size < 1.5 * weight.nbytes
    back = load(path)[0]["m"]
    assert back["embed"] is back["head.weight"]
    assert torch.equal(back["embed"], weight)
    for name, view in views.items():
        assert torch.equal(back[name], view)
    back["head"].fill_(9)
    assert torch.equal(back["flat"], flat)


def test_conjugate_view(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    back = load(
        save(tmp_path, 1, {"g": {"z": z, "conj": z.conj(), "neg": z.conj().imag}}, {}, keep=1)
    )[0]["g"]
    assert torch.equal(back["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(back["neg"], torch.tensor([-2.0, 4.0]))


def test_loaded_tensors_are_their_own(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    tensors, _ = load(path)
    (path / "model.safetensors").write_bytes(b"")
    assert (
        tensors["model"]["x"] == 1
    ).all()  # a mapped file would have ended the process with SIGBUS


def test_state_comes_back_or_is_refused(tmp_path: Path) -> None:
    state = {"a": [1, 0.1, -0.0, None, True, "é\ud800"], "b": {"c": 2**70}}
    back = load(save(tmp_path, 1, {"g": {}}, state, keep=1))[1]
    assert json.dumps(back) == json.dumps(state)
    for bad in (
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": (1, 2)},
        {1: 2},
        {"a": {None: 1}},
    ):
        with pytest.raises(CheckpointError, match="JSON"):
            save(tmp_path, 2, {"g": {}}, bad, keep=1)
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 2, {"g": {}}, {"a": torch.tensor(1)}, keep=1)
    assert names(tmp_path) == ["step-00000001"]


class Wrapped(torch.Tensor):
    """Stands for DTensor and quantized weights, whose outer tensor has no memory."""


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        (torch.zeros(2).as_subclass(Wrapped), "w"),
        (torch.zeros(2, device="meta"), "w"),
        (torch.eye(2).to_sparse(), "w"),
        (torch.zeros(2, dtype=torch.complex128), "w"),
        (torch.zeros(2), "__metadata__"),
        (torch.zeros(2), "w format"),
        (torch.zeros(2), "w DCP_SHARDING_INFO"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_writing(
    tmp_path: Path, tensor: torch.Tensor, names: str
) -> None:
    name, *also = names.split()
    box = TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, aliases=tuple(also))
    with pytest.raises(CheckpointError, match=r"step 1 was not saved in .*root: g: "):
        write_checkpoint(tmp_path / "root", 1, Share({"g": [box]}, {}, {}), 1, World())
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("group", ["../g", "a/b", "", ".g", "g\n"])
def test_group_names_are_file_names(tmp_path: Path, group: str) -> None:
    with pytest.raises(CheckpointError, match="name of a file"):
        save(tmp_path, 1, {group: {}}, {}, keep=1)


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100_000_000):
        put(tmp_path, step)
    assert names(tmp_path) == ["step-00000015", "step-100000000"]
    assert step_of(newest(tmp_path, pytest.fail)) == 100_000_000


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    flip(tmp_path / "step-00000002" / "fp8.safetensors")
    put(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    put(tmp_path, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_order_is_by_step_not_by_time(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    os.utime(tmp_path / "step-00000001", (4e9, 4e9))
    os.utime(tmp_path / "step-00000002", (0, 0))
    assert step_of(newest(tmp_path, pytest.fail)) == 2


def test_a_save_behind_later_steps_survives(tmp_path: Path) -> None:
    for step in (5, 6, 3):
        put(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_same_step_again(tmp_path: Path) -> None:
    first = put(tmp_path, 1)
    put(tmp_path, 2)
    for number in range(3):
        tensors, state = content(2)
        again = save(tmp_path, 2, tensors, state | {"number": number}, keep=2)
        assert newest(tmp_path, pytest.fail) == again
        assert load(again)[1]["number"] == number
        assert names(tmp_path) == [first.name, again.name]


def test_same_step_again_over_a_damaged_one(tmp_path: Path) -> None:
    put(tmp_path, 1)
    flip(put(tmp_path, 2) / "state.json")
    assert newest(tmp_path, lambda _: None) == tmp_path / "step-00000001"
    assert step_of(put(tmp_path, 2)) == 2
    assert step_of(newest(tmp_path, pytest.fail)) == 2


def test_arguments(tmp_path: Path) -> None:
    for step, keep in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="keep >= 1"):
            save(tmp_path, step, {}, {}, keep=keep)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
