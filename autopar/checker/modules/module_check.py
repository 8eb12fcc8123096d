"""Checks a module that somebody parallelised by hand: the loss and the gradient of each parameter have the kinds that they must.

A factory makes the module as one rank would, with process groups of its own. It runs forward and backward on ranks of a group
that sends nothing; what they ran is compared, and kinds are carried through the lines of the first one. Start here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.checker.modules.line_kinds import LineKinds
from autopar.checker.modules.recording import UNKNOWN, Made, RecordedLine, Recorder, Recording, WrongLine
from autopar.checker.modules.values import VARYING, RankDifference, RankValue, since, word
from autopar.checker.shards import REPLICATED, Axes, Cut, Kind
from autopar.errors import AutoparError
from autopar.ir.placement import Shard, parse_placement

Group = Callable[[int, int], AbstractContextManager[None]]
"""Makes this process a rank of a group that sends nothing."""
_FEW = 8
"""Ranks of an axis that are all run; of a longer axis the first, the second and the last are."""
_PARTS = ("aten.split", "aten.split_with_sizes", "aten.chunk")


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


@dataclass(frozen=True, slots=True)
class RanksOfAxis:
    """The recordings of ranks along one axis that run one text, and their coordinates there: numbers and parts that follow from a
    coordinate may differ, and all else is equal."""

    recordings: Sequence[Recording]
    coordinates: tuple[int, ...]

    def differences(self) -> dict[int, RankDifference]:
        """Return the part that differs of each line, by its number. WrongLine where a rank runs other operations."""
        first, out = self.recordings[0].lines, dict[int, RankDifference]()
        makers = {made.name: (line, index) for line in first for index, made in enumerate(line.results)}
        for number, line in enumerate(first):
            ranks = [each.lines[number] if number < len(each.lines) else None for each in self.recordings]
            other = next((each for each in ranks if each is None or _form(each) != _form(line)), line)
            if other is not line:
                runs = "nothing" if other is None else other.op.removeprefix("aten.")
                raise WrongLine(line.source, f"one rank runs {line.op.removeprefix('aten.')} here, and another one {runs}")
            found = self._difference([each for each in ranks if each is not None], makers)
            if found is not None:
                out[number] = found
        longest = max(self.recordings, key=lambda each: len(each.lines)).lines
        if len(longest) > len(first):
            raise WrongLine(longest[len(first)].source, "one rank runs this, and another one does not")
        return out

    def _difference(self, ranks: Sequence[RecordedLine], makers: Mapping[int, tuple[RecordedLine, int]]) -> RankDifference | None:
        line = ranks[0]
        columns = list(zip(*(rank.operands for rank in ranks), strict=True))
        operands = {i: self._part([made.name for made in each], makers) for i, each in enumerate(columns) if len(set(each)) > 1}
        numbers = [{k: repr(each) for k, each in rank.arguments.items() if "TensorName" not in repr(each)} for rank in ranks]
        if all(each == numbers[0] for each in numbers):
            return RankDifference(operands) if operands else None
        if line.op == "aten.slice" and not operands:
            dim = int(line.arguments["dim"]) % len(line.operands[0].shape)
            size = line.results[0].shape[dim]
            if [int(each.arguments["start"] or 0) for each in ranks] == [each * size for each in self.coordinates]:
                return RankDifference({}, Cut(dim, size))
        return RankDifference(operands, VARYING)

    def _part(self, names: Sequence[int], makers: Mapping[int, tuple[RecordedLine, int]]) -> Kind:
        """The cut of a tensor of which each rank takes the part of its coordinate."""
        found = [makers.get(name) for name in names]
        line = found[0][0] if found[0] is not None else None
        parts = [each[1] for each in found if each is not None and each[0] is line]
        if line is None or line.op not in _PARTS or parts != list(self.coordinates):
            return VARYING
        dim = int(line.arguments.get("dim", 0)) % len(line.results[0].shape)
        return Cut(dim, line.results[0].shape[dim])


def _form(line: RecordedLine) -> tuple[Any, ...]:
    return line.op, line.axes, *(tuple((x.shape, x.dtype) for x in side) for side in (line.operands, line.results))
