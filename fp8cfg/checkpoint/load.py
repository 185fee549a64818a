"""Reading of a checkpoint: JSON state at once, and tensors or boxes of them on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fp8cfg.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    NoUsableCheckpoint,
    check_sums,
    sha256_of,
    verify_step,
)
from fp8cfg.checkpoint.tensor_layout import SAFETENSORS, Offsets, slices
from fp8cfg.parallel.process_group import World
from fp8cfg.parallel.sharding import balance_over_ranks
from fp8cfg.run_folder.files import RunFiles, StrangeFile

SHARDING = "DCP_SHARDING_INFO"
"""Key in the header of a file: the place of each box. torch's reader looks for the offsets."""
OFFSETS = "saved_offsets"
SHAPE = "shape"
TORCH_KEYS = {"format": "pt", "DCP_VERSION": "1.0"}
"""Other keys that torch and its tools write to the header of a file."""
STATE = "state.json"
RNG = "rng"
MAX_STATE = 1 << 30
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors. Its Python package (0.8) has no F8_E8M0 in its table."""
UNREADABLE = (
    OSError,
    StrangeFile,
    SafetensorError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    RuntimeError,
)
"""Errors of a file that did not come from a save. Its sha256 may still be right."""
Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name."""


def open_checkpoint(
    root: RunFiles, name: str, num_ranks: int = 1
) -> tuple[LoadedTensors, dict[str, Any]]:
    """Verifies a checkpoint, reads its state and opens its tensors.

    If several ranks call it, `LoadedTensors.check_sums` verifies the sha256 of the tensors later.

    Args:
        root: The folder of checkpoints.
        name: The folder of the checkpoint.
        num_ranks: The ranks that load the checkpoint.

    Returns:
        The tensors and the JSON state.

    Raises:
        DamagedCheckpoint: The message names the file.
        OtherCheckpointFormat: Another version of fp8cfg wrote the checkpoint.
    """
    small_files = (STATE, f"{RNG}{SAFETENSORS}")

    def is_checked(file: str) -> bool:
        """Returns whether this rank compares the sha256 of a file now."""
        # The ranks share the large files. Each rank reads the small ones.
        return num_ranks == 1 or file in small_files

    manifest = verify_step(root, name, is_checked)
    folder = root.folder(name)
    unchecked = [file for file in manifest.files if not is_checked(file)]
    return LoadedTensors(folder, manifest, unchecked), read_state(folder)


def read_state(folder: RunFiles) -> dict[str, Any]:
    """Reads the JSON state of the checkpoint in `folder`. Raises DamagedCheckpoint."""
    try:
        # Python's parser accepts NaN and Infinity, but JSON does not have them.
        state = json.loads(folder.read(STATE, MAX_STATE), parse_constant=_reject_constant)
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: not a JSON object")
    return state


def _reject_constant(name: str) -> None:
    """Raises ValueError for NaN and Infinity."""
    raise ValueError(f"{name} is not JSON")


class LoadedTensors(dict[str, Mapping[str, Tensor]]):
    """The tensors of a checkpoint by group.

    Attributes:
        recalibrate_fp8: Whether to reset missing or invalid scales and amax histories instead of
            raising an error.
    """

    recalibrate_fp8 = False

    def __init__(self, folder: RunFiles, manifest: Manifest, unchecked: list[str]) -> None:
        self._files = TensorFiles(folder)
        self._manifest = manifest
        self._unchecked = unchecked
        super().__init__(read_index(self._files, manifest.files))

    def check_sums(self, world: World) -> None:
        """Compares the sha256 of files that are not verified yet.

        All ranks call it. Each verifies some of the files, balanced by size.

        Args:
            world: The ranks.

        Raises:
            DamagedCheckpoint: On all ranks, if one file is damaged.
        """
        sizes = [self._manifest.files[name].size for name in self._unchecked]
        names = []
        for name, rank in zip(self._unchecked, balance_over_ranks(sizes, world.size), strict=True):
            if rank == world.rank:
                names.append(name)
        # Exchange the problem before raising. Otherwise the other ranks would wait for this one.
        problem = ""
        try:
            check_sums(self._files.folder, self._manifest, names)
        except DamagedCheckpoint as error:
            problem = str(error)
        for text in world.texts(problem):
            if text.strip():
                raise DamagedCheckpoint(text)
        self._unchecked = []

    def close(self) -> None:
        """Closes the files. They open again when a tensor is read."""
        self._files.close()


