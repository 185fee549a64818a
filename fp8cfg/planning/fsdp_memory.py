"""FSDP2 memory: unsharded weights and gradients during a backward pass, as torch 2.13 frees them.

FSDP2 gathers the weights and reduces the gradients of a group of parameters at once
(FSDPParamGroup). Each Transformer layer is a group. The root group has the embedding, the last norm
and the output layer, and is reduced last. A backward pass has:

    weights    storage.shard=fsdp: of the root, of the current layer, and of the next layer
               (prefetched). zero1, zero2: of all groups, each until its backward pass ends in the
               last pass of a step
    gradients  of the output layer and of the current layer. If several microbatches are reduced at
               once: of all groups
    reduction  after a layer's backward pass its weights are freed, and its gradients are copied to
               be sent and freed. Only the last parameter's gradient is freed after the sum
               (foreach_reduce). The copy stays until the next reduction. gloo makes one more copy

With one shard (storage.shard=none) nothing is gathered or scattered, and torch divides a copy of
the gradients. Replica groups (HSDP) keep the sums of a pass until it ends, in addition to the
shards.

A `BackwardSchedule` answers how many bytes these take at each moment of a backward pass. Groups are
numbered in the order of their backward passes: the last layer is 0, the root comes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES, fp8_weight_extra_bytes, stored_bytes
from fp8cfg.planning.layout import (
    Part,
    local_shapes,
    microbatches,
    reduces_once,
    shard_degree,
    vectors,
)
from fp8cfg.planning.state_shards import (
    fsdp_group,
    parameter_columns,
    quantized_gradients,
    trained_shapes,
)
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import SCALED, against_fp8_gather, gathered, gathers_params
from fp8cfg.schema.tables import wrapped

OUTPUT_WEIGHTS = ("output_layer.weight", "embedding.weight")  # the latter if it is tied


def gather_line(recipe: Recipe, part: Part, backend: str) -> str:
    """Returns a line with the dtype of FSDP2's weight gathers, "" if it is the default.

    If fp8.params is set but the gather is not in FP8, the line has the reason.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        backend: Name of the backend of the FP8 layers.
    """
    precision = recipe.precision
    if not by_fsdp2(recipe, part.state, part.shards, backend) or part.shard == "none":
        return ""
    if part.shard != "fsdp":
        return _zero_gather_line(recipe, part)
    dtype = gathered(precision, backend)
    line = f"weights are sharded over the ranks and gathered in {dtype}"
    if dtype == "fp8":
        if capabilities(backend).fp8_gather == "cast":
            line += (
                f", cast by {backend}, with any fp8.params; storage.gather={precision.compute}"
                " turns it off"
            )
        return wrapped(line, more="  ")
    if precision.fp8.enabled and precision.fp8.params and precision.storage.gather == "auto":
        reason, _, _ = against_fp8_gather(precision, backend)[0].partition(";")
        return wrapped(f"{line}: {reason}", more="  ")
    return line


def _zero_gather_line(recipe: Recipe, part: Part) -> str:
    """Returns the line for zero1 and zero2, with one gather per step."""
    if recipe.lora.enabled:
        return "frozen weights are replicated; adapters are gathered once a step"
    if part.state.fp8_weights:
        line = "weights are gathered in fp8 once a step"
        if fp8_weight_extra_bytes(recipe) >= 1:
            line += ", two copies of each: dgrad needs other scales"
        return line
    dtype = part.state.linear["weight"]
    if dtype == part.state.gathered_dtype:
        return ""
    return f"weights of linear layers are gathered in {dtype} once a step"


def root_bytes(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int
) -> int:
    """Returns bytes of the root group's gathered weights.

    FSDP2 does not free them between forward and backward.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        parameters: Number of parameters of `part`.
    """
    # All parameters of the rank, minus norms and biases of layers, minus matrices of layers.
    elements = parameters - len(part.layers) * vectors(recipe, part)
    for linear in linears:
        if linear.name != "output_layer":
            elements -= -(-linear.weights // part.tensor)
    return int(elements * ELEMENT_BYTES[recipe.precision.compute])


class BackwardSchedule:
    """Bytes of weights and gradients at each moment of a backward pass.

    Bytes are relative to the state kept from step to step. They are negative while gradients do
    not exist yet, because gradients count as state. This base class adds nothing: all gradients
    exist from the start.

    Attributes:
        reduces_once: Whether unsharded gradients accumulate over all microbatches and are reduced
            in the last pass.
        fresh_gradient_bytes: Bytes per element of a gradient allocated in the backward pass of its
            group. 0 if all gradients exist already.
        at_loss: Bytes at the output layer's backward pass.
        at_forward_end: Bytes at the end of the forward pass.
    """

    reduces_once = False
    fresh_gradient_bytes = 0.0
    at_loss = 0.0
    at_forward_end = 0.0

    def during_backward(self, group: int) -> float:
        """Returns bytes in the backward pass of a group.

        Args:
            group: Number of the group, 0 for the last layer.
        """
        return 0.0

    def during_reduction(self, group: int) -> float:
        """Returns peak bytes from the end of a group's backward pass to its reduction."""
        return 0.0


