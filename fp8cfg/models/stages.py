"""Pipeline stages: which layers stand on which pipeline rank, as Megatron places them. Without torch.

The layers are cut into as many chunks as there are ranks times chunks of a rank; chunk k is on rank k modulo the ranks (Megatron's
interleaving, arXiv 2104.04473). The embedding goes with the first chunk, the final norm and the output layer with the last.
"""

from __future__ import annotations


def chunk_layers(layers: int, cuts: int) -> list[range]:
    """The layers of each of `cuts` chunks, in the order of the model.

    Where layers do not divide, embedding and output layer count as one layer each, as NeMo's llama31_405b has it; else the
    first chunks have one layer more.
    """
    sizes = [layers // cuts + (i < layers % cuts) for i in range(cuts)]
    if layers % cuts and (layers + 2) % cuts == 0:
        sizes = [(layers + 2) // cuts - (i in (0, cuts - 1)) for i in range(cuts)]
    starts = [sum(sizes[:i]) for i in range(cuts)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stage_chunks(layers: int, ranks: int, chunks: int) -> list[list[range]]:
    """For each of `ranks` pipeline ranks the layers of each of its `chunks` chunks."""
    cut = chunk_layers(layers, ranks * chunks)
    return [cut[rank::ranks] for rank in range(ranks)]


def stage_layers(layers: int, ranks: int, chunks: int) -> list[list[int]]:
    """The layers of each pipeline rank, of all its chunks together."""
    return [
        [layer for chunk in mine for layer in chunk] for mine in stage_chunks(layers, ranks, chunks)
    ]