class TensorFiles:
    """The safetensors files in the folder of a checkpoint. Each file is opened once."""

    def __init__(self, folder: RunFiles) -> None:
        self.folder = folder
        self._open_files: dict[str, Any] = {}

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Yields the open file `name`. Raises DamagedCheckpoint if it cannot be read."""
        try:
            if name not in self._open_files:
                # Opens the folder first, without following links.
                parent, _, last = name.rpartition("/")
                files = self.folder
                if parent:
                    files = self.folder.folder(parent)
                self._open_files[name] = safe_open(files.stable_path / last, framework="pt")
            yield self._open_files[name]
        except UNREADABLE as error:
            raise self.damaged(name, f"cannot be read ({error_text(error)})") from error

    def damaged(self, name: str, problem: str) -> DamagedCheckpoint:
        """Returns the error for the file `name`."""
        return DamagedCheckpoint(f"{self.folder.path}: {name}: {problem}")

    def close(self) -> None:
        """Closes all files. An open file that was removed keeps its space on the disk."""
        self._open_files.clear()


def error_text(error: Exception) -> str:
    """Returns the text of an error in one line, without paths through a descriptor."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"/proc/self/fd/\d+/", "", text)


def read_index(files: TensorFiles, names: Iterable[str]) -> dict[str, StoredGroup]:
    """Reads the headers of safetensors files.

    Args:
        files: The folder.
        names: Files of the checkpoint. Files of other types are skipped.

    Returns:
        The groups by name.

    Raises:
        DamagedCheckpoint: A file cannot be read, or a tensor is incomplete.
    """
    groups: dict[str, StoredGroup] = {}
    for name in names:
        if name.endswith(SAFETENSORS):
            # `model.safetensors` of one rank, or `model/rank-00001-1.safetensors` of several.
            group = name.partition("/")[0].removesuffix(SAFETENSORS)
            groups.setdefault(group, StoredGroup(files)).add_file(name)
    for stored in groups.values():
        stored.check_whole()
    return groups


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor in a file."""

    file: str
    offsets: Offsets
    sizes: Offsets


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its parts by offsets, in one or more files."""

    dtype: torch.dtype
    shape: Offsets
    parts: dict[Offsets, StoredPart]


