"""Activation memory on one rank: tensors kept by forward, and temporaries of backward.

The counts follow the model's code in eager mode. Letters in these tables are bytes per element or
channels on this rank. `LinearBytes` has them as attributes:

    c  compute_bytes     bytes per element in the compute dtype
    e  operand_bytes     bytes per element of an operand of an FP8 GEMM
    D  hidden_shard      Q  query_channels     K  key_channels
    F  mlp_channels      V  vocab_shard

A layer keeps these bytes per token for its backward pass (fp8cfg/models/transformer.py,
numerics/fp8_linear.py):

    2 norms      their inputs, cD each
    linear_qkv   its input, cD or quantized eD; its output c(Q + 2K), values are a view of it
    attention    rotated queries and keys c(Q + K), output cQ, log-sum-exp 4 per head (flash)
    linear_proj  its input is the output of attention; a quantized copy takes eQ more
    linear_fc1   its input, cD or eD; its output 2cF, gate and up are views of it
    linear_fc2   its input, cF or eF; the activation function only keeps linear_fc1's output

Differences:

    full recomputation       a layer keeps its input cD. While its backward pass runs, it also keeps
                             of each norm the float32 input 4D, 1 / rms 4, and on a CPU, where
                             RMSNorm is not fused, the normalized input 4D; and silu(gate) cF
    selective recomputation  no input of linear_qkv, linear_fc1 and linear_fc2, and no quantized
                             copy of any input, except this rank's tokens of a gathered input
    attention                attention_memory.py has soft caps, masks, FP8 and context parallelism
    norms of q, k            their inputs in float32
    sequence parallelism     D is divided by the ranks in norms and the residual stream. BF16 layers
                             keep the gathered input of linear_qkv, linear_fc1 and output layer,
                             FP8 layers their own tokens (numerics/token_shard.py)
    frozen weights           only adapters keep inputs, in their dtype (models/lora.py)
    torchao                  layers keep inputs in c and no quantized weights

The final norm, the output layer's input, logits and the loss follow after the layers. A pipeline
stage also keeps the tensors received and sent by each chunk, cD each, until the microbatch's
backward pass. In addition it has one received gradient, and the gradient sent after the previous
pass. Interleaved stages have two sends and about as many receives in progress per chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.attention_memory import (
    attention_bytes,
    attention_window,
    gathered_key_bytes,
    mask_bytes,
)
from fp8cfg.planning.fsdp_memory import BackwardSchedule
from fp8cfg.planning.layer_plan import attention_plan
from fp8cfg.planning.layout import Part
from fp8cfg.planning.linear_memory import LinearBytes
from fp8cfg.schema.recipe import Recipe

# Elements of a chunk of logits, converted to float32 together by the loss (models/cross_entropy.py,
# CHUNK and GPU_CHUNK).
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}

# Peak number of tensors of MLP width in the backward pass of an activation function
# (models/transformer.py, MLP). First if forward has kept all tensors: gradients only. Second if
# forward has kept only the input: gradients and recomputed tensors. SwiGLU recomputes silu and its
# product, squared ReLU relu and its square.
ACTIVATION_BACKWARD_TENSORS = {
    "swiglu": (3, 6),
    "geglu": (3, 6),
    "gelu": (2, 3),
    "squared_relu": (4, 6),
}


@dataclass(frozen=True)
class Activations:
    """Peak bytes of a microbatch on one rank.

    Attributes:
        kept_activations: Activations kept from forward to backward.
        logits: Logits, loss and their gradients.
        quantized_weights: Quantized and cast weights.
        backward: Temporaries at the widest moment of the backward pass.
        unsharded: Unsharded weights and gradients of FSDP2 at that moment.
    """

    kept_activations: int
    logits: int
    quantized_weights: int
    backward: int
    unsharded: int

    @property
    def total(self) -> int:
        """All bytes together."""
        passes = self.kept_activations + self.logits + self.backward
        return passes + self.quantized_weights + self.unsharded


class _Moment(NamedTuple):
    """Bytes at a moment of the backward pass in addition to kept activations.

    Attributes:
        activations: Gradients and recomputed tensors, minus freed activations.
        schedule: Unsharded weights and gradients (fsdp_memory.py).
    """

    activations: float
    schedule: float


def activations(
    recipe: Recipe,
    device: str,
    part: Part,
    linears: Sequence[PlannedLinear],
    gradient_bytes: float,
    backend: str,
    schedule: BackwardSchedule | None = None,
) -> Activations:
    """Returns the activation memory of a rank.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        part: The layers and shards of the rank.
        linears: Its linear layers: four per Transformer layer, then the output layer.
        gradient_bytes: Bytes per element of a weight's gradient.
        backend: Name of the backend of the FP8 layers.
        schedule: Weights and gradients at each moment. By default all of them exist always.
    """
    schedule = schedule or BackwardSchedule()
    sizes = LinearBytes(
        recipe, device, part, gradient_bytes, backend, schedule.fresh_gradient_bytes
    )
    layers = _layers(sizes, linears)
    kept_bytes = _kept_bytes(sizes, layers)
    quantized_weights = 0.0
    if recipe.model.recompute_granularity != "full":
        quantized_weights = sum(layer.quantized_weights for layer in layers)
    workspaces = 0.0
    for linear in linears:
        workspaces += sizes.weight_workspace_bytes(linear) + sizes.cast_weight_bytes(linear)

    # Earlier microbatches have finished before the pass in which FSDP2 sums gradients.
    earlier_microbatches = 0.0
    if schedule.reduces_once:
        earlier_microbatches = kept_bytes * (1 - 1 / part.in_flight)

    moments = []
    logits = LogitBytes(0, 0, 0)
    head_kept = 0.0
    if part.output:
        head = _OutputHead(sizes, linears[-1])
        logits = logit_bytes(sizes)
        head_kept = head.kept_per_token * sizes.tokens
        quantized_weights += head.quantized_weights
        # At the loss the caller of the output layer still has the residual stream.
        stream = 0.0
        if sizes.compute_bytes < 4:
            stream = sizes.compute_bytes * sizes.hidden_shard * sizes.tokens
        moments.append(_Moment(logits.forward + stream, schedule.at_forward_end))
        for activation_bytes in head.backward_moments():
            moments.append(_Moment(activation_bytes, schedule.at_loss))
    moments.append(_Moment(logits.peak, schedule.at_loss))
    moments += _layer_moments(sizes, layers, head_kept, schedule, earlier_microbatches)
    freed = kept_bytes / part.in_flight + head_kept + quantized_weights
    if part.embedding and not recipe.lora.enabled:
        # The gradient of the embedding, in the compute dtype and accumulated.
        elements = sizes.vocab_shard * recipe.model.hidden_size
        embedding_gradient = elements * (sizes.compute_bytes + gradient_bytes)
        during = schedule.during_backward(len(layers))
        moments.append(_Moment(embedding_gradient - freed, during))
    root_reduction = schedule.during_reduction(len(layers))
    moments.append(_Moment(-freed - earlier_microbatches, root_reduction))

    widest, unsharded = max((sum(moment), moment.schedule) for moment in moments)
    # Unsharded weights may take the place of logits. Only what exceeds them is counted.
    unsharded = max(0, min(unsharded, widest - logits.peak))
    return Activations(
        kept_activations=int(kept_bytes + head_kept),
        logits=int(logits.peak),
        quantized_weights=int(quantized_weights + workspaces),
        backward=int(widest - logits.peak - unsharded),
        unsharded=int(unsharded),
    )


def _layers(sizes: LinearBytes, linears: Sequence[PlannedLinear]) -> list[_Layer]:
    """Returns the rank's layers."""
    # Equal layers share one object: a model may have a hundred of them.
    fp8_attention = set()
    for attention in attention_plan(sizes.recipe):
        if attention.fp8_share:
            fp8_attention.add(int(attention.name.split(".")[1]))
    distinct: dict[Hashable, _Layer] = {}
    layers = []
    for index, number in enumerate(sizes.part.layers):
        layer_linears = linears[4 * index : 4 * index + 4]
        runs_fp8_attention = number in fp8_attention
        backward = tuple(
            (linear.gemms, linear.left_out, sizes.adapter_counts[linear.name])
            for linear in layer_linears
        )
        key = (runs_fp8_attention, attention_window(sizes, number), backward)
        if key not in distinct:
            distinct[key] = _Layer(sizes, layer_linears, number, runs_fp8_attention)
        layers.append(distinct[key])
    return layers


