"""What a forward reads that is no argument, recorded while it is traced: attributes of modules, states of random generators.

What Python computes in the forward (a draw of `random`, ``self.n += 1``) happens once, at the capture; a program would repeat its
result for ever, so that is a CaptureError.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.runtime.plain.frozen_reads import EVERY_FIELD, LEAVES, NamedValue, Reads, class_name

_NUMBERS = (bool, int, float, str)
_NO_SETTINGS = frozenset(("torch", "sympy", "numpy", "autopar", "builtins", "functools", "collections", "types"))
"""Packages whose objects are no settings; dynamo's own, which reads of it would change, are among them."""
_LIBRARY = (torch.__file__.rsplit("/", 1)[0], random.__file__, "/numpy/", "/autopar/capture/", "/contextlib.py")


@dataclass(eq=False)
class ReadRecord:
    """`read` and `written`: (class, attribute) of modules; `fields`: of plain objects in them. `numbers`: the value that was read
    first; `seen`: each (module, attribute) that was read, `reset`: those that the forward wrote before it read them. `counters`:
    by (path, attribute), numbers that the forward read and then replaced, with the last one and the line. `generators`: those of
    modules, with their state. `seeded`: generators that the forward itself seeds before it draws."""

    read: set[tuple[str, str]] = field(default_factory=set)
    written: set[tuple[str, str]] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)
    numbers: dict[tuple[int, str], Any] = field(default_factory=dict)
    seen: set[tuple[int, str]] = field(default_factory=set)
    reset: set[tuple[int, str]] = field(default_factory=set)
    counters: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    generators: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    seeded: set[str] = field(default_factory=set)

    @property
    def reads(self) -> Reads:
        return Reads(frozenset(self.read), frozenset(self.written), frozenset(self.fields))

    def add(self, reads: Reads) -> None:
        self.read |= reads.attributes
        self.written |= reads.writes
        self.fields |= reads.fields


_recorded: ContextVar[tuple[ReadRecord, ...]] = ContextVar("records of what captures read", default=())


@contextmanager
def recorded_reads() -> Iterator[ReadRecord]:
    """The record of what every capture inside reads."""
    record = ReadRecord()
    token = _recorded.set((*_recorded.get(), record))
    try:
        yield record
    finally:
        _recorded.reset(token)


def call_recorded(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, ReadRecord]:
    """What the forward of the model gives, and what it read. CaptureError where it draws from a random generator of Python or
    numpy."""
    own = ReadRecord()
    states = _global_states()
    with _recording(own, {id(module): path for path, module in model.named_modules()}), _single_draws(own, states):
        try:
            result = call()
        except Exception as error:
            if _Single.__name__ not in str(error):
                raise
            raise CaptureError(_draw_text(_line_of(error), "Python's or numpy's")) from None
        if _drawn(states, own):
            raise CaptureError(_said_draw(model, call, own))
    for record in _recorded.get():
        record.add(own.reads)
    return result, own


def refuse_counters(trace: Callable[[Mapping[tuple[str, str], Any]], Any], records: list[ReadRecord]) -> None:
    """CaptureError where the forward changes a number that it reads, and changes it again when it begins with the new one (a
    cache does not). `trace` runs it with attributes of these values, by (path, name), and appends to `records`."""
    record = records[-1]
    if not record.counters:
        return
    trace({(path, name): value for (path, name), (value, _) in record.counters.items()})
    for (path, name), (value, line) in records[-1].counters.items():
        place = f"{path}.{name}" if path else name
        raise CaptureError(
            f"{line}: the forward counts in {place}, which would be {value!r} for ever in a program: make it a buffer "
            "(register_buffer), or pass it in with the batch"
        )


@contextmanager
def _recording(record: ReadRecord, paths: Mapping[int, str]) -> Iterator[None]:
    """While active, `record` gets what is read and written of modules."""
    usual = vars(nn.Module())
    kind: Any = nn.Module
    put = kind.__setattr__

    def write(module: nn.Module, name: str, value: Any) -> None:
        if name not in usual:
            record.written.add((class_name(module), name))
            if (id(module), name) not in record.seen:
                record.reset.add((id(module), name))
            before = record.numbers.get((id(module), name), value)
            counts = (id(module), name) not in record.reset
            if counts and type(value) in _NUMBERS and type(before) in _NUMBERS and value != before:
                record.counters[paths.get(id(module), ""), name] = (value, _user_line(sys._getframe(1)))
        put(module, name, value)

    with ExitStack() as stack:
        kind.__getattribute__ = _Reading(record, frozenset(usual), _FieldReads(record, stack))
        kind.__setattr__ = write
        try:
            yield
        finally:
            kind.__setattr__ = put
            del kind.__getattribute__


