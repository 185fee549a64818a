"""Sweep job: one run of a sweep as a Hydra launcher calls it, in the sweep's process or on another machine."""

from __future__ import annotations

import gc
import sys
import traceback
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.cli import sweep_results
from fp8cfg.config.errors import Fp8cfgError, printable, refuse_if
from fp8cfg.config.out_of_memory import out_of_memory
from fp8cfg.training.run_folder import RunFolder

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fp8cfg.composition.authors import Authors
    from fp8cfg.composition.config_groups import Library


def job(authors: Authors, library: Library, config: DictConfig) -> float:
    """Train, and leave the result in the folder of the job. `authors` are those of the recipe that the words of the job change,
    of which `library` has the choices. Returns the loss, for sweepers that search. Raises nothing but KeyboardInterrupt, once a
    signal has stopped it."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    made = list[RunFolder]()
    words = list(hydra.overrides.task)
    code, error = _train(
        OmegaConf.to_container(config, resolve=True), words, (library, authors), folder, made
    )
    result = sweep_results.write(folder, hydra.job.num, words, code, error, ran=bool(made))
    if code in (75, 130):
        raise KeyboardInterrupt
    found = [result[k] for k in ("validation_loss", "training_loss") if result[k] is not None]
    return float(found[0]) if found and code == 0 else float("nan")


def _train(
    values: Any,
    words: list[str],
    written: tuple[Library, Authors],
    folder: Path,
    made: list[RunFolder],
) -> tuple[int, str]:
    """Train the recipe of `values`, composed of `words`, into `folder`, which is put into `made` once it is this job's. Returns
    the exit code, and the lines of the error."""
    from fp8cfg.cli.composed import say
    from fp8cfg.cli.run_recipe import launch, sized
    from fp8cfg.composition import to_yaml
    from fp8cfg.composition.authors import of_words
    from fp8cfg.composition.giving_way import settled
    from fp8cfg.config.recipe import Recipe

    def own() -> RunFolder:
        made.append(RunFolder.create(folder, recipe.name, datetime.now(), to_yaml(recipe), folder))
        return made[0]

    try:
        composed = Recipe(**values)
        found = settled(composed, of_words(words, *written, composed), sweep=True)
        refuse_if(found.problems)
        say(found.notes)
        recipe = sized(found.recipe)
        return launch(recipe, own, None), ""
    except Fp8cfgError as e:
        print(
            *(f"error: {printable(line)}" for line in str(e).splitlines()),
            sep="\n",
            file=sys.stderr,
        )
        return e.exit_code, str(e)
    except KeyboardInterrupt:
        return 130, "interrupted"
    except Exception as e:  # a bug, or no memory: the other runs go on
        if line := out_of_memory(e):
            print(f"error: {printable(line)}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1, line or f"{type(e).__name__}: {e}"
    finally:
        _forget()


def _forget() -> None:
    """Give back what a run leaves behind in its process, which the next run may share."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
