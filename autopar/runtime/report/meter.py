"""Divides the time of a training step: forward and backward of each block, waits for each kind of collective, optimizer, rest.

The parts add up to the step. A block's backward begins when the gradient of its output is known, and ends where that of another
begins; recomputation is part of it. Blocks that torch.compile compiled have their collectives inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..compat.autograd import at_end_of_backward, in_backward
from ..compat.hooks import around_optimizer_steps
from ..module import BlockModule
from .observe import Launched, Observer, observing

Charge = Callable[[float, float], None]
"""Takes seconds of the clock, and of them the seconds of this thread's processor (0 on a GPU)."""


class Clock:
    """Gives the time between two marks to whoever is charged for it, at once."""

    def __init__(self) -> None:
        self.last = (0.0, 0.0)

    def start(self) -> None:
        """The first mark."""
        self.last = (time.perf_counter(), time.thread_time())

    def mark(self, charge: Charge) -> None:
        """Charge what has passed since the last mark."""
        now = (time.perf_counter(), time.thread_time())
        charge(now[0] - self.last[0], now[1] - self.last[1])
        self.last = now

    def settle(self) -> None:
        """Settle all charges at the end of a step."""


class StreamClock(Clock):
    """The clock of the current CUDA stream: what it waits for counts, what the host does ahead of it does not. Charges are known
    after `settle`, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.events: list[tuple[torch.cuda.Event, Charge | None]] = []

    def start(self) -> None:
        self.events = []
        self._record(None)

    def mark(self, charge: Charge) -> None:
        self._record(charge)

    def _record(self, charge: Charge | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.events.append((event, charge))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        for (before, _), (after, charge) in zip(self.events, self.events[1:], strict=False):
            if charge is not None:
                charge(before.elapsed_time(after) / 1e3, 0.0)
        self.events = self.events[-1:]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return StreamClock(device) if device.type == "cuda" else Clock()


Label = tuple[str, str]
"""(``forward backward optimizer other``, block), or (``wait``, kind and axis)."""

TIED = "tied"
"""The axis of groups that are of no mesh axis: stages that share parameters."""
OTHER: Label = ("other", "")
OPTIMIZER: Label = ("optimizer", "")


class StepTimes:
    """One step. `seconds`: of the clock, and of this thread's processor, by label. `sent`: how many collectives, their bytes, and
    their seconds from the launch until the wait for them ended, by kind and axis. `calls`: forwards of each block. `spans`:
    labels with their seconds of the clock, in order, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[Label, list[float]] = {}
        self.spans: list[tuple[Label, float]] = []
        self.sent: dict[tuple[str, str], list[float]] = {}
        self.calls: dict[str, int] = {}
        self.between_seconds = 0.0
        self.examples = 0

    def charge(self, label: Label, clock: float, processor: float) -> None:
        """Add to a label."""
        entry = self.seconds.setdefault(label, [0.0, 0.0])
        entry[0] += clock
        entry[1] += processor
        self.spans.append((label, clock))

    @property
    def step_seconds(self) -> float:
        return sum(clock for clock, _ in self.seconds.values())


