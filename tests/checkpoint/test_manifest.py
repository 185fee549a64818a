"""The manifest finds every kind of damage, and whatever stands in it the only error is DamagedCheckpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.checkpoint.manifest import (
    SCHEMA,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    OtherCheckpointFormat,
    read_manifest,
    verify,
)
from tests.support.small_checkpoints import put
from tests.support.whole_checkpoints import describe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    (path / "ranks").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(
        bytes(range(256)) * 9000
    )  # longer than one chunk of hashing
    (path / "state.json").write_text("{}")
    (path / "ranks" / "0.safetensors").write_bytes(b"zero")
    describe(path, step=7, world_size=2)
    return path


def edit(folder: Path, change: dict[str, object]) -> None:
    raw = json.loads((folder / "MANIFEST.json").read_text())
    raw.update(change)
    (folder / "MANIFEST.json").write_text(json.dumps(raw))


def test_reads_back(folder: Path) -> None:
    verify(folder)
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.world_size) == (7, 2)
    assert set(manifest.files) == {"model.safetensors", "state.json", "ranks/0.safetensors"}
    assert manifest.files["ranks/0.safetensors"].size == 4
    assert manifest.created.endswith("+00:00")


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "ranks/0.safetensors"])
@pytest.mark.parametrize(
    "damage", ["truncate", "grow", "flip first", "flip last", "delete", "link", "folder"]
)
def test_damage_is_named(folder: Path, name: str, damage: str) -> None:
    path, data = folder / name, (folder / name).read_bytes()
    if damage in ("delete", "link", "folder"):
        path.unlink()
        (folder.parent / "same").write_bytes(data)  # a link to the right bytes is still a link
    match damage:
        case "truncate":
            path.write_bytes(data[:-1])
        case "grow":
            path.write_bytes(data + b"\0")
        case "flip first":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "flip last":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
        case "link":
            path.symlink_to(folder.parent / "same")
        case "folder":
            path.mkdir()
    with pytest.raises(DamagedCheckpoint, match=name):
        verify(folder)


def test_unlisted_file(folder: Path) -> None:
    (folder / "ranks" / "MANIFEST.json").write_text("{}")  # only the one at the top is the manifest
    with pytest.raises(DamagedCheckpoint, match=r"ranks/MANIFEST.json: not listed"):
        verify(folder)


STRANGE = [
    "../other",
    "/etc/passwd",
    "a/../../b",
    "a//b",
    "",
    ".",
    "a\0b",
    "a\nb",
    "\ud800",
    "MANIFEST.json",
]


@pytest.mark.parametrize("name", STRANGE)
def test_names_stay_inside(folder: Path, name: str) -> None:
    entry = {"size": 0, "sha256": "0" * 64}
    edit(folder, {"files": {name: entry}})
    with pytest.raises(DamagedCheckpoint, match="not a plain path") as caught:
        verify(folder)
    assert str(caught.value).isprintable()


def test_linked_folder_inside(folder: Path) -> None:
    (folder / "ranks").rename(folder.parent / "ranks")
    (folder / "ranks").symlink_to(folder.parent / "ranks")
    with pytest.raises(DamagedCheckpoint, match="ranks: neither a regular file nor a folder"):
        verify(folder)


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder", "huge"])
def test_manifest_itself(folder: Path, kind: str) -> None:
    path = folder / "MANIFEST.json"
    path.rename(folder.parent / "moved")
    match kind:
        case "link":
            path.symlink_to(folder.parent / "moved")
        case "pipe":
            os.mkfifo(path)  # opening one would wait for ever
        case "folder":
            path.mkdir()
        case "huge":
            path.write_text(" " * (2 << 20))
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json"):
        verify(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(NoUsableCheckpoint, match="missing"):
        verify(tmp_path / "none")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 0),
        ("schema", "2"),
        ("step", -1),
        ("step", True),
        ("step", 1.0),
        ("world_size", 0),
        ("created", 1),
    ],
)
def test_fields_are_typed(folder: Path, key: str, value: object) -> None:
    edit(folder, {key: value})
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json"):
        verify(folder)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
entries = (
    st.fixed_dictionaries({"size": st.just(4) | values, "sha256": st.just("0" * 64) | values})
    | values
)
manifests = st.fixed_dictionaries(
    {
        "schema": st.just(SCHEMA) | values,
        "step": st.just(7) | values,
        "world_size": st.just(1) | values,
        "created": st.just("now") | values,
        "files": st.dictionaries(
            st.sampled_from(["model", "../model", "a/b"]) | st.text(), entries, max_size=3
        )
        | values,
    }
)


@settings(max_examples=150, deadline=None)
@given(content=(manifests | values).map(json.dumps).map(str.encode) | st.binary(max_size=64))
def test_only_one_kind_of_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "model").write_bytes(b"abcd")
    (folder / "MANIFEST.json").write_bytes(content)
    with pytest.raises((DamagedCheckpoint, OtherCheckpointFormat)) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff", b"\xef\xbb\xbf{}", b"NaN"]
)
def test_hostile_json(folder: Path, content: bytes) -> None:
    (folder / "MANIFEST.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        verify(folder)


@pytest.mark.parametrize("schema", [1, SCHEMA + 1])
def test_another_format_is_named(folder: Path, schema: int) -> None:
    edit(folder, {"schema": schema})
    with pytest.raises(OtherCheckpointFormat, match=f"format {schema}, but .* {SCHEMA}; ") as error:
        verify(folder)
    assert error.value.exit_code == 4


def test_every_file_and_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    put(tmp_path, 7)
    # The manifest after the files that it describes, the folders after their entries.
    names = [Path(path).name.partition(".tmp-")[0] for path in synced]
    tensors = ["model.safetensors", "optimizer.safetensors", "fp8.safetensors"]
    root = tmp_path.name
    assert names == [*tensors, "state.json", "MANIFEST.json", "step-00000007", root]
