"""Wheel, checkout and editable install are one package: the same composed recipe, and nothing else at the top level."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fp8cfg

ROOT = Path(__file__).parents[1]
SHOW = ("import fp8cfg, sys; from fp8cfg.recipes import llama_8b; from fp8cfg.config.presets import choices; "
        "print(fp8cfg.__file__, file=sys.stderr); "
        "print(choices(), fp8cfg.to_yaml(fp8cfg.compose(['recipe=llama_8b', 'precision=bf16_fp8', 'fp8.margin=1'])))")


@pytest.mark.slow
def test_the_wheel_runs_from_an_empty_folder_like_the_checkout(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    wheel, = tmp_path.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert {n.split("/")[0] for n in names} == {"fp8cfg", f"fp8cfg-{fp8cfg.__version__}.dist-info"}
    assert {"fp8cfg/conf/precision/bf16_fp8.yaml", "fp8cfg/recipes/llama.py", "fp8cfg/data/tiny.txt"} <= set(names)
    installed = subprocess.run([sys.executable, "-c", SHOW], cwd=empty, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True)
    checkout = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    editable = subprocess.run([sys.executable, "-c", SHOW], cwd=empty, capture_output=True, text=True)
    if importlib.util.find_spec("fp8cfg") and editable.returncode == 0:  # where the environment has an editable install, as ours does
        assert editable.stdout == checkout.stdout
    assert str(site) in installed.stderr and str(ROOT) in checkout.stderr
    assert installed.stdout == checkout.stdout


def test_every_public_name_can_be_imported() -> None:
    for name in fp8cfg.__all__:
        assert getattr(fp8cfg, name) is not None, name
    assert set(fp8cfg.__all__) <= set(dir(fp8cfg))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp8cfg.nothing  # noqa: B018