def _kept_bytes(sizes: LinearBytes, layers: Sequence[_Layer]) -> float:
    """Returns bytes kept by layers and masks, for all microbatches in flight."""
    part = sizes.part
    residual = sizes.compute_bytes * sizes.hidden_shard
    if sizes.recipe.model.recompute_granularity == "full":
        per_token = residual * len(layers)
    else:
        per_token = sum(layer.kept_per_token for layer in layers)
    # A stage keeps each sent output, except for the model's last chunk. A received tensor is the
    # kept input of a chunk's first layer, and already counted.
    per_token += (part.chunks - part.output) / part.chunks * residual
    # Gradients received and sent. A stage at an end has only one of them. Interleaved chunks have
    # two of each in progress.
    streams = 2 - part.embedding - part.output
    if part.chunks > 1:
        streams = 4 * part.chunks
    masked_layers = []  # FP8 attention makes its mask in each pass
    for number, layer in zip(part.layers, layers, strict=True):
        if not layer.runs_fp8_attention:
            masked_layers.append(number)
    masks = mask_bytes(sizes, masked_layers)
    num_bytes = (per_token * sizes.tokens + masks) * part.in_flight
    return num_bytes + streams * residual * sizes.tokens


def _layer_moments(
    sizes: LinearBytes,
    layers: Sequence[_Layer],
    freed: float,
    schedule: BackwardSchedule,
    earlier_microbatches: float,
) -> Iterator[_Moment]:
    """Yields the moments of the layers' backward passes, the last layer first.

    Args:
        sizes: Sizes of the rank.
        layers: Its layers.
        freed: Bytes freed by the backward pass before the last layer.
        schedule: Weights and gradients at each moment.
        earlier_microbatches: Bytes of earlier microbatches, freed before the first reduction.
    """
    recomputes_layers = sizes.recipe.model.recompute_granularity == "full"
    residual = sizes.compute_bytes * sizes.hidden_shard * sizes.tokens
    widest: dict[_Layer, float] = {}
    for group, layer in enumerate(reversed(layers)):
        if layer not in widest:
            moments = list(layer.backward_moments())
            recomputed = 0.0
            if recomputes_layers:
                recomputed = layer.kept_bytes - sizes.shared_input_bytes * sizes.tokens
                moments += layer.recompute_moments()
            widest[layer] = recomputed + max(moments)
        yield _Moment(widest[layer] - freed, schedule.during_backward(group))
        if recomputes_layers:
            freed += residual
        else:
            freed += layer.kept_bytes
        if group == 0:
            freed += earlier_microbatches
        # During the reduction the gradient of the residual stream waits for the next layer.
        yield _Moment(residual - freed, schedule.during_reduction(group))