class Meter(Observer):
    """Measures steps while it is `installed`. `axes` names process groups. `owns` tells this model's optimizers; `ended` is
    called after each step, `begun` before it with the arguments of the call."""

    def __init__(
        self,
        clock: Clock,
        axes: Mapping[str, str],
        owns: Callable[[Optimizer], bool],
        begun: Callable[[Any], None],
        ended: Callable[[StepTimes], None],
    ) -> None:
        self.clock, self.axes, self.owns, self.begun, self.ended = clock, axes, owns, begun, ended
        self.step: StepTimes | None = None
        self.stack: list[Label] = []
        self.installed, self.observed, self.finished = ExitStack(), ExitStack(), False
        self.between: StepTimes | None = None
        self.flights: list[tuple[tuple[str, str], float]] = []

    # -- hooks

    def install(self, model: torch.nn.Module, blocks: Iterable[BlockModule]) -> None:
        """Hooks into a model, its blocks, collectives and optimizers, until `remove`."""
        keep = self.installed.callback
        keep(model.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True).remove)
        for block in blocks:
            name = block_class(block)
            keep(block.register_forward_pre_hook(partial(self._block_begins, name), prepend=True).remove)
            keep(block.register_forward_hook(partial(self._block_ends, name), always_call=True).remove)
        for handle in around_optimizer_steps(self, before=Meter._step_begins, after=Meter._step_ends):
            keep(handle.remove)
        self.observed.enter_context(observing(self))

    def finish(self) -> None:
        """Measures no more. What cannot go now, since torch is walking through its hooks, goes with `remove` or the next
        forward."""
        self.finished, self.step = True, None
        self.observed.close()

    def remove(self) -> None:
        """Take all hooks out."""
        self.finish()
        self.installed.close()
        self.stack = []

    def _forward_begins(self, model: Any, args: Any, kwargs: Any) -> None:
        if self.finished:
            self.remove()
            return
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or in_backward():
            return
        if self.step is None:
            self.step, self.stack = StepTimes(), [OTHER]
            if self.between is not None:
                self.clock.mark(partial(self._outside, self.step))
            else:
                self.clock.start()
        self.begun((args, kwargs))

    def _outside(self, step: StepTimes, clock: float, _: float) -> None:
        step.between_seconds += clock

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if self.step is not None and self.owns(optimizer):
            self._push(OPTIMIZER)

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self.step is None or not self.owns(optimizer):
            return
        self._pop(OPTIMIZER)
        self._mark(OTHER)
        self.clock.settle()
        done, self.step, self.stack, self.between = self.step, None, [], self.step
        self.ended(done)

    def _block_begins(self, name: str, *_: Any) -> None:
        if self.step is not None:
            self.step.calls[name] = self.step.calls.get(name, 0) + 1
            self._push(("forward", name))

    def _block_ends(self, name: str, module: Any, inputs: Any, result: Any) -> None:
        if self.step is None:
            return
        self._pop(("forward", name))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(partial(self._backward_begins, name))

    def _backward_begins(self, name: str, _: torch.Tensor) -> None:
        if self.step is None or not self.stack:
            return
        label = ("backward", name)
        if self.stack[-1][0] == "backward":
            self._mark(self.stack[-1])
            self.stack[-1] = label
            return
        self._push(label)
        at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        if self.stack and self.stack[-1][0] == "backward":
            self._pop(self.stack[-1])

    # -- collectives

    def launched(self, collective: Launched) -> None:
        if self.step is not None:
            entry = self.step.sent.setdefault(self._key(collective), [0, 0, 0.0])
            entry[0] += 1
            entry[1] += collective.bytes

    def waiting(self, collective: Launched | None, since: float) -> None:
        if self.step is not None:
            kind, axis = key = self._key(collective) if collective is not None else ("other", "all")
            self._push(("wait", f"{kind} {axis}"))
            self.flights.append((key, since))

    def wait_ended(self) -> None:
        if self.step is None or not self.flights:
            return
        key, since = self.flights.pop()
        if self.stack and self.stack[-1][0] == "wait":
            self._pop(self.stack[-1])
        if key in self.step.sent:
            self.step.sent[key][2] += time.perf_counter() - since

    def _key(self, collective: Launched) -> tuple[str, str]:
        return collective.kind, self.axes.get(collective.group, TIED)

    # -- the clock

    def _push(self, label: Label) -> None:
        self._mark(self.stack[-1] if self.stack else OTHER)
        self.stack.append(label)

    def _pop(self, label: Label) -> None:
        """End a label, and what an error left inside of it."""
        if label not in self.stack:
            return
        while self.stack:
            top = self.stack.pop()
            self._mark(top)
            if top == label:
                return

    def _mark(self, label: Label) -> None:
        assert self.step is not None
        self.clock.mark(partial(self.step.charge, label))


def block_class(block: BlockModule) -> str:
    """The name of the block's class, without what FSDP2 puts before it."""
    kind = type(block)
    return kind.__bases__[-1].__name__ if kind.__name__.startswith("FSDP") and len(kind.__bases__) > 1 else kind.__name__
