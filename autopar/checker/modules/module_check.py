"""Checks a module that somebody parallelised by hand: the loss and the gradient of each parameter have the kinds that they must.

A factory makes the module as one rank would, with process groups of its own. It runs forward and backward on ranks of a group
that sends nothing; what they ran is compared, and kinds are carried through the lines of the first one. Start here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.checker.modules.line_kinds import LineKinds
from autopar.checker.modules.ranks import RanksOfAxis
from autopar.checker.modules.recording import UNKNOWN, Made, Recorder, Recording, WrongLine
from autopar.checker.modules.values import VARYING, RankValue, since, word
from autopar.checker.shards import REPLICATED, Axes, Cut, Kind
from autopar.errors import AutoparError
from autopar.ir.placement import Shard, parse_placement

Group = Callable[[int, int], AbstractContextManager[None]]
"""Makes this process a rank of a group that sends nothing."""
_FEW = 8
"""Ranks of an axis that are all run; of a longer axis the first, the second and the last are."""


@dataclass(frozen=True, slots=True)
class ManualModule:
    """The result of a factory. `placements`: by name (or pattern) of an input or parameter its placement on axes, as in
    ``{"*.up.weight": {"tp": "S(0)"}}``; all else is replicated, but that inputs are cut along their first dimension on data axes.
    `after_backward` adds up what gradients need; what it returns must be complete. `data`: axes over which gradients of all
    parameters are added up later, as DDP and FSDP do."""

    module: nn.Module
    inputs: Mapping[str, Any]
    placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    after_backward: Callable[[], Any] | None = None
    data: tuple[str, ...] = ("dp",)

    @staticmethod
    def of(made: Any) -> ManualModule:
        """The module and inputs that a factory returned, and the rest by name."""
        if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module) and isinstance(made[1], Mapping):
            more = dict(made[2]) if len(made) == 3 else {}
            if not set(more) - {"placements", "after_backward", "data"}:
                return ManualModule(made[0], made[1], **more)
        raise AutoparError('the factory of check-module returns (module, inputs) or (module, inputs, {"placements": {...}})')


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """`wrong`: the first line whose result, or the parameters whose gradients, have the wrong kind. `assumed`: by line."""

    wrong: tuple[str, ...]
    assumed: Mapping[str, str]
    lines: int
    parameters: int


def check_module(factory: Callable[[], Any], mesh: Mapping[str, int], group: Group) -> ModuleVerdict:
    """Check the module that a factory makes on each rank of a mesh (outermost axis first)."""
    recordings: dict[int, Recording] = {}
    kinds: LineKinds | None = None
    try:
        manual, recordings[0] = _record(factory, 0, mesh, group)
        axes = Axes.of(mesh, 1)
        kinds = LineKinds(axes, frozenset(manual.data))
        differences = {}
        for name, size in zip(axes.names, axes.sizes, strict=True):
            coordinates = range(size) if size <= _FEW else (0, 1, size - 1)
            below = prod(list(mesh.values())[list(mesh).index(name) + 1 :])
            for each in coordinates:
                if each * below not in recordings:
                    recordings[each * below] = _record(factory, each * below, mesh, group)[1]
            differences[name] = RanksOfAxis([recordings[each * below] for each in coordinates], tuple(coordinates)).differences()
        first = recordings[0]
        for name, made in first.given.items():
            kinds.values[made.name] = _declared(manual, name, made, axes)
            if name.startswith(UNKNOWN):
                kinds.assumed[name] = "it is equal on all ranks"
        needed = _needed(first)
        for number, line in enumerate(first.lines):
            if number in needed:
                kinds.run(line, {name: found[number] for name, found in differences.items() if number in found})
    except WrongLine as error:
        lines = len(recordings[0].lines) if 0 in recordings else 0
        return ModuleVerdict((str(error),), {} if kinds is None else kinds.assumed, lines, 0)
    wrong = tuple(_results(manual, first, kinds))
    gradients = sum(name.startswith("gradient of ") for name in first.results)
    return ModuleVerdict(wrong, kinds.assumed, len(first.lines), gradients)


def _record(factory: Callable[[], Any], rank: int, mesh: Mapping[str, int], group: Group) -> tuple[ManualModule, Recording]:
    """Run the module forward and backward on a rank."""
    recorder = Recorder(rank, mesh)
    with group(rank, prod(mesh.values())), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anomaly detection, which keeps the line of each operation for its backward
        torch.manual_seed(0)
        try:
            manual = ManualModule.of(factory())
            _run(manual, recorder)
        except (AutoparError, WrongLine):
            raise
        except Exception as error:
            raise AutoparError(f"rank {rank} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    return manual, recorder.recording


def _run(manual: ManualModule, recorder: Recorder) -> None:
    given = (*manual.module.named_parameters(), *manual.module.named_buffers(), *manual.inputs.items())
    for name, each in given:
        if isinstance(each, Tensor) and type(each) not in (Tensor, nn.Parameter):
            raise AutoparError(f"{name} is a {type(each).__name__}: check-module takes plain tensors, and collectives by hand")
        if isinstance(each, Tensor):
            recorder.give(name, each)
    with recorder, sdpa_kernel(SDPBackend.MATH), torch.autograd.set_detect_anomaly(True, check_nan=False):
        made = manual.module(**manual.inputs)
        loss = made if isinstance(made, Tensor) else next(iter(made.values() if isinstance(made, Mapping) else made))
        if loss.dim() or not loss.requires_grad:
            raise AutoparError(f"the module returns a tensor of shape {list(loss.shape)} first: return its loss there")
        recorder.take("the loss", loss)
        seed = torch.ones_like(loss)
        recorder.give("the gradient of the loss", seed)
        recorder.pair_gradients()
        loss.backward(seed)
        complete = manual.after_backward() if manual.after_backward is not None else None
    for index, each in enumerate(complete if isinstance(complete, tuple) else (complete,)):
        if isinstance(each, Tensor):
            recorder.take(f"result {index + 1} of after_backward", each)
    for name, parameter in manual.module.named_parameters():
        if parameter.grad is not None:
            recorder.take(f"gradient of {name}", parameter.grad)
        elif parameter.requires_grad:
            raise AutoparError(f"{name} gets no gradient: freeze it (requires_grad_(False)), or look for what detaches it")


def _needed(recording: Recording) -> set[int]:
    """The lines that the results follow from; of the others (metrics) nothing is asked."""
    wanted = {made.name for made in recording.results.values()}
    needed = set[int]()
    for number in reversed(range(len(recording.lines))):
        line = recording.lines[number]
        if wanted & {made.name for made in line.results} or not line.results:
            needed.add(number)
            wanted |= {made.name for made in line.operands}
    return needed


def _declared(manual: ManualModule, name: str, made: Made, axes: Axes) -> RankValue:
    """The kinds that a tensor has before anything runs."""
    places = next((dict(places) for pattern, places in manual.placements.items() if fnmatch(name, pattern)), {})
    if name in manual.inputs and made.shape:
        places = {**dict.fromkeys(manual.data, "S(0)"), **places}
    out: list[Kind] = []
    for axis in axes.names:
        place = parse_placement(places.get(axis, "R"))
        out.append(Cut(place.dim % len(made.shape), made.shape[place.dim]) if isinstance(place, Shard) else str(place)[0])
    return RankValue(tuple(out), ("",) * len(out))


def _results(manual: ManualModule, recording: Recording, kinds: LineKinds) -> Iterator[str]:
    """Return what is wrong with the loss and with gradients."""
    for name, made in recording.results.items():
        value = kinds.values[made.name]
        for index, axis in enumerate(kinds.axes.names):
            kind, where = value.kinds[index], since(value, index)
            given = recording.given.get(name.removeprefix("gradient of "))
            own = kinds.values[given.name].kinds[index] if given is not None else REPLICATED
            if axis in manual.data:
                if name.startswith("gradient of ") and kind == REPLICATED and own == REPLICATED:
                    yield f"{name} is equal on {axis}{where}, over which it is added up once more"
            elif isinstance(own, Cut):
                if kind not in (own, VARYING, REPLICATED):
                    yield f"{name} is {word(kind)} on {axis}{where}, and the parameter is {word(own)}"
            elif kind != REPLICATED:
                yield f"{name} is {word(kind)} on {axis}{where}, and must be complete on every rank"
