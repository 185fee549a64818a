"""Storage columns: the codecs of a parameter's weight, master, gradient and moments."""

from __future__ import annotations

from typing import NamedTuple

from fp8cfg.numerics.codecs import FP32, Codec, Rounding, codec


class Columns(NamedTuple):
    """The codecs of one parameter, one for each column of the low-precision chart. `grad` is the codec of gradients stored apart
    from `.grad`; None leaves them where autograd puts them.
    """

    weight: Codec = Codec(FP32)
    master: Codec | None = None
    grad: Codec | None = None
    exp_avg: Codec = Codec(FP32)
    exp_avg_sq: Codec = Codec(FP32)

    @property
    def source(self) -> Codec:
        """The codec of the tensor that a step updates: the master, or the weight where there is none."""
        return self.master or self.weight

    @property
    def read(self) -> Codec:
        """The codec in which gradients are stored."""
        return self.grad or Codec(FP32)

    @property
    def written(self) -> tuple[Codec | None, ...]:
        """The codecs that a step writes, in the order of `Slot`; None for the weight where it is the source."""
        return (
            self.source,
            None if self.master is None else self.weight,
            self.exp_avg,
            self.exp_avg_sq,
        )

    @property
    def stochastic(self) -> bool:
        """Whether a step needs random numbers."""
        return any(codec is not None and codec.rounding == "stochastic" for codec in self.written)

    @property
    def amaxes(self) -> tuple[bool, ...]:
        """Whether scales of whole tensors need the amax of the weight, which its master shares, and of each moment."""
        source, weight, *moments = (
            codec is not None and codec.per_tensor for codec in self.written
        )
        return (source or weight, *moments)

    @property
    def per_tensor(self) -> bool:
        """Whether any scale is computed from the amax of a whole tensor."""
        return any(codec is not None and codec.per_tensor for codec in self.written)

    @property
    def blocks_written(self) -> bool:
        """Whether any scale that a step writes is computed from the amax of a block."""
        return any(codec is not None and codec.block for codec in self.written)

    @property
    def block(self) -> int:
        """The number of elements that a piece, unless it is the last, must be a multiple of."""
        return max(codec.block or 1 for codec in (*self.written, self.read) if codec is not None)


def named_columns(
    weight: str = "fp32",
    master_weight: str = "none",
    weight_grad: str = "fp32",
    exp_avg: str = "fp32",
    exp_avg_sq: str = "fp32",
    rounding: Rounding = "nearest",
) -> Columns:
    """The columns by the names that the storage keys take. `rounding` is that of weights and masters. Gradients without a scale
    stay where autograd puts them. Raises ValueError for an unknown name."""

    def updated(name: str) -> Codec:
        return codec(name, "nearest" if name == "fp32" else rounding)

    grad = codec(weight_grad)
    return Columns(
        updated(weight),
        None if master_weight == "none" else updated(master_weight),
        None if grad.scaling == "none" else grad,
        codec(exp_avg),
        codec(exp_avg_sq, second_moment=True),
    )
