"""Wheel, sdist, checkout and editable install are one package: the same composed recipe, and nothing else at the top level."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from pathlib import Path

import fp8cfg
from tests.support.installs import ROOT, Builds, Environment, environment

SHOW = (
    "import fp8cfg; from fp8cfg.recipes import llama_8b; from fp8cfg.schema.presets import choices; "
    "recipe = fp8cfg.compose(['recipe=llama_8b', 'precision=bf16_fp8', 'fp8.margin=1']); print(choices(), fp8cfg.to_yaml(recipe), "
    "'\\n'.join(str(fp8cfg.explain(['recipe=llama_8b', 'precision=bf16_fp8'], k)) for k in ('fp8.format', 'name', 'trainer.devices')))"
)
BESIDE = (
    "import importlib.util; specs = map(importlib.util.find_spec, ('recipes', 'conf', 'tests', 'tools', 'examples')); "
    "print(*[s.origin or list(s.submodule_search_locations) for s in specs if s])"
)


def contents(wheel: Path) -> dict[str, str]:
    """Files of `wheel` and what they hold."""
    with zipfile.ZipFile(wheel) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(builds: Builds) -> None:
    files = contents(builds.wheel)
    assert {name.split("/")[0] for name in files} == {
        "fp8cfg",
        f"fp8cfg-{fp8cfg.__version__}.dist-info",
    }
    own = {name: digest for name, digest in files.items() if name.startswith("fp8cfg/")}
    assert "fp8cfg/py.typed" in own and "fp8cfg/data/tiny.txt" in own
    for folder in ("recipes", "conf"):
        there = {
            f"fp8cfg/{file.relative_to(ROOT).as_posix()}"
            for file in (ROOT / folder).rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        assert there and {name for name in own if name.startswith(f"fp8cfg/{folder}/")} == there
    digests = [
        digest
        for name, digest in own.items()
        if not name.endswith("__init__.py") and digest != hashlib.sha256(b"").hexdigest()
    ]
    assert len(digests) == len(set(digests)), "a file is there twice"


def test_the_sdist_holds_each_file_once_and_builds_the_same_wheel(builds: Builds) -> None:
    with tarfile.open(builds.sdist) as archive:
        names, kinds = archive.getnames(), {member.type for member in archive.getmembers()}
    assert len(names) == len(set(names)) and kinds <= {tarfile.REGTYPE}, (
        "no links, which Windows and some unpackers refuse"
    )
    below = {Path(name).parts[1] for name in names}
    assert {
        "fp8cfg",
        "tests",
        "examples",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } <= below and not below & {"recipes", "conf", ".editable"}
    assert contents(builds.wheel_from_sdist) == contents(builds.wheel)


def test_every_way_to_have_it_gives_the_same_recipe(
    builds: Builds, installed: Environment, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare, editable = (
        environment(tmp_path / "bare"),
        environment(tmp_path / "editable", builds.editable),
    )
    assert bare.run("import importlib.util as u; print(u.find_spec('fp8cfg'))", empty) == "None\n"
    shown = {
        "checkout": bare.run(SHOW, empty, ROOT),
        "editable": editable.run(SHOW, empty),
        "sdist": bare.run(SHOW, empty, builds.unpacked),
        "wheel from sdist": installed.run(SHOW, empty),
    }
    assert set(shown.values()) == {shown["checkout"]}, shown
    assert (
        "margin: 1" in shown["checkout"]
        and "conf/precision/bf16_fp8.yaml:3" in shown["checkout"]
        and "recipe function llama_8b" in shown["checkout"]
    )
    for there in (editable, installed):
        beside = there.run(BESIDE, empty)
        assert str(ROOT) not in beside and str(installed.site) not in beside
    where = "import fp8cfg; print(fp8cfg.__file__)"
    assert Path(editable.run(where, empty).strip()).resolve() == ROOT / "fp8cfg/__init__.py"
    assert Path(installed.run(where, empty).strip()) == installed.site / "fp8cfg/__init__.py"