class _Reading:
    """``__getattribute__`` of modules. It is no function, since dynamo (the branches of torch.cond) refuses classes with one."""

    def __init__(self, record: ReadRecord, usual: frozenset[str], fields: _FieldReads) -> None:
        self.record, self.usual, self.fields = record, usual, fields

    def __get__(self, module: Any, kind: Any) -> Callable[..., Any]:
        return self.read if module is None else partial(self.read, module)  # dynamo asks the class for it

    def read(self, module: nn.Module, name: str) -> Any:
        if name in self.usual or name.startswith("__"):
            return object.__getattribute__(module, name)
        self.record.read.add((class_name(module), name))
        self.record.seen.add((id(module), name))
        value = object.__getattribute__(module, name)
        if type(value) in _NUMBERS:
            self.record.numbers.setdefault((id(module), name), value)
        elif (state := _state_of(value)) is not None:
            self.record.generators.setdefault(id(value), (value, state))
        else:
            self.fields.watch(value)
        return value


class _FieldReads:
    """Records which fields of plain objects are read, once they were read of a module: transformers writes others into its
    settings when it saves, on one rank. The classes are as they were when `stack` ends."""

    def __init__(self, record: ReadRecord, stack: ExitStack) -> None:
        self.record, self.stack = record, stack
        self.classes: set[type] = set()

    def watch(self, value: Any) -> None:
        """Records reads of the class of an object, or of those in a list or dictionary."""
        if isinstance(value, (list, tuple, dict)):
            for each in value.values() if isinstance(value, dict) else value:
                if not isinstance(each, (*LEAVES, list, tuple, dict)):
                    self.watch(each)
            return
        kind: Any = type(value)
        if kind in self.classes or isinstance(value, (type, nn.Module)) or kind.__module__.partition(".")[0] in _NO_SETTINGS:
            return
        if not hasattr(value, "__dict__"):
            return
        before, usual = vars(kind).get("__getattribute__"), kind.__getattribute__
        with suppress(TypeError):  # a built-in class: all of its fields count
            kind.__getattribute__ = _FieldReading(self, usual)
            self.classes.add(kind)
            self.record.fields.add((class_name(value), ""))
            self.stack.callback(partial(_put_back, kind, before))

    def note(self, value: Any, name: str, found: Any) -> None:
        """A field was read, under its name or another one (a property, `attribute_map` of transformers)."""
        own = object.__getattribute__(value, "__dict__")
        names = {EVERY_FIELD} if name == "__dict__" else {name} if not name.startswith("__") else set[str]()
        if name not in own and isinstance(found, LEAVES):
            names |= {each for each, held in own.items() if held is found}
        self.record.fields |= {(class_name(value), each) for each in names}


class _FieldReading:
    """``__getattribute__`` of a class of plain objects; no function, as `_Reading`."""

    def __init__(self, reads: _FieldReads, usual: Callable[[Any, str], Any]) -> None:
        self.reads, self.usual = reads, usual

    def __get__(self, value: Any, kind: Any) -> Callable[..., Any]:
        return self.read if value is None else partial(self.read, value)

    def read(self, value: Any, name: str) -> Any:
        try:
            found = self.usual(value, name)
        except AttributeError:
            self.reads.note(value, name, _FieldReading)  # of which no field has the value
            raise
        self.reads.note(value, name, found)
        if not isinstance(found, LEAVES):
            self.reads.watch(found)
        return found


def _put_back(kind: Any, before: Any) -> None:
    if before is None:
        del kind.__getattribute__
    else:
        kind.__getattribute__ = before


@contextmanager
def numbers_unchanged(names: Sequence[NamedValue]) -> Iterator[None]:
    """CaptureError where captures inside change a number that is a global or in a closure."""
    before = [each.at.get(each.name, None) for each in names]
    yield
    for each, value in zip(names, before, strict=True):
        now = each.at.get(each.name, None)
        if type(value) in (int, float) and type(now) in (int, float) and now != value:
            raise CaptureError(
                f"the forward counts in {each.place}, which would be {now!r} for ever in a program: make it a buffer of a module "
                "(register_buffer), or pass it in with the batch"
            )


# -- random generators


def _state_of(value: Any) -> Any:
    """The state of a random generator of Python or numpy, else None."""
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        with suppress(Exception):
            return repr(value.get_state() if hasattr(value, "get_state") else value.bit_generator.state)
    return None


