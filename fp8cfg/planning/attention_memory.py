"""Memory of attention on one rank: queries, keys, values, scores and masks kept for backward.

Letters are those of activation_memory.py. torch's flash attention keeps rotated queries and keys
c(Q + K), values as a view of linear_qkv's output, the output cQ and the log-sum-exp. Its backward
pass computes the scores again. These cases differ:

    soft cap               explicit matrices of scores, 8 + c per score
    mask                   soft caps, sliding windows and separate documents repeat keys and values
                           for each head. Sliding windows and documents also have masks of
                           c x tokens x tokens, shared by layers with the same window
    FP8 attention          only quantized queries, keys and values e(Q + 2K). Its backward pass has
                           score matrices of 8 + 2e and a mask for one layer at a time
                           (numerics/fp8_attention.py)
    context parallelism    keys and values of the whole sequence (parallel/context.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.linear_memory import LinearBytes


class AttentionBytes(NamedTuple):
    """Bytes per token of one layer's attention, between linear_qkv and linear_proj.

    Attributes:
        kept_bytes: Kept from forward to backward without recomputation. Includes the output of
            linear_qkv and the input of linear_proj.
        recomputed: Net bytes that selective recomputation frees.
    """

    kept_bytes: float
    recomputed: float


def attention_bytes(
    sizes: LinearBytes, proj: PlannedLinear, layer: int, runs_fp8: bool
) -> AttentionBytes:
    """Returns the bytes of one layer's attention.

    Args:
        sizes: Sizes of the rank.
        proj: linear_proj of the layer.
        layer: Number of the layer.
        runs_fp8: Whether attention runs in FP8.
    """
    compute = sizes.compute_bytes
    quantizes_output = sizes.keeps_quantized_input(proj)
    quantized_output = 0.0
    if quantizes_output:
        quantized_output = sizes.operand_bytes * sizes.query_channels
    if sizes.context > 1:
        attention = _context_attention_bytes(sizes, layer, quantizes_output)
        return attention._replace(kept_bytes=attention.kept_bytes + quantized_output)
    qkv_channels = sizes.query_channels + 2 * sizes.key_channels
    if runs_fp8:
        output = sizes.input_bytes(proj, sizes.query_channels)
        return AttentionBytes(sizes.operand_bytes * qkv_channels + output, 0.0)
    rotated_channels = 0.0
    if sizes.recipe.model.position_embedding_type == "rope":
        rotated_channels = sizes.query_channels + sizes.key_channels
    channels = qkv_channels + rotated_channels + sizes.query_channels  # and the output
    scores = score_bytes(sizes, layer)
    recomputed = 0.0
    if _has_mask(sizes, layer):
        recomputed = scores
        if quantizes_output:
            recomputed += compute * sizes.query_channels
    return AttentionBytes(compute * channels + scores + quantized_output, recomputed)


# Scores and masks.


def score_bytes(sizes: LinearBytes, layer: int) -> float:
    """Returns bytes per token of scores kept by high-precision attention.

    Includes the log-sum-exp and repeated keys and values. Queries, keys, values and the output
    themselves are not counted, and neither are shared masks (`mask_bytes`).

    Args:
        sizes: Sizes of the rank.
        layer: Number of the layer.
    """
    model = sizes.recipe.model
    # Flash attention takes neither explicit masks nor float32 inputs. Other kernels repeat keys
    # and values for each head.
    has_float32_inputs = sizes.device == "cuda" and sizes.compute_bytes == 4
    repeats_keys = _has_mask(sizes, layer) or has_float32_inputs
    repeated = 0.0
    if repeats_keys and model.position_embedding_type == "rope":
        # Rotated queries and repeated keys and values, 3Q, instead of linear_qkv's output,
        # Q + 2K, and rotated queries and keys, Q + K.
        repeated = sizes.compute_bytes * (sizes.query_channels - 3 * sizes.key_channels)
    elif repeats_keys:
        # Queries are a view of linear_qkv's output, which stays.
        repeated = 2 * sizes.compute_bytes * sizes.query_channels
    if model.attn_logit_softcapping is None:
        return _logsumexp_bytes(sizes) + repeated
    scores = model.seq_length * sizes.heads
    return repeated + scores * _capped_score_bytes(sizes)


def _logsumexp_bytes(sizes: LinearBytes) -> float:
    """Returns bytes per token of flash attention's log-sum-exp, float32 for each head."""
    return 4 * sizes.heads


def _capped_score_bytes(sizes: LinearBytes) -> float:
    """Returns bytes per score of attention with a soft cap (models/attention.py)."""
    # tanh and the softmax in float32, and the softmax cast to the compute dtype.
    if sizes.compute_bytes == 4:
        return 4 + 4
    return 4 + 4 + sizes.compute_bytes


def _has_mask(sizes: LinearBytes, layer: int) -> bool:
    """Whether high-precision attention of a layer has an explicit mask."""
    return (
        sizes.recipe.data.reset_attention_mask
        or attention_window(sizes, layer) is not None
        or sizes.recipe.model.attn_logit_softcapping is not None
    )


