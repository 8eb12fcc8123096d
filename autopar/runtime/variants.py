"""The variants of a parallel model: one set of weights and many programs. What a call may change selects the program."""

from __future__ import annotations

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .call_keys import CallKey, KeyedCall, call_leaves, hash_of, sight_of
from .comm.agreement import Stated, bounds_on_ranks, require_agreement
from .compat.autograd import apply, in_backward
from .device.autocast import autocast_of
from .device.groups import control_group, several_ranks
from .device.mesh import MeshHandle
from .errors import AutoparError, RuntimeProblem
from .key_value_cache import USE_CACHE
from .module import Program
from .pipeline.pipeline_step import PipeDreamStep, PipelineStep
from .pipeline.stage_modules import PipelineProgram
from .plain.frozen_reads import FrozenReads, Reads
from .plain.plain_model import PlainModel
from .plain.script_work import ScriptWork
from .state.lend import UnfrozenParameters, lend_state
from .state.model_state import State
from .step.compiled_blocks import compile_blocks
from .step.inputs import arguments_by_name
from .step.micro_batches import Batch, StepResult, run_micro_batches, split_result
from .step.outputs import EVERYTHING
from .step.results import Lacks, Missing, leaves_out
from .step.step_graph import StepGraph

MOST_VARIANTS = 64
"""Programs that are kept; the least recently used one goes first."""

MANY_VALUES = 4
"""The number of values of one attribute, each with a program of its own, after which a warning says what costs less."""

LOGGER = logging.getLogger("autopar")


class VariantParts(NamedTuple):
    """The ingredients of a variant: a program, the form of its result, and the batch size that it is fixed to (0: any).
    `whole_batch`: every data rank computes the whole batch; `uneven`: data ranks have uneven shards of it; `context`: so many
    share an example, and shard its sequence. `reads`: of its capture. `lacks`: what it lacks of all fields."""

    program: type[Program]
    form: Any
    fixed_batch: int
    whole_batch: bool
    uneven: bool = False
    reads: Reads = Reads()
    context: int = 1
    lacks: Missing = ()


@dataclass(eq=False)
class Variant:
    """A program that computes with the weights of the first one. `whole_batch`: every data rank computes the whole batch, and its
    gradients count as one part of their sum."""

    program: Program
    form: Any
    state: State
    step: PipelineStep | PipeDreamStep | None = None
    whole_batch: bool = False
    fixed_batch: int = 0
    graph: StepGraph | None = None
    lacks: Missing = ()
    calls_by_mode: Counter[Hashable] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.training = self.program.training

    @property
    def overlaps_steps(self) -> bool:
        """Return whether steps overlap, with two versions of the weights: then it is the only program."""
        return isinstance(self.step, PipeDreamStep)

    @property
    def copies(self) -> int:
        """The number of data ranks that compute the same."""
        return self.program.state_program.mesh.dp.size if self.whole_batch else 1

    def run(self, inputs: Batch, training: bool) -> StepResult:
        """The loss, and this rank's shard of each output."""
        if self.training != training:
            self.program.train(training)
            self.training = training
        if self.copies > 1:
            inputs = {name: scale_gradient(x, self.copies) for name, x in inputs.items()}
        graph = self.graph if training and torch.is_grad_enabled() and not in_backward() else None
        if graph is not None and graph.takes(inputs):
            loss, others = graph.run(inputs)
        elif self.step is not None:
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
    """Return `x`, whose gradient is multiplied by `factor`."""
    return apply(_ScaleGradient, x, factor) if x.requires_grad else x


