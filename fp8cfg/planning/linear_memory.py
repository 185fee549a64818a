"""Linear layer memory: sizes that all layers share, the bytes that a layer keeps, and those that it needs while it multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.planning.layout import Part, keeps_weights, microbatches
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales, transforms, weights_2d
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.scalings import SCALINGS, Tile
from fp8cfg.schema.storage import SCALED, gathers_params

CODEC: dict[str, float] = {
    "none": 0,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp16_scaled": 2,
    "fp8": 1,
    "fp8_pow2": 1,
    "fp8_block": 1 + 4 / 128,
    "fp8_expand": 1 + 8 / 128,
}
"""One element in each codec of `storage`, with its share of a block's scale; one for a whole tensor is left out."""
CODEC_BLOCK = 128
"""Elements that share a scale in the codecs of blocks."""


@cache
def stored_bytes(codec: str, elements: int) -> int:
    """A tensor of `element_numbers` in a codec of `storage`, with its scales, float32: one, or those of its blocks."""
    data, per_block = int(CODEC[codec]) * elements, int(CODEC[codec] % 1 * CODEC_BLOCK)
    if per_block:
        return data + per_block * -(-elements // CODEC_BLOCK)
    return data + (4 if codec in SCALED and elements else 0)


def emulated(recipe: Recipe, device: str) -> bool:
    """Whether products are emulated on `device` ("cpu" or "cuda"): float8 values carried in a wider dtype."""
    return device == "cpu" or recipe.fp8.emulate


def operand(recipe: Recipe, device: str) -> float:
    """An element of a quantized activation, or of a weight quantized for one pass. Emulated it is the carrier's: bfloat16 under
    bf16, unless its scale is multiplied in and is no power of two, and else float32. On hardware a byte, under nvfp4 half of one
    where a kernel packs it, and its share of a block's scale."""
    scaling = SCALINGS[recipe.fp8.scaling]
    if emulated(recipe, device):
        exact = scaling.exact_in_bfloat16(power_2_scales(recipe.fp8))
        return CODEC["bf16"] if recipe.precision.compute == "bf16" and exact else CODEC["fp32"]
    if scaling.two_levels and not _packs(recipe.fp8):
        return CODEC["fp8"] + CODEC["fp32"] / scaling.block
    return CODEC["fp8"] / (2 if scaling.two_levels else 1) + scaling.scale_share(_tile(recipe.fp8))


def _packs(fp8: FP8) -> bool:
    """Whether the kernel of nvfp4 makes every operand (numerics/quantize.py): of activations for wgrad it takes transformed ones, of
    weights squares."""
    return transforms(fp8) and weights_2d(fp8)


def _tile(fp8: FP8, weight: bool = False) -> Tile | None:
    """What shares a scale of an activation, or of a weight, as fprop reads it."""
    return SCALINGS[fp8.scaling].tile(1, fp8.granularity, square=weight and weights_2d(fp8))


def directions(recipe: Recipe) -> int:
    """How often an activation or a gradient is quantized: twice where scales lie along the contracted dimension, since
    products contract both."""
    return 2 if _tile(recipe.fp8) else 1


def row_scaled(recipe: Recipe) -> bool:
    """Whether a weight has scales along rows, and others for dgrad."""
    tile = _tile(recipe.fp8, weight=True)
    return tile is not None and tile[0] != tile[1]


def held_beside(recipe: Recipe) -> float:
    """What an element of a weight held in FP8 alone takes beside its byte: its share of scales; and where these lie along rows,
    another byte and scales along columns, for dgrad."""
    tile = _tile(recipe.fp8, weight=True)
    share = SCALINGS[recipe.fp8.scaling].scale_share(tile)
    return 1 + 2 * share if row_scaled(recipe) else share


def decoded(recipe: Recipe, device: str) -> float:
    """What an element of a weight held in FP8 alone takes more while an emulated product reads it: the carrier."""
    return operand(recipe, device) if emulated(recipe, device) else 0


def product(recipe: Recipe, device: str, out: float, made: float, read: float) -> float:
    """The most that an FP8 product takes before its result of `made` elements is there, `out` bytes each; `read` are the elements
    of its operands.

    Hardware writes the output. An emulated product has float32 sums (numerics/gemm.py), for which a CPU copies operands of two
    bytes. Scales that are not in the operands are multiplied in afterwards, into another float32 matrix; those of rows and columns
    are one themselves then.
    """
    if not emulated(recipe, device):
        return out * made
    carrier, scaling = operand(recipe, device), SCALINGS[recipe.fp8.scaling]
    copies = 4 * read if device == "cpu" and carrier < 4 else 0
    cast = out if out < 4 else 0
    after = (
        12 if per_row(recipe.fp8) else 4 + cast if scaling.block and not scaling.two_levels else 8
    )
    return max(copies + 4 * made, after * made)


def by_kernel(recipe: Recipe, device: str) -> bool:
    """Whether kernels quantize, without temporaries (numerics/kernels/launch.py): for products of the hardware."""
    packs = _packs(recipe.fp8) or not SCALINGS[recipe.fp8.scaling].two_levels
    return device == "cuda" and not emulated(recipe, device) and packs


def quantizing(recipe: Recipe, device: str, elements: float, gradient: bool) -> float:
    """The most that quantizing a matrix of `element_numbers`, a `gradient` or a weight, takes, its result among it. A GPU does so by a
    kernel that writes the result and its transpose alone, or else eagerly. The Hadamard transform of a gradient is made of a copy
    that runs along the other dimension, and quantized in its place."""
    mixed = CODEC[recipe.precision.compute] * elements if gradient and transforms(recipe.fp8) else 0
    if by_kernel(recipe, device):
        return 2 * mixed + 2 * operand(recipe, device) * elements
    return max(2 * mixed, mixed + _rounding(recipe, gradient) * elements)


def _rounding(recipe: Recipe, gradient: bool) -> float:
    """The most that an element of a matrix takes while it is rounded without a kernel (numerics/formats.py): float32 scaled and cut
    to the range, and its code. Four bits are rounded in steps: scaled, cut, its exponent, step, number of steps, product and that
    cut again, beside a random number where a `gradient` is rounded stochastically. With scales of tiles what was scaled stays
    beside it, and two float32 scales of each tile.
    """
    tile = _tile(recipe.fp8)
    apart = 4.0 if tile and recipe.precision.compute != "fp32" else 0.0
    if tile and 0 not in tile:
        apart += 2 * 4 / (tile[0] * tile[1])
    if SCALINGS[recipe.fp8.scaling].two_levels:
        return apart + 7 * 4 + 4 * (gradient and recipe.fp8.stochastic_rounding)
    return apart + 4 + 4 + 1


QUANTIZED, BLOCKS = 1.0, 1 + 1 / 32
"""Bytes of an element in float8: with one scale, or one for each row; and with one for each block of 32."""


def backward(
    recipe: Recipe, device: str, linear: PlannedLinear, g: float, w: float, x: float
) -> float:
    """The most that the backward pass of `linear` takes beside what is kept and the gradient of its output."""
    return max(_moments(recipe, device, linear, g, w, x))


def _moments(
    recipe: Recipe, device: str, linear: PlannedLinear, g: float, w: float, x: float
) -> Iterator[float]:
    c, has_blocks = CODEC[recipe.precision.compute], SCALINGS[recipe.fp8.scaling].torchao == "mx"
    e = BLOCKS if has_blocks else QUANTIZED
    making, multiplying = (
        _making(recipe, device),
        (_emulated if emulated(recipe, device) else _multiplied),
    )
    _, dgrad, wgrad = linear.gemms
    beside = 0.0
    if dgrad:
        yield making * g
        yield e * g + making * w
        yield e * (g + w) + multiplying(c, has_blocks, g, w, x)
        beside = e * (g + w)
    beside += c * x
    if wgrad:
        yield beside + making * g
        yield beside + e * g + making * x
        yield beside + e * (g + x) + multiplying(c, has_blocks, g, x, w)
    yield beside + c * w


def _making(recipe: Recipe, device: str) -> float:
    """Bytes of an element while it is quantized, its float8 among them: scaled and cut to the range in float32; in blocks by
    torch where products are emulated, its amaxes, quotients and a transposed copy among them, and else by one kernel.
    """
    if SCALINGS[recipe.fp8.scaling].torchao != "mx":
        return 4 + 4 + QUANTIZED
    return (
        (14 if CODEC[recipe.precision.compute] == 2 else 12) + 13 / 32
        if emulated(recipe, device)
        else BLOCKS
    )


def _emulated(c: float, blocks: bool, a: float, b: float, out: float) -> float:
    """A product of decoded operands: with blocks in the compute dtype, else copied into rows and columns and in float32."""
    if blocks:
        return max(2 * c * a, c * a + 2 * c * b, c * (a + b + out))
    return a + b + max(8 * a, 4 * a + 8 * b, 4 * (a + b + out), (4 + c) * out)


def _multiplied(c: float, blocks: bool, a: float, b: float, out: float) -> float:
    """A product by hardware, whose operands are copied into rows and columns where they lie otherwise."""
    return (0 if blocks else a + b) + c * out


GATHERED = ("linear_qkv", "linear_fc1", "output_layer")
"""Column-parallel layers, whose input is gathered under sequence parallelism."""


def keeps_input_shard(recipe: Recipe, part: Part, linear: PlannedLinear) -> bool:
    """Whether a rank keeps its own tokens of `linear`'s gathered input, and gathers them again for wgrad (numerics/token_shard.py)."""
    if not part.sequence_parallel or recipe.model.recompute_granularity == "full":
        return False
    if directions(recipe) == 2 and keeps_input(recipe, linear):
        return False
    return linear.name.endswith(GATHERED) and bool(linear.gemms[0] and linear.gemms[2])


def keeps_input(recipe: Recipe, linear: PlannedLinear) -> bool:
    """Whether `linear` keeps its input as it came and quantizes it again for wgrad: selective recomputation makes it again."""
    if recipe.model.recompute_granularity != "selective" or linear.name == "output_layer":
        return False
    return bool(linear.gemms[0] and linear.gemms[2])


def input_shard(recipe: Recipe) -> float:
    """Bytes for an element of that shard. Inputs that wgrad reads with other scales than fprop are quantized again."""
    return CODEC["fp8"] if directions(recipe) == 1 else CODEC[recipe.precision.compute]


class LinearBytes:
    """Those sizes and bytes on one rank, letters as in planning/activation_memory.py. Gradients have `grads` bytes an element, and
    those that are not there before the backward pass `fresh`."""

    def __init__(
        self, recipe: Recipe, device: str, part: Part, grads: float, backend: str, fresh: float = 0
    ) -> None:
        m, tp = recipe.model, part.tensor
        self.in_fp8 = part.state.fp8_weights or gathers_params(recipe.precision, backend)
        capabilities = registry.capabilities(backend)
        self.requantizes, self.keeps_cast, self.context = (
            capabilities.requantizes,
            capabilities.keeps_cast,
            part.context,
        )
        self.once = keeps_weights(recipe, part, backend)
        self.recipe, self.device, self.grads, self.new, self.tp = recipe, device, grads, fresh, tp
        self.c, self.e = CODEC[recipe.precision.compute], operand(recipe, device)
        self.d = m.hidden_size / (tp if part.sequence_parallel else 1)
        # of a token that is an input of a column-parallel layer, gathered where sequences are split
        self.wide = m.hidden_size
        self.gathers = part.sequence_parallel
        self.part, self.native = part, backend == registry.REFERENCE
        self.selective = m.recompute_granularity == "selective"
        # norms and activation functions, by themselves
        self.remakes = m.recompute_granularity != "full"
        self.q, self.k = (
            m.num_attention_heads * m.head_dim / tp,
            -(-m.num_query_groups // tp) * m.head_dim,
        )
        self.config = config = transformer_config(recipe)
        self.f, self.fc1, self.v = (
            m.ffn_hidden_size / tp,
            config.fc1_size / tp,
            -(-m.vocab_size // tp),
        )
        self.tokens = recipe.trainer.micro_batch_size * m.seq_length / part.context
        rms = m.normalization == "RMSNorm"
        parts = 4 if device == "cpu" and rms else 0  # RMSNorm is fused on GPUs alone
        kept = (
            0 if recipe.lora.enabled else parts
        )  # the normalized input, for the gradient of its weight
        self.norm = 4 * self.d + (4 if rms else 8) + kept * self.d
        self.norms = (2 if m.layernorm_placement == "both" else 1) * 2 * self.norm
        self.head_norms = 0.0
        if m.qk_layernorm != "none":
            heads = 1 if m.qk_layernorm == "hidden" else m.num_attention_heads / tp
            self.head_norms = (4 + kept) * (self.q + self.k) + 8 * heads
            self.norms += self.head_norms
        self.shared = (
            4 * self.d if self.c == 4 else 0
        )  # a layer's input is its first norm's float32 input, not a copy of it
        self.norm_backward = (
            16 if parts else 8
        ) * self.d  # float32 gradients; on a CPU one for each of its parts
        self.softmax = m.num_attention_heads / tp * 4
        gathered = part.shard == "fsdp"  # by which adapters, too, are in the compute dtype
        self.in_compute_dtype = gathered
        self.adds_stored = (
            recipe.storage.accumulate == "stored"
            and microbatches(recipe, part) > 1
            and not by_fsdp2(recipe, part.state, part.shards, backend)
        )
        self.adapter = self.c if gathered else CODEC[part.state.other["weight"]]
        self.beside = Counter(projection.module for projection in adapted_projections(recipe))

    def scores(self, layer: int) -> float:
        """What attention in high precision keeps beside queries, keys, values and its output."""
        m = self.recipe.model
        by_head = self.masked(layer) or (
            self.device == "cuda" and self.c == 4
        )  # flash attention takes neither
        copied = 0.0  # keys and values, in place of those of each group
        if by_head and m.position_embedding_type == "rope":
            copied = self.c * (self.q - 3 * self.k)  # what the product gave is not kept either
        elif by_head:
            copied = 2 * self.c * self.q
        if m.attn_logit_softcapping is not None:  # tanh, the softmax, and that in the compute dtype
            return copied + m.seq_length * m.num_attention_heads / self.tp * (
                8 + (self.c if self.c < 4 else 0)
            )
        return self.softmax + copied

    def masked(self, layer: int) -> bool:
        """Whether attention in high precision has an explicit mask."""
        m, apart = self.recipe.model, self.recipe.data.reset_attention_mask
        return apart or self.window(layer) is not None or m.attn_logit_softcapping is not None

    def masks(self, layers: Iterable[int]) -> float:
        """Bytes of the masks of tokens x tokens that stay for the backward pass, one for all of `layers` that have the same, and
        one for each sample where documents differ. Soft caps keep none, but to compute a layer again.
        """
        m = self.recipe.model
        if self.context > 1 or (
            m.attn_logit_softcapping is not None and m.recompute_granularity == "none"
        ):
            return 0
        samples = (
            self.recipe.trainer.micro_batch_size if self.recipe.data.reset_attention_mask else 1
        )
        return (
            len({self.window(layer) for layer in layers if self.masked(layer)})
            * samples
            * self.c
            * m.seq_length**2
        )

    def window(self, layer: int) -> int | None:
        """The sliding window of that layer, None where it is as long as a sequence."""
        window = self.config.window(layer)
        return window if window is not None and window < self.recipe.model.seq_length else None

    def input(self, linear: PlannedLinear, width: float) -> float:
        """What `linear` keeps of its input: the quantized one, or the input itself for a wgrad in high precision; beside a frozen
        weight what adapters keep."""
        if "wgrad" in linear.left_out:
            return self.adapters(linear, width)
        if self.keeps_shard(linear):
            return input_shard(self.recipe) * width / self.tp
        return (self.e if self.keeps_quantized(linear) else self.c) * width

    def keeps_shard(self, linear: PlannedLinear) -> bool:
        """Whether `linear` keeps this rank's tokens of its gathered input alone."""
        return keeps_input_shard(self.recipe, self.part, linear)

    def input_again(self, linear: PlannedLinear, width: float) -> tuple[float, float]:
        """Wgrad's input of `linear`, `width` wide: bytes while it is made, and then; 0 if the layer has kept it."""
        gathers = self.keeps_shard(linear)
        if not linear.gemms[2] or (self.keeps_quantized(linear) and not gathers):
            return 0, 0
        elements = width * self.tokens
        if not gathers or directions(self.recipe) == 2:
            made = quantizing(self.recipe, self.device, elements, gradient=False)
            return gathers * self.c * elements + made, self.e * elements
        if emulated(self.recipe, self.device):
            return (CODEC["fp8"] + self.e) * elements, self.e * elements
        # The hardware reads a transposed copy.
        return 2 * CODEC["fp8"] * elements, 2 * CODEC["fp8"] * elements

    def adapters(self, linear: PlannedLinear, width: float) -> float:
        """What adapters of `linear` keep: the input in their dtype, and A's output of each; with dropout its mask and a copy."""
        parts, stored = self.beside.get(linear.name, 0), self.adapter
        inputs = stored + (parts * (1 + stored) if self.recipe.lora.dropout else 0)
        return inputs * width + parts * stored * self.recipe.lora.rank if parts else 0

    def adapters_keep_input(self, linear: PlannedLinear) -> bool:
        """Whether what adapters of `linear` keep of its input is the input itself: neither cast nor dropped out."""
        return (
            self.beside.get(linear.name, 0) > 0
            and self.adapter == self.c
            and not self.recipe.lora.dropout
        )

    def keeps_quantized(self, linear: PlannedLinear) -> bool:
        """Whether `linear` keeps its input quantized, beside what its input is elsewhere."""
        if self.keeps_shard(linear):
            return True
        again = self.native and keeps_input(self.recipe, linear)
        return bool(linear.gemms[2]) and not self.requantizes and not again

    def held(self, linear: PlannedLinear) -> bool:
        """Whether the weight is held or gathered in FP8 alone; a tied output layer's is the embedding's, in high precision."""
        if not (self.in_fp8 and linear.fp8):
            return False
        return (
            linear.name != "output_layer"
            or not self.recipe.model.share_embeddings_and_output_weights
        )

    def casts(self, linear: PlannedLinear) -> bool:
        """Whether the weight is stored in another dtype, from which each pass casts it: its gradient is not of that dtype."""
        p, tied = (
            self.recipe.precision,
            self.recipe.model.share_embeddings_and_output_weights and linear.name == "output_layer",
        )
        stored = (
            self.part.state.other if tied else self.part.state.of_parameter(True, bool(linear.fp8))
        )["weight"]
        return stored != p.compute and not self.in_compute_dtype and not self.held(linear)

    def copy(self, linear: PlannedLinear) -> float:
        """The quantized weight that is kept for dgrad, all of it; none of one that is held in FP8, quantized again, or kept for all
        passes."""
        away = self.held(linear) or self.requantizes or self.once or not linear.gemms[1]
        return 0 if away else self.e * self.elements(linear)

    def workspace(self, linear: PlannedLinear) -> float:
        """The quantized weight that is kept for all passes of a step: a matrix for each product that reads it, or one for both that
        read it by stride, as emulated products do where scales allow; of one that is held in FP8 its transpose alone.
        """
        if self.held(linear) or not self.once:
            return self.transpose(linear)
        each = sum(map(bool, linear.gemms[:2]))
        shared = emulated(self.recipe, self.device) and not row_scaled(self.recipe)
        return (min(each, 1) if shared else each) * self.e * self.elements(linear)

    def cast(self, linear: PlannedLinear) -> float:
        """The weight that a pass cast or decoded, where the layer keeps it until its backward pass, recomputed or not."""
        return (
            self.c * self.elements(linear)
            if self.keeps_cast and linear.fp8 and self.casts(linear)
            else 0
        )

    def transpose(self, linear: PlannedLinear) -> float:
        """The transpose that is kept of a weight that is held in FP8, for dgrad: its scales are at hand."""
        reads = linear.gemms[1] and "dgrad" not in linear.left_out
        if not (self.held(linear) and self.once and self.recipe.fp8.keep_transpose_cache and reads):
            return 0
        return (decoded(self.recipe, self.device) or 1) * self.elements(linear)

    def elements(self, linear: PlannedLinear) -> float:
        """The elements of the weight."""
        return linear.in_features * linear.out_features / self.tp

    def again(self, linear: PlannedLinear, out: float, width: float) -> float:
        """The most that the backward pass of `linear` takes beside what is kept, where that quantizes again."""
        return backward(
            self.recipe,
            self.device,
            linear,
            out * self.tokens,
            self.elements(linear),
            width * self.tokens,
        )

    def quantizing(self, linear: PlannedLinear) -> float:
        """The most that quantizing the weight takes beside what is kept of it."""
        if self.held(linear) or self.requantizes or self.once or not linear.gemms[0]:
            return 0
        return quantizing(
            self.recipe, self.device, self.elements(linear), gradient=False
        ) - self.copy(linear)

    def gradient(self, linear: PlannedLinear, made: bool) -> float:
        """The gradient of the weight, all of it: at most while it is `made`, or while it is cast and accumulated."""
        if "wgrad" in linear.left_out:
            return 0
        held, casts = self.held(linear), self.casts(linear)
        out = self.grads if held or casts else self.c
        if not made:
            there = (out + (self.grads if self.grads > out else 0)) * self.elements(linear)
            return max(there, self.grads * self.elements(linear) + self.added(linear))
        again = held and not self.transpose(
            linear
        )  # is decoded for dgrad, and stays beside the gradient
        beside = decoded(self.recipe, self.device) * self.elements(linear) if again else 0
        if casts and not linear.gemms[1]:
            beside = self.c * self.elements(linear)
        if not linear.gemms[2]:
            return beside + (self.c + (out if held or casts else 0)) * self.elements(linear)
        if linear.name.endswith(GATHERED):
            channels = linear.in_features + linear.out_features / self.tp
        else:
            channels = linear.in_features / self.tp + linear.out_features
        return beside + product(
            self.recipe, self.device, out, self.elements(linear), channels * self.tokens
        )

    def added(self, linear: PlannedLinear) -> float:
        """What the gradient of the weight that is stored takes to be decoded, which that of a microbatch is added to: float32."""
        if (
            not self.adds_stored
            or self.part.state.of_parameter(True, bool(linear.fp8))["weight_grad"] not in SCALED
        ):
            return 0
        return 4 * self.elements(linear)

    def fresh(self, linear: PlannedLinear) -> float:
        """The gradient of the weight, once it was made, where it was not there before."""
        return 0 if "wgrad" in linear.left_out else self.new * self.elements(linear)

    def multiplying(self, linear: PlannedLinear, pass_: int, width: float) -> float:
        """The most that fprop (0) or dgrad (1) of `linear` takes until its result, `width` wide, is there."""
        made = width * self.tokens
        if not linear.gemms[pass_]:
            return self.c * made
        other = linear.in_features * linear.out_features / self.tp / width if width else 0
        again = (
            pass_ == 1 and self.held(linear) and not self.transpose(linear)
        )  # is decoded for dgrad
        beside = decoded(self.recipe, self.device) * self.elements(linear) if again else 0
        return beside + product(
            self.recipe, self.device, self.c, made, self.elements(linear) + other * self.tokens
        )

    def incoming(self, linear: PlannedLinear, width: float) -> tuple[float, float]:
        """The quantized gradient of `linear`'s output, `width` wide: bytes while it is made, and then; 0 where none is."""
        if not (linear.gemms[1] or linear.gemms[2]):
            return 0, 0
        elements = width * self.tokens
        if by_kernel(self.recipe, self.device):
            made = self.e * elements * (2 if linear.gemms[1] and linear.gemms[2] else 1)
            return (
                made
                + quantizing(self.recipe, self.device, elements, gradient=True)
                - 2 * self.e * elements,
                made,
            )
        first = (
            (directions(self.recipe) - 1) * self.e * elements
            if linear.gemms[1] and linear.gemms[2]
            else 0
        )
        return (
            first + quantizing(self.recipe, self.device, elements, gradient=True),
            first + self.e * elements,
        )
