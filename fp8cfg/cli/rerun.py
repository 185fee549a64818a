"""`rerun`: the same run again into a new run folder, with what has changed since, and whether its losses are the same."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.cli.words import split
from fp8cfg.config.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.runfolder import RunFolder

USAGE = """
fp8cfg rerun RUN_FOLDER [key=value ...] [--config-dir FOLDER]

Runs the recipe of a run folder again from its start, into a new run folder.
Says first what has changed: code, versions, hardware, environment variables,
data, and the keys given here; and at the end whether the losses equal those of
the first run, bit for bit, or how far they are apart.
"""
MAX_BYTES = 1 << 20
"""A larger environment.json is not one of ours."""


def run(argv: list[str]) -> int:
    """Rerun the run folder of `argv`. Returns the exit code."""
    from fp8cfg.cli.train import launch
    from fp8cfg.composition import compose, from_yaml, to_yaml
    from fp8cfg.training.runfolder import RunFolder

    arguments = split(argv, ("--config-dir",))
    if len(arguments.plain) != 1:
        raise ConfigError("rerun: needs one run folder, as in: fp8cfg rerun runs/NAME")
    first = RunFolder.open(Path(arguments.plain[0]), lock=False)
    before = from_yaml(first.recipe)
    recipe = compose(arguments.words, arguments.one("--config-dir"), base=before)
    then = _losses(first)
    if os.environ.get("RANK", "0") == "0":
        print(f"rerun of {first.path}")
        changed = _changes(first, before, recipe)
        print(*(f"changed: {line}" for line in changed) if changed else ("nothing that is recorded has changed",), sep="\n")
        print()
    now, made = datetime.now(), list[RunFolder]()

    def folder() -> RunFolder:
        made.append(RunFolder.create(Path(recipe.log.dir), recipe.name, now, to_yaml(recipe)))
        return made[0]

    code = launch(recipe, folder, None)
    for again in made:  # on the first rank
        print(*compared(then, _losses(again)), sep="\n")
    return code


def _changes(first: RunFolder, before: Recipe, recipe: Recipe) -> list[str]:
    """What differs from the first run, one line each: keys, environment, data."""
    from fp8cfg.training.data import run_data
    from fp8cfg.training.environment import differences, environment
    from fp8cfg.training.saved import changes

    keys = changes(before, recipe)
    lines = [f"{key}: {_at(before, key)} -> {_at(recipe, key)}" for key in keys]
    lines += differences(_json(first.environment), environment())
    digest = _data_digest(first)
    if digest is None:
        lines.append("data: not recorded, the first run has no checkpoint")
    elif not any(key.startswith("data.") for key in keys) and run_data(recipe)[0].sha256 != digest:
        lines.append("data: the text or tokens to train on are not those of the first run")
    return lines


def _at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError where there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def _data_digest(first: RunFolder) -> str | None:
    """sha256 of the data that the first run trained on, from the state of its newest checkpoint."""
    states = sorted(p for p in first.checkpoints.glob("step-*/state.json") if ".tmp-" not in p.parent.name)
    data = _json(states[-1]).get("data") if states else None
    found = data.get("corpus_sha256") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


Losses = dict[str, dict[int, float]]
"""Training and validation losses by step."""


def _losses(folder: RunFolder) -> Losses:
    from fp8cfg.training import metrics

    rows: list[Any] = []
    if folder.metrics.exists():
        try:
            rows = metrics.read(folder.metrics)
        except (OSError, ValueError) as e:
            raise ConfigError(str(e)) from None
    return {name: {r["step"]: r[key] for r in rows if isinstance(r.get(key), float)}
            for name, key in (("training loss", "loss"), ("validation loss", "val_loss"))}


def compared(then: Losses, now: Losses) -> list[str]:
    """The lines that compare the losses of two runs, over the steps that both have."""
    ends = [max(losses["training loss"], default=0) for losses in (then, now)]
    short = [f"compared up to step {min(ends)}; the first run has {ends[0]} steps, this one {ends[1]}"]
    return (short if ends[0] != ends[1] else []) + [_compared(name, then[name], now[name]) for name in now]


def _compared(name: str, then: dict[int, float], now: dict[int, float]) -> str:
    common = sorted(then.keys() & now.keys())
    if not common:
        return f"{name}: the two runs have none in common"
    last = common[-1]
    different = [step for step in common if then[step].hex() != now[step].hex()]
    if not different:
        return f"{name}: equal bit for bit in all {len(common)} values, the last {now[last]!r}"
    apart = f"{abs(now[last] - then[last]):.3g} apart"
    return f"{name}: {now[last]:.7g}, was {then[last]:.7g} at step {last}: {apart}, from step {different[0]}"