def division_of(batch: int, ranks: int, micro_batches: int, uneven: bool) -> str:
    """Return the words for what a program depends on beside the sizes: how a batch divides over data ranks and micro-batches.
    `uneven`: where data ranks may have uneven shards."""

    def parts_of(examples: int) -> int:
        return max(parts for parts in range(1, micro_batches + 1) if examples % parts == 0)

    if batch % ranks == 0:
        parts = parts_of(batch // ranks)
        return "micro-batches" if parts == micro_batches else f"{parts} micro-batches"
    shared = f"by {gcd(batch, ranks)} of {ranks} data ranks"
    return f"uneven, {shared}" if uneven and batch > ranks else f"{shared}, {parts_of(batch)} micro-batches"


MakeVariant = Callable[[KeyedCall, nn.Module], VariantParts]


class Variants:
    """All programs of a parallel model. `make` captures and plans one of the plain model without data (all ranks call it
    together). `modes`: training or evaluation of each module in the `first` one. `compiler`: the backend of torch.compile, or
    False."""

    def __init__(
        self, first: Variant, make: MakeVariant, plain: PlainModel, modes: tuple[bool, ...], compiler: Any = False
    ) -> None:
        self.first, self.make, self.plain, self.captured_modes, self.compiler = first, make, plain, modes, compiler
        self.sight = sight_of(plain.frozen.model, plain.frozen.questions)
        self._values: dict[str, set[str]] = {}
        self.programs: OrderedDict[tuple[CallKey, int], Variant] = OrderedDict()
        self.uneven: dict[CallKey, VariantParts] = {}  # a program for each number of examples, of one class
        self.control: dist.ProcessGroup | None = None
        self.outputs: tuple[str, ...] | None = None
        self.incomplete: dict[CallKey, Missing] = {}  # calls of which no program returns everything
        self.lacks = Lacks()  # of the last call
        self.autocast = ""
        self.unfrozen, self.work = UnfrozenParameters(first.state), ScriptWork(first.state)
        self.trains = True  # a parameter of any stage, in the last call
        self.adopt: Callable[[Program], None] = lambda program: None  # called before a program runs

    def different_programs(self) -> list[Program]:
        """The first program and all others that are there, each once."""
        return list(dict.fromkeys((self.first.program, *(each.program for each in self.programs.values()))))

    @property
    def frozen(self) -> FrozenReads:
        """The reads of programs in the plain model."""
        return self.plain.frozen

    @contextmanager
    def returning(self, outputs: tuple[str, ...]) -> Iterator[None]:
        """A context in which calls return these fields beside the loss."""
        before, self.outputs = self.outputs, outputs
        try:
            yield
        finally:
            self.outputs = before

    def call(self, modes: tuple[bool, ...], args: tuple[Any, ...], keywords: Mapping[str, Any], times: int = 1) -> KeyedCall:
        """Return a call in words. `times`: how often the global batch holds that of the arguments."""
        program = self.first.program
        arguments = arguments_by_name(program, args, keywords)
        words, batch = call_leaves(program, arguments, times, self.sight)
        division = division_of(batch, program.mesh.dp.size, program.micro_batches, self.first.step is None)
        gradients = self.first.step is not None and torch.is_grad_enabled()
        outputs = self.outputs
        if outputs is None:
            outputs = () if torch.is_grad_enabled() or self.first.overlaps_steps else (EVERYTHING,)
        key = CallKey(modes, words, division, gradients, outputs, autocast=self.autocast, changed=self.frozen.changed())
        return KeyedCall(arguments, key, batch, times)

    def learn_first(self, args: tuple[Any, ...], keywords: Mapping[str, Any], fixed_batch: int = 0) -> None:
        """The example inputs, which select the first program whether gradients are wanted or not. Under the active autocast."""
        self.autocast = autocast_of(self.first.program.mesh.device.type)
        self.first.fixed_batch = fixed_batch
        key = self.call(self.captured_modes, args, keywords).key._replace(division="micro-batches", outputs=())
        for gradients in (False, True):
            self.programs[key._replace(gradients=gradients), fixed_batch] = self.first

    def find(self, call: KeyedCall) -> tuple[Variant, bool]:
        """The variant of a call, made where it is new, and whether it runs in training mode. All ranks must come here
        together."""
        modes, training = self._program_modes(call.key.modes)
        call = call._replace(key=call.key._replace(modes=modes))
        variant, missing = self._complete(call) if EVERYTHING in call.key.outputs else (self._find(call), ())
        self.lacks = Lacks(missing, self._caches(call))
        self.adopt(variant.program)
        return variant, training

    def _program_modes(self, modes: tuple[bool, ...]) -> tuple[tuple[bool, ...], bool]:
        """Return the modes in which the program of a call is captured, and the one in which it runs: a program without another
        branch in evaluation just leaves dropout out."""
        alike = modes != self.captured_modes and len(set(modes)) == 1
        if alike and not self.frozen.changed() and self.plain.right_in(modes[0]):  # it answers for the first program's attributes
            return self.captured_modes, modes[0]
        return modes, True

    def _caches(self, call: KeyedCall) -> bool:
        """Return whether a call asks a model of transformers for a cache."""
        asked = call.arguments.get(USE_CACHE)
        return bool(getattr(getattr(self.frozen.model, "config", None), USE_CACHE, True) if asked is None else asked)

    def _complete(self, call: KeyedCall) -> tuple[Variant, Missing]:
        """A program that returns all fields: that of training where it leaves none out, else one that is asked for them. Where
        there is none, what is left out says so when it is used."""
        plain = call._replace(key=call.key._replace(outputs=()))
        usual = self._lookup(plain)
        missing = self.incomplete.get(plain.key, ())
        if missing or (usual is not None and not leaves_out(usual.form)):
            return usual or self._find(plain), missing
        try:
            variant = self._find(call)
        except AutoparError as problem:
            LOGGER.info("no program returns every field of a call with %s: %s", call.words(), problem)
            self.incomplete[plain.key] = (("", f"no program returns every field of this call ({problem})"),)
            return self._find(plain), self.incomplete[plain.key]
        if usual is None and not (variant.program.outputs and variant.program.has_loss):  # a call with gradients gets the same
            fixed = next(fixed for fixed in self._batches(call) if self.programs.get((call.key, fixed)) is variant)
            self._keep(plain, max(fixed, 0), self.programs.pop((call.key, fixed)))
        return variant, variant.lacks

    def _batches(self, call: KeyedCall) -> Iterator[int]:
        """Yield the second keys of the programs that may take a call: 0 is any batch, a number that alone, and a negative one any
        batch of the branches of the forward that this many examples took first."""
        yield from (0, call.batch, *(batch for key, batch in self.programs if batch < 0 and key == call.key))

    def _lookup(self, call: KeyedCall) -> Variant | None:
        for fixed in self._batches(call):
            variant = self.programs.get((call.key, fixed))
            if variant is not None and variant.program.takes_batch(call.batch):
                if variant is not self.first:
                    self.programs.move_to_end((call.key, fixed))
                return variant
        return None

    def _find(self, call: KeyedCall) -> Variant:
        if (existing := self._lookup(call)) is not None:
            return existing
        known = self.uneven.get(call.key)
        parts = known if known is not None and known.program.takes_batch(call.batch) else self._make(call)
        if parts.uneven:
            self.uneven[call.key] = parts
        uneven_batch = call.batch if parts.uneven else 0
        variant = self._load(parts, self.first.program.mesh.for_variant(parts.whole_batch, uneven_batch, context=parts.context))
        self._keep(call, uneven_batch or parts.fixed_batch, variant)
        self._evict()
        return variant

    def _keep(self, call: KeyedCall, fixed: int, variant: Variant) -> None:
        """Keep a variant for calls of any batch of its branches, or of the batch that it is `fixed` to."""
        self.programs[call.key, fixed or (-call.batch if (call.key, 0) in self.programs else 0)] = variant

    def _load(self, parts: VariantParts, mesh: MeshHandle) -> Variant:
        """Return the variant with the weights of the first one."""
        program = parts.program(mesh)
        lend_state(program, self.first.program, self.first.state)
        step: PipelineStep | None = None
        if isinstance(program, PipelineProgram):
            if not isinstance(self.first.step, PipelineStep):
                raise RuntimeProblem(
                    "with two versions of the weights all calls must be like the first one: take weight_versions=1"
                )
            step = PipelineStep(program, self.first.state, self.first.step)
        if self.compiler:
            compile_blocks(program, self.compiler)
        if self.first.graph is not None and torch.is_grad_enabled():
            warnings.warn(
                "a call with another mode, arguments, lengths or autocast than the example inputs runs without a CUDA graph: "
                "pass example inputs of the kind that trains, in its mode and autocast",
                stacklevel=2,
            )
        return Variant(
            program, parts.form, self.first.state, step, parts.whole_batch, fixed_batch=parts.fixed_batch, lacks=parts.lacks
        )

    def _make(self, call: KeyedCall) -> VariantParts:
        parts = self.make(call, self.frozen.model)
        self.frozen.add(parts.reads)
        for place, text in call.key.changed:
            values = self._values.setdefault(place, {text})
            if text not in values and len(values) + 1 == MANY_VALUES:
                warnings.warn(
                    f"{place} has had {MANY_VALUES} new values, and each makes a program of its own: pass it to the model as a "
                    "tensor, or make it a buffer (register_buffer), which is filled with the next value",
                    stacklevel=2,
                )
            values.add(text)
        return parts

    def _evict(self) -> None:
        while len(self.programs) > MOST_VARIANTS:
            oldest = next(key for key, each in self.programs.items() if each is not self.first)
            del self.programs[oldest]
            self.uneven.pop(oldest[0], None)
            if not dist.is_initialized() or dist.get_rank() == 0:
                LOGGER.warning(
                    "more than %d kinds of calls: the program of the one that was used least recently is dropped; pad inputs to "
                    "fewer lengths (parallel.sampler(dataset, lengths=...))", MOST_VARIANTS
                )  # fmt: skip

    def agree(self, call: KeyedCall, describe: Callable[[int], str], backwards: int = 0) -> KeyedCall:
        """The call, with the parameters of all stages that train now. MismatchProblem on all ranks where they call different
        variants, or with batches of different sizes, or have begun different numbers of backwards, or have made different
        optimizer steps or read different values of stages."""
        changed, self.trains = self.unfrozen.changed(), self.first.state.trains()
        several, seeds = several_ranks(), [*self.first.program.mesh.seed_change()]
        if several:
            if self.control is None:
                self.control = control_group()
            number = hash_of((*call.key, call.batch))
            own = torch.tensor([number, backwards, changed, self.trains, hash_of(self.work.record), *seeds])
            least, most = bounds_on_ranks(own, [self.control])
            same_call, same_backwards, same_changes, _, same_work, *_ = (least == most).tolist()
            self.trains, seeds = bool(most[3]), most[5:].tolist()  # scripts may seed each rank otherwise
            if not same_call:
                require_agreement({"a call with": Stated(call.words(), call.remedy())}, describe)
            if not same_backwards:
                require_agreement(
                    {"a number of backwards": Stated(str(backwards), "call backward on all ranks, or on none")}, describe
                )
            self.work.agree(same_work, describe)
            changed = changed or not same_changes
        if changed:
            self.unfrozen.agree(several, describe)
        # without a change too: an evaluation may have drawn on one stage alone
        for program in self.different_programs() if seeds[0] else [self.first.program]:
            program.mesh.follow_seed(*seeds)
        unfrozen = self.unfrozen.names if torch.is_grad_enabled() else ()
        return call._replace(key=call.key._replace(unfrozen=unfrozen))
