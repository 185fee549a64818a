"""Loaded checkpoint: its JSON state and its tensors, which are read when they are asked for, after their sums were checked."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from fp8cfg.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    NoUsableCheckpoint,
    check_sums,
    sum_of,
)
from fp8cfg.checkpoint.tensor_layout import SAFETENSORS, Offsets
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles, StrangeFile

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Under which the header of a file has where its boxes begin in the whole."""
OF_TORCH = ("DCP_VERSION", "format")


class GroupReader(HuggingFaceStorageReader):
    """DCP storage reader of the `files` of a group in `folder`. Once `read_metadata` was called `tensors` are those that they have,
    and `also` other names in their headers. Raises DamagedCheckpoint for files that cannot be read or do not make whole tensors.
    """

    def __init__(self, folder: RunFiles, files: list[str]) -> None:
        super().__init__(path=str(folder.path))
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.also: dict[str, str] = {}
        self._folder, self._files = folder, files
        self._file_of: dict[MetadataIndex, str] = {}

    def read_metadata(self) -> Metadata:
        """Sizes, dtypes and parts of all tensors."""
        for file in self._files:
            with (
                self._refusing(file),
                safe_open(self._folder.reached / file, framework="pt") as opened,
            ):
                self._index(file, opened)
        for name, tensor in self.tensors.items():
            tensor.size = self._whole(name, tensor.chunks)
        return Metadata({**self.tensors}, storage_data=self._file_of)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what `plan` has from its files to where `planner` wants it."""
        by_file = defaultdict[str, list[ReadItem]](list)
        for item in plan.items:
            by_file[self._file_of[item.storage_index]].append(item)
        for file, items in by_file.items():
            with (
                self._refusing(file),
                safe_open(self._folder.reached / file, framework="pt") as opened,
            ):
                for item in items:
                    tensor = planner.resolve_tensor(item)
                    planner.commit_tensor(item, tensor.copy_(_part(opened, item)))
        done = Future[None]()
        done.set_result(None)
        return done

    def _index(self, file: str, opened: Any) -> None:
        header = dict(opened.metadata() or {})
        places = json.loads(header.pop(SHARDING, "null"))
        if places is not None:
            header = {name: kept for name, kept in header.items() if name not in OF_TORCH}
        for name in opened.keys():  # noqa: SIM118, it is no dict
            stored = opened.get_slice(name)
            shape = torch.Size(stored.get_shape())
            dtype = (
                stored[:0] if shape else opened.get_tensor(name)
            ).dtype  # by its name safetensors 0.8 knows none of F8_E8M0
            offsets = torch.Size(
                [0] * len(shape) if places is None else _checked(places[name][OFFSETS], shape)
            )
            tensor = self.tensors.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype), shape, [])
            )
            if tensor.properties.dtype != dtype:
                raise ValueError(f"{name} has parts of other dtypes")
            chunk = ChunkStorageMetadata(offsets, shape)
            if chunk not in tensor.chunks:
                tensor.chunks.append(chunk)
                self._file_of[MetadataIndex(name, offsets)] = file
        self.also |= header

    def _whole(self, name: str, chunks: list[ChunkStorageMetadata]) -> torch.Size:
        """The size of the tensor that `chunks` make."""
        if len({len(chunk.sizes) for chunk in chunks}) > 1:
            raise self.damaged(name, "has parts of other dimensions")
        ends = [
            [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            for chunk in chunks
        ]
        size = torch.Size(map(max, zip(*ends, strict=True)))
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(size):
            raise self.damaged(
                self._file_of[MetadataIndex(name, chunks[0].offsets)],
                f"the parts of {name} do not make a whole",
            )
        return size

    @contextmanager
    def _refusing(self, file: str) -> Iterator[None]:
        """Around the reading of `file`. The sums hold and yet it cannot be read: not written by a save."""
        try:
            yield
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            RuntimeError,
            SafetensorError,
            StrangeFile,
        ) as error:
            raise self.damaged(file, f"cannot be read ({error})") from error

    def damaged(self, file: str, what: str) -> DamagedCheckpoint:
        """The error that says `what` is wrong with `file`."""
        return DamagedCheckpoint(f"{self._folder.path}: {file}: {what}")


def _part(opened: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:  # of which safetensors makes no slices
        scalar: torch.Tensor = opened.get_tensor(name)
        return scalar
    ranges = (
        slice(start, start + size)
        for start, size in zip(item.storage_offsets, item.lengths, strict=True)
    )
    part: torch.Tensor = opened.get_slice(name)[tuple(ranges)]
    return part


def _checked(offsets: Any, shape: Offsets) -> Offsets:
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(shape)
        or not all(type(n) is int and n >= 0 for n in offsets)
    ):
        raise ValueError(f"{OFFSETS} must be a place in {len(shape)} dimensions")
    return tuple(offsets)


_NONE: Mapping[str, str] = {}


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a group by name, on the CPU; `also` are other names of some. Raises DamagedCheckpoint for files that cannot be
    read or do not make whole tensors, as it is made and as it is read."""

    def __init__(self, folder: RunFiles, files: list[str], also: Mapping[str, str] = _NONE) -> None:
        self._reader = GroupReader(folder, files)
        self._reader.read_metadata()
        self._tensors = self._reader.tensors
        self._also = {**self._reader.also, **also}
        for name in self._also.values():
            if name not in self._tensors:
                raise self._reader.damaged(files[0], f"has no {name}")

    def shape(self, name: str) -> Offsets:
        """The shape of the whole tensor `name`."""
        return tuple(self._tensors[self._also.get(name, name)].size)

    def read(self, name: str, offsets: Offsets, size: Offsets) -> Tensor:
        """The part of `size` that begins at `offsets` in the tensor `name`."""
        name = self._also.get(name, name)
        tensor = self._tensors[name]
        part = torch.empty(size, dtype=tensor.properties.dtype)
        items = create_read_items_for_chunk_list(
            name, tensor, [ChunkStorageMetadata(torch.Size(offsets), part.shape)]
        )
        if sum(item.lengths.numel() for item in items) != part.numel():
            raise self._reader.damaged(name, "its parts do not make a whole")
        self._reader.read_data(LoadPlan(items), _Into(part))
        return part

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._also

    def __len__(self) -> int:
        return len(self._tensors) + len(self._also)

    def whole(self) -> dict[str, Tensor]:
        """All tensors, read; names of one tensor share it."""
        read = {name: self[name] for name in self._tensors}
        return read | {name: read[kept] for name, kept in self._also.items()}


