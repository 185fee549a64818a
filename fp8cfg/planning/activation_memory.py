"""Activation memory on one rank, from the model's code: what the forward pass keeps, and what the backward pass adds.

Letters are bytes or sizes for one token on this rank:

    c  compute dtype    e  operand of an FP8 product    D  hidden    Q, K  query and key channels    F  MLP    V  vocabulary

Kept by each layer for its backward pass (fp8cfg/models/transformer.py, numerics/fp8_linear.py):

    2 norms     their inputs, cD each
    linear_qkv  its input, cD, or eD quantized; its output c(Q + 2K), of which the values are a view
    attention   rotated queries and keys c(Q + K), output cQ, log-sum-exp 4 a head (flash attention)
    linear_proj its input is attention's output; quantized it is eQ beside it
    linear_fc1  its input, cD or eD; its output 2cF, of which gate and up are views
    linear_fc2  its input, cF or eF; the activation function reads linear_fc1's output, and keeps no more

A layer that is repeated as a whole keeps more, for as long as its backward pass runs: of each norm the float32 input 4D, 1 / rms 4, and
on a CPU the normalized input 4D, since RMSNorm is fused on GPUs alone; silu(gate) cF. LayerNorm keeps no normalized input.

Selective recomputation keeps no input of linear_qkv, linear_fc1 and linear_fc2, and FP8 layers no quantized copy of any input, but for
a rank's tokens of one that is gathered.

Where scores have a soft cap attention keeps explicit matrices of them, 8 + c each; with one,
with a sliding window or with documents kept apart a copy of keys and values for each head. The mask of the latter two, c x tokens
x tokens, is one for all layers that have the same. Norms of queries and keys keep these in float32; norms after attention and MLP
are two more.

With sequences split over context ranks keys and values are whole ones. With sequences split
over tensor-parallel ranks D is a rank's part of the tokens in norms and the residual stream. Inputs of linear_qkv, linear_fc1 and the
output layer are gathered: BF16 layers keep all tokens, FP8 layers the rank's part (numerics/token_shard.py).

Attention in FP8 (numerics/attention.py) keeps quantized queries, keys and values alone, e(Q + 2K), and takes its matrices of
scores one layer at a time: 8 + 2e and a mask for each of heads x T x T in the backward pass.

Where weights are frozen, inputs are kept by adapters alone, in their dtype (models/lora.py).

torchao's layers keep inputs in c, and no quantized weights (planning/linear_memory.py).

The final norm and the output layer's input come on top, and logits and loss (report/memory/cross_entropy.py). Full recomputation
keeps cD a layer, and all this for the one at hand.

A pipeline stage keeps what it has received and what it has sent, cD each for each chunk, until the backward pass of the microbatch;
beside that the gradient that it receives for this pass, to its end, and the one that it has sent after the pass before. Of several
chunks each has two sends under way and about as many receives.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.fsdp_memory import ShardedPass, SinglePass
from fp8cfg.planning.layer_plan import attention_plan
from fp8cfg.planning.layout import Part
from fp8cfg.planning.linear_memory import LinearBytes
from fp8cfg.schema.recipe import Recipe

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits in float32 at a time (models/cross_entropy.py, CHUNK and GPU_CHUNK)."""


ACTIVATION_BACKWARD = {"swiglu": (3, 6), "geglu": (3, 6), "gelu": (2, 3), "squared_relu": (4, 6)}
"""The most tensors of the width of the MLP in the backward pass of an activation function: gradients beside what the forward pass
has kept, and where that kept its input alone. Those are made again: silu and the product of SwiGLU, relu and its square."""


class LogitBytes(NamedTuple):
    """Bytes of a microbatch: kept from the forward to the backward pass, at the widest moment of the forward pass, and of both."""

    kept: int
    forward: int
    widest: int


def logit_bytes(b: LinearBytes) -> LogitBytes:
    """Those of a rank that has the output layer."""
    count, c = b.tokens * b.v, b.c
    chunk = min(count, CHUNK[b.device])
    capped = c * count if b.recipe.model.final_logit_softcapping is not None else 0
    cast = 4 if c == 4 else 8  # logits in float32 are no copy
    forward = c * count + cast * chunk + capped
    if b.tp == 1 and count == chunk:
        return LogitBytes(int(4 * count + capped), int(forward), int(12 * count + capped))
    widest = max(forward, 2 * c * count + (12 if b.tp == 1 else 4) * chunk + capped)
    return LogitBytes(int(c * count + capped), int(forward), int(widest))


