"""The options of planning as one frozen struct, checked when it is made, from which the question of the plan cache is derived.

`parallelize` and `make_plan` take these fields as keywords. A new option is a new field: it is part of the question that the
cache is asked, because that is made by iterating over the fields (`solve.plan_cache.question_of`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.capture.options import LossFunction
from autopar.cost_models.state.optimizers import check_optimizer
from autopar.errors import AutoparError
from autopar.ir.names import LONGEST
from autopar.ir.plan import Precision
from autopar.ir.plan_file.plan_file import Plan
from autopar.precision import PrecisionLike
from autopar.solve.problem.pins import Constraints, parse_constraints
from autopar.solve.space.force import Force, parse_force

_MOST_DIMS = 64
"""Dimensions of a tensor in torch, at most."""

_LARGEST = 2**31 - 1
"""The largest batch, length or seconds: what is larger is a mistake, and may not fit the integers of a solver."""


DocumentLengthsLike = str | float | Sequence[int] | Mapping[int, int] | None
"""What `DocumentLengths.parse` reads."""
Beside = Any
"""A plan or parallel model, or several in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of planning, beside model, cluster and example inputs. AutoparError where a value makes no sense.

    precision: dtypes of a step, see `parallelize` (None: those of the model).
    force: degrees that are fixed (``"tp=4,zero=3"``), or a whole configuration, which is priced as it is.
    constrain: placements of parameters and values by mesh axis (``{"lm_head": {"tp": "R"}}``, see `parallelize`).
    optimizer: its name (``"adamw"``), for the bytes and seconds of its state.
    strict: an operation without a sharding rule is an error.
    time_limit_seconds: when a search ends that its own limits, which are counts, have not ended; the plan says so then, and a
        second search (of programs that are not compiled) does not begin.
    outputs: fields of the model's result that come back beside the loss.
    batch_norm: ``"global"``: statistics of the whole batch, or ``"local"``: of each data rank's examples.
    expert_load: load of the busiest expert-parallel rank over the mean, or the path of a JSON list of tokens per expert.
    document_lengths: lengths of the documents in packed sequences, see `planning.make_plan`.
    loss_fn: from the model's result and a target to the loss, where the model has none.
    memory_margin: share of each device's memory that the plan leaves free (None: that of the cluster).
    held_bytes: memory of each device that other models take (see `held_bytes`).
    batch_dim: the tensor dimension of the batch, of all inputs or by argument (None: 0).
    batch: global batch in examples (None: that of the example inputs).
    seq, name, source: tokens of a sequence, name and origin of the model, which stand in the plan's description.
    compile: whether torch.compile compiles the program's blocks, and prices are those of compiled ones (None: on GPUs).
    processes: of the search, forked from this one.
    mode: ``"training"``, or ``"inference"``: a forward without gradients, of a model in evaluation.
    new_tokens: of each sequence after its prompt, which are decoded with a key-value cache (0: nothing is decoded).
    objective: of inference: ``"latency"`` of the batch, or ``"throughput"``: the batch is chosen too.
    """

    precision: PrecisionLike | None = None
    force: str | Mapping[str, int | str] | Force | None = ""
    constrain: Mapping[str, Mapping[str, Any]] | None = None
    optimizer: str = "adamw"
    strict: bool = False
    time_limit_seconds: float = 300.0
    outputs: Sequence[str] = ()
    batch_norm: str = "global"
    expert_load: float | str = 1.0
    document_lengths: DocumentLengthsLike = None
    loss_fn: LossFunction | None = None
    memory_margin: float | None = None
    held_bytes: int = 0
    batch_dim: int | Mapping[str, int] | None = None
    batch: int | None = None
    seq: int | None = None
    name: str = ""
    source: str = ""
    compile: bool | None = None
    processes: int = 1
    mode: str = "training"
    new_tokens: int = 0
    objective: str = "latency"

    def __post_init__(self) -> None:
        _check(self, _PLAN_CHECKS)
        check_optimizer(self.optimizer)
        if not isinstance(self.force, Force):
            parse_force(self.force)  # what does not parse is refused now, not after the model was captured
        if not self.infers and (self.new_tokens or self.objective != "latency"):
            raise AutoparError('new_tokens= and objective= are for inference: write mode="inference" too')
        if self.infers and self.forced.is_configuration:
            raise AutoparError("a whole configuration of force= is one of training: write degrees, such as tp=4")
        if self.infers and (self.forced.degrees.get("pp", 1) > 1 or self.forced.schedule or self.forced.synthesize):
            raise AutoparError("plans for inference have no pipeline: leave pp= and schedule= out of force=")
        if self.constraints and self.forced.is_configuration:
            raise AutoparError("constrain= is for the search, and force= is a whole configuration: leave one of them out")

    @property
    def infers(self) -> bool:
        """True where the plan is for inference."""
        return self.mode == "inference"

    def resolved(self, precision: Precision) -> PlanOptions:
        """The same options with the dtypes of a model, and with `force` and `constrain` parsed: two spellings of one question are
        one."""
        return replace(self, precision=precision, force=self.forced, constrain=self.constraints)

    @property
    def constraints(self) -> Constraints:
        """The placements that `constrain` pins."""
        return parse_constraints(self.constrain)

    @property
    def forced(self) -> Force:
        """The degrees and choices that `force` fixes."""
        return self.force if isinstance(self.force, Force) else parse_force(self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Options of running, see `parallelize`.

    plan: one that was made before, or its path (None: search).
    compile: blocks by torch.compile; a text is its backend (None: as the plan is priced, where there are GPUs and Triton).
    state: full tensors by name, or a folder of safetensors files (None: those of the model).
    cache: take plans from the cache, and keep them there.
    patience_seconds, join_seconds: until ranks that do not answer, or never join, are errors, in seconds.
    check_batch_every, check_every: calls and steps between two checks that cost time (0: never).
    proof: the program must be proven equal to the model before it runs (`checker`; else rank 0 warns where it is not).
    cuda_graph: training steps are captured and replayed as one CUDA graph.
    """

    plan: Plan | str | Path | None = None
    compile: bool | str | None = None
    state: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None
    cache: bool = True
    patience_seconds: float
    join_seconds: float
    check_batch_every: int = 100
    check_every: int = 0
    proof: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        _check(self, _RUNTIME_CHECKS)


