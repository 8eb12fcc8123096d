"""The options of planning as one frozen struct, checked when it is made, from which the question of the plan cache is derived.

`parallelize` and `make_plan` take these fields as keywords. A new option is a new field: it is part of the question that the
cache is asked, because that is made by iterating over the fields (`solve.plan_cache.question_of`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopar.capture.tracing.trace import LossFunction
from autopar.cost_models.state.optimizers import check_optimizer
from autopar.errors import AutoparError
from autopar.ir.plan import Precision
from autopar.ir.plan_file.names import LONGEST
from autopar.ir.plan_file.plan_file import Plan
from autopar.precision import PrecisionLike
from autopar.solve.space.force import Force, parse_force

_MOST_DIMS = 64
"""Dimensions of a tensor in torch, at most."""

_LARGEST = 2**31 - 1
"""For batches, lengths and seconds: what is larger is a mistake, and may not fit the integers of a solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of planning, beside model, cluster and example inputs. AutoparError where a value makes no sense.

    precision: dtypes of a step, see `parallelize` (None: those of the model).
    force: degrees that are fixed (``"tp=4,zero=3"``), or a whole configuration, which is priced as it is.
    optimizer: its name (``"adamw"``), for the bytes and seconds of its state.
    strict: an operation without a sharding rule is an error.
    time_limit_seconds: when a search ends that its own limits, which are counts, have not ended; the plan says so then.
    outputs: fields of the model's result that come back beside the loss.
    batch_norm: ``"global"``: statistics of the whole batch, or ``"local"``: of each data rank's examples.
    expert_load: load of the busiest expert-parallel rank over the mean, or the path of a JSON list of tokens per expert.
    loss_fn: from the model's result and a target to the loss, where the model has none.
    memory_margin: share of each device's memory that the plan leaves free (None: that of the cluster).
    batch_dim: the tensor dimension of the batch, of all inputs or by argument (None: 0).
    batch: global batch in examples (None: that of the example inputs).
    seq, name, source: tokens of a sequence, name and origin of the model, which stand in the plan's description.
    processes: of the search, forked from this one.
    """

    precision: PrecisionLike | None = None
    force: str | Mapping[str, int | str] | Force | None = ""
    optimizer: str = "adamw"
    strict: bool = False
    time_limit_seconds: float = 300.0
    outputs: Sequence[str] = ()
    batch_norm: str = "global"
    expert_load: float | str = 1.0
    loss_fn: LossFunction | None = None
    memory_margin: float | None = None
    batch_dim: int | Mapping[str, int] | None = None
    batch: int | None = None
    seq: int | None = None
    name: str = ""
    source: str = ""
    processes: int = 1

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    def resolved(self, precision: Precision) -> PlanOptions:
        """The same options with the dtypes of a model, and with `force` parsed: two spellings of one question are one."""
        return replace(self, precision=precision, force=self.forced)

    @property
    def forced(self) -> Force:
        """The degrees and choices that `force` fixes."""
        return self.force if isinstance(self.force, Force) else parse_force(self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Options of running, see `parallelize`.

    plan: one that was made before, or its path (None: search).
    compile: blocks by torch.compile; a text is its mode.
    state: full tensors by name, or a folder of safetensors files (None: those of the model).
    cache: take plans from the cache, and keep them there.
    patience_seconds, join_seconds: until ranks that do not answer, or never join, are errors, in seconds.
    check_batch_every, check_every: calls and steps between two checks that cost time (0: never).
    proof: the program must be proven equal to the model before it runs (`checker`).
    """

    plan: Plan | str | Path | None = None
    compile: bool | str = False
    state: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None
    cache: bool = True
    patience_seconds: float
    join_seconds: float
    check_batch_every: int = 100
    check_every: int = 0
    proof: bool = False

    def __post_init__(self) -> None:
        for what in ("patience_seconds", "join_seconds"):
            value = getattr(self, what)
            if not _is_number(value) or not 0 < value <= _LARGEST:
                raise AutoparError(f"{what}={_shorten(value)} is no number of seconds: write one above 0, such as 30")
        for what in ("check_batch_every", "check_every"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
                raise AutoparError(f"{what}={_shorten(value)} is no number of calls: write 0 (never) or more")


# -- checks, each of one or a few fields


def _check_texts(options: PlanOptions) -> None:
    """Check that a text that stands in a plan is one line of printable characters."""
    for what in ("optimizer", "name", "source"):
        text = getattr(options, what)
        if not isinstance(text, str) or len(text) > LONGEST or not (text == "" or text.isprintable()):
            raise AutoparError(f"{what} {str(text)[:40]!r} is no text that a plan can hold: write printable characters")
    check_optimizer(options.optimizer)


def _check_force(options: PlanOptions) -> None:
    """Refuse what does not parse now, not after the model was captured."""
    if not isinstance(options.force, Force):
        parse_force(options.force)


def _check_counts(options: PlanOptions) -> None:
    for what in ("batch", "seq", "processes"):
        value = getattr(options, what)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= _LARGEST):
            raise AutoparError(f"{what}={_shorten(value)} is no count: write a whole number of 1 to {_LARGEST}")


def _check_seconds(options: PlanOptions) -> None:
    value = options.time_limit_seconds
    if not _is_number(value) or not 0 < value <= _LARGEST:
        raise AutoparError(f"time_limit_seconds={_shorten(value)} is no number of seconds: write one above 0, such as 300")


def _check_outputs(options: PlanOptions) -> None:
    value = options.outputs
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        example = f'outputs=("{value}",)' if isinstance(value, str) and value.isidentifier() else 'outputs=("logits",)'
        raise AutoparError(f"outputs={_shorten(value)} is no list of names: write {example}, or () for the loss alone")


def _check_load(options: PlanOptions) -> None:
    value = options.expert_load
    if not isinstance(value, str) and not (_is_number(value) and 1 <= value <= _LARGEST):
        raise AutoparError(f"expert_load={_shorten(value)} is no load of the busiest rank over the mean: write 1.0 or more")


def _check_margin(options: PlanOptions) -> None:
    value = options.memory_margin
    if value is not None and not (_is_number(value) and 0 <= value < 1):
        raise AutoparError(f"memory_margin={_shorten(value)} is no share of memory: write 0 (none) or more, below 1, such as 0.1")


def _check_batch_dim(options: PlanOptions) -> None:
    value = options.batch_dim
    every = list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < _MOST_DIMS for each in every):
        raise AutoparError(f'batch_dim={_shorten(value)} is no dimension: write 1, or {{"src": 1}} by argument of the forward')


def _check_loss(options: PlanOptions) -> None:
    if options.loss_fn is not None and not callable(options.loss_fn):
        raise AutoparError(f"loss_fn={_shorten(options.loss_fn)} is no function: pass one of the model's result and a target")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def _shorten(value: object) -> str:
    """The value in a message: integers of thousands of digits have no text."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:60]


_CHECKS: tuple[Callable[[PlanOptions], None], ...] = (
    _check_texts, _check_force, _check_counts, _check_seconds, _check_outputs, _check_load, _check_margin, _check_batch_dim,
    _check_loss,
)  # fmt: skip
