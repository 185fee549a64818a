"""Memory of linear layers on one rank: tensors kept for backward, and peaks in each GEMM.

A linear layer keeps these tensors from its forward to its backward pass (numerics/fp8_linear.py):

    input    quantized if wgrad runs in FP8, otherwise in the compute dtype. Selective recomputation
             recomputes it. Under sequence parallelism a rank keeps its own tokens
    weight   a quantized copy for dgrad, unless the weight itself is FP8

`LinearBytes` has the sizes of one rank. Unless their docstring names a unit per token, methods
return bytes of the rank. `activation_memory.py` adds them up over the layers.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.gemm_memory import (
    ELEMENT_BYTES,
    decoded_weight_bytes,
    emulates_gemms,
    gemm_peak_bytes,
    has_quantize_kernel,
    operand_bytes,
    quantize_peak_bytes,
    quantizes_twice,
    requantizing_backward_bytes,
    weight_needs_two_copies,
)
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.planning.layout import COLUMN_PARALLEL, Part, keeps_quantized_weights, microbatches
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import SCALED, gathers_params


class QuantizedBytes(NamedTuple):
    """Bytes of an operand: the peak while it is quantized, and the result."""

    peak: float
    result: float


class LinearBytes:
    """Sizes of the layers of one rank, and the bytes of its linear layers.

    Attributes:
        compute_bytes: Bytes per element in the compute dtype.
        operand_bytes: Bytes per element of a quantized operand.
        gradient_bytes: Bytes per element of an accumulated weight gradient.
        adapter_bytes: Bytes per element of a LoRA adapter.
        adapter_counts: Number of adapters by name of the linear layer.
        requantizes: Whether the backend keeps inputs in the compute dtype (torchao).
        keeps_cast: Whether the backend keeps cast weights from forward to backward.
        keeps_quantized_weights: Whether quantized weights stay for all passes of a step.
        selective: Whether selective recomputation is on.
        recomputes_norms: Whether norms and activation functions only keep their input.
        tensor: Number of tensor-parallel ranks.
        context: Number of context-parallel ranks.
        tokens: Tokens of a microbatch on this rank. With sequence parallelism, tokens of its
            tensor-parallel group.
        hidden: Input channels of a column-parallel layer, after the gather.
        hidden_shard: Channels per token in norms and the residual stream. With sequence
            parallelism a rank has 1 / tensor of the tokens, counted as fewer channels.
        heads: Query heads of this rank.
        query_channels: Query channels of this rank.
        key_channels: Key channels of this rank, equal to its value channels.
        fc1_channels: Output channels of linear_fc1: gate and up, or only up.
        mlp_channels: Input channels of linear_fc2.
        vocab_shard: Output channels of the output layer.
        norm_bytes: Bytes per token kept by one norm.
        norms_bytes: Bytes per token kept by all norms of a layer.
        qk_norm_bytes: Bytes per token kept by the norms of queries and keys.
        norm_backward_bytes: Bytes per token in the backward pass of a norm.
        shared_input_bytes: Bytes per token of a layer's input, if it is its first norm's input too.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        gradient_bytes: float,
        backend: str,
        fresh_gradient_bytes: float = 0,
    ) -> None:
        """Computes the sizes.

        Args:
            recipe: The recipe.
            device: "cpu" or "cuda".
            part: The layers and shards of this rank.
            gradient_bytes: Bytes per element of an accumulated weight gradient.
            backend: Name of the backend of the FP8 layers.
            fresh_gradient_bytes: Bytes per element of a gradient allocated in the backward pass
                of its layer. 0 if all gradients exist already.
        """
        model, storage = recipe.model, recipe.storage
        capabilities = registry.capabilities(backend)
        self.recipe = recipe
        self.device = device
        self.part = part
        self.config = transformer_config(recipe)
        self.tensor = part.tensor
        self.context = part.context
        self.sequence_parallel = part.sequence_parallel
        self.requantizes = capabilities.requantizes
        self.keeps_cast = capabilities.keeps_cast
        self.is_native = backend == registry.REFERENCE

        self.compute_bytes = ELEMENT_BYTES[recipe.precision.compute]
        self.operand_bytes = operand_bytes(recipe, device)
        self.gradient_bytes = gradient_bytes
        self.fresh_gradient_bytes = fresh_gradient_bytes

        self.tokens = recipe.trainer.micro_batch_size * model.seq_length / part.context
        self.hidden = model.hidden_size
        self.hidden_shard = float(model.hidden_size)
        if part.sequence_parallel:
            self.hidden_shard /= part.tensor
        self.heads = model.num_attention_heads / part.tensor
        self.query_channels = model.num_attention_heads * model.head_dim / part.tensor
        # If there are fewer groups than ranks, several ranks have a copy of a group.
        self.key_channels = -(-model.num_query_groups // part.tensor) * model.head_dim
        self.fc1_channels = self.config.fc1_size / part.tensor
        self.mlp_channels = model.ffn_hidden_size / part.tensor
        self.vocab_shard = -(-model.vocab_size // part.tensor)

        self.selective = model.recompute_granularity == "selective"
        # Norms and activation functions keep their input and compute the rest again. Under full
        # recomputation the whole layer does.
        self.recomputes_norms = model.recompute_granularity != "full"
        self._set_norm_bytes()

        self.has_fp8_storage = part.state.fp8_weights or gathers_params(recipe.precision, backend)
        self.keeps_quantized_weights = keeps_quantized_weights(recipe, part, backend)
        self.uses_fsdp = part.shard == "fsdp"
        self.adds_to_stored_gradients = (
            storage.accumulate == "stored"
            and microbatches(recipe, part) > 1
            and not by_fsdp2(recipe, part.state, part.shards, backend)
        )
        # fsdp gathers adapters in the compute dtype too.
        self.adapter_bytes = ELEMENT_BYTES[part.state.other["weight"]]
        if self.uses_fsdp:
            self.adapter_bytes = self.compute_bytes
        # Adapters of each linear layer. linear_qkv can have three.
        self.adapter_counts = Counter(
            projection.module for projection in adapted_projections(recipe)
        )

    def _set_norm_bytes(self) -> None:
        """Sets the sizes of norms (models/norms.py)."""
        model = self.recipe.model
        is_rms = model.normalization == "RMSNorm"
        # RMSNorm is fused on GPUs only. On a CPU it also keeps the normalized input in float32,
        # for the gradient of its weight. LoRA trains no norms.
        is_unfused = self.device == "cpu" and is_rms
        normalized_bytes = 0
        if is_unfused and not self.recipe.lora.enabled:
            normalized_bytes = 4
        statistics_bytes = 4 if is_rms else 8  # 1 / rms, or mean and 1 / deviation

        input_bytes = 4 * self.hidden_shard  # float32
        self.norm_bytes = input_bytes + statistics_bytes + normalized_bytes * self.hidden_shard
        norms = 4 if model.layernorm_placement == "both" else 2
        self.norms_bytes = norms * self.norm_bytes
        self.qk_norm_bytes = 0.0
        if model.qk_layernorm != "none":
            norms_per_token = 1.0
            if model.qk_layernorm == "head":
                norms_per_token = self.heads
            channels = self.query_channels + self.key_channels
            # Float32 inputs, and statistics of 4 bytes for queries and 4 for keys.
            self.qk_norm_bytes = (4 + normalized_bytes) * channels + 8 * norms_per_token
            self.norms_bytes += self.qk_norm_bytes
        # With an fp32 compute dtype a layer's input is the float32 input of its first norm.
        self.shared_input_bytes = 0.0
        if self.compute_bytes == 4:
            self.shared_input_bytes = input_bytes
        # Gradients are float32: of the output and the input. An unfused norm has one for each of
        # its operations.
        gradients = 4 if is_unfused else 2
        self.norm_backward_bytes = 4 * gradients * self.hidden_shard

    # Input of a linear layer.

    def input_bytes(self, linear: PlannedLinear, width: float) -> float:
        """Returns bytes per token of a layer's kept input with `width` channels."""
        if "wgrad" in linear.left_out:
            return self.adapter_input_bytes(linear, width)
        if self.keeps_input_shard(linear):
            return input_shard_bytes(self.recipe) * width / self.tensor
        if self.keeps_quantized_input(linear):
            return self.operand_bytes * width
        return self.compute_bytes * width

    def keeps_input_shard(self, linear: PlannedLinear) -> bool:
        """Whether the layer keeps this rank's tokens of a gathered input, not the whole input."""
        return keeps_input_shard(self.recipe, self.part, linear)

    def keeps_quantized_input(self, linear: PlannedLinear) -> bool:
        """Whether the layer keeps a quantized input. Other modules may keep it unquantized."""
        if self.keeps_input_shard(linear):
            return True
        if self.requantizes or (self.is_native and keeps_input(self.recipe, linear)):
            return False
        return bool(linear.gemms[2])

    def wgrad_input_bytes(self, linear: PlannedLinear, width: float) -> QuantizedBytes:
        """Returns bytes of the input quantized for wgrad, 0 if forward has kept it quantized."""
        gathers = self.keeps_input_shard(linear)
        if not linear.gemms[2] or (self.keeps_quantized_input(linear) and not gathers):
            return QuantizedBytes(0, 0)
        elements = width * self.tokens
        if not gathers or quantizes_twice(self.recipe):
            peak = quantize_peak_bytes(self.recipe, self.device, elements, is_gradient=False)
            if gathers:
                peak += self.compute_bytes * elements  # gathered in the compute dtype
            return QuantizedBytes(peak, self.operand_bytes * elements)
        # Gathered in FP8.
        if emulates_gemms(self.recipe, self.device):
            peak = (ELEMENT_BYTES["fp8"] + self.operand_bytes) * elements
            return QuantizedBytes(peak, self.operand_bytes * elements)
        transposed = 2 * ELEMENT_BYTES["fp8"] * elements  # cuBLAS reads a transposed copy
        return QuantizedBytes(transposed, transposed)

    def adapter_input_bytes(self, linear: PlannedLinear, width: float) -> float:
        """Returns bytes per token kept by the LoRA adapters of a layer (models/lora.py)."""
        # The input in the adapters' dtype, and the output of each A. Dropout adds a mask of 1
        # byte and the masked input for each adapter.
        adapters = self.adapter_counts.get(linear.name, 0)
        if not adapters:
            return 0
        bytes_per_channel = self.adapter_bytes
        if self.recipe.lora.dropout:
            bytes_per_channel += adapters * (1 + self.adapter_bytes)
        outputs = adapters * self.adapter_bytes * self.recipe.lora.rank
        return bytes_per_channel * width + outputs

    def adapters_keep_input(self, linear: PlannedLinear) -> bool:
        """Whether adapters keep the input tensor itself, neither cast nor dropped out."""
        return (
            self.adapter_counts.get(linear.name, 0) > 0
            and self.adapter_bytes == self.compute_bytes
            and not self.recipe.lora.dropout
        )

    # Weight of a linear layer.

    def weight_elements(self, linear: PlannedLinear) -> float:
        """Returns elements of the weight's shard on a tensor-parallel rank."""
        return linear.in_features * linear.out_features / self.tensor

    def has_fp8_weight(self, linear: PlannedLinear) -> bool:
        """Whether the weight is stored or gathered in FP8 only."""
        if not (self.has_fp8_storage and linear.fp8):
            return False
        return not self._is_tied(linear)  # the embedding stays in high precision

    def casts_weight(self, linear: PlannedLinear) -> bool:
        """Whether each pass casts the weight to the compute dtype, and its gradient back."""
        # FSDP2 casts while it gathers.
        state = self.part.state
        columns = state.of_parameter(True, bool(linear.fp8))
        if self._is_tied(linear):
            columns = state.other
        if columns["weight"] == self.recipe.precision.compute:
            return False
        return not self.uses_fsdp and not self.has_fp8_weight(linear)

    def _is_tied(self, linear: PlannedLinear) -> bool:
        """Whether the weight is the embedding's."""
        is_output_layer = linear.name == "output_layer"
        return is_output_layer and self.recipe.model.share_embeddings_and_output_weights

    def quantized_weight_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes of the quantized weight kept from forward for dgrad."""
        if self.has_fp8_weight(linear) or self.requantizes or self.keeps_quantized_weights:
            return 0
        if not linear.gemms[1]:
            return 0
        return self.operand_bytes * self.weight_elements(linear)

    def weight_workspace_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes of the quantized weight kept for all passes of a step.

        For an FP8 primary weight this is its cached transpose.
        """
        if self.has_fp8_weight(linear) or not self.keeps_quantized_weights:
            return self.transpose_cache_bytes(linear)
        # fprop and dgrad each need a matrix: cuBLAS on Hopper only multiplies FP8 operands with a
        # contiguous contracted dimension (TN).
        # Emulated GEMMs read a transpose by its strides, unless its scales differ.
        matrices = sum(map(bool, linear.gemms[:2]))
        if emulates_gemms(self.recipe, self.device) and not weight_needs_two_copies(self.recipe):
            matrices = min(matrices, 1)
        return matrices * self.operand_bytes * self.weight_elements(linear)

    def cast_weight_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes of a cast weight kept by the backend from forward to backward."""
        if self.keeps_cast and linear.fp8 and self.casts_weight(linear):
            return self.compute_bytes * self.weight_elements(linear)
        return 0

    def transpose_cache_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes of the cached transpose of an FP8 weight for dgrad."""
        has_cache = self.keeps_quantized_weights and self.recipe.fp8.keep_transpose_cache
        runs_dgrad = linear.gemms[1] and "dgrad" not in linear.left_out
        if not (self.has_fp8_weight(linear) and has_cache and runs_dgrad):
            return 0
        # Emulation caches the decoded weight.
        element_bytes = decoded_weight_bytes(self.recipe, self.device) or 1
        return element_bytes * self.weight_elements(linear)

    def quantize_weight_bytes(self, linear: PlannedLinear) -> float:
        """Returns temporary bytes while the weight is quantized, without the kept result."""
        if self.has_fp8_weight(linear) or self.requantizes or self.keeps_quantized_weights:
            return 0
        if not linear.gemms[0]:
            return 0
        elements = self.weight_elements(linear)
        peak = quantize_peak_bytes(self.recipe, self.device, elements, is_gradient=False)
        return peak - self.quantized_weight_bytes(linear)

    def _decoded_dgrad_weight_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes of an FP8 weight decoded for dgrad, 0 with a cached transpose."""
        if not self.has_fp8_weight(linear) or self.transpose_cache_bytes(linear):
            return 0
        return decoded_weight_bytes(self.recipe, self.device) * self.weight_elements(linear)

    # Gradient of a weight.

    def fresh_gradient(self, linear: PlannedLinear) -> float:
        """Returns bytes of the weight's gradient if it is allocated in this backward pass."""
        if "wgrad" in linear.left_out:
            return 0
        return self.fresh_gradient_bytes * self.weight_elements(linear)

    def wgrad_peak_bytes(self, linear: PlannedLinear) -> float:
        """Returns peak bytes of wgrad, including its output."""
        if "wgrad" in linear.left_out:
            return 0
        elements = self.weight_elements(linear)
        output_bytes = self._wgrad_output_bytes(linear)
        # dgrad has decoded the weight, which stays until the layer's backward pass ends.
        existing = self._decoded_dgrad_weight_bytes(linear)
        if self.casts_weight(linear) and not linear.gemms[1]:
            existing = self.compute_bytes * elements
        if not linear.gemms[2]:
            # torch computes in the compute dtype and casts.
            product_bytes = self.compute_bytes
            if self.has_fp8_weight(linear) or self.casts_weight(linear):
                product_bytes += output_bytes
            return existing + product_bytes * elements
        if linear.name.endswith(COLUMN_PARALLEL):
            channels = linear.in_features + linear.out_features / self.tensor
        else:
            channels = linear.in_features / self.tensor + linear.out_features
        return existing + gemm_peak_bytes(
            self.recipe, self.device, output_bytes, elements, channels * self.tokens
        )

    def accumulate_peak_bytes(self, linear: PlannedLinear) -> float:
        """Returns peak bytes while autograd accumulates the weight's gradient."""
        if "wgrad" in linear.left_out:
            return 0
        elements = self.weight_elements(linear)
        output_bytes = self._wgrad_output_bytes(linear)
        cast_peak = output_bytes * elements
        if self.gradient_bytes > output_bytes:
            cast_peak += self.gradient_bytes * elements
        decode_peak = self.gradient_bytes * elements + self._decoded_gradient_bytes(linear)
        return max(cast_peak, decode_peak)

    def _wgrad_output_bytes(self, linear: PlannedLinear) -> float:
        """Returns bytes per element of wgrad's output."""
        if self.has_fp8_weight(linear) or self.casts_weight(linear):
            return self.gradient_bytes
        return self.compute_bytes

    def _decoded_gradient_bytes(self, linear: PlannedLinear) -> float:
        """Returns float32 bytes of a stored gradient, decoded to add the next microbatch."""
        if not self.adds_to_stored_gradients:
            return 0
        columns = self.part.state.of_parameter(True, bool(linear.fp8))
        if columns["weight_grad"] not in SCALED:
            return 0
        return 4 * self.weight_elements(linear)

    # GEMMs.

    def output_peak_bytes(
        self, linear: PlannedLinear, gemm: Literal["fprop", "dgrad"], width: float
    ) -> float:
        """Returns peak bytes of fprop or dgrad, including the output with `width` channels."""
        output_elements = width * self.tokens
        if not linear.products[gemm]:
            return self.compute_bytes * output_elements
        contracted = self.weight_elements(linear) / width
        peak = gemm_peak_bytes(
            self.recipe,
            self.device,
            self.compute_bytes,
            output_elements,
            self.weight_elements(linear) + contracted * self.tokens,
        )
        if gemm == "dgrad":
            peak += self._decoded_dgrad_weight_bytes(linear)
        return peak

    def grad_output_bytes(self, linear: PlannedLinear, width: float) -> QuantizedBytes:
        """Returns bytes of the quantized grad_output with `width` channels."""
        _, dgrad, wgrad = linear.gemms
        if not (dgrad or wgrad):
            return QuantizedBytes(0, 0)
        elements = width * self.tokens
        peak = quantize_peak_bytes(self.recipe, self.device, elements, is_gradient=True)
        if has_quantize_kernel(self.recipe, self.device):
            # The kernel writes one matrix for each GEMM, and `peak` has both.
            result = self.operand_bytes * elements
            if dgrad and wgrad:
                result *= 2
            return QuantizedBytes(result + peak - 2 * self.operand_bytes * elements, result)
        # dgrad's operand stays while grad_output is quantized again for wgrad.
        dgrad_operand = 0.0
        if quantizes_twice(self.recipe) and dgrad and wgrad:
            dgrad_operand = self.operand_bytes * elements
        result = dgrad_operand + self.operand_bytes * elements
        return QuantizedBytes(dgrad_operand + peak, result)

    def requantizing_backward_bytes(
        self, linear: PlannedLinear, output_width: float, input_width: float
    ) -> float:
        """Returns peak bytes of the layer's backward pass with a requantizing backend (torchao).

        Args:
            linear: The layer.
            output_width: Channels of its output.
            input_width: Channels of its input.
        """
        return requantizing_backward_bytes(
            self.recipe,
            self.device,
            linear,
            output_width * self.tokens,
            self.weight_elements(linear),
            input_width * self.tokens,
        )


def keeps_input_shard(recipe: Recipe, part: Part, linear: PlannedLinear) -> bool:
    """Whether a rank keeps its tokens of a gathered input and gathers it again for wgrad.

    Only FP8 layers do this (numerics/token_shard.py).
    """
    # Full recomputation repeats the forward pass, including the gather.
    if not part.sequence_parallel or recipe.model.recompute_granularity == "full":
        return False
    if quantizes_twice(recipe) and keeps_input(recipe, linear):
        return False
    # Only column-parallel layers gather their input.
    runs_fp8 = bool(linear.gemms[0] and linear.gemms[2])
    return linear.name.endswith(COLUMN_PARALLEL) and runs_fp8


def keeps_input(recipe: Recipe, linear: PlannedLinear) -> bool:
    """Whether a layer keeps its unquantized input and quantizes it again for wgrad."""
    # Selective recomputation frees this input and recomputes it, so that it takes no memory.
    if recipe.model.recompute_granularity != "selective" or linear.name == "output_layer":
        return False
    return bool(linear.gemms[0] and linear.gemms[2])


def input_shard_bytes(recipe: Recipe) -> float:
    """Returns bytes per element of the tokens kept of a gathered input."""
    if quantizes_twice(recipe):
        return ELEMENT_BYTES[recipe.precision.compute]  # wgrad needs other scales than fprop
    return ELEMENT_BYTES["fp8"]