class _Layer:
    """One Transformer layer.

    Attributes:
        runs_fp8_attention: Whether attention runs in FP8.
        kept_per_token: Bytes per token kept by forward.
        quantized_weights: Bytes of quantized weights kept by forward.
        kept_bytes: Bytes of both, in a microbatch.
    """

    def __init__(
        self,
        sizes: LinearBytes,
        linears: Sequence[PlannedLinear],
        number: int,
        runs_fp8_attention: bool,
    ) -> None:
        """Computes the kept bytes.

        Args:
            sizes: Sizes of the rank.
            linears: linear_qkv, linear_proj, linear_fc1 and linear_fc2 of the layer.
            number: Number of the layer.
            runs_fp8_attention: Whether attention runs in FP8.
        """
        self.sizes = sizes
        self.runs_fp8_attention = runs_fp8_attention
        qkv, proj, self.fc1, self.fc2 = linears
        self.fc1_input = sizes.input_bytes(self.fc1, sizes.hidden)
        self.fc2_input = sizes.input_bytes(self.fc2, sizes.mlp_channels)
        attention = attention_bytes(sizes, proj, number, runs_fp8_attention)
        self.recomputed_attention = attention.recomputed
        # linear_fc1's output. A gated activation also keeps silu(gate).
        inner_channels = sizes.fc1_channels
        if sizes.fc1_channels > sizes.mlp_channels:
            inner_channels += sizes.mlp_channels
        self.mlp_inner = sizes.compute_bytes * inner_channels
        self.recomputed = recomputed_bytes(
            sizes, qkv, self.fc1, self.fc2, self.mlp_inner, self.recomputed_attention
        )

        inputs = sizes.input_bytes(qkv, sizes.hidden) + self.fc1_input + self.fc2_input
        kept_per_token = sizes.norms_bytes + attention.kept_bytes + inputs + self.mlp_inner
        self.kept_per_token = kept_per_token - self.recomputed.total
        records_graph = any(
            "dgrad" not in linear.left_out or sizes.adapter_counts[linear.name]
            for linear in linears
        )
        if not records_graph:  # all layers before the first adapter
            self.kept_per_token = 0.0
        self.quantized_weights = sum(sizes.quantized_weight_bytes(linear) for linear in linears)
        self.kept_bytes = self.kept_per_token * sizes.tokens + self.quantized_weights

    def backward_moments(self) -> Iterator[float]:
        """Yields bytes at each possible peak, in addition to the kept bytes, first to last."""
        # Tensors are freed after their last use: first linear_fc2's input, then the rest of the
        # MLP. A recomputed tensor stays until the backward pass of its own operation. The gradient
        # of the residual stream exists all the time.
        yield from self._fc2_moments()
        yield from self._fc1_moments()
        yield from self._attention_moments()

    def _fc2_moments(self) -> Iterator[float]:
        """Yields the moments of linear_fc2 and of the activation function."""
        sizes = self.sizes
        compute, tokens = sizes.compute_bytes, sizes.tokens
        residual = compute * sizes.hidden_shard
        grad_output = residual
        if sizes.sequence_parallel:
            grad_output += compute * sizes.hidden  # gathered
        # The activation function runs again if linear_fc2's input was freed.
        recomputed = 0.0
        if self.recomputed.fc2_input:
            recomputed = self.recomputed.activation

        existing = tokens * (grad_output + recomputed)
        grad_input = compute * sizes.mlp_channels
        if sizes.requantizes:
            yield existing + sizes.requantizing_backward_bytes(
                self.fc2, sizes.hidden, sizes.mlp_channels
            )
        else:
            existing += sizes.grad_output_bytes(self.fc2, sizes.hidden).result
            yield existing + sizes.output_peak_bytes(self.fc2, "dgrad", sizes.mlp_channels)
            existing += tokens * grad_input
            wgrad_input = sizes.wgrad_input_bytes(self.fc2, sizes.mlp_channels)
            yield existing + wgrad_input.peak
            yield existing + wgrad_input.result + sizes.wgrad_peak_bytes(self.fc2)
        freed = self.fc2_input - self.recomputed.fc2_input
        per_token = residual + grad_input + recomputed - freed
        yield tokens * per_token + sizes.accumulate_peak_bytes(self.fc2)

        per_token = residual + self._activation_backward_bytes() - freed
        yield sizes.fresh_gradient(self.fc2) + tokens * per_token

    def _fc1_moments(self) -> Iterator[float]:
        """Yields the moments of linear_fc1."""
        sizes = self.sizes
        compute, tokens = sizes.compute_bytes, sizes.tokens
        residual = compute * sizes.hidden_shard
        # The norm runs again if linear_fc1's input was freed.
        recomputed = 0.0
        if self.recomputed.fc1_input:
            recomputed = self.recomputed.norm
        fresh = sizes.fresh_gradient(self.fc2)
        freed = self.mlp_inner + self.fc2_input - self.recomputed.activation

        grad_output = compute * sizes.fc1_channels
        existing = fresh + tokens * (residual + grad_output + recomputed - freed)
        if sizes.requantizes:
            yield existing + sizes.requantizing_backward_bytes(
                self.fc1, sizes.fc1_channels, sizes.hidden
            )
        else:
            quantized = sizes.grad_output_bytes(self.fc1, sizes.fc1_channels)
            yield existing + quantized.peak
            existing += quantized.result
            yield existing + sizes.output_peak_bytes(self.fc1, "dgrad", sizes.hidden)
            existing += tokens * compute * sizes.hidden  # grad_input
            wgrad_input = sizes.wgrad_input_bytes(self.fc1, sizes.hidden)
            yield existing + wgrad_input.peak
            yield existing + wgrad_input.result + sizes.wgrad_peak_bytes(self.fc1)
        freed += self.fc1_input - self.recomputed.fc1_input
        per_token = residual + compute * sizes.hidden + recomputed - freed
        yield fresh + tokens * per_token + sizes.accumulate_peak_bytes(self.fc1)

    def _attention_moments(self) -> Iterator[float]:
        """Yields the moments of the norm before the MLP and of attention."""
        sizes = self.sizes
        tokens = sizes.tokens
        residual = sizes.compute_bytes * sizes.hidden_shard
        fresh = sizes.fresh_gradient(self.fc2) + sizes.fresh_gradient(self.fc1)
        freed = self.mlp_inner + self.fc2_input - self.recomputed.activation
        freed += self.fc1_input - self.recomputed.fc1_input
        per_token = residual + sizes.norm_backward_bytes + self.recomputed.norm - freed
        yield fresh + tokens * per_token

        # Gradients in attention are as large as their tensors.
        per_token = 2 * residual - freed
        if sizes.context > 1:
            # Gradients of gathered keys and values, as gathered and in the ranks' order.
            yield fresh + tokens * (per_token + 2 * gathered_key_bytes(sizes))
        if sizes.selective and self.recomputed_attention:
            yield fresh + tokens * (per_token + 2 * self.recomputed_attention)
        if self.runs_fp8_attention:
            scores = sizes.heads * sizes.recipe.model.seq_length
            # Scores and their gradient, each in float32 and quantized. Heads share one bool mask,
            # 1 byte: half a byte per score from two heads on (numerics/fp8_attention.py).
            bytes_per_score = 2 * (4 + sizes.operand_bytes) + 0.5
            yield fresh + tokens * (per_token + bytes_per_score * scores)

    def _activation_backward_bytes(self) -> float:
        """Returns peak bytes per token in the activation function's backward pass."""
        gradients, with_recomputed = ACTIVATION_BACKWARD_TENSORS[self.sizes.recipe.model.activation]
        tensors = gradients
        if self.sizes.recomputes_norms:
            tensors = with_recomputed
        return tensors * self.sizes.compute_bytes * self.sizes.mlp_channels

    def recompute_moments(self) -> Iterator[float]:
        """Yields bytes in addition to the kept bytes while full recomputation repeats forward."""
        # Peaks are where the MLP quantizes its weights and multiplies. The residual stream, its
        # gradient and quantized inputs exist then.
        sizes = self.sizes
        residual = sizes.compute_bytes * sizes.hidden_shard
        fc1_input = fc2_input = 0.0  # unquantized, still alive next to the quantized input
        if sizes.keeps_quantized_input(self.fc1):
            fc1_input = sizes.compute_bytes * sizes.hidden
        if sizes.keeps_quantized_input(self.fc2):
            fc2_input = sizes.compute_bytes * sizes.mlp_channels
        quantize_fc2 = sizes.quantize_weight_bytes(self.fc2)
        yield sizes.tokens * (2 * residual + fc1_input + fc2_input) + quantize_fc2
        fc2_output = sizes.output_peak_bytes(self.fc2, "fprop", sizes.hidden)
        yield sizes.tokens * residual + fc2_output
        # linear_fc1, before anything of linear_fc2 exists.
        without_fc2 = sizes.tokens * (2 * residual - self.mlp_inner - self.fc2_input)
        without_fc2 -= sizes.quantized_weight_bytes(self.fc2)
        yield without_fc2 + sizes.tokens * fc1_input + sizes.quantize_weight_bytes(self.fc1)
        yield without_fc2 + sizes.output_peak_bytes(self.fc1, "fprop", sizes.fc1_channels)