def kept(b: LinearBytes, layer: int, proj_quantized: bool) -> tuple[float, float]:
    """Bytes of one token that attention of `layer` in high precision keeps, all but the quantized input of linear_proj, without
    recomputation; and those of them that selective recomputation does not, but for those that it keeps in their place.
    """
    m, window = b.recipe.model, b.window(layer)
    selective = m.recompute_granularity == "selective"
    whole = m.position_embedding_type != "rope" or (
        selective and b.head_norms > 0
    )  # queries are views, or made again of them
    found = b.c * (
        (b.q + 2 * b.k if whole else 0) + (b.q if m.position_embedding_type == "rope" else 0)
    )
    found += b.c * b.q * (1 if proj_quantized else 2)
    keys = keys_seen(m.seq_length, b.context, window)
    copied = 2 * b.c * b.q * keys * 2 * b.context / m.seq_length
    outputs = b.c * b.q - gathered(b)
    if (
        m.attn_logit_softcapping is not None
    ):  # tanh, the softmax, and that in the compute dtype; the mask
        scores = copied + keys * (m.num_attention_heads / b.tp * (8 + (b.c if b.c < 4 else 0)) + 1)
        return found + scores, scores + outputs
    if window is not None or b.device == "cpu":
        masked = b.softmax + copied + b.c * keys
        chunk = m.seq_length // (2 * b.context)
        if window is None or chunk <= window:
            # The first rank's first chunk needs no mask, and its keys are a view of all.
            last = min(m.seq_length, chunk + window - 1) if window else m.seq_length
            first = (copied + b.c * keys) * last / 2 / keys
            masked = max(masked, b.softmax + first + gathered(b))
        return found + masked, masked + outputs
    return (
        found + b.softmax + (copied if b.c == 4 and b.q > b.k else gathered(b)),
        0.0,
    )  # by head: as in models/attention.py


def gathered(b: LinearBytes) -> float:
    """Bytes of the gathered keys and values, for one token of this rank."""
    return 2 * b.c * b.k * b.context


@cache
def keys_seen(length: int, context: int, window: int | None) -> float:
    """Keys that a call for one chunk takes: the mean over a rank's two, on the rank that has most."""
    chunk = length // (2 * context)
    most = length if window is None else chunk + window - 1
    return (
        max(
            sum(min((c + 1) * chunk, most) for c in (r, 2 * context - 1 - r))
            for r in range(context)
        )
        / 2
    )


class Dropped(NamedTuple):
    """Bytes of a token that one layer does not keep, by the part of its backward pass that makes them again; `fc1` and `fc2` are
    the inputs of those layers among them."""

    attention: float = 0.0
    norm: float = 0.0
    fc1: float = 0.0
    activation: float = 0.0
    fc2: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.attention + self.norm + self.activation


def dropped(
    b: LinearBytes,
    qkv: PlannedLinear,
    fc1: PlannedLinear,
    fc2: PlannedLinear,
    inner: float,
    explicit: float,
) -> Dropped:
    """Of a layer of those products, that keeps `inner` bytes between those of its MLP, and `explicit` ones of attention that is
    recomputed. Norms and the activation function keep their input alone; nothing is dropped where a whole layer is repeated."""
    m = b.recipe.model
    if m.recompute_granularity == "full":
        return Dropped()
    before, after = m.layernorm_placement != "post", m.layernorm_placement != "pre"
    norm = b.norm - b.c * b.d
    if m.recompute_granularity == "none":
        return Dropped((before + 2 * after) * norm, before * norm, 0.0, inner - b.c * b.fc1)
    inputs = [discarded(b, p, b.wide) if before else 0.0 for p in (qkv, fc1)]
    second = discarded(b, fc2, b.f)
    attention = b.head_norms + explicit + before * norm + inputs[0] + 2 * after * norm
    return Dropped(
        attention, before * norm + inputs[1], inputs[1], inner - b.c * b.fc1 + second, second
    )


