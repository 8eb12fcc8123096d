"""Bytes of parameters, gradients, optimizer state and gathered weights on a rank of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.checker.program import ProgramProof
from autopar.checker.text import BlockText, CallsText, ParameterText
from autopar.ir.mesh import DATA_AXIS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Bytes of an element by dtype; of all other dtypes 8."""
_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """`stored`: parameters, buffers, gradients, optimizer state. `moving`: gathered weights, and buffers in which weights are
    gathered and gradients reduced. `update`: the optimizer's temporaries."""

    stored: int
    moving: int
    update: int

    @staticmethod
    def of(proof: ProgramProof, chunks: Sequence[CallsText], optimizer: str) -> StateBytes:
        ranks = proof.candidate.zero_group or proof.candidate.mesh.size_of(DATA_AXIS)
        data = proof.candidate.mesh.size_of(DATA_AXIS)
        compute = BYTES.get(proof.candidate.precision.compute, 8)
        stored = always = update = 0
        transient, flat, reduced, largest = [0], [0], [0], 0
        for text, prefix in _blocks(proof, chunks):
            gathered = block_gradients = 0
            zero = int(text.flags.get("zero", 0))
            for each, whole, share, unit in _parameters(proof, text, prefix, ranks):
                if each.buffer:
                    stored += whole
                    continue
                elements = whole // unit
                sharded = zero > 0 and ranks > 1
                mine = share if sharded else whole
                if "int" in each.dtype:
                    gathered += whole if sharded else 0
                else:
                    gathered += elements * compute if sharded or unit != compute else 0
                stored += mine * (2 + _state_tensors(optimizer, each.shape) if each.trainable else 1)
                if each.trainable:
                    block_gradients += elements * max(unit, compute)
                    update += mine
                    largest = max(largest, mine)
                    # unreduced until the last micro-batch; or the buffer of the bucket, which is used again
                    stored += whole if zero == 1 and proof.micro_batches > 1 else 0
                    stored += whole if not sharded and data > 1 else 0
            always += 0 if zero == 3 else gathered
            transient.append(gathered if zero == 3 else 0)
            flat.append(gathered)
            reduced.append(block_gradients)
        # of the block that runs and the next one: weights, the buffers that they come in, and those that gradients leave in
        moving = always + sum(sum(sorted(each)[-2:]) for each in (transient, flat, reduced))
        return StateBytes(stored, moving, max(update, 2 * largest))


def _state_tensors(optimizer: str, shape: Sequence[int]) -> int:
    """Muon's one of a matrix, and AdamW's two of the rest: vectors, stacks of experts, tables of words."""
    if optimizer == "muon" and len(shape) == 2 and max(shape) < 16 * min(shape):
        return 1
    return _MOMENTS.get(optimizer, 2)


def _blocks(proof: ProgramProof, chunks: Sequence[CallsText]) -> Iterator[tuple[BlockText, dict[str, str]]]:
    """Each block of a stage with the original names of its parameters, a shared one once."""
    seen = set[str]()
    for chunk in chunks:
        for instance in (each for group in chunk.instances.values() for each in group):
            text = proof.text.blocks[instance.block]
            names = {each.path: instance.name_of(each.path) for each in text.stored}
            yield text, {path: name for path, name in names.items() if name not in seen}
            seen.update(names.values())


def _parameters(
    proof: ProgramProof, text: BlockText, names: Mapping[str, str], ranks: int
) -> Iterator[tuple[ParameterText, int, int, int]]:
    """Each parameter of a block with the bytes of what model axes leave of it, of a data rank's share of that (of the first
    dimension that divides; of the first one, rounded up; or all), and of an element."""
    for stored in text.stored:
        if stored.path in names:
            kinds = proof.interface.stored_kinds(stored.shape, stored.places, text.line)
            local = proof.axes.local_shape(tuple(stored.shape), kinds) or stored.shape
            unit, elements = BYTES.get(stored.dtype, 8), prod(local)
            if any(size and size % ranks == 0 for size in local):
                share = elements // ranks
            else:
                share = -(-local[0] // ranks) * prod(local[1:]) if local and local[0] == stored.shape[0] else elements
            yield stored, elements * unit, share * unit, unit