class StoredGroup(Mapping[str, Tensor]):
    """The tensors of a group by name. Reads a tensor, or a box of it, on demand.

    Attributes:
        tied: Maps further names of a tensor to its stored name.
    """

    def __init__(self, files: TensorFiles) -> None:
        self.tied: dict[str, str] = {}
        self._files = files
        self._tensors: dict[str, StoredTensor] = {}

    def add_file(self, name: str) -> None:
        """Adds the tensors in the header of the file `name`. Raises DamagedCheckpoint."""
        with self._files.reading(name) as file:
            metadata = dict(file.metadata() or {})
            places = json.loads(metadata.pop(SHARDING, "null"))
            if not isinstance(places, dict | None):
                raise ValueError(f"{SHARDING} is not a JSON object")
            for tensor_name in file.keys():  # noqa: SIM118, it is no dict
                header = file.get_slice(tensor_name)
                dtype = DTYPES[header.get_dtype()]
                sizes = tuple(header.get_shape())
                place: Any = {OFFSETS: [0] * len(sizes), SHAPE: list(sizes)}
                # Other tools write full tensors, without places.
                if places is not None:
                    place = places.get(tensor_name)
                offsets, shape = _checked_place(tensor_name, place, sizes)
                stored = self._tensors.setdefault(tensor_name, StoredTensor(dtype, shape, {}))
                # The same box in two files is a copy: one of them is read.
                part = stored.parts.setdefault(offsets, StoredPart(name, offsets, sizes))
                if (stored.dtype, stored.shape, part.sizes) != (dtype, shape, sizes):
                    raise ValueError(f"{tensor_name} has parts of other dtypes or shapes")
            for alias, tensor_name in metadata.items():
                if alias not in TORCH_KEYS:
                    self.tied[alias] = tensor_name

    def check_whole(self) -> None:
        """Raises DamagedCheckpoint unless the parts of each tensor cover it exactly."""
        for name, stored in self._tensors.items():
            parts = list(stored.parts.values())
            total = sum(prod(part.sizes) for part in parts)
            # Parts lie inside of the tensor. If they don't overlap and the sizes add up, they cover
            # it.
            if total != prod(stored.shape) or _has_overlap(parts):
                problem = f"the parts of {name} do not make a whole"
                raise self._files.damaged(parts[0].file, problem)
        for alias, name in self.tied.items():
            problem = ""
            if name not in self._tensors:
                problem = f"{alias} is tied to {name}, which is not stored"
            elif alias in self._tensors:
                problem = f"{alias} is tied to {name} and stored too"
            if problem:
                raise DamagedCheckpoint(f"{self._files.folder.path}: {problem}")

    def shape(self, name: str) -> Offsets:
        """Returns the shape of the tensor `name`."""
        return self._tensors[self.tied.get(name, name)].shape

    def read(self, name: str, offsets: Offsets, sizes: Offsets) -> Tensor:
        """Reads a box of a tensor.

        Args:
            name: The tensor.
            offsets: Where the box begins.
            sizes: The shape of the box.

        Returns:
            A new tensor on the CPU.
        """
        name = self.tied.get(name, name)
        stored = self._tensors[name]
        if not _is_inside(offsets, sizes, stored.shape):
            raise ValueError(f"{name}: no box {sizes} at {offsets} in {stored.shape}")
        box = torch.empty(sizes, dtype=stored.dtype, device="cpu")
        for part in stored.parts.values():
            common = _intersection(offsets, sizes, part.offsets, part.sizes)
            if common is None:
                continue
            start, size = common
            source = slices(_difference(start, part.offsets), size)
            with self._files.reading(part.file) as file:
                # safetensors makes no slices of a scalar.
                values = file.get_slice(name)[source] if source else file.get_tensor(name)
            box[slices(_difference(start, offsets), size)] = values
        return box

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self.tied

    def __len__(self) -> int:
        return len(self._tensors) + len(self.tied)


def _checked_place(name: str, place: Any, sizes: Offsets) -> tuple[Offsets, Offsets]:
    """Returns the offsets of a part and the shape of its full tensor. Raises ValueError."""
    if not isinstance(place, dict):
        place = {}
    offsets = _checked_numbers(place.get(OFFSETS))
    shape = _checked_numbers(place.get(SHAPE))
    if offsets is None or shape is None or not _is_inside(offsets, sizes, shape):
        raise ValueError(f"{SHARDING} must have {OFFSETS} and {SHAPE} of {name}")
    return offsets, shape


