"""The key of a call of a parallel model: everything about it that selects a program, in words that are equal on all ranks."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .compat.modules import forward_of
from .errors import BatchError
from .module import Program
from .plain.frozen_reads import Change
from .plain.questions import IDENTITY, LAYOUT, LEAF
from .step.arguments import argument_parts
from .step.inputs import constant_text, model_placements, path_word, same_text
from .step.layouts import layout_of


class CallKey(NamedTuple):
    """The key that selects a variant. `modes`: training or evaluation, of each module. `leaves`: each argument by its path, and
    each container, in words that leave the batch size out. `division`: how the batch divides over data ranks and micro-batches.
    `outputs`: what is asked for beside the loss in this call. `unfrozen`: parameters that were frozen when the plan was made, and
    get gradients now. `autocast`: the dtype of a ``torch.autocast`` around the call. `changed`: what programs read that is no
    argument (attributes, globals), and is not as the first program read it."""

    modes: tuple[bool, ...]
    leaves: tuple[tuple[str, str], ...]
    division: str
    gradients: bool
    outputs: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()
    autocast: str = ""
    changed: tuple[Change, ...] = ()


class KeyedCall(NamedTuple):
    """A call of the parallel model: its arguments by name, key, global batch size, and how many times it is that of the
    arguments (more than once for a local batch)."""

    arguments: Mapping[str, Any]
    key: CallKey
    batch: int
    times: int

    def remedy(self) -> str:
        """Return how to mend a call that differs between ranks."""
        if self.times == 1:
            return "call it alike on every rank, with the global batch or with local_batch on all"
        return (
            "pass parts of one size on all ranks: take examples from parallel.sampler(dataset), which gives each rank as many, "
            "and pad them to one length over the ranks (a fixed one, or parallel.sampler(dataset, lengths=...))"
        )

    def words(self) -> str:
        """Return the call in the words of a message."""
        inputs = ", ".join(f"{path} {text}" for path, text in self.key.leaves)
        trained = f", with gradients of {self.key.unfrozen[0]} ..." if self.key.unfrozen else ""
        cast = f", under torch.autocast({self.key.autocast})" if self.key.autocast else ""
        changed = "".join(f", {place} {text or 'gone'}" for place, text in self.key.changed[:3])
        size = f"batch {self.batch}" if self.times == 1 else f"a local_batch of {self.batch // self.times}"
        return f"{inputs}, {size}{'' if all(self.key.modes) else ', in evaluation'}{trained}{cast}{changed}"


class Sight(NamedTuple):
    """The view that a forward has of its arguments. `named`: those that it takes by name, whose order it does not see (None:
    all). `questions`: those of its code (`plain.questions`)."""

    named: frozenset[str] | None = None
    questions: frozenset[str] = frozenset()

    def ordered(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in one order, but for further ones (``**kwargs``), which the forward sees in that of the call."""
        named = arguments.keys() if self.named is None else self.named
        return dict(sorted(arguments.items(), key=lambda each: each[0] if each[0] in named else "~"))

    def words(self, leaves: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
        """Yield the answers to the questions, by path. BatchError where no program could give one."""
        first: dict[int, str] = {}
        for path, leaf in leaves if self.questions else ():
            if not isinstance(leaf, torch.Tensor):
                continue
            if LEAF in self.questions and not leaf.is_leaf:
                raise BatchError(f"argument {path} is no leaf of autograd, and the forward asks is_leaf: ask requires_grad there")
            if IDENTITY in self.questions and first.setdefault(id(leaf), path) != path:
                yield path, same_text(first[id(leaf)])
            if LAYOUT in self.questions and (layout := layout_of(leaf)):
                yield path, f"in memory {layout}"


_PLAIN = Sight()


def sight_of(model: nn.Module, questions: frozenset[str]) -> Sight:
    """Return what the forward of a model sees, whose code has these questions."""
    parameters = inspect.signature(forward_of(model)).parameters
    further = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return Sight(frozenset(parameters) if further else None, questions)


def call_leaves(
    program: Program, arguments: Mapping[str, Any], times: int, sight: Sight = _PLAIN
) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return the arguments of a call by path, in words, and the size of its global batch, which has `times` that of the
    arguments."""
    arguments = sight.ordered(arguments)
    parts = {name: argument_parts(name, value) for name, value in arguments.items()}
    leaves = [(".".join(map(path_word, keys)), leaf) for own, _ in parts.values() for keys, leaf in own]
    paths = {name: path for path, name in program.arguments.items()}
    dims = {paths.get(name, name): dim for name, dim in program.batch_dims.items()}
    own = batch_size(leaves, dims)
    constants, tensors = {**program.constants, **program.defaults}, set(paths.values())
    words = tuple(
        (path, constant_text(leaf) if _is_number(leaf) and path not in tensors else _words(leaf, own, dims.get(path, 0)))
        for path, leaf in leaves
        if not (leaf is None and path not in constants) and not _is_default(constants, program.defaults, path, leaf)
    )
    containers = (
        (name, text)
        for name, (own, text) in parts.items()
        if text and (own or not _is_default(constants, program.defaults, name, arguments[name]))
    )
    return (*words, *containers, *sight.words(leaves)), own * times


def hash_of(value: object) -> int:
    """Return a hash of 60 bits that is equal on all ranks for equal values."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 4


def batch_votes(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors whose first dimension may be the batch. Lists of integers beside integers ``[B, S]`` may be anything:
    where packed documents end (``cu_seqlens``)."""
    found = [each for each in tensors if len(each.shape)]
    whole = [each for each in found if "int" in str(each.dtype)]
    lists = {id(each) for each in whole if len(each.shape) == 1} if any(len(each.shape) > 1 for each in whole) else set()
    return [each for each in found if id(each) not in lists] or found


def batch_size(leaves: list[tuple[str, Any]], dims: Mapping[str, int]) -> int:
    """The size of the batch's dimension of most tensors: `dims` by path, 0 of others."""
    own = {id(leaf): dims.get(path, 0) for path, leaf in leaves}
    votes = batch_votes(leaf for _, leaf in leaves if hasattr(leaf, "shape"))
    sizes = Counter(int(leaf.shape[own[id(leaf)]]) for leaf in votes if len(leaf.shape) > own[id(leaf)])
    return sizes.most_common(1)[0][0] if sizes else 1


def _is_number(leaf: Any) -> bool:
    """Return whether a leaf is a number of numpy, which is a constant as one of Python is."""
    return getattr(leaf, "shape", None) == () and not isinstance(leaf, torch.Tensor)


def _words(leaf: Any, batch: int, dim: int) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return constant_text(leaf)
    sizes = ["B" if number == dim and size == batch else str(int(size)) for number, size in enumerate(shape)]
    flows = isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
    placed = model_placements(leaf) if isinstance(leaf, DTensor) else {}
    return f"{dtype} ({', '.join(sizes)}){' with gradient' if flows else ''}{f' {placed}' if placed else ''}"


def _is_default(constants: Mapping[str, str], defaults: Mapping[str, str], path: str, leaf: Any) -> bool:
    """Return whether an argument says what is taken for it anyway."""
    return path in defaults and (not constants[path] or constant_text(leaf) == constants[path])