class _OutputHead:
    """The final norm and the output layer. For the attributes see `_Layer`."""

    def __init__(self, sizes: LinearBytes, linear: PlannedLinear) -> None:
        """Computes the kept bytes of the final norm and of `linear`, the output layer."""
        self.sizes = sizes
        self.linear = linear
        self.input_bytes = sizes.input_bytes(linear, sizes.hidden)
        self.kept_per_token = sizes.norm_bytes + self.input_bytes
        self.quantized_weights = sizes.quantized_weight_bytes(linear)

    def backward_moments(self) -> Iterator[float]:
        """Yields bytes at each possible peak: both GEMMs, accumulation and the norm."""
        sizes, linear = self.sizes, self.linear
        grad_input = sizes.compute_bytes * sizes.hidden
        existing = sizes.tokens * sizes.compute_bytes * sizes.vocab_shard  # gradient of the logits
        if sizes.requantizes:
            yield existing + sizes.requantizing_backward_bytes(
                linear, sizes.vocab_shard, sizes.hidden
            )
        else:
            grad_output = sizes.grad_output_bytes(linear, sizes.vocab_shard)
            yield existing + grad_output.peak
            existing += sizes.tokens * grad_input + grad_output.result
            wgrad_input = sizes.wgrad_input_bytes(linear, sizes.hidden)
            yield existing + wgrad_input.peak
            yield existing + wgrad_input.result + sizes.wgrad_peak_bytes(linear)
        per_token = grad_input - self.input_bytes
        yield sizes.tokens * per_token + sizes.accumulate_peak_bytes(linear)
        per_token = sizes.norm_backward_bytes - self.input_bytes
        yield sizes.fresh_gradient(linear) + sizes.tokens * per_token