def _global_states() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy.random")
    states: dict[str, Any] = {"Python's": random.getstate()}
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        states["numpy's"] = (state["pos"], state["key"].tobytes()) if "pos" in state else repr(state)
    return states


def _drawn(states: Mapping[str, Any], record: ReadRecord) -> str:
    """The name of a generator whose state is another one now."""
    now = _global_states()
    for name, state in states.items():
        if name not in record.seeded and now.get(name) != state:
            return name
    return next((type(value).__name__ for value, state in record.generators.values() if _state_of(value) != state), "")


class _Single:
    """A number that the forward draws, between two ends. A comparison that comes out alike for all of them is answered (layers
    are dropped with probability 0); any other use is a CaptureError."""

    def __init__(self, whose: str, low: float = 0.0, high: float = 1.0) -> None:
        self.whose, self.low, self.high = whose, low, high

    def __lt__(self, other: Any) -> bool:
        return self._answer(self.low >= other, self.high <= other)

    def __ge__(self, other: Any) -> bool:
        return not self < other

    __le__, __gt__ = __lt__, __ge__

    def _answer(self, never: bool, always: bool) -> bool:
        if not (never or always):
            self._used()
        return always

    def _used(self, *args: Any) -> Any:
        raise CaptureError(_draw_text(_user_line(sys._getframe(1)), self.whose))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __float__ = __int__ = __bool__ = __round__ = _used
    __abs__ = __eq__ = __ne__ = __str__ = __repr__ = __format__ = __getattr__ = _used
    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _single_draws(record: ReadRecord, states: Mapping[str, Any]) -> Iterator[None]:
    """While active, single numbers of Python's and numpy's generators are drawn as `_Single`, and a generator that the forward
    seeds before it draws counts as one of its own."""
    with ExitStack() as stack:
        for whose, library in (("Python's", random), ("numpy's", sys.modules.get("numpy.random"))):
            if library is not None:
                stack.enter_context(_replaced(library, "seed", partial(_seed, record, states, whose, library.seed)))
                for name in ("random", "uniform", "rand", "random_sample"):
                    if hasattr(library, name):
                        draw = partial(_single, record, whose, getattr(library, name), name)
                        stack.enter_context(_replaced(library, name, draw))
        yield


def _seed(record: ReadRecord, states: Mapping[str, Any], whose: str, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is not None and _global_states().get(whose) == states.get(whose):
        record.seeded.add(whose)
    return usual(*args, **kwargs)


def _single(record: ReadRecord, whose: str, usual: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    ends = args if name == "uniform" and len(args) == 2 else () if not args else None
    if kwargs or ends is None or whose in record.seeded:
        return usual(*args, **kwargs)
    return _Single(whose, *sorted(ends))


@contextmanager
def _replaced(library: Any, name: str, function: Any) -> Iterator[None]:
    usual = getattr(library, name)
    setattr(library, name, function)
    try:
        yield
    finally:
        setattr(library, name, usual)


def _said_draw(model: nn.Module, call: Callable[[], Any], record: ReadRecord) -> str:
    """The message; the line is that of a second run, in which every call is looked at."""
    states = _global_states()
    record.generators = {key: (value, _state_of(value)) for key, (value, _) in record.generators.items()}
    lines: list[str] = []
    drawn: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if not lines and event in ("return", "c_return") and (name := _drawn(states, record)):
            drawn.append(name)
            lines.append(_user_line(frame))

    sys.setprofile(look)
    try:
        with suppress(Exception):
            call()
    finally:
        sys.setprofile(None)
    where = lines[0] if lines else type(model).__name__
    whose = drawn[0] if drawn else "a"
    return _draw_text(where, whose)


def _draw_text(where: str, whose: str) -> str:
    return (
        f"{where}: the forward draws from {whose} random generator, and a program would have the capture's numbers for ever: "
        "draw with torch.rand or torch.randint, or pass the numbers in with the batch"
    )


def _line_of(error: Exception) -> str:
    """`_user_line` of where it was raised."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return _user_line(traceback.tb_frame if traceback is not None else None)


def _user_line(frame: FrameType | None) -> str:
    """``file.py:line`` of the innermost frame that is the user's, with the class of its module."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _LIBRARY) and "<" not in file:
            owner = frame.f_locals.get("self")
            return f"{file}:{frame.f_lineno}" + (f" ({type(owner).__name__})" if isinstance(owner, nn.Module) else "")
        frame = frame.f_back
    return "the forward"
