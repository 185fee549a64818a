"""Bytes of activations on one rank, from the model's code: what the forward pass keeps, and what the backward pass adds.

Letters are bytes or sizes for one token on this rank:

    c  compute dtype    e  operand of an FP8 product    D  hidden    Q, K  query and key channels    F  MLP    V  vocabulary

Kept by each layer for its backward pass (fp8cfg/models/layers.py, numerics/function.py):

    2 norms     each the float32 input 4D and 1 / rms 4; on a CPU the normalized input too, 4D: RMSNorm is fused on GPUs alone
    linear_qkv  its input, cD, or eD quantized; its output c(Q + 2K), of which the values are a view
    attention   rotated queries and keys c(Q + K), output cQ, log-sum-exp 4 a head (flash attention)
    linear_proj its input is attention's output; quantized it is eQ beside it
    linear_fc1  its input, cD or eD; its output 2cF, of which gate and up are views
    linear_fc2  silu(gate) cF, and its input cF, or eF in place of it

Attention in FP8 (numerics/attention.py) keeps quantized queries, keys and values alone, e(Q + 2K), and takes its matrices of
scores one layer at a time: 8 + 2e and a mask for each of heads x T x T in the backward pass.

The final norm and the output layer's input come on top. Recomputation keeps cD a layer, and all this for the one at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8cfg.backends.planning import PlannedLinear, plan_attention
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import fp8_weights
from fp8cfg.report.layout import Part
from fp8cfg.report.operands import CODEC, decoded, directions, operand, product, quantizing

LOGITS = 12
"""Bytes of a logit at the widest moment of the cross entropy's backward pass: log-probabilities, their gradient, and that of
the logits, each float32. The forward pass has as many or fewer: logits, their float32 copy, log-probabilities."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch on one rank: kept from forward to backward pass; logits and their gradients; FP8 copies of
    weights; and what the widest moment of the backward pass takes beyond these."""

    kept: int
    logits: int
    copies: int
    backward: int


def activations(recipe: Recipe, device: str, part: Part, linears: Sequence[PlannedLinear], grads: float) -> Activations:
    """The bytes for `part`, whose linear layers are `linears`, on `device` ("cpu" or "cuda"); a gradient has `grads` bytes."""
    model = _Bytes(recipe, device, part, grads)
    attends = {int(p.name.split(".")[1]) for p in plan_attention(recipe.fp8, recipe.model.num_layers) if p.fp8_share}
    layers = [_Layer(model, linears[4 * i:4 * i + 4], n in attends) for i, n in enumerate(part.layers)]
    widest = max(layers, key=lambda layer: layer.kept + layer.copies, default=None)
    recompute = recipe.model.recompute_granularity == "full"
    kept = sum(model.c * model.d if recompute else layer.kept for layer in layers) * part.in_flight * model.tokens
    head = _Head(model, linears[-1]) if part.output else None
    final, logits = (head.kept * model.tokens, LOGITS * model.v * model.tokens) if head else (0.0, 0.0)
    copies = (head.copies if head else 0) + (0 if recompute else sum(layer.copies for layer in layers))
    again = (widest.kept - model.shared) * model.tokens + widest.copies if recompute and widest else 0.0
    moments = [logits, *(head.moments() if head else [])]
    moments += [again - final + m for m in widest.moments()] if widest else []
    if part.embedding:
        moments.append(model.v * recipe.model.hidden_size * (model.c + grads) - kept - final - copies)
    return Activations(int(kept + final), int(logits), int(copies), int(max(moments) - logits))


class _Bytes:
    """Sizes and bytes that all layers share."""

    def __init__(self, recipe: Recipe, device: str, part: Part, grads: float) -> None:
        m, tp = recipe.model, part.tensor
        self.recipe, self.device, self.grads, self.tp = recipe, device, grads, tp
        self.c, self.e = CODEC[recipe.precision.compute], operand(recipe, device)
        self.d = m.hidden_size / (tp if part.sequence_parallel else 1)
        self.q, self.k = m.num_attention_heads * m.head_dim / tp, -(-m.num_query_groups // tp) * m.head_dim
        self.f, self.v = m.ffn_hidden_size / tp, -(-m.vocab_size // tp)
        self.tokens = recipe.trainer.micro_batch_size * m.seq_length / part.context
        self.norm = 4 * self.d + 4 + (4 * self.d if device == "cpu" else 0)
        self.shared = 4 * self.d if self.c == 4 else 0  # a layer's input is its first norm's float32 input, not a copy of it
        self.norm_backward = (16 if device == "cpu" else 8) * self.d  # float32 gradients; on a CPU one for each of its parts
        # Flash attention takes no float32, and what does takes no grouped queries: the probabilities are kept then.
        materialized = device == "cuda" and self.c == 4 and m.num_query_groups < m.num_attention_heads
        self.softmax = m.num_attention_heads / tp * (4 * m.seq_length if materialized else 4)

    def input(self, linear: PlannedLinear, width: float) -> float:
        """What `linear` keeps of its input: the quantized one, or the input itself for a wgrad in high precision."""
        return (self.e if linear.gemms[2] else self.c) * width

    def held(self, linear: PlannedLinear) -> bool:
        """Whether the weight is held in FP8 alone; a tied output layer's is the embedding's, in high precision."""
        tied = self.recipe.model.share_embeddings_and_output_weights and linear.name == "output_layer"
        return fp8_weights(self.recipe.precision) and linear.fp8 and not tied

    def copy(self, linear: PlannedLinear) -> float:
        """The quantized weight that is kept for dgrad, all of it; none of a weight that is held in FP8."""
        return 0 if self.held(linear) or not linear.gemms[1] else self.e * linear.in_features * linear.out_features / self.tp

    def gradient(self, linear: PlannedLinear, made: bool) -> float:
        """The gradient of the weight, all of it: at most while it is `made`, or while it is cast and accumulated."""
        held = self.held(linear)
        out = self.grads if held else self.c
        if made:
            each = product(self.recipe, self.device, out) if linear.gemms[2] else self.c + (out if held else 0)
            each += decoded(self.recipe, self.device) if held else 0
        else:
            each = out + (self.grads if self.grads > out else 0)
        return each * linear.in_features * linear.out_features / self.tp

    def incoming(self, linear: PlannedLinear, width: float) -> tuple[float, float]:
        """The quantized gradient of `linear`'s output, `width` wide: bytes while it is made, and then; 0 where none is."""
        if not (linear.gemms[1] or linear.gemms[2]):
            return 0, 0
        elements = width * self.tokens
        first = (directions(self.recipe) - 1) * self.e * elements if linear.gemms[1] and linear.gemms[2] else 0
        return first + quantizing(self.recipe, self.device, elements), first + self.e * elements