def discarded(b: LinearBytes, linear: PlannedLinear, width: float) -> float:
    """The input that `linear` would keep as it is, for its wgrad or for adapters of the same dtype."""
    if "wgrad" in linear.left_out:
        return (
            b.adapters(linear, width) - b.adapters(linear, 0)
            if b.adapters_keep_input(linear)
            else 0.0
        )
    return 0.0 if b.keeps_quantized(linear) else b.c * width


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch on one rank: kept from forward to backward pass; logits and their gradients; FP8 copies of
    weights; and at the widest moment of the backward pass whole weights and gradients that FSDP2 shards, and what it takes beyond
    all these."""

    kept: int
    logits: int
    copies: int
    backward: int
    whole: int

    @property
    def total(self) -> int:
        """All of these."""
        return self.kept + self.logits + self.copies + self.backward + self.whole


def activations(
    recipe: Recipe,
    device: str,
    part: Part,
    linears: Sequence[PlannedLinear],
    grads: float,
    backend: str,
    sharded: ShardedPass | SinglePass | None = None,
) -> Activations:
    """The bytes for `part`, whose linear layers are `linears` and multiplied by `backend`, on `device` ("cpu" or "cuda"); a
    gradient has `grads` bytes. Under FSDP2 passes are `sharded`, as they are said to be where a step is one alone.
    """
    model = LinearBytes(recipe, device, part, grads, backend, sharded.fresh if sharded else 0)
    attends = {int(p.name.split(".")[1]) for p in attention_plan(recipe) if p.fp8_share}
    kinds: dict[Hashable, _Layer] = {}  # of layers that are alike one is looked at
    layers = [
        kinds.get(key)
        or kinds.setdefault(key, _Layer(model, linears[4 * i : 4 * i + 4], n, n in attends))
        for i, n in enumerate(part.layers)
        for key in [
            (
                n in attends,
                model.window(n),
                *((p.gemms, model.beside[p.name]) for p in linears[4 * i : 4 * i + 4]),
            )
        ]
    ]
    recompute = recipe.model.recompute_granularity == "full"
    masks = model.masks(n for n in part.layers if n not in attends)
    # What a stage has sent. The first layer of a chunk keeps what the stage has received.
    ends = (part.chunks - part.output) / part.chunks * model.c * model.d
    each = sum(model.c * model.d if recompute else layer.kept for layer in layers) + ends
    streams = 4 * part.chunks if part.chunks > 1 else 2 - part.embedding - part.output
    kept = (
        each * model.tokens + masks
    ) * part.in_flight + streams * model.c * model.d * model.tokens
    head = _Head(model, linears[-1]) if part.output else None
    final, _, forward, logits = (
        (head.kept * model.tokens, *logit_bytes(model)) if head else (0.0, 0, 0, 0)
    )
    copies = (head.copies if head else 0) + (
        0 if recompute else sum(layer.copies for layer in layers)
    )
    kept_weights = sum(
        model.workspace(p) + model.cast(p)
        for p in (linears if part.output else linears[: 4 * len(layers)])
    )
    first = sharded.start if sharded else 0
    moments = [(logits, first), *((m, first) for m in (head.moments() if head else ()))]
    earlier = kept * (1 - 1 / part.in_flight)  # are back before the pass that sums
    others = earlier if sharded and sharded.adds_up else 0
    moments += _of_layers(model, layers, final, recompute, sharded, others)
    gone = kept / part.in_flight + final + copies
    if part.embedding and not recipe.lora.enabled:
        making = model.v * recipe.model.hidden_size * (model.c + grads)
        moments.append((making - gone, sharded.back(len(layers)) if sharded else 0))
    if head:  # the loss, beside the residual stream, which the caller of the output layer has
        stream = model.c * model.d * model.tokens if model.c < 4 else 0
        moments.append((forward + stream, sharded.received if sharded else 0))
    if sharded:
        moments.append((-gone - others, sharded.summing(len(layers))))
    widest, whole = max((m + beside, beside) for m, beside in moments)
    whole = max(0, min(whole, widest - logits))  # the rest is in place of logits
    return Activations(
        int(kept + final),
        int(logits),
        int(copies + kept_weights),
        int(widest - logits - whole),
        int(whole),
    )


def _of_layers(
    model: LinearBytes,
    layers: Sequence[_Layer],
    gone: float,
    recompute: bool,
    sharded: ShardedPass | SinglePass | None,
    others: float,
) -> Iterator[tuple[float, float]]:
    """Bytes beyond those that were kept, at the moments of the layers' backward passes, and of whole weights and gradients beside
    them: the last layer's first, after which what it kept is `gone` too. After its sum those of `others` in flight are.
    """
    widest: dict[Hashable, float] = {}
    for number, layer in enumerate(reversed(layers)):
        if layer.kind not in widest:
            again = layer.bytes - model.shared * model.tokens if recompute else 0
            widest[layer.kind] = again + max(
                *layer.moments(), *(layer.repeated() if recompute else ())
            )
        yield widest[layer.kind] - gone, sharded.back(number) if sharded else 0
        gone += (model.c * model.d * model.tokens if recompute else layer.bytes) + (
            0 if number else others
        )
        if sharded:  # beside the gradient of the residual stream
            yield model.c * model.d * model.tokens - gone, sharded.summing(number)


class _Layer:
    """One Transformer layer: bytes for a token that it keeps, bytes of its weights' copies, and its backward pass."""

    def __init__(
        self, b: LinearBytes, linears: Sequence[PlannedLinear], number: int, attends: bool
    ) -> None:
        self.b, self.attends = b, attends  # in FP8
        qkv, proj, self.fc1, self.fc2 = linears
        self.kind = attends, b.scores(number), *(p.gemms for p in linears)
        self.fc1_in, self.fc2_in = b.input(self.fc1, b.wide), b.input(self.fc2, b.f)
        attention = b.e * (b.q + 2 * b.k) + b.input(proj, b.q)
        explicit = 0.0
        if b.context > 1:
            attention, explicit = kept(b, number, b.keeps_quantized(proj))
            attention += b.e * b.q if b.keeps_quantized(proj) else 0
        elif not attends:
            rotated = b.q + b.k if b.recipe.model.position_embedding_type == "rope" else 0
            attention = (
                b.c * (2 * b.q + 2 * b.k + rotated)
                + b.scores(number)
                + (b.e * b.q if b.keeps_quantized(proj) else 0)
            )
            if b.masked(number):
                explicit = b.scores(number) + (b.c * b.q if b.keeps_quantized(proj) else 0)
        attention += b.input(qkv, b.wide)
        self.inner = b.c * (
            b.fc1 + b.f if b.fc1 > b.f else b.f
        )  # kept between the MLP's two products
        self.again, self.explicit = (
            dropped(b, qkv, self.fc1, self.fc2, self.inner, explicit),
            explicit,
        )
        self.kept = b.norms + attention + self.fc1_in + self.inner + self.fc2_in - self.again.total
        if all("dgrad" in p.left_out and not b.beside[p.name] for p in linears):
            self.kept = 0.0  # before the first adapter there is no graph
        self.copies = sum(b.copy(p) for p in linears)
        self.bytes = self.kept * b.tokens + self.copies

    def moments(self) -> Iterator[float]:
        """Bytes beyond what the layer keeps, at the moments that can be the widest of its backward pass, first to last. What
        is used up is given back: fc2's input, then all of the MLP; what is made again stays until its own backward pass.
        """
        b, residual, again = (
            self.b,
            self.b.c * self.b.d,
            self.again,
        )  # the gradient of the residual stream
        incoming = b.c * b.wide if b.gathers else 0.0  # that of outputs, gathered
        made = again.activation if again.fc2 else 0.0
        if b.requantizes:
            yield b.tokens * (residual + incoming + made) + b.again(self.fc2, b.wide, b.f)
        else:
            _, quantized = b.incoming(self.fc2, b.wide)
            yield (
                b.tokens * (residual + incoming + made)
                + b.multiplying(self.fc2, 1, b.f)
                + quantized
            )
            beside = b.tokens * (residual + incoming + made + b.c * b.f) + quantized
            quantizing, there = b.input_again(self.fc2, b.f)
            yield beside + quantizing
            yield beside + there + b.gradient(self.fc2, made=True)
        there = (
            residual + b.c * b.f - self.fc2_in + again.fc2 + (again.activation if again.fc2 else 0)
        )
        yield b.tokens * there + b.gradient(self.fc2, made=False)
        fresh = b.fresh(self.fc2)
        yield fresh + b.tokens * (residual + self.activation_backward() - self.fc2_in + again.fc2)
        used = self.inner + self.fc2_in - again.activation
        made = again.norm if again.fc1 else 0.0
        if b.requantizes:
            yield (
                fresh
                + b.tokens * (residual + b.c * b.fc1 - used + made)
                + b.again(self.fc1, b.fc1, b.wide)
            )
        else:
            making, quantized = b.incoming(self.fc1, b.fc1)
            yield fresh + b.tokens * (residual + b.c * b.fc1 - used + made) + making
            beside = fresh + b.tokens * (residual + b.c * b.fc1 - used + made) + quantized
            yield beside + b.multiplying(self.fc1, 1, b.wide)
            beside += b.tokens * b.c * b.wide
            quantizing, there = b.input_again(self.fc1, b.wide)
            yield beside + quantizing
            yield beside + there + b.gradient(self.fc1, made=True)
        used += self.fc1_in - again.fc1
        there = residual + b.c * b.wide - used + (again.norm if again.fc1 else 0)
        yield fresh + b.tokens * there + b.gradient(self.fc1, made=False)
        fresh += b.fresh(self.fc1)
        yield fresh + b.tokens * (residual + b.norm_backward - used + again.norm)
        if b.context > 1:  # of gathered keys and values, as they were gathered and in their order
            yield fresh + b.tokens * (2 * residual - used + 2 * gathered(b))
        if b.selective and self.explicit:  # gradients are as large as what they are of
            yield fresh + b.tokens * (2 * residual - used + 2 * self.explicit)
        if self.attends:
            scores = b.recipe.model.num_attention_heads / b.tp * b.recipe.model.seq_length
            yield fresh + b.tokens * (2 * residual - used + (8.5 + 2 * b.e) * scores)

    def activation_backward(self) -> float:
        """Bytes of a token at most in the backward pass of the activation function: gradients, and what is made again."""
        kept, again = ACTIVATION_BACKWARD[self.b.recipe.model.activation]
        return (again if self.b.remakes else kept) * self.b.c * self.b.f

    def repeated(self) -> Iterator[float]:
        """As moments, of the layer's forward pass where that is repeated: while the weights of the MLP are quantized, beside the
        residual stream, its gradient and what was quantized already."""
        b, residual = self.b, 2 * self.b.c * self.b.d
        normed, gated = (
            b.c * width if b.keeps_quantized(p) else 0
            for p, width in ((self.fc1, b.wide), (self.fc2, b.f))
        )
        yield b.tokens * (residual + normed + gated) + b.quantizing(self.fc2)
        yield b.tokens * (residual - b.c * b.d) + b.multiplying(self.fc2, 0, b.wide)
        ahead = b.tokens * (residual - self.inner - self.fc2_in) - b.copy(
            self.fc2
        )  # nothing of fc2 is there yet
        yield ahead + b.tokens * normed + b.quantizing(self.fc1)
        yield ahead + b.multiplying(self.fc1, 0, b.fc1)


class _Head:
    """The final norm and the output layer."""

    def __init__(self, b: LinearBytes, linear: PlannedLinear) -> None:
        self.b, self.linear = b, linear
        self.input = b.input(linear, b.wide)
        self.kept, self.copies = b.norm + self.input, b.copy(linear)

    def moments(self) -> Iterator[float]:
        """As those of a layer: the output layer's gradients, their accumulation, the norm's."""
        b = self.b
        if b.requantizes:
            yield b.tokens * b.c * b.v + b.again(self.linear, b.v, b.wide)
        else:
            making, quantized = b.incoming(self.linear, b.v)
            yield b.tokens * b.c * b.v + making
            beside = b.tokens * (b.c * b.v + b.c * b.wide) + quantized
            quantizing, there = b.input_again(self.linear, b.wide)
            yield beside + quantizing
            yield beside + there + b.gradient(self.linear, made=True)
        yield b.tokens * (b.c * b.wide - self.input) + b.gradient(self.linear, made=False)
        yield b.fresh(self.linear) + b.tokens * (b.norm_backward - self.input)
