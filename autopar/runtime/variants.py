"""The variants of a parallel model: one set of weights and many programs. What a call may change selects the program."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from .comm.agreement import Stated, require_agreement
from .compat import apply
from .device.autocast import autocast_of
from .device.groups import control_group
from .device.mesh import MeshHandle
from .errors import AutoparError
from .frozen_reads import Change, FrozenReads, Reads
from .module import Program
from .pipeline.pipeline_step import PipelineStep
from .pipeline.weight_versions import PipeDreamStep
from .state.materialize import State
from .state.unfreeze import UnfrozenParameters
from .step.constants import constant_text
from .step.inputs import arguments_by_name, path_word
from .step.micro_batches import Batch, StepResult, run_micro_batches, split_result
from .step.outputs import EVERYTHING, leaves_out
from .step.placed_inputs import model_placements

MOST_VARIANTS = 64
"""Programs that are kept; the least recently used one goes first."""

MANY_VALUES = 4
"""After so many values of one attribute, each with a program of its own, a warning says what costs less."""

LOGGER = logging.getLogger("autopar")


class CallKey(NamedTuple):
    """What selects a variant. `modes`: training or evaluation, of each module. `leaves`: each argument by its path, in words that
    leave the batch size out. `division`: how the batch divides over data ranks and micro-batches. `outputs`: what is asked for
    beside the loss in this call. `unfrozen`: parameters that were frozen when the plan was made, and get gradients now.
    `autocast`: the dtype of a ``torch.autocast`` around the call. `changed`: what programs read that is no argument (attributes,
    globals), and is not as the first program read it."""

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

    def words(self) -> str:
        """For messages."""
        inputs = ", ".join(f"{path} {text}" for path, text in self.key.leaves)
        trained = f", with gradients of {self.key.unfrozen[0]} ..." if self.key.unfrozen else ""
        cast = f", under torch.autocast({self.key.autocast})" if self.key.autocast else ""
        changed = "".join(f", {place} {text or 'gone'}" for place, text in self.key.changed[:3])
        return f"{inputs}, batch {self.batch}{'' if all(self.key.modes) else ', in evaluation'}{trained}{cast}{changed}"


class MadeVariant(NamedTuple):
    """What makes a variant: a program, the form of its result, and the batch size that it is fixed to (0: any). `whole_batch`:
    every data rank computes the whole batch; `uneven`: data ranks have uneven shards of it. `reads`: of its capture."""

    program: type[Program]
    form: Any
    fixed_batch: int
    whole_batch: bool
    uneven: bool = False
    reads: Reads = Reads()


class Variant:
    """A program that computes with the weights of the first one. `whole_batch`: every data rank computes the whole batch, and its
    gradients count as one part of their sum."""

    def __init__(
        self,
        program: Program,
        form: Any,
        state: State,
        step: PipelineStep | PipeDreamStep | None = None,
        *,
        whole_batch: bool = False,
        fixed_batch: int = 0,
    ) -> None:
        self.program, self.form, self.state, self.step = program, form, state, step
        self.whole_batch, self.fixed_batch = whole_batch, fixed_batch
        self.training = program.training

    @property
    def copies(self) -> int:
        """How many data ranks compute the same."""
        return self.program.state_program.mesh.dp.size if self.whole_batch else 1

    def run(self, inputs: Batch, training: bool) -> StepResult:
        """The loss, and this rank's shard of each output."""
        if self.training != training:
            self.program.train(training)
            self.training = training
        if self.copies > 1:
            inputs = {name: scale_gradient(x, self.copies) for name, x in inputs.items()}
        if self.step is not None:
            loss, others = self.step.run(inputs)
        elif self.program.micro_batches > 1:
            loss, others = run_micro_batches(self.program, self.state, inputs)
        else:
            loss, others = split_result(self.program(**inputs))
        if self.copies > 1:
            loss, others = scale_gradient(loss, 1 / self.copies), [scale_gradient(each, 1 / self.copies) for each in others]
        return loss, others


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`x`, whose gradient is multiplied by `factor`."""
    return apply(_ScaleGradient, x, factor) if x.requires_grad else x


MakeVariant = Callable[[KeyedCall, nn.Module], MadeVariant]


class Variants:
    """All programs of a parallel model. `make` captures and plans one of the model of `frozen` (all ranks call it together),
    `load` gives it the weights; `modes_of` says in which modes a program is captured for the modes of a call, and in which mode
    it then runs."""

    def __init__(
        self,
        first: Variant,
        make: MakeVariant,
        modes_of: Callable[[tuple[bool, ...]], tuple[tuple[bool, ...], bool]],
        load: Callable[[MadeVariant, MeshHandle], Variant],
        frozen: FrozenReads,
    ) -> None:
        self.first, self.make, self.modes_of, self.load, self.frozen = first, make, modes_of, load, frozen
        self._values: dict[str, set[str]] = {}
        self.known: OrderedDict[tuple[CallKey, int], Variant] = OrderedDict()
        self.uneven: dict[CallKey, MadeVariant] = {}  # a program for each number of examples, of one class
        self.control: dist.ProcessGroup | None = None
        self.outputs: tuple[str, ...] | None = None
        self.incomplete: set[CallKey] = set()  # calls of which no program returns everything
        self.autocast = ""
        self.unfrozen = UnfrozenParameters(first.state)

    def call(self, modes: tuple[bool, ...], args: tuple[Any, ...], keywords: Mapping[str, Any], times: int = 1) -> KeyedCall:
        """A call in words. `times`: how often the global batch holds that of the arguments."""
        program = self.first.program
        given = arguments_by_name(program, args, keywords)
        leaves = [(".".join(map(path_word, keys)), leaf) for keys, leaf in tree_flatten_with_path(given)[0]]
        paths = {name: path for path, name in program.arguments.items()}
        dims = {paths.get(name, name): dim for name, dim in program.batch_dims.items()}
        own = batch_size(leaves, dims)
        batch = own * times
        known = {**program.constants, **program.defaults}
        words = tuple(
            (path, _words(leaf, own, dims.get(path, 0)))
            for path, leaf in sorted(leaves, key=lambda leaf: leaf[0])
            if not (leaf is None and path not in program.constants) and not _is_default(known, program.defaults, path, leaf)
        )
        ranks = program.mesh.dp.size
        division = "data ranks"
        if batch % (ranks * program.micro_batches) == 0:
            division = "micro-batches"
        elif batch % ranks:
            division = "uneven" if batch > ranks and self.first.step is None else "whole"
        gradients = self.first.step is not None and torch.is_grad_enabled()
        outputs = self.outputs
        if outputs is None:
            overlapping = isinstance(self.first.step, PipeDreamStep)  # it has one program
            outputs = () if torch.is_grad_enabled() or overlapping else (EVERYTHING,)
        key = CallKey(modes, words, division, gradients, outputs, autocast=self.autocast, changed=self.frozen.changed())
        return KeyedCall(given, key, batch, times)

    def learn_first(
        self, args: tuple[Any, ...], keywords: Mapping[str, Any], modes: tuple[bool, ...], fixed_batch: int = 0
    ) -> None:
        """The example inputs, which select the first program whether gradients are wanted or not. Under the active autocast."""
        self.autocast = autocast_of(self.first.program.mesh.device.type)
        self.first.fixed_batch = fixed_batch
        key = self.call(modes, args, keywords).key._replace(division="micro-batches", outputs=())
        for gradients in (False, True):
            self.known[key._replace(gradients=gradients), fixed_batch] = self.first

    def find(self, call: KeyedCall) -> tuple[Variant, bool]:
        """The variant of a call, made where it is new, and whether it runs in training mode. All ranks must come here
        together."""
        modes, training = self.modes_of(call.key.modes)
        call = call._replace(key=call.key._replace(modes=modes))
        return (self._complete(call) if EVERYTHING in call.key.outputs else self._find(call)), training

    def _complete(self, call: KeyedCall) -> Variant:
        """A program that returns all fields: that of training where it leaves none out, else one that is asked for them. Where
        there is none, what is left out says so when it is used."""
        plain = call._replace(key=call.key._replace(outputs=()))
        found = self._known(plain)
        if plain.key in self.incomplete or (found is not None and not leaves_out(found.form)):
            return found or self._find(plain)
        try:
            variant = self._find(call)
        except AutoparError as problem:
            LOGGER.info("no program returns every field of a call with %s: %s", call.words(), problem)
            self.incomplete.add(plain.key)
            return self._find(plain)
        if found is None and not (variant.program.outputs and variant.program.has_loss):  # a call with gradients gets the same
            fixed = next(fixed for fixed in (0, call.batch) if (call.key, fixed) in self.known)
            self.known[plain.key, fixed] = self.known.pop((call.key, fixed))
        return variant

    def _known(self, call: KeyedCall) -> Variant | None:
        for fixed in (0, call.batch):
            found = self.known.get((call.key, fixed))
            if found is not None:
                if found is not self.first:
                    self.known.move_to_end((call.key, fixed))
                return found
        return None

    def _find(self, call: KeyedCall) -> Variant:
        if (found := self._known(call)) is not None:
            return found
        made = self.uneven.get(call.key) or self._made(call)
        if made.uneven:
            self.uneven[call.key] = made
        uneven_batch = call.batch if made.uneven else 0
        variant = self.load(made, self.first.program.mesh.for_variant(made.whole_batch, uneven_batch))
        self.known[call.key, uneven_batch or made.fixed_batch] = variant
        self._evict()
        return variant

    def _made(self, call: KeyedCall) -> MadeVariant:
        made = self.make(call, self.frozen.model)
        self.frozen.add(made.reads)
        for place, text in call.key.changed:
            values = self._values.setdefault(place, {text})
            if text not in values and len(values) + 1 == MANY_VALUES:
                warnings.warn(
                    f"{place} has had {MANY_VALUES} new values, and each makes a program of its own: pass it to the model as a "
                    "tensor, or make it a buffer (register_buffer), which is filled with the next value",
                    stacklevel=2,
                )
            values.add(text)
        return made

    def _evict(self) -> None:
        while len(self.known) > MOST_VARIANTS:
            oldest = next(key for key, each in self.known.items() if each is not self.first)
            del self.known[oldest]
            self.uneven.pop(oldest[0], None)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOGGER.warning(
                    "more than %d kinds of calls: the program of the one that was used least recently is dropped; pad inputs to "
                    "fewer lengths", MOST_VARIANTS
                )  # fmt: skip

    def agree(self, call: KeyedCall, describe: Callable[[int], str], backwards: int = 0) -> KeyedCall:
        """The call, with the parameters of all stages that train now. MismatchProblem on all ranks where they call different
        variants, or with batches of different sizes, or have begun different numbers of backwards."""
        changed = self.unfrozen.changed()
        several = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        if several:
            if self.control is None:
                self.control = control_group()
            number = hash_of((*call.key, call.batch))
            said = torch.tensor([number, -number, changed, backwards, -backwards])
            dist.all_reduce(said, dist.ReduceOp.MAX, self.control)
            if said[0] != -said[1]:
                stated = Stated(call.words(), "call it alike on every rank, with the global batch or with local_batch on all")
                require_agreement({"a call with": stated}, describe)
            if said[3] != -said[4]:
                require_agreement(
                    {"a number of backwards": Stated(str(backwards), "call backward on all ranks, or on none")}, describe
                )
            changed = bool(said[2])
        if changed:
            self.unfrozen.agree(several, describe)
        unfrozen = self.unfrozen.names if torch.is_grad_enabled() else ()
        return call._replace(key=call.key._replace(unfrozen=unfrozen))


def hash_of(value: object) -> int:
    """Equal on all ranks for equal values; 60 bits."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 4


def batch_size(leaves: list[tuple[str, Any]], dims: Mapping[str, int]) -> int:
    """The size of the batch's dimension of most tensors: `dims` by path, 0 of others."""
    shapes = [(leaf.shape, dims.get(path, 0)) for path, leaf in leaves if hasattr(leaf, "shape")]
    sizes = Counter(int(shape[dim]) for shape, dim in shapes if len(shape) > dim)
    return sizes.most_common(1)[0][0] if sizes else 1


def _words(leaf: Any, batch: int, dim: int) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return constant_text(leaf)
    sizes = ["B" if number == dim and size == batch else str(int(size)) for number, size in enumerate(shape)]
    flows = isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
    placed = model_placements(leaf) if isinstance(leaf, DTensor) else {}
    return f"{dtype} ({', '.join(sizes)}){' with gradient' if flows else ''}{f' {placed}' if placed else ''}"


def _is_default(known: Mapping[str, str], defaults: Mapping[str, str], path: str, leaf: Any) -> bool:
    """Whether an argument says what is taken for it anyway."""
    return path in defaults and (not known[path] or constant_text(leaf) == known[path])