class _Layer:
    """One Transformer layer: bytes for a token that it keeps, bytes of its weights' copies, and its backward pass."""

    def __init__(self, b: _Bytes, linears: Sequence[PlannedLinear], attends: bool) -> None:
        self.b, self.attends = b, attends  # in FP8
        qkv, proj, self.fc1, self.fc2 = linears
        self.fc1_in, self.fc2_in = b.input(self.fc1, b.d), b.input(self.fc2, b.f)
        attention = b.e * (b.q + 2 * b.k) + (b.e if proj.gemms[2] else b.c) * b.q
        if not attends:
            attention = b.c * (3 * b.q + 3 * b.k) + b.softmax + (b.e * b.q if proj.gemms[2] else 0)
        attention += b.input(qkv, b.d)
        self.kept = 2 * b.norm + attention + self.fc1_in + 3 * b.c * b.f + self.fc2_in
        self.copies = sum(b.copy(p) for p in linears)

    def moments(self) -> Iterator[float]:
        """Bytes beyond what the layer keeps, at the moments that can be the widest of its backward pass, first to last. What
        is used up is given back: fc2's input, then all of the MLP."""
        b, residual = self.b, self.b.c * self.b.d  # the gradient of the residual stream
        _, quantized = b.incoming(self.fc2, b.d)
        making = product(b.recipe, b.device, b.c) if self.fc2.gemms[1] else b.c
        yield b.tokens * (residual + making * b.f) + quantized
        yield b.tokens * (residual + b.c * b.f) + quantized + b.gradient(self.fc2, made=True)
        yield b.tokens * (residual + b.c * b.f - self.fc2_in) + b.gradient(self.fc2, made=False)
        yield b.tokens * (residual + 3 * b.c * b.f - self.fc2_in)  # SwiGLU: of its product, of silu and of up
        used = 3 * b.c * b.f + self.fc2_in
        making, quantized = b.incoming(self.fc1, 2 * b.f)
        yield b.tokens * (residual + 2 * b.c * b.f - used) + making
        yield b.tokens * (2 * residual + 2 * b.c * b.f - used) + quantized + b.gradient(self.fc1, made=True)
        used += self.fc1_in
        yield b.tokens * (2 * residual - used) + b.gradient(self.fc1, made=False)
        yield b.tokens * (residual + b.norm_backward - used)
        if self.attends:
            scores = b.recipe.model.num_attention_heads / b.tp * b.recipe.model.seq_length
            yield b.tokens * (2 * residual - used + (8.5 + 2 * b.e) * scores)


class _Head:
    """The final norm and the output layer."""

    def __init__(self, b: _Bytes, linear: PlannedLinear) -> None:
        self.b, self.linear = b, linear
        self.input = b.input(linear, b.d)
        self.kept, self.copies = b.norm + self.input, b.copy(linear)

    def moments(self) -> Iterator[float]:
        """As those of a layer: the output layer's gradients, their accumulation, the norm's."""
        b = self.b
        making, quantized = b.incoming(self.linear, b.v)
        yield b.tokens * b.c * b.v + making
        yield b.tokens * (b.c * b.v + b.c * b.d) + quantized + b.gradient(self.linear, made=True)
        yield b.tokens * (b.c * b.d - self.input) + b.gradient(self.linear, made=False)
        yield b.tokens * (b.norm_backward - self.input)