# Logits.


class LogitBytes(NamedTuple):
    """Bytes of a microbatch's logits and loss.

    Attributes:
        kept_bytes: Bytes kept from forward to backward.
        forward: Peak of the forward pass.
        peak: Peak of forward and backward.
    """

    kept_bytes: int
    forward: int
    peak: int


def logit_bytes(sizes: LinearBytes) -> LogitBytes:
    """Returns the bytes of logits on a rank with the output layer (models/cross_entropy.py)."""
    count = sizes.tokens * sizes.vocab_shard
    compute = sizes.compute_bytes
    chunk = min(count, CHUNK[sizes.device])
    capped = 0.0  # tanh of the soft cap
    if sizes.recipe.model.final_logit_softcapping is not None:
        capped = compute * count
    # Of a chunk: float32 logits and their log-softmax. Float32 logits need no copy.
    chunk_bytes = 8
    if compute == 4:
        chunk_bytes = 4
    forward = compute * count + chunk_bytes * chunk + capped
    if sizes.tensor == 1 and count == chunk:
        # torch's own formula: it keeps float32 log-probabilities. Backward adds the gradient of the
        # losses and the gradient of the logits.
        return LogitBytes(int(4 * count + capped), int(forward), int(12 * count + capped))
    # Logits and their gradient. A chunk has the same three float32 matrices, or one that is
    # overwritten if tensor-parallel ranks share the vocabulary.
    chunk_bytes = 12
    if sizes.tensor > 1:
        chunk_bytes = 4
    backward = 2 * compute * count + chunk_bytes * chunk + capped
    return LogitBytes(int(compute * count + capped), int(forward), int(max(forward, backward)))


