"""Context-parallel attention memory: what attention keeps of a token of this rank where sequences are split over ranks.

Keys and values are gathered once a layer, 2cK for each token of the whole sequence; the projection's output, of which the local
ones are views, is let go of unless queries are views of it too. Each of a rank's two chunks is a call of its own, whose output
stays beside the two put together (fp8cfg/parallel/context.py). Where a kernel takes a mask, the mask in the compute dtype and a
copy of keys and values for each head stay, of the keys that a chunk sees. Letters as in report/memory/activations.py.
"""

from __future__ import annotations

from functools import cache

from fp8cfg.report.memory.linears import LinearBytes


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