def _checked_numbers(values: Any) -> Offsets | None:
    """Returns a list of non-negative integers as a tuple, None for anything else."""
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a box lies inside of a tensor of `shape`."""
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        return False
    dims = zip(offsets, sizes, shape, strict=True)
    return all(offset >= 0 and offset + size <= length for offset, size, length in dims)


def _intersection(
    offsets: Offsets, sizes: Offsets, other_offsets: Offsets, other_sizes: Offsets
) -> tuple[Offsets, Offsets] | None:
    """Returns offsets and sizes of the intersection of two boxes, None if it is empty."""
    starts = []
    lengths = []
    dims = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    for offset, size, other_offset, other_size in dims:
        start = max(offset, other_offset)
        end = min(offset + size, other_offset + other_size)
        if start >= end:
            return None
        starts.append(start)
        lengths.append(end - start)
    return tuple(starts), tuple(lengths)


def _has_overlap(parts: list[StoredPart]) -> bool:
    """Returns whether two parts of a tensor overlap."""
    ordered = sorted(parts, key=lambda part: part.offsets)
    for number, part in enumerate(ordered, start=1):
        for other_box in islice(ordered, number, None):
            # All later parts begin below this one: row shards are compared once each.
            if part.offsets and other_box.offsets[0] >= part.offsets[0] + part.sizes[0]:
                break
            if (
                _intersection(part.offsets, part.sizes, other_box.offsets, other_box.sizes)
                is not None
            ):
                return True
    return False


def _difference(offsets: Offsets, origin: Offsets) -> Offsets:
    """Returns offsets relative to `origin`."""
    return tuple(offset - start for offset, start in zip(offsets, origin, strict=True))


def refuse_unlike(state: Mapping[str, Any] | None, world: World) -> None:
    """Checks that all ranks resume from the same checkpoint. All ranks call it.

    Without this check, a rank that skipped the newest checkpoint or sees another file system would
    train another model.

    Args:
        state: JSON state of the checkpoint that this rank has read. None for a start without one.
        world: The ranks.

    Raises:
        NoUsableCheckpoint: On all ranks.
    """
    if world.size == 1:
        return
    source = ["the start", None]
    if state is not None:
        source = [f"step {state['step']}", sha256_of(json.dumps(state, sort_keys=True).encode())]
    sources = [json.loads(text) for text in world.texts(json.dumps(source))]
    for rank, rank_source in enumerate(sources):
        if rank_source != sources[0]:
            raise NoUsableCheckpoint(
                f"rank 0 would resume from {sources[0][0]}, but rank {rank} from {rank_source[0]}"
                " of another checkpoint; all ranks need the same run folder on a shared file"
                " system"
            )


def load_by_layer(model: nn.Module, tensors: Tensors, left_out: Collection[str] = ()) -> None:
    """Loads a checkpoint into a model on one rank, layer by layer.

    Args:
        model: The model.
        tensors: The checkpoint. Only the groups model and fp8 are read.
        left_out: Names of the model that may be missing in the checkpoint.

    Raises:
        RuntimeError: Names are missing or unexpected, or shapes differ.
    """
    saved: dict[str, Mapping[str, Tensor]] = {}
    for group in (tensors["model"], tensors.get("fp8", {})):
        # A colon marks FP8 state of other ranks (job_tensors.py).
        saved |= {name: group for name in group if ":" not in name}
    missing: list[str] = []
    unexpected = set(saved)
    for prefix, module in _modules_by_prefix(model):
        direct_names = _direct_names(module)
        names = [name for name in saved if name.startswith(prefix)]
        if not prefix:
            names = [name for name in names if name in direct_names]
        # The dict has the only references, so a layer's tensors are freed before the next layer.
        result = module.load_state_dict(
            {name.removeprefix(prefix): saved[name][name] for name in names}, strict=False
        )
        missing += [prefix + key for key in result.missing_keys if prefix or key in direct_names]
        for name in names:
            if name.removeprefix(prefix) not in result.unexpected_keys:
                unexpected.discard(name)
    missing = [name for name in missing if name not in left_out]
    if missing:
        raise RuntimeError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if unexpected:
        first = min(unexpected)
        raise RuntimeError(f"{len(unexpected)} tensors are unexpected, the first is {first}")


def _modules_by_prefix(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules to load, in order, with the prefix of their names.

    Layers of a list come one by one. The model itself comes last, for its direct parameters. Its
    load hooks then see a complete model.
    """
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for number, layer in child.named_children():
                yield f"{name}.{number}.", layer
        else:
            yield f"{name}.", child
    yield "", model


def _direct_names(module: nn.Module) -> set[str]:
    """Returns the names of a module's own parameters and buffers, without its children."""
    parameters = module.named_parameters(recurse=False)
    buffers = module.named_buffers(recurse=False)
    return {name for name, _ in (*parameters, *buffers)}