def mask_bytes(sizes: LinearBytes, layers: Iterable[int]) -> float:
    """Returns bytes of the masks [tokens, tokens] kept for backward, without context parallelism.

    Args:
        sizes: Sizes of the rank.
        layers: Numbers of the layers.
    """
    # Layers with the same window share a mask. Each sample has other documents and its own mask.
    model = sizes.recipe.model
    if sizes.context > 1:
        return 0  # _context_attention_bytes counts them
    if model.attn_logit_softcapping is not None and model.recompute_granularity == "none":
        return 0  # backward of the soft cap does not read the mask
    windows = {attention_window(sizes, layer) for layer in layers if _has_mask(sizes, layer)}
    masks = len(windows)
    if sizes.recipe.data.reset_attention_mask:
        masks *= sizes.recipe.trainer.micro_batch_size
    return masks * sizes.compute_bytes * model.seq_length**2


def attention_window(sizes: LinearBytes, layer: int) -> int | None:
    """Returns the sliding window of a layer in tokens, None if it covers the sequence."""
    window = sizes.config.window(layer)
    if window is None or window >= sizes.recipe.model.seq_length:
        return None
    return window


# Context parallelism: attention of two chunks of queries with the keys of the whole sequence
# (parallel/context.py).


def _context_attention_bytes(
    sizes: LinearBytes, layer: int, quantizes_output: bool
) -> AttentionBytes:
    """Returns the bytes of high-precision attention with context parallelism.

    Args:
        sizes: Sizes of the rank.
        layer: Number of the layer.
        quantizes_output: Whether linear_proj keeps a quantized input. Its bytes are not counted.
    """
    model = sizes.recipe.model
    compute = sizes.compute_bytes
    window = attention_window(sizes, layer)
    channels = 0.0
    has_rope = model.position_embedding_type == "rope"
    recomputes_qk_norms = sizes.selective and sizes.qk_norm_bytes > 0
    if not has_rope or recomputes_qk_norms:
        # linear_qkv's output stays: queries are views of it, or their norms run again.
        channels += sizes.query_channels + 2 * sizes.key_channels
    if has_rope:
        channels += sizes.query_channels  # rotated queries
    channels += sizes.query_channels  # the outputs of both chunks
    if not quantizes_output:
        channels += sizes.query_channels  # the input of linear_proj, a copy of both
    num_bytes = compute * channels
    keys = _visible_keys(model.seq_length, sizes.context, window)
    # Keys and values, repeated for each head, of both chunks.
    repeated = 2 * compute * sizes.query_channels * keys * 2 * sizes.context / model.seq_length
    # Selective recomputation frees one output, but keeps the gathered keys and values.
    freed_output = compute * sizes.query_channels - gathered_key_bytes(sizes)
    if model.attn_logit_softcapping is not None:
        scores = keys * (sizes.heads * _capped_score_bytes(sizes) + 1)  # and a bool mask
        capped = repeated + scores
        return AttentionBytes(num_bytes + capped, capped + freed_output)
    if window is not None or sizes.device == "cpu":
        masked = _masked_context_bytes(sizes, window, keys, repeated)
        return AttentionBytes(num_bytes + masked, masked + freed_output)
    # Flash attention. In float32, with fewer groups than heads, keys are repeated per head as in
    # models/attention.py.
    if compute == 4 and sizes.query_channels > sizes.key_channels:
        return AttentionBytes(num_bytes + _logsumexp_bytes(sizes) + repeated, 0.0)
    keys_and_values = gathered_key_bytes(sizes)
    return AttentionBytes(num_bytes + _logsumexp_bytes(sizes) + keys_and_values, 0.0)


def _masked_context_bytes(
    sizes: LinearBytes, window: int | None, keys: float, repeated: float
) -> float:
    """Returns bytes per token of masks, repeated keys and values and the log-sum-exp."""
    length = sizes.recipe.model.seq_length
    mask = sizes.compute_bytes * keys
    logsumexp = _logsumexp_bytes(sizes)
    masked_chunks = logsumexp + repeated + mask
    chunk = length // (2 * sizes.context)
    if window is not None and chunk > window:
        return masked_chunks
    # The first rank's first chunk needs no mask, and its keys are a view of all gathered keys.
    # Its other chunk is the last one of the sequence.
    last_keys = length
    if window is not None:
        last_keys = min(length, chunk + window - 1)
    last_chunk = (repeated + mask) * last_keys / 2 / keys
    return max(masked_chunks, logsumexp + last_chunk + gathered_key_bytes(sizes))


def gathered_key_bytes(sizes: LinearBytes) -> float:
    """Returns bytes of the gathered keys and values, per token of this rank."""
    return 2 * sizes.compute_bytes * sizes.key_channels * sizes.context


@cache
def _visible_keys(length: int, context: int, window: int | None) -> float:
    """Returns the number of keys per chunk: the mean of a rank's two chunks, largest of all ranks.

    Args:
        length: Tokens of the sequence.
        context: Number of context-parallel ranks.
        window: Sliding window in tokens. None without one.
    """
    # Each rank has two chunks, r and 2 * context - 1 - r. Causal attention then costs every rank
    # the same.
    chunk = length // (2 * context)
    limit = length
    if window is not None:
        limit = chunk + window - 1
    widest = 0
    for rank in range(context):
        first_keys = min((rank + 1) * chunk, limit)
        second_keys = min((2 * context - rank) * chunk, limit)
        widest = max(widest, first_keys + second_keys)
    return widest / 2
