"""Times of steps: which tree is imported, what a ratio above the noise is, and that a run ends with its time."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--hidden", "32", "--layers", "1", "--seq", "16", "--batch", "1"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_step")


class Told:
    """A worker that answers from a list, in the order of its requests."""

    def __init__(self, *seconds: float, refused: str = "") -> None:
        self.seconds, self.refused = list(seconds), refused

    def ask(self, **request: Any) -> dict[str, Any]:
        if "make" in request:
            return (
                {"refused": ["fp8.x: no such key"]}
                if request["make"] == self.refused
                else {"losses": []}
            )
        return {"seconds": self.seconds.pop(0)}


def test_slower_is_what_the_noise_does_not_explain(bench: ModuleType) -> None:
    times = {
        "bf16 eager": {"this": [1.0, 3.0], "other": [1.0, 3.0], "again": [0.98, 3.0]},
        "O2 eager": {"this": [2.0, 2.0], "other": [1.8, 2.0], "again": [2.0, 2.1]},
    }
    assert (
        bench.beside(times).splitlines()[-1]
        == "noise of least times 2.0 %; slower by more: O2 eager (1.111)"
    )
    times["O2 eager"]["other"] = [1.97, 2.0]
    assert (
        bench.beside(times).splitlines()[-1] == "noise of least times 2.0 %; slower by more: none"
    )


def test_a_run_ends_with_its_time(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """At least one precision and three rounds are done."""
    args = bench.parse(["--minutes", "0", "--only", "bf16 eager", "O2 eager"])
    workers: Any = {"this": Told(1.0, 2.0, 3.0, 4.0), "other": Told(1.0, 2.0, 3.0, 4.0)}
    assert (ready := bench.made_ready(args, workers, 0.0)) == ["bf16 eager"]
    assert bench.rounds(args, workers, ready, 0.0) == {
        "bf16 eager": {"this": [1.0, 2.0, 3.0], "other": [1.0, 2.0, 3.0]}
    }
    assert "O2 eager: left out, for want of time (--minutes 0)" in capsys.readouterr().err


def test_what_a_tree_refuses_is_left_out(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    args = bench.parse(["--only", "bf16 eager", "O2 eager"])
    workers: Any = {"this": Told(), "other": Told(refused="O2 eager")}
    assert bench.made_ready(args, workers, 1e12) == ["bf16 eager"]
    assert "O2 eager: left out, refused by a tree: fp8.x: no such key" in capsys.readouterr().err


def test_a_tree_is_a_folder_or_a_revision(bench: ModuleType, tmp_path: Path) -> None:
    from step_times.trees import ROOT, NoTreeError, tree

    assert tree(str(ROOT), tmp_path) == ROOT
    with pytest.raises(
        NoTreeError, match="no-such-tree: neither a folder with fp8cfg in it nor a revision of"
    ):
        tree("no-such-tree", tmp_path)
    if (ROOT / ".git").exists():  # a checkout
        assert (tree("HEAD", tmp_path) / "fp8cfg" / "conf" / "config.yaml").is_file()


@pytest.mark.slow
def test_a_worker_takes_steps_of_its_tree(bench: ModuleType, tmp_path: Path) -> None:
    """It imports the fp8cfg of its folder, and says what that refuses."""
    from step_times.trees import ROOT, Worker

    (tmp_path / "fp8cfg").symlink_to(ROOT / "fp8cfg")
    worker, words = Worker(tmp_path, 1), bench.recipe_words(bench.parse(SMALL), [])
    made = worker.ask(make="one", words=words, compiled=False)
    assert made["losses"][2] < made["losses"][0] and worker.ask(step="one")["seconds"] > 0
    assert "aten::mm" in worker.ask(profile="one")["table"]
    assert worker.ask(make="two", words=[*words, "fp8.margn=1"], compiled=False)["refused"][
        0
    ].startswith("fp8.margn: no such key")
    worker.end()
    with pytest.raises(ValueError):
        worker.ask(step="one")
