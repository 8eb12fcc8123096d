"""Random numbers that a forward draws from generators of Python or numpy: a program would have the capture's for ever, so they
are refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from inspect import isroutine
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import nn

from autopar.capture.tracing.places import is_users, user_frame
from autopar.errors import CaptureError
from autopar.runtime.compat.hooks import replaced

_STANDARD = random.__file__.rpartition("/")[0]
"""The folder of Python's own modules."""


class DrawRecord:
    """`states`: of Python's and numpy's own generators before the forward. `generators`: those of modules, with their state.
    `seeded`: generators that the forward itself seeds before it draws."""

    def __init__(self) -> None:
        self.states = _global_states()
        self.generators: dict[int, tuple[Any, Any]] = {}
        self.seeded: set[str] = set()

    def note(self, value: Any) -> bool:
        """Take down the state of an object that is a generator, or draws from one (its method), before it draws; False for any
        other."""
        while isinstance(value, partial):
            value = value.func
        value = getattr(value, "__self__", value) if isroutine(value) else value
        state = _state_of(value)
        if state is not None:
            self.generators.setdefault(id(value), (value, state))
        return state is not None

    def advanced(self) -> str:
        """Return the name of a generator whose state is another one now."""
        now = _global_states()
        for name, state in self.states.items():
            if name not in self.seeded and now.get(name) != state:
                return name
        return next((type(value).__name__ for value, state in self.generators.values() if _state_of(value) != state), "")

    def restart(self) -> None:
        """Take all states down once more."""
        self.states = _global_states()
        self.generators = {key: (value, _state_of(value)) for key, (value, _) in self.generators.items()}


@contextmanager
def no_draws(model: nn.Module, call: Callable[[], Any], record: DrawRecord) -> Iterator[None]:
    """CaptureError where the forward of the model, which `call` runs, draws inside."""
    with _single_draws(record):
        try:
            yield
        except Exception as error:
            if _Single.__name__ not in str(error):
                raise
            raise CaptureError(_draw_text(_line_of(error), "Python's or numpy's")) from None
        if record.advanced():
            raise CaptureError(_draw_message(model, call, record))


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
        whole = numpy.get_state(legacy=False)
        state, normal = whole["state"], (whole.get("has_gauss"), whole.get("gauss"))  # of two drawn at once one is kept
        states["numpy's"] = (state["pos"], state["key"].tobytes(), normal) if "pos" in state else repr(whole)
    return states


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
        raise CaptureError(_draw_text(place_of(sys._getframe(1)), self.whose))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __float__ = __int__ = __bool__ = __round__ = _used
    __abs__ = __eq__ = __ne__ = __str__ = __repr__ = __format__ = __getattr__ = _used
    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _single_draws(record: DrawRecord) -> Iterator[None]:
    """While active, single numbers of Python's and numpy's generators are drawn as `_Single`, and a generator that the forward
    seeds before it draws counts as one of its own."""
    with ExitStack() as stack:
        for whose, library in (("Python's", random), ("numpy's", sys.modules.get("numpy.random"))):
            if library is not None:
                stack.enter_context(replaced(library, "seed", partial(_seed, record, whose, library.seed)))
                for name in ("random", "uniform", "rand", "random_sample"):
                    if hasattr(library, name):
                        draw = partial(_single, record, whose, getattr(library, name), name)
                        stack.enter_context(replaced(library, name, draw))
        yield


def _seed(record: DrawRecord, whose: str, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args and args[0] is not None and _global_states().get(whose) == record.states.get(whose):
        record.seeded.add(whose)
    return usual(*args, **kwargs)


def _single(record: DrawRecord, whose: str, usual: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    ends = args if name == "uniform" and len(args) == 2 else () if not args else None
    if kwargs or ends is None or whose in record.seeded:
        return usual(*args, **kwargs)
    return _Single(whose, *sorted(ends))


def _draw_message(model: nn.Module, call: Callable[[], Any], record: DrawRecord) -> str:
    """Return the message; the line is that of a second run, in which every call is looked at."""
    record.restart()
    lines: list[str] = []
    drawn: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if not lines and (own := _boundary(frame, event)) is not None and (name := record.advanced()):
            drawn.append(name)
            lines.append(place_of(own))

    sys.setprofile(look)
    try:
        with suppress(Exception):
            call()
    finally:
        sys.setprofile(None)
    where = lines[0] if lines else type(model).__name__
    whose = drawn[0] if drawn else "a"
    return _draw_text(where, whose)


def _boundary(frame: FrameType, event: str) -> FrameType | None:
    """Return the frame of a model's code that calls, returns or is returned to. None inside of torch, where nothing draws: to
    compare states at each of its calls takes seconds."""
    own = frame.f_back if event == "call" or (event == "return" and not _is_models(frame.f_code.co_filename)) else frame
    return own if own is not None and _is_models(own.f_code.co_filename) else None


@lru_cache(maxsize=1024)
def _is_models(file: str) -> bool:
    """Return whether a file may have the code of a model: it is not torch's, and not of what torch traces with."""
    return is_users(file) and "/sympy/" not in file and not (file.startswith(_STANDARD) and "-packages/" not in file)


def _draw_text(where: str, whose: str) -> str:
    return (
        f"{where}: the forward draws from {whose} random generator, and a program would have the capture's numbers for ever: "
        "draw with torch.rand or torch.randint, or pass the numbers in with the batch"
    )


def _line_of(error: Exception) -> str:
    """Return the place where an error was raised."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return place_of(frames[-1] if frames else None)


def place_of(frame: FrameType | None) -> str:
    """Return ``file.py:line (Class)`` of the innermost frame that is the user's, of a method of a module."""
    frame = user_frame(frame)
    if frame is None:
        return "the forward"
    owner = frame.f_locals.get("self")
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" + (f" ({type(owner).__name__})" if isinstance(owner, nn.Module) else "")