class _Into(DefaultLoadPlanner):
    """DCP load planner that puts what is read of one tensor into `part`."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._part


def groups(folder: RunFiles, also: Mapping[str, Mapping[str, str]]) -> dict[str, SavedTensors]:
    """The groups of tensors of the checkpoint in `folder`, of some of which there are `also` other names. Raises
    DamagedCheckpoint."""
    found: dict[str, SavedTensors] = {}
    for name in folder.names():
        kind = folder.kind(name)
        if kind == "folder":
            inside = folder.folder(name)
            if files := [
                file for file in inside.names() if file.endswith(SAFETENSORS)
            ]:  # none of a group that no rank has
                found[name] = SavedTensors(inside, files, also.get(name, _NONE))
        elif kind == "file" and name.endswith(SAFETENSORS):
            found[name.removesuffix(SAFETENSORS)] = SavedTensors(folder, [name])
    return found


Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name."""
STATE, RNG = "state.json", "rng"
ALSO = "also"
"""Of the state of a checkpoint by several ranks: other names of tensors, by group."""
MAX_STATE = 1 << 30


class LoadedTensors(dict[str, Mapping[str, Tensor]]):
    """The groups of tensors of a checkpoint. Sums of `unchecked` files are still to be compared with the manifest.

    Attributes:
        recalibrate_fp8: Whether scales and amax histories that are missing or impossible start anew, instead of an error.
    """

    recalibrate_fp8 = False

    def __init__(
        self,
        folder: RunFiles,
        manifest: Manifest,
        unchecked: list[str],
        also: Mapping[str, dict[str, str]],
    ) -> None:
        found = groups(folder, also)
        super().__init__(
            {name: tensors.whole() if name == RNG else tensors for name, tensors in found.items()}
        )
        self._folder, self._manifest, self._unchecked = folder, manifest, unchecked

    def check_sums(self, world: World) -> None:
        """Compare the sums of the files that are not checked, each by one of the ranks, all of which call it. Raises
        DamagedCheckpoint on all of them."""
        problem = ""
        try:
            check_sums(self._folder, self._manifest, self._unchecked[world.rank :: world.size])
        except DamagedCheckpoint as e:
            problem = str(e)
        said = [text for text in world.texts(problem) if text.strip()]
        if said:
            raise DamagedCheckpoint(said[0])
        self._unchecked = []


