"""Result of the rerun of a bad step, as text for the terminal and as JSON for the run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fp8cfg.run_folder.metrics_file import to_json_value
from fp8cfg.schema.errors import printable
from fp8cfg.training.module_checks import PHASES, BadTensor
from fp8cfg.training.overflow_watch import WARNING_RATIO

SHOWN_SAMPLES = 3
"""Number of samples in the message. The file has all samples of the batch."""


@dataclass(frozen=True)
class Fault:
    """Result of the rerun of a bad step.

    Attributes:
        step: The step, counted from 1.
        problem: Why the step is bad.
        weights: "before the step" or "after the step": the weights of the rerun.
        loss: Loss of the rerun.
        compiled: Whether the step itself ran compiled code.
        not_finite: Tensors that are not finite, the first one first.
        out_of_range: Tensors whose largest values FP8 cuts off, the first one first.
        backend: The backend, if its scales are not read.
        num_bad: Number of all such tensors, over all ranks.
        samples: Origin, rank and microbatch of each sample of the batch, with its loss in the rerun
            if known.
    """

    step: int
    problem: str
    weights: str
    loss: float
    compiled: bool
    not_finite: Sequence[BadTensor]
    out_of_range: Sequence[BadTensor]
    num_bad: int
    backend: str
    samples: Sequence[dict[str, Any]] = field(repr=False)

    @property
    def first_bad(self) -> BadTensor | None:
        """The first tensor that is not finite. If all are finite, the first one out of range.

        Delayed scaling often clips tensors a little, so the first one far out of range counts.
        """
        if self.not_finite:
            return self.not_finite[0]
        for tensor in self.out_of_range:
            if tensor.range_used is not None and tensor.range_used >= WARNING_RATIO:
                return tensor
        return None

    def lines(self) -> list[str]:
        """Returns the message: a line about the tensor, and one about the samples."""
        return [f"  {self._tensor_line()}", f"  {self._samples_line()}"]

    def data(self) -> dict[str, Any]:
        """Returns the contents of fault-step-N.json. Non-finite numbers are strings."""
        first_bad = None
        if self.first_bad is not None:
            first_bad = _tensor_data(self.first_bad)
        data: dict[str, Any] = _to_json(
            {
                "step": self.step,
                "problem": self.problem,
                "rerun": {
                    "loss": self.loss,
                    "weights": self.weights,
                    "eager": True,
                    "step_was_compiled": self.compiled,
                },
                "first": first_bad,
                "not_finite": [_tensor_data(tensor) for tensor in self.not_finite],
                "out_of_range": [_tensor_data(tensor) for tensor in self.out_of_range],
                "bad_tensors": self.num_bad,
                "samples": list(self.samples),
            }
        )
        return data

    def _tensor_line(self) -> str:
        tensor = self.first_bad
        if tensor is None:
            hint = ""
            if self.compiled:
                hint = "; compiled code may differ, try trainer.compile=off"
            return (
                "the rerun found no bad tensor: all are finite and in range (loss"
                f" {self.loss:.4g}){hint}"
            )
        place = PHASES[tensor.phase]
        if tensor.microbatch:
            place += f", microbatch {tensor.microbatch}, rank {tensor.rank}"
        name = f"{tensor.module or 'the model'} {tensor.tensor}"
        if not tensor.is_finite:
            return (
                f"first not finite: {name} ({place}), {tensor.nan:,} NaN and {tensor.infinite:,}"
                f" infinite of {tensor.elements:,} values, {_scale_text(tensor, self.backend)}"
            )
        return (
            f"first out of range: {name} ({place}), its largest value {tensor.largest:.4g} is"
            f" {tensor.range_used:.3g} times what FP8 can represent,"
            f" {_scale_text(tensor, self.backend)}"
        )

    def _samples_line(self) -> str:
        samples = self.samples
        tensor = self.first_bad
        # A tensor out of range may be far from the samples that make a loss spike.
        if tensor is not None and tensor.microbatch and not tensor.is_finite:
            reader = (tensor.rank, tensor.microbatch)
            samples_of_reader = [sample for sample in samples if reader in sample["read_by"]]
            samples = samples_of_reader or samples
        worst = sorted(samples, key=_sort_value, reverse=True)
        # If all losses are bad in the same way, the order of the batch is the best one.
        if _sort_value(worst[0]) == _sort_value(worst[-1]):
            worst = list(samples)
        texts = [_sample_text(sample) for sample in worst[:SHOWN_SAMPLES]]
        if len(samples) > SHOWN_SAMPLES:
            texts.append(f"{len(samples) - SHOWN_SAMPLES} more")
        return f"samples: {'; '.join(texts)}"


def _scale_text(tensor: BadTensor, backend: str) -> str:
    """Describes the FP8 scale of a tensor."""
    if not tensor.format and backend:
        return f"{tensor.dtype}, scales of backend={backend} are not read"
    if not tensor.format:
        return f"no FP8 scale ({tensor.dtype})"
    if tensor.scale_min is None or tensor.scale_max is None:
        return f"no valid scale ({tensor.format})"
    if tensor.scale_min == tensor.scale_max:
        return f"scale {tensor.scale_max:.4g} ({tensor.format})"
    return f"scales {tensor.scale_min:.4g} to {tensor.scale_max:.4g} ({tensor.format})"


def _sort_value(sample: dict[str, Any]) -> float:
    """Sorts samples by loss. A loss that is not finite is the worst."""
    loss = sample["loss"]
    if loss is None:
        return 0.0
    if not math.isfinite(loss):
        return math.inf
    return float(loss)


def _sample_text(sample: dict[str, Any]) -> str:
    """Describes a sample in a few words."""
    parts = []
    if "place" in sample:
        parts.append(printable(str(sample["place"])))
    elif "document" in sample:
        text = f"document {sample['document']}"
        if "part" in sample:
            text += f" of part {sample['part']}"
        parts.append(text)
    for key, name in (("offset", "token"), ("token", "token")):
        if key in sample:
            parts.append(f"{name} {sample[key]}")
    if sample["loss"] is not None:
        parts.append(f"loss {sample['loss']:.4g}")
    return f"{sample['sample']} ({', '.join(parts)})"


def _tensor_data(tensor: BadTensor) -> dict[str, Any]:
    """Returns a tensor for the JSON file."""
    return {**asdict(tensor), "phase": PHASES[tensor.phase]}


def _to_json(value: Any) -> Any:
    """Replaces numbers that JSON does not have by strings, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return to_json_value(value)
