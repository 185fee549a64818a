"""Saved state: the JSON of a checkpoint, and whether what was read is what a save writes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, ValidationError

from fp8cfg.config.recipe import Recipe
from fp8cfg.training.checkpoint import rng
from fp8cfg.training.checkpoint.loaded import Tensors
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint

WRONG_CONTENTS = (
    KeyError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    IndexError,
)
"""What reading a state raises that is not one of ours."""


class SavedCursor(BaseModel):
    """A place in a stream, as data.shards.Cursor has it."""

    epoch: int = Field(ge=0)
    shard: int = Field(ge=0)
    row: int = Field(ge=0)
    token: int = Field(ge=0)
    digest: str


class SavedData(BaseModel):
    """A place in the data, as `Batches.state` gives it; of a stream with its cursor."""

    seed: int
    seq_length: int
    samples_seen: int = Field(ge=0)
    corpus_sha256: str
    tokenizer_sha256: str | None = None
    stream: SavedCursor | None = None


class SavedBase(BaseModel):
    """The frozen weights that adapters stand over: their folder and its sha256, both null where they are drawn."""

    weights: str | None
    sha256: str | None


class SavedState(BaseModel):
    """The JSON state of a checkpoint. What the optimizer and the generators keep is checked where they take it back."""

    step: int = Field(ge=0)
    data: SavedData
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    recipe: dict[str, Any]
    compiled: bool
    backend: str | None = None  # who multiplied; none in checkpoints of earlier versions
    base: SavedBase | None = None
    also: dict[str, dict[str, str]] = {}  # other names of tensors, of checkpoints by several ranks


def check(tensors: Tensors, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint where `state`, or a generator's, is not what a save writes: right sums say nothing of contents."""
    name = "state.json"
    try:
        saved = SavedState.model_validate(state, strict=True)
        recipe = Recipe(**state["recipe"])
        if saved.data.samples_seen != saved.step * recipe.trainer.global_batch_size:
            raise ValueError(
                f"{saved.data.samples_seen} samples seen are not those of {saved.step} steps"
            )
        if not 0 <= state["optimizer"].get("steps", 0) <= saved.step:
            raise ValueError(f"optimizer.steps is not one of {saved.step} steps")
        name = "rng.safetensors"
        rng.check(tensors["rng"], state["rng"])
    except ValidationError as e:
        first = e.errors()[0]
        raise DamagedCheckpoint(
            f"{name}: {'.'.join(map(str, first['loc'])) or 'state'}: {first['msg']}"
        ) from None
    except WRONG_CONTENTS as e:
        raise DamagedCheckpoint(f"{name}: {one_line(e)}") from None


def another_multiplies(state: dict[str, Any], recipe: Recipe, backend: str) -> str | None:
    """The line for a run of `state` whose FP8 products another backend made than `backend`, which backend=auto of `recipe` takes
    here; None where it is the same one, or not known."""
    before, fp8 = state.get("backend"), state["recipe"]["trainer"]["plugins"]["fp8"]["enabled"]
    if before in (None, backend) or not fp8 or not recipe.fp8.enabled or recipe.backend != "auto":
        return None
    return (
        f"note: backend=auto: {before} multiplied before, and {backend} does here; losses are not"
        " those of before bit for bit"
    )


def one_line(error: Exception) -> str:
    """All that `error` says, a long list cut; torch begins a line for each kind of key that is wrong."""
    text = str(error) if not isinstance(error, KeyError) else f"has no {error}"
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= 300 else f"{line[:297]}..."
