"""Resume of a smoke run: its last step once more, from the checkpoint before it, by a job built anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.builder import build
from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.smoke import SAVED_AT, STEPS
from fp8cfg.training.checkpoint import checkpoint, step_folders
from fp8cfg.training.loop import Result, train
from fp8cfg.training.run_folder import CHECKPOINTS, RunFolder

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe
    from fp8cfg.training.distributed.world import World

BOUND = 1e-3
"""Relative difference of losses over several ranks or on a GPU, whose sums may have another order; on one CPU there is none."""


class ResumeDiffers(Fp8cfgError):
    """A run that was resumed from its checkpoint did not give the losses that it had given before. Exit code 4."""

    exit_code = 4


def resume(
    recipe: Recipe, folder: Path | None, first: Result, world: World, say: Callable[[str], None]
) -> None:
    """Train the last step of `recipe`, a smoke run that ended with `first`, from the checkpoint before it in the run folder, whose
    path the first rank has. Raises ResumeDiffers where losses are others, and NoUsableCheckpoint.
    """
    root = RunFolder.reading(Path(world.text(str(folder or "")))).files.folder(CHECKPOINTS)
    name = next((name for step, name in step_folders.steps(root) if step == SAVED_AT), None)
    if name is None:
        raise step_folders.none_usable(root)
    again = train(
        build(recipe), None, checkpoint.load_named(root, name, world.size), world, lambda _: None
    )
    exact = world.size == 1 and not _on_gpu()
    for what, old, new in (
        ("training", first.loss, again.loss),
        ("validation", first.val_loss, again.val_loss),
    ):
        if (
            old is not None
            and new is not None
            and not (old == new if exact else abs(old - new) <= BOUND * abs(old))
        ):
            raise ResumeDiffers(
                f"resume: step {STEPS} from {name} has a {what} loss of {new!r}, and had {old!r}"
                " before"
            )
    same = (
        "the same losses"
        if (first.loss, first.val_loss) == (again.loss, again.val_loss)
        else f"losses within {BOUND:g}"
    )
    say(f"resume: step {STEPS} from {name} gave {same}")


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