def read(
    folder: RunFiles, manifest: Manifest, unchecked: list[str]
) -> tuple[LoadedTensors, dict[str, Any]]:
    """The tensors and the state of the checkpoint in `folder`. Raises DamagedCheckpoint, naming the file."""
    try:
        state = json.loads(folder.read(STATE, MAX_STATE), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: not a JSON object")
    if not _names(also := state.get(ALSO, {})):
        raise DamagedCheckpoint(
            f"{folder.path}: {STATE}: {ALSO} must map groups to names of tensors"
        )
    return LoadedTensors(folder, manifest, unchecked, also), state


def refuse_unlike(state: Mapping[str, Any] | None, world: World) -> None:
    """Raise NoUsableCheckpoint on all ranks, which all call it, unless they go on from one checkpoint, whose `state` each has read
    by itself; None is the start. A rank that passed over the newest, or sees another file system, would train another model.
    """
    if world.size == 1:
        return
    own = (
        "the start" if state is None else f"step {state['step']}",
        state and sum_of(json.dumps(state, sort_keys=True).encode()),
    )
    found = [json.loads(text) for text in world.texts(json.dumps(own))]
    for rank, each in enumerate(found):
        if each != found[0]:
            raise NoUsableCheckpoint(
                f"rank 0 would go on from {found[0][0]} and rank {rank} from {each[0]} of another"
                " checkpoint; all must read one run folder, on a file system that they share"
            )


def _names(also: Any) -> bool:
    return isinstance(also, dict) and all(
        isinstance(named, dict) and all(isinstance(name, str) for name in named.values())
        for named in also.values()
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def load_by_layer(model: nn.Module, tensors: Tensors, left_out: Collection[str] = ()) -> None:
    """Load the groups model and fp8 of a checkpoint into `model`, on one rank; what is `left_out` stays as it is. Raises
    RuntimeError for missing and unexpected names and for other shapes, as torch does."""
    saved = {
        name: group
        for group in (tensors["model"], tensors.get("fp8", {}))
        for name in group
        if ":" not in name
    }
    missing, unexpected = list[str](), set(saved)
    for prefix, part in _parts(model):
        names = [
            name for name in saved if name.startswith(prefix) and (prefix or name in _own(part))
        ]
        # The dict of what is read is nobody's after the call: two layers are never there at once.
        wrong = part.load_state_dict(
            {name.removeprefix(prefix): saved[name][name] for name in names}, strict=False
        )
        missing += [prefix + name for name in wrong.missing_keys if prefix or name in _own(part)]
        unexpected -= {
            name for name in names if name.removeprefix(prefix) not in wrong.unexpected_keys
        }
    missing = [name for name in missing if name not in left_out]
    if missing or unexpected:
        problem, names = ("missing", missing) if missing else ("unexpected", sorted(unexpected))
        raise RuntimeError(f"{len(names)} tensors are {problem}, the first is {names[0]}")


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of `model` that are loaded one after the other, with the beginning of their names: each layer of a list by itself,
    and the tensors that the model has beside its parts."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}.", layer) for number, layer in child.named_children())
        else:
            yield f"{name}.", child
    yield "", model  # last: hooks of the model itself see all of it


def _own(module: nn.Module) -> set[str]:
    return {
        name
        for name, _ in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
    }
