"""Refusal of what a forward keeps for its next call in anything but buffers, since programs keep those alone.

Where a forward changed some of Python's state, it is called twice more on fake tensors, which no graph records. A copy of each
tensor that the first of these calls left is in its place before the second one: the operations on it tell whether it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import SymInt, Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from autopar.capture.state.python_state import Change, Leaf, PlainState
from autopar.capture.state.value_flow import SAME_VALUES, Origin, ValueFlow
from autopar.errors import CaptureError


@dataclass(frozen=True)
class LeftState:
    """A value that the first call left. `inside`: see `Change`; `varies`: see `Origin`; `repeats`: the second call changed it
    too; `is_read`: its results depend on the copy."""

    leaf: Leaf
    line: str
    inside: bool
    varies: bool
    repeats: bool
    is_read: bool

    @property
    def refusal(self) -> str:
        """The reason why a program would be wrong, with the remedy; empty where it is right."""
        place, value = self.leaf.place, self.leaf.value
        if self.repeats and not self.leaf.tensors:
            shown = "what it is now" if isinstance(value, (SymInt, bytes)) else repr(value)
            what = f"counts in {place}, which would be {shown} for ever in a program: make it a buffer (register_buffer)"
        elif self.is_read and self.varies:
            what = f"keeps {place} for the next one, which a program does not: make it a buffer of this shape (register_buffer)"
        elif self.is_read and self.repeats:
            what = f"changes {place} in every call, which a program does not: make it a buffer (register_buffer)"
        else:
            return ""
        return f"{self.line}the forward {what}, or pass it in with the batch{' and return it' * bool(self.leaf.tensors)}"

    @property
    def warning(self) -> str:
        """The tensors that a script may look for; empty for numbers and attributes of the model's modules."""
        if self.is_read or not (self.inside and self.varies):
            return ""
        return (
            f"{self.line}the forward leaves tensors in {self.leaf.within or self.leaf.place}, which a program does not: return "
            "them, and register a buffer for what the next forward reads"
        )


def refuse_states(
    state: PlainState, changes: Sequence[Change], varying: Iterable[Tensor], call: Callable[[], Sequence[Tensor]]
) -> tuple[str, ...]:
    """CaptureError where a second call reads what the first one left, and that depends on the batch, on weights or on random
    numbers, or changes in each call; or where it computes something else. Return warnings for tensors that are left and not
    read. `changes`: those of `call`; `varying`: the tensors whose values differ from step to step, before it."""
    flow = ValueFlow(varying)
    with state.restored(), _not_traced():
        with flow:
            first = call()
        left = state.leaves()
        changes = [each for each in changes if each.path in left]
        made = {each.path: flow.origins(*left[each.path].tensors) for each in changes}
        copies = {each.path: flow.copies(left[each.path]) for each in changes}
        before, flow.number = state.leaves(), 2
        with flow:
            second = call()
        after = state.leaves()
    read = flow.ancestors(second)
    found: list[LeftState] = []
    for each in changes:
        path, operations = each.path, made[each.path]
        line = next((f"{line}: " for line in (each.line, *(one.line for one in operations)) if line), "")
        now = after.get(path)
        repeats = now is not None and not now.same(before[path])
        if repeats and now is not None and now.tensors:
            repeats = not all(flow.has_values_of(tensor, copies[path]) for tensor in now.tensors)
        grows = each.inside and any(key[:-1] == path[:-1] and key not in before for key in after)
        repeats = repeats or (grows and bool(copies[path]))
        varies = any(one.varies for one in operations)
        found.append(LeftState(left[path], line, each.inside, varies, repeats, not read.isdisjoint(copies[path])))
    refusals = [each.refusal for each in found if each.refusal]
    if not refusals and _computed(flow.ancestors(first), 1) != _computed(read, 2):
        places = ", ".join(each.leaf.place for each in found)
        refusals = [
            f"the forward changes {places}, and then computes something else than in its first call, which a program would "
            "repeat: call the model once before this"
        ]
    for text in refusals:
        raise CaptureError(text)
    return tuple(dict.fromkeys(each.warning for each in found if each.warning))


def _computed(operations: Iterable[Origin], number: int) -> Counter[str]:
    """Return the operations of a call on values that vary."""
    own = (each for each in operations if each.number == number and each.varies)
    return Counter(each.name for each in own if each.name not in SAME_VALUES)


@contextmanager
def _not_traced() -> Iterator[None]:
    """Operations inside run on fake tensors, and are no part of the graph that is made."""
    mode = detect_fake_mode()
    assert mode is not None and mode.shape_env is not None
    with disable_proxy_modes_tracing(), mode.shape_env.ignore_fresh_unbacked_symbols():
        yield