# Recomputation inside a layer.


class RecomputedBytes(NamedTuple):
    """Recomputed bytes per token of a layer, by the backward operation.

    Attributes:
        attention: Norms, scores and linear_qkv's input.
        norm: The norm before the MLP, and linear_fc1's input.
        fc1_input: linear_fc1's input, a part of `norm`.
        activation: Activation function, and linear_fc2's input.
        fc2_input: linear_fc2's input, a part of `activation`.
    """

    attention: float = 0.0
    norm: float = 0.0
    fc1_input: float = 0.0
    activation: float = 0.0
    fc2_input: float = 0.0

    @property
    def total(self) -> float:
        """All bytes together. `fc1_input` and `fc2_input` are parts of other fields."""
        return self.attention + self.norm + self.activation


def recomputed_bytes(
    sizes: LinearBytes,
    qkv: PlannedLinear,
    fc1: PlannedLinear,
    fc2: PlannedLinear,
    mlp_inner: float,
    attention: float,
) -> RecomputedBytes:
    """Returns the recomputed bytes per token of a layer.

    Norms and activation functions always keep only their input. Full recomputation repeats the
    whole layer, so this function returns zeros.

    Args:
        sizes: Sizes of the rank.
        qkv: linear_qkv of the layer.
        fc1: linear_fc1 of the layer.
        fc2: linear_fc2 of the layer.
        mlp_inner: Bytes per token between linear_fc1 and linear_fc2.
        attention: Bytes per token saved in attention by selective recomputation.
    """
    model = sizes.recipe.model
    if model.recompute_granularity == "full":
        return RecomputedBytes()
    has_norms_before = model.layernorm_placement != "post"
    has_norms_after = model.layernorm_placement != "pre"
    norm = sizes.norm_bytes - sizes.compute_bytes * sizes.hidden_shard
    norm_before = norms_after = 0.0
    if has_norms_before:
        norm_before = norm
    if has_norms_after:
        norms_after = 2 * norm  # of attention and of the MLP
    activation = mlp_inner - sizes.compute_bytes * sizes.fc1_channels
    if model.recompute_granularity == "none":
        return RecomputedBytes(
            attention=norm_before + norms_after, norm=norm_before, activation=activation
        )
    # Without a norm in between, the layer's input is the residual stream, which stays.
    qkv_input = fc1_input = 0.0
    if has_norms_before:
        qkv_input = _discarded_input_bytes(sizes, qkv, sizes.hidden)
        fc1_input = _discarded_input_bytes(sizes, fc1, sizes.hidden)
    fc2_input = _discarded_input_bytes(sizes, fc2, sizes.mlp_channels)
    return RecomputedBytes(
        attention=sizes.qk_norm_bytes + attention + norm_before + qkv_input + norms_after,
        norm=norm_before + fc1_input,
        fc1_input=fc1_input,
        activation=activation + fc2_input,
        fc2_input=fc2_input,
    )


def _discarded_input_bytes(sizes: LinearBytes, linear: PlannedLinear, width: float) -> float:
    """Returns bytes per token of an unquantized input freed by selective recomputation."""
    if "wgrad" in linear.left_out:
        if not sizes.adapters_keep_input(linear):
            return 0.0
        # Without the outputs of A, which stay.
        return sizes.adapter_input_bytes(linear, width) - sizes.adapter_input_bytes(linear, 0)
    if sizes.keeps_quantized_input(linear):
        return 0.0
    return sizes.compute_bytes * width
