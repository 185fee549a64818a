"""docs/extending/backend.md, followed: a backend from a package outside, found by its entry point; and packages that are broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs/extending/backend.md").read_text(encoding="utf-8")
    return [textwrap.dedent(body) for kind, body in BLOCK.findall(text) if kind == language]


def install(folder: Path, name: str, points: str, files: dict[str, str]) -> None:
    """What pip leaves of a package: its modules and its metadata."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    for path, text in {
        **files,
        f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info.name}/entry_points.txt": points,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own, which finds the packages of `folder`."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page, installed."""
    folder = tmp_path_factory.mktemp("site")
    files = {
        found[1]: block for block in blocks("python") if (found := re.match(r"# (\S+)\n", block))
    }
    assert set(files) == {f"fp8_theirs/{name}.py" for name in ("__init__", "rules", "backend")}
    (toml,) = blocks("toml")
    name, value = re.findall(r'^(\w+) = "(.+)"$', toml, re.MULTILINE)[0]
    assert '[project.entry-points."fp8cfg.backends"]' in toml
    install(folder, "fp8-theirs", f"[fp8cfg.backends]\n{name} = {value}\n", files)
    return folder


TRAINS = """
import json
from pathlib import Path
import fp8cfg
from fp8cfg.__main__ import main
from tests.support.small import SMALL, small, steps

words = [*SMALL, "precision=bf16_fp8", "trainer.max_steps=2", "optim.warmup_steps=1", "backend=theirs", "trainer.compile=off"]
assert main(["train", *words, "log.dir=runs"]) == 0
(run,) = Path("runs").iterdir()
metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
coverage = json.loads((run / "coverage.json").read_text())
versions = [f.name for f in run.glob("*.json") if '"fp8-theirs": "1.0"' in f.read_text()]
job = fp8cfg.build(small(*[w for w in words if w != "backend=theirs"], "backend=native"))
print(json.dumps({"theirs": [m["loss"] for m in metrics if "loss" in m], "native": [s.loss for s in steps(job, 2)],
                  "coverage": coverage, "version": versions,
                  "model": str(fp8cfg.coverage(job.model))}))
"""


def test_it_trains_with_the_losses_of_the_functions_that_it_takes(theirs: Path) -> None:
    done = python(theirs, TRAINS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend:    theirs (asked for; their emulation)" in done.stdout and done.stderr == ""
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["theirs"] == seen["native"] and len(seen["theirs"]) == 2
    assert seen["coverage"]["backend"] == {
        "backend": "theirs",
        "product": "emulate",
        "why": "asked for; their emulation",
        "passed_over": [],
    }
    assert seen["coverage"]["theirs"] == "Transformer" and seen["coverage"]["layers_in_fp8"] == 8
    assert seen["version"], "the versions of its distributions are recorded"


LOOKS = """
import sys
from fp8cfg.__main__ import main
codes = [main([verb, "recipe=llama_tiny", "precision=bf16_fp8", f"backend={name}"])
         for verb, name in (("check", "theirs"), ("plan", "theirs"), ("plan", "auto"), ("check", "theirz"))]
codes += [main(["doctor", "--json"]), main(["completion", "--words", "backend="]), main(["explain", "backend"])]
print(codes, "torch" in sys.modules)
"""


def test_every_verb_names_it(theirs: Path) -> None:
    done = python(theirs, LOOKS)
    assert done.stdout.splitlines()[-1].startswith("[0, 0, 0, 2, 0, 0, 0]"), (
        done.stdout + done.stderr
    )
    assert ": theirs, asked for; their emulation\n" in done.stdout
    assert ": native, auto; a CPU emulates FP8\n" in done.stdout, (
        "without a priority it multiplies where it is named alone"
    )
    assert "error: backend=theirz: not an option; did you mean 'theirs'?" in done.stderr
    assert '"theirs": "emulated"' in done.stdout and "backend=theirs\n" in done.stdout
    assert re.search(r"auto, native, te, torchao, msamp,?\s+(or )?theirs", done.stdout)


def test_packages_that_are_broken_are_left_out_with_one_line_each(tmp_path: Path) -> None:
    points = "[fp8cfg.backends]\nlost = fp8_broken.nothing\nnative = fp8_broken\nbare = fp8_broken\n\n[fp8cfg.recipes]\nlost = fp8_broken.nothing\n"
    install(
        tmp_path,
        "fp8-broken",
        points,
        {
            "fp8_broken/__init__.py": "",
            "fp8_broken/nothing.py": "raise OSError('no such library\\nhere')\n",
        },
    )
    code = "from fp8cfg.__main__ import main; print(main({argv}))"
    recipes, backends = (
        f"warning: package fp8-broken: its entry point lost of fp8cfg.{group} cannot be loaded (OSError: no such library); it is skipped"
        for group in ("recipes", "backends")
    )
    taken = "warning: package fp8-broken: its entry point native of fp8cfg.backends has the name of another backend; it is skipped"
    bare = (
        "warning: package fp8-broken: its entry point bare of fp8cfg.backends has no CAPABILITIES of class "
        "fp8cfg.schema.backends.Capabilities; it is skipped"
    )
    done = python(tmp_path, code.format(argv=["list", "recipe"]))
    assert done.stdout.endswith("\n0\n") and "llama_tiny" in done.stdout
    assert set(done.stderr.splitlines()) == {recipes, taken}
    done = python(tmp_path, code.format(argv=["plan", "recipe=llama_tiny", "precision=bf16_fp8"]))
    assert done.stdout.endswith("\n0\n") and ": native, auto" in done.stdout
    assert sorted(done.stderr.splitlines()) == sorted([recipes, backends, taken, bare])
    done = python(
        tmp_path,
        code.format(argv=["check", "recipe=llama_tiny", "precision=bf16_fp8", "backend=lost"]),
    )
    assert done.stdout.endswith("2\n")
    assert (
        "error: backend=lost: package fp8-broken: its entry point lost of fp8cfg.backends cannot be loaded"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