def held_bytes(beside: Beside) -> int:
    """Return the bytes of a device that other models on it take at the peaks of their plans, in whichever order they run; the
    process and its context count once. AutoparError where one has no plan with a prediction."""
    every = [getattr(each, "plan", each) for each in (beside if isinstance(beside, Sequence) else [beside])]
    total = 0
    for plan in every:
        if not isinstance(plan, Plan) or plan.document.predicted.peak_memory_bytes is None:
            raise AutoparError(f"beside={type(plan).__name__} has no plan: pass parallel models of parallelize, or plans")
        predicted = plan.document.predicted
        total += predicted.peak_memory_bytes - predicted.memory.get("base", 0)  # type: ignore[operator]
    return total


# -- checks: fields, what their values are, and the message where one is not


def _check(options: PlanOptions | RuntimeOptions, checks: Checks) -> None:
    for fields, holds, message in checks:
        for field in fields.split():
            value = getattr(options, field)
            if not holds(value):
                said = message if isinstance(message, str) else message(value)
                raise AutoparError(f"{field}={_shorten(value)} {said}")


def _is_whole(value: object, least: int = 0, most: int = _LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and 0 < value <= _LARGEST


def _is_line(value: object) -> bool:
    """Return whether a text can stand in a plan: one line of printable characters."""
    return isinstance(value, str) and len(value) <= LONGEST and (value == "" or value.isprintable())


def _are_names(value: Any) -> bool:
    return not isinstance(value, str) and isinstance(value, Sequence) and all(isinstance(each, str) for each in value)


def _name_in(value: object) -> str:
    """The name that was passed without a list around it, quoted; an example where it is none."""
    return f'"{value}"' if isinstance(value, str) and 0 < len(value) <= 60 and value.isprintable() else '"logits"'


def _are_dims(value: Any) -> bool:
    every = value.values() if isinstance(value, Mapping) else () if value is None else (value,)
    return all(_is_whole(each, most=_MOST_DIMS - 1) for each in every)


def _shorten(value: object) -> str:
    """The value in a message: integers of thousands of digits have no text."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:60]


Checks = tuple[tuple[str, Callable[[Any], bool], str | Callable[[Any], str]], ...]

_PLAN_CHECKS: Checks = (
    ("optimizer name source", _is_line, "is no text that a plan can hold: write printable characters"),
    ("batch seq processes", lambda value: value is None or _is_whole(value, 1),
     f"is no count: write a whole number of 1 to {_LARGEST}"),
    ("time_limit_seconds", _is_seconds, "is no number of seconds: write one above 0, such as 300"),
    ("outputs", _are_names, lambda value: f"is no list of names: write outputs=({_name_in(value)},), or () for the loss alone"),
    ("expert_load", lambda value: isinstance(value, str) or (_is_number(value) and 1 <= value <= _LARGEST),
     "is no load of the busiest rank over the mean: write 1.0 or more"),
    ("document_lengths", lambda value: value is None or isinstance(value, (str, Sequence, Mapping)) or _is_number(value),
     "is no lengths of documents: write a number of tokens, a list, a histogram {length: count}, or the path of a JSON file"),
    ("memory_margin", lambda value: value is None or (_is_number(value) and 0 <= value < 1),
     "is no share of memory: write 0 (none) or more, below 1, such as 0.1"),
    ("batch_dim", _are_dims, 'is no dimension: write 1, or {"src": 1} by argument of the forward'),
    ("mode", lambda value: value in ("training", "inference"), 'is no mode: write "training" or "inference"'),
    ("objective", lambda value: value in ("latency", "throughput"), 'is no objective: write "latency" or "throughput"'),
    ("new_tokens", _is_whole, "is no number of tokens: write 0 or more"),
    ("compile", lambda value: value is None or isinstance(value, bool),
     "says nothing about prices: write True or False (backends are for autopar.parallelize)"),
    ("loss_fn", lambda value: value is None or callable(value),
     "is no function: pass one of the model's result and a target"),
)  # fmt: skip
_RUNTIME_CHECKS: Checks = (
    ("patience_seconds join_seconds", _is_seconds, "is no number of seconds: write one above 0, such as 30"),
    ("check_batch_every check_every", _is_whole, "is no number of calls: write 0 (never) or more"),
)