class SingleMicrobatch(BackwardSchedule):
    """One microbatch without FSDP2: autograd allocates gradients as it frees activations."""

    def __init__(self, recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> None:
        """Computes the gradient bytes of each group."""
        shapes = trained_shapes(recipe, part)
        quantized = quantized_gradients(recipe, part, linears, is_fsdp=False)
        group_bytes = Counter[str]()
        output_gradient = 0
        for name, columns in parameter_columns(part.state, linears, shapes).items():
            dtype = columns["weight_grad"]
            if dtype in SCALED:
                dtype = quantized.get(name, "fp32")
            size = stored_bytes(dtype, prod(shapes[name]))
            group_bytes[fsdp_group(name)] += size
            if part.output and name in OUTPUT_WEIGHTS:
                output_gradient = max(output_gradient, size)

        kinds = [part.state.linear]
        if part.state.fp8_layers_only:
            kinds.append(part.state.other)
        self.fresh_gradient_bytes = max(ELEMENT_BYTES[kind["weight_grad"]] for kind in kinds)
        # Bytes of gradients by group. The output layer's exist first, before all groups.
        self.groups = [group_bytes[f"layers.{layer}"] for layer in reversed(part.layers)]
        self.groups.append(group_bytes[""] - output_gradient)
        self.at_loss = self.at_forward_end = -float(group_bytes.total())

    def during_backward(self, group: int) -> float:
        """Returns minus the bytes of gradients not yet allocated."""
        # Gradients of this group count as missing too. The moments in activation_memory.py add
        # each of them when wgrad allocates it.
        return -float(sum(self.groups[group:]))

    def during_reduction(self, group: int) -> float:
        """Returns minus the bytes of gradients of later groups. Nothing is reduced here."""
        return self.during_backward(group + 1)


class FsdpSchedule(BackwardSchedule):
    """FSDP2. Unsharded gradients count here. With `reduces_once` they count as state instead."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        gradient_bytes: float,
    ) -> None:
        """Reads the schedule from the recipe.

        Args:
            recipe: The recipe.
            device: "cpu" or "cuda".
            part: The layers and shards of the rank.
            linears: Its linear layers.
            backend: Name of the backend of the FP8 layers.
            gradient_bytes: Bytes per element of an unsharded gradient.
        """
        passes = microbatches(recipe, part)
        shard = part.shard
        comm_bytes = ELEMENT_BYTES[part.state.linear["comm"]]
        self.is_fsdp = shard == "fsdp"
        self.in_pipeline = recipe.trainer.strategy.pipeline_model_parallel_size > 1
        self.shards = shard_degree(recipe, part)
        self.gradient_bytes = gradient_bytes
        self.reduces_once = reduces_once(recipe, part)
        self.fresh_gradient_bytes = gradient_bytes
        if self.reduces_once:
            self.fresh_gradient_bytes = 0.0

        # Bytes per element of the copy that is reduced, and of its sum. zero1 and zero2 copy
        # gradients as stored and cast them to the dtype that is sent (parallel/fsdp.py).
        self.copy_bytes = comm_bytes
        self.cast_bytes = 0.0
        if shard in ("zero1", "zero2"):
            self.copy_bytes = gradient_bytes
            if comm_bytes != gradient_bytes:
                self.cast_bytes = comm_bytes
        # Of gloo's own copy; with one shard of the copy that torch divides (torch 2.13).
        self.extra_copy_bytes = 0.0
        if device == "cpu" or self.shards == 1:
            self.extra_copy_bytes = self.cast_bytes or self.copy_bytes

        # Replica groups keep the sums of a pass until it ends if the sums are converted then: widened
        # to float32, added to stored gradients, or quantized. After several microbatches quantized
        # gradients replace the accumulated ones.
        quantizes_sums = part.state.linear["weight_grad"] in SCALED and not self.reduces_once
        converts_sums = (
            self.copy_bytes < 4 or recipe.storage.accumulate == "stored" or quantizes_sums
        )
        is_replicated = part.groups > 1 or shard == "none"
        self.keeps_sums = is_replicated and converts_sums

        # zero1 and zero2 free a group's weights after its backward pass, but only in the last pass
        # of a step. With more than two passes of zero2 an earlier pass has the peak. Pipeline stages
        # free weights after all passes.
        self.frees_weights = shard != "fsdp" and not self.in_pipeline
        if shard == "zero2" and passes > 2:
            self.frees_weights = False
        # Of two passes of zero2 the second one frees weights, but all gradient shards exist in it.
        self.has_second_pass = shard == "zero2" and passes > 1
        self.prefetches = self.shards > 1 and len(part.layers) > part.chunks
        self.groups = _parameter_groups(recipe, part, linears, backend)
        last_layer, root = self.groups[0], self.groups[-1]

        # The output layer's gradient exists from the start to the reduction of the root.
        output_elements = 0
        if part.output:
            shapes = trained_shapes(recipe, part)
            output_elements = max(prod(shapes.get(name, (0,))) for name in OUTPUT_WEIGHTS)
        self.output_gradient = self.fresh_gradient_bytes * output_elements

        # zero1, zero2: the buffer of the last layer's gather lives until the forward pass ends.
        if not (self.is_fsdp or self.in_pipeline) and passes == 1 and self.shards > 1:
            self.at_forward_end = last_layer.weight_bytes
        # fsdp: the last layer is prefetched during the output layer's backward pass.
        if self.is_fsdp:
            self.at_loss = root.weight_bytes
            if self.shards > 1 and not self.in_pipeline:
                self.at_loss += last_layer.weight_bytes

    def during_backward(self, group: int) -> float:
        """Returns bytes of weights, sums and gradient copies in a group's backward pass."""
        weights = 0.0
        # The root is resharded only after the backward pass. Its weights exist all the time.
        if self.is_fsdp:
            weights = self.groups[-1].weight_bytes
            if not self._is_root(group):
                weights += self.groups[group].weight_bytes + self._prefetched_bytes(group)
        previous_copy = 0.0  # stays until the next reduction
        if group:
            previous_copy = self.copy_bytes * self.groups[group - 1].gradient_elements
        weights -= self._freed_weight_bytes(group, group)
        return weights + self._sum_bytes(group) + self.output_gradient + previous_copy

    def during_reduction(self, group: int) -> float:
        """Returns peak bytes while a group's gradients are copied, sent and summed."""
        gradients = self.groups[group].gradient_elements
        last_parameter = self.groups[group].last_elements
        copy = self.copy_bytes * gradients
        weights = 0.0
        if self.is_fsdp:
            weights = self._prefetched_bytes(group)
            if self.in_pipeline or not self._is_root(group):
                weights += self.groups[-1].weight_bytes  # stages free the root after all passes
        existing = weights - self._freed_weight_bytes(group + 1, group) + self._sum_bytes(group)
        existing += self.fresh_gradient_bytes * gradients
        if not self._is_root(group):
            existing += self.output_gradient

        # Two peaks: while FSDP2 copies, all gradients and the copy exist. While it sends, gradients
        # are freed, except for the last parameter.
        shard_elements = gradients / self.shards
        freed = self.gradient_bytes * gradients
        if self.shards > 1:
            freed = self.gradient_bytes * (gradients - last_parameter)
        sending = self.cast_bytes * (gradients + shard_elements) + self.extra_copy_bytes * gradients
        widening = 0.0
        if self.copy_bytes < 4:
            widening = 4 * shard_elements  # the sum in float32
        sum_shard = self.copy_bytes * shard_elements
        return existing + max(copy, copy - freed + sum_shard + max(sending, widening))

    def _is_root(self, group: int) -> bool:
        """Whether a group is the root. Its backward pass is the last one."""
        return group == len(self.groups) - 1

    def _prefetched_bytes(self, group: int) -> float:
        """Returns bytes of the next layer's weights, prefetched during a group."""
        if self.prefetches and group + 2 < len(self.groups):
            return self.groups[group + 1].weight_bytes
        return 0

    def _freed_weight_bytes(self, groups: int, reduced_groups: int) -> float:
        """Returns bytes of the weights freed so far.

        Args:
            groups: Number of groups with freed weights.
            reduced_groups: Number of groups with gradient shards in the first of two passes.
        """
        # The first of two passes frees no weights, but has fewer gradient shards. The pass with
        # more memory counts.
        if not self.frees_weights:
            return 0
        weights = sum(group.weight_bytes for group in self.groups[:groups])
        if not self.has_second_pass:
            return weights
        return min(weights, 4 * self._gradient_elements(reduced_groups, None) / self.shards)

    def _sum_bytes(self, groups: int) -> float:
        """Returns bytes of the first groups' sums, minus the replaced unsharded gradients."""
        element_bytes = 0.0
        if self.keeps_sums:
            element_bytes += self.copy_bytes
        if self.reduces_once:
            element_bytes += 4 - self.gradient_bytes * self.shards
        return self._gradient_elements(0, groups) / self.shards * element_bytes

    def _gradient_elements(self, first: int, end: int | None) -> int:
        """Returns the elements of the unsharded gradients of a range of groups."""
        return sum(group.gradient_elements for group in self.groups[first:end])


class OneShardFsdpSchedule(FsdpSchedule):
    """FSDP2 with one shard and one microbatch.

    The sum of a gradient is as large as the gradient and counts as state. It is allocated in the
    reduction of its group.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        gradient_bytes: float,
    ) -> None:
        """Computes the bytes of the sums. For the arguments see `FsdpSchedule`."""
        super().__init__(recipe, device, part, linears, backend, gradient_bytes)
        quantized = quantized_gradients(recipe, part, linears)
        group_bytes = Counter[str]()
        for name, shape in trained_shapes(recipe, part).items():
            group_bytes[fsdp_group(name)] += stored_bytes(quantized.get(name, "fp32"), prod(shape))
        self.sums = [group_bytes[f"layers.{layer}"] for layer in reversed(part.layers)]
        self.sums.append(group_bytes[""])
        self.at_loss -= group_bytes.total()
        self.at_forward_end -= group_bytes.total()

    def during_backward(self, group: int) -> float:
        """Returns the bytes of `FsdpSchedule`, minus the sums not yet allocated."""
        return super().during_backward(group) - sum(self.sums[group:])

    def during_reduction(self, group: int) -> float:
        """Returns the bytes of `FsdpSchedule`, minus the sums not yet allocated."""
        # `FsdpSchedule` already counts the sum of this group while it is computed.
        return super().during_reduction(group) - sum(self.sums[group:])


def single_microbatch_schedule(
    recipe: Recipe,
    device: str,
    part: Part,
    linears: list[PlannedLinear],
    backend: str,
    gradient_bytes: float,
) -> BackwardSchedule | None:
    """Returns the schedule of a step with one microbatch and whole gradients on each rank.

    For the arguments see `FsdpSchedule`.

    Returns:
        The schedule. None for several microbatches, pipeline stages or sharded gradients.
    """
    has_stages = recipe.trainer.strategy.pipeline_model_parallel_size > 1
    if has_stages or microbatches(recipe, part) > 1:
        return None
    if not by_fsdp2(recipe, part.state, part.shards, backend):
        return SingleMicrobatch(recipe, part, linears)
    if shard_degree(recipe, part) > 1:
        return None
    return OneShardFsdpSchedule(recipe, device, part, linears, backend, gradient_bytes)


class _Group(NamedTuple):
    """A group of parameters.

    Attributes:
        weight_bytes: Bytes of its gathered weights.
        gradient_elements: Elements of its gradients.
        last_elements: Elements of its last parameter's gradient.
    """

    weight_bytes: float
    gradient_elements: int
    last_elements: int


def _parameter_groups(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str
) -> list[_Group]:
    """Returns the layers of `part`, the last one first, and the root."""
    precision = recipe.precision
    is_fsdp = part.shard == "fsdp"
    trained = trained_shapes(recipe, part)
    if is_fsdp:
        # fsdp also shards frozen weights. zero1 and zero2 keep them whole on each rank.
        shapes = {**local_shapes(recipe, part), **trained}
        gathers_fp8 = gathered(precision, backend) == "fp8"
    else:
        shapes = trained
        gathers_fp8 = part.state.fp8_weights
    fp8_bytes = ELEMENT_BYTES["fp8"]
    if not is_fsdp or gathers_params(precision, backend):
        fp8_bytes += fp8_weight_extra_bytes(recipe)
    in_fp8 = {f"{linear.name}.weight" for linear in linears if gathers_fp8 and linear.fp8}

    columns = parameter_columns(part.state, linears, shapes)
    empty = _Group(0, 0, 0)
    groups: dict[str, _Group] = {}
    for name, shape in shapes.items():
        count = prod(shape)
        if name in in_fp8:
            element_bytes = fp8_bytes
        elif is_fsdp:
            element_bytes = ELEMENT_BYTES[precision.compute]
        else:
            element_bytes = ELEMENT_BYTES[columns[name]["weight"]]
        group = groups.get(fsdp_group(name), empty)
        weight_bytes = group.weight_bytes + count * element_bytes
        if name in trained:
            gradients = group.gradient_elements + count
            groups[fsdp_group(name)] = _Group(weight_bytes, gradients, count)
        else:
            groups[fsdp_group(name)] = group._replace(weight_bytes=weight_bytes)
    layers = [groups.get(f"layers.{layer}", empty) for layer in reversed(part.layers)]
    return [*layers, groups.get("", empty)]
