"""Estimated seconds of FP8 training on a GPU, by FLOPs over peak and bytes over bandwidth; what a first real run is held against.

Nothing here is measured. A product takes the longer of its FLOPs at a share of the dense peak and its bytes at a share of the memory's
bandwidth; everything else takes its bytes. Kernels follow one another, no launch is waited for, and compiled code fuses what stands
between two products. One kernel quantizes a tensor for the two products that read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8cfg.models.config import parameter_counts
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.hardware import GPU, find_gpu
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.schema.recipe import Recipe

BANDWIDTH = {"h100": 3.35e12, "h100-pcie": 2.0e12, "h200": 4.8e12, "b200": 7.7e12}
"""Bytes a second of the GPUs' memory, as their datasheets say; HGX B200's an eighth of the eight."""
FP4 = {"b200": 9e15}
"""FLOPs a second of dense products in NVFP4, as its datasheet says; HGX B200's an eighth of the eight."""
OF_BANDWIDTH = 0.85
"""Share of the bandwidth that a large elementwise kernel reaches."""
OF_PEAK = {
    "bf16": 0.7,
    "delayed": 0.7,
    "current": 0.7,
    "row": 0.7,
    "block": 0.6,
    "mxfp8": 0.7,
    "nvfp4": 0.7,
}
"""Share of the dense peak that a large product reaches; with scales of 128 less, whose partial sums are promoted to float32."""
OF_PEAK_ATTENTION = 0.5
"""Share of the BF16 peak that flash attention reaches, forward and backward together."""
QUANTIZED = {
    "bf16": 0.0,
    "delayed": 2 + 2,
    "current": 2 + 2 + 2,
    "row": 2 + 2 + 2 + 2,
    "block": 2 + 2 + 2 * 4 / 128,
    "mxfp8": 2 + 2 + 2 * 1 / 32,
    "nvfp4": (2 + 2 + 2 * 9 / 16) / 3 + (2 * (2 + 2 + 9 / 16) + 8) * 2 / 3,
}
"""Bytes moved per BF16 element to have it quantized for both directions: read, and written row-major and transposed; read once more
for the amax of the moment. Scales of rows are made out of the cache, those of columns read all once for the amax and once for the
cast. NVFP4 reads a tensor for its amax and to be quantized, and writes half a byte and a sixteenth of a scale for each direction: a
weight for both at once, activations and gradients for each, and for one of them they are transposed and go through the Hadamard
transform, two copies written and read."""
LOGIT, PARAMETER = 54, 35
"""Bytes moved per logit by the loss in chunks (models/cross_entropy.py), and per parameter by a step of AdamW over float32 masters:
master and two moments read and written, gradient read twice, weight written."""


@dataclass(frozen=True)
class Device:
    """A GPU: FLOPs a second of its dense peaks, and bytes a second of its memory."""

    bf16: float
    fp8: float
    bandwidth: float
    fp4: float = 0.0

    @classmethod
    def of(cls, name: str) -> Device:
        """The GPU of that name in fp8cfg's table. Raises KeyError where its bandwidth is not known."""
        gpu: GPU = find_gpu(name)
        return cls(
            gpu.bf16 * 1e12, (gpu.fp8 or 0) * 1e12, BANDWIDTH[gpu.name], FP4.get(gpu.name, 0.0)
        )

    def moved(self, count: float) -> float:
        """Seconds in which so many bytes are read or written."""
        return count / (self.bandwidth * OF_BANDWIDTH)

    def product(self, scaling: str, m: int, n: int, k: int) -> float:
        """Seconds of [m, k] @ [k, n] with an output in BF16."""
        peak, element = {"bf16": (self.bf16, 2.0), "nvfp4": (self.fp4, 0.5)}.get(
            scaling, (self.fp8, 1.0)
        )
        return max(
            2.0 * m * n * k / (peak * OF_PEAK[scaling]),
            self.moved(element * (m * k + k * n) + 2 * m * n),
        )


def linear(device: Device, scaling: str, tokens: int, in_features: int, out_features: int) -> float:
    """Seconds of the forward and backward pass of a linear layer with BF16 weights, quantization included."""
    t, k, n = tokens, in_features, out_features
    products = (
        device.product(scaling, t, n, k)
        + device.product(scaling, t, k, n)
        + device.product(scaling, n, k, t)
    )
    return products + device.moved(QUANTIZED[scaling] * (t * k + k * n + t * n))


def layers(
    device: Device, scaling: str, recipe: Recipe, output_layer: bool = True
) -> dict[str, float]:
    """Seconds of forward and backward passes over one microbatch of `recipe`, by what takes them; `scaling` is that of layers that
    its plan has in FP8."""
    m, config = recipe.model, transformer_config(recipe)
    tokens = recipe.trainer.micro_batch_size * m.seq_length
    linears = [p for p in plan_layers(recipe) if output_layer or p.name != "output_layer"]
    products = sum(
        linear(device, scaling if p.fp8 else "bf16", tokens, p.in_features, p.out_features)
        for p in linears
    )
    attention = (
        tokens
        * planned_coverage(recipe, linears).attention_flops
        / (device.bf16 * OF_PEAK_ATTENTION)
    )
    # Forward: two norms, two residual sums, rotation of queries and keys, SwiGLU; backward twice as much, and what is repeated in it.
    norms, swiglu = 2 * 4 * m.hidden_size, 2 * 3 * m.ffn_hidden_size
    forward = norms + swiglu + 2 * (6 * m.hidden_size + 2 * (config.query_size + config.key_size))
    again = {"none": 0, "selective": norms + swiglu, "full": forward}[m.recompute_granularity]
    found = {
        "linear layers": products,
        "attention": attention,
        "elementwise": device.moved((3 * forward + again) * tokens * m.num_layers),
    }
    if m.recompute_granularity == "full":
        inside = [p for p in linears if p.name != "output_layer"]
        found["recomputed products"] = attention / 3 + sum(
            device.product(scaling if p.fp8 else "bf16", tokens, p.out_features, p.in_features)
            for p in inside
        )
    return found | ({"loss": device.moved(LOGIT * tokens * m.vocab_size)} if output_layer else {})


def transposes(device: Device, recipe: Recipe) -> float:
    """Seconds in which a GPU that multiplies matrices along their rows alone, as Hopper does, transposes the weights that `recipe` holds
    in FP8, for the dgrads of one microbatch."""
    return device.moved(
        2.0 * sum(p.in_features * p.out_features for p in plan_layers(recipe) if p.fp8)
    )


def step(device: Device, scaling: str, recipe: Recipe) -> dict[str, float]:
    """Seconds of an optimizer step of `recipe` on one GPU, by what takes them."""
    passes = recipe.trainer.global_batch_size // recipe.trainer.micro_batch_size
    found = {what: seconds * passes for what, seconds in layers(device, scaling, recipe).items()}
    return found | {
        "optimizer": device.moved(PARAMETER * parameter_counts(transformer_config(recipe))["total"])
    }


def device_called(name: str) -> Device | None:
    """The device of which CUDA says this name, such as "NVIDIA H200"; None of one whose bandwidth is not known, and of a part of one."""
    words = name.lower().replace("-", " ").split()
    found = [
        gpu
        for gpu in BANDWIDTH
        if gpu.partition("-")[0] in words
        and ("pcie" in gpu) == ("pcie" in words)
        and "mig" not in words
    ]
    return Device.of(found[0]) if found else None
