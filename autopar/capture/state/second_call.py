"""Refusal of what a forward keeps for its next call in anything but buffers, since programs keep those alone.

Where a forward changed some of Python's state, it is called twice more on fake tensors, which no graph records. A copy of each
tensor that the first of these calls left is in its place before the second one: the operations on it tell whether it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from autopar.capture.state.python_state import Change, Leaf, Path, PlainState
from autopar.capture.state.reads import ReadRecord
from autopar.capture.state.value_flow import SAME_VALUES, Origin, ValueFlow
from autopar.errors import CaptureError

_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


@dataclass(frozen=True)
class LeftState:
    """A value that the first call left, or took away. `inside`: see `Change`; `nested`: in a container or object; `varies`: see
    `Origin`; `repeats`: the second call changed it too; `is_read`: its results depend on the copy."""

    leaf: Leaf
    line: str
    inside: bool
    nested: bool
    varies: bool
    repeats: bool
    is_read: bool

    @property
    def counts(self) -> str:
        """The reason why a number is wrong in a program, with the remedy."""
        plain = isinstance(self.leaf.value, (bool, int, float, str))
        shown = repr(self.leaf.value) if plain else "what it is now"
        return (
            f"{self.line}the forward counts in {self.leaf.place}, which would be {shown} for ever in a program: make it a buffer "
            "(register_buffer), or pass it in with the batch"
        )

    @property
    def refusal(self) -> str:
        """The reason why a program would be wrong, with the remedy; empty where it is right."""
        if self.repeats and not self.leaf.tensors and (not self.nested or isinstance(self.leaf.value, bytes)):
            return self.counts
        if not self.is_read or not (self.varies or self.repeats):
            return ""
        place = self.leaf.place
        what = f"keeps {place} for the next one" if self.varies else f"changes {place} in every call"
        return (
            f"{self.line}the forward {what}, which a program does not: make it a buffer of this shape (register_buffer), or pass "
            "it in with the batch and return it"
        )

    @property
    def warning(self) -> str:
        """The tensors and numbers that a script may look for; empty for attributes of the model's modules."""
        if not self.inside or self.is_read or not (self.varies or (self.repeats and not self.leaf.tensors)):
            return ""
        what = "tensors" if self.leaf.tensors else "numbers"
        return (
            f"{self.line}the forward leaves {what} in {self.leaf.within or self.leaf.place}, which a program does not: return "
            "them, and register a buffer for what the next forward reads"
        )


def refuse_states(
    state: PlainState,
    changes: Sequence[Change],
    varying: Iterable[Tensor],
    call: Callable[[], tuple[Sequence[Tensor], ReadRecord]],
) -> tuple[str, ...]:
    """CaptureError where a second call reads what the first one left, and that depends on the batch, on weights or on random
    numbers, or changes in each call; or where it computes something else. Return warnings for what is left and not read.
    `changes`: those of `call`; `varying`: the tensors whose values differ from step to step, before it."""
    if _has_control_flow():  # dynamo, which traces its branches, allows no mode that records
        line, places = _words(changes, state.leaves())
        return (f"{line}the forward changes {places}, which a program does not: it is right where that is a cache",)
    flow = ValueFlow(varying)
    with state.restored(), _not_traced():
        start = state.leaves()
        with flow:
            first, _ = call()
        left = {**start, **state.leaves()}
        here = state.leaves().keys()
        changes = [each for each in changes if each.path in left]
        made = {each.path: flow.origins(*left[each.path].tensors) for each in changes if each.path in here}
        copies = {each.path: flow.copies(left[each.path]) for each in changes if each.path in here}
        before, flow.number = state.leaves(), 2
        try:
            with flow:
                second, record = call()
        except CaptureError:
            raise
        except Exception as error:
            line, places = _words(changes, left)
            text = str(error).partition("\n")[0][:120]
            raise CaptureError(
                f"{line}the forward changes {places}, and fails in its next call ({type(error).__name__}: {text}): make what it "
                "keeps a buffer (register_buffer)"
            ) from None
        after = state.leaves()
        written = {path: flow.origins(*before[path].tensors) for path in copies}
    read = flow.ancestors(second)
    found: list[LeftState] = []
    for each in changes:
        path, own = each.path, copies.get(each.path, [])
        if each.reset and record.is_reset(path[:2]):
            continue
        operations = made.get(path, [])
        line = next((f"{line}: " for line in (each.line, *(one.line for one in operations)) if line), "")
        now = after.get(path)
        repeats = now is not None and path in before and not now.same(before[path])
        if repeats and now is not None and now.tensors:
            repeats = not all(flow.has_values_of(tensor, own) for tensor in now.tensors)
        grows = each.inside and any(key[:-1] == path[:-1] and key not in before for key in after)
        repeats = repeats or bool(own) and (grows or len(written[path]) > len(own))
        varies = any(one.varies for one in operations)
        found.append(LeftState(left[path], line, each.inside, len(path) > 2, varies, repeats, not read.isdisjoint(own)))
    refusals = [each.refusal for each in found if each.refusal]
    if not refusals and _computed(flow.ancestors(first), 1) != _computed(read, 2):
        line, places = _words(changes, left)
        refusals = [each.counts for each in found if each.repeats and not each.leaf.tensors] or [
            f"{line}the forward changes {places}, and then computes something else than in its first call, which a program would "
            "repeat: call the model once before this"
        ]
    for text in refusals:
        raise CaptureError(text)
    return tuple(dict.fromkeys(each.warning for each in found if each.warning))


def _words(changes: Sequence[Change], left: Mapping[Path, Leaf]) -> tuple[str, str]:
    """Return the line of the first change of which it is known, and the places of all."""
    line = next((f"{each.line}: " for each in changes if each.line), "")
    return line, ", ".join(dict.fromkeys(left[each.path].place for each in changes[:3] if each.path in left))


def _computed(origins: Iterable[Origin], number: int) -> Counter[tuple[str, tuple[str, ...]]]:
    """Return the operations of a call on values that vary."""
    own = (each for each in origins if each.number == number and each.varies)
    return Counter((each.name, each.constants) for each in own if each.name not in SAME_VALUES)


def _has_control_flow() -> bool:
    """Return whether the graph that is made has loops or branches."""
    mode = get_proxy_mode()
    nodes = mode.tracer.graph.nodes if mode is not None else ()
    return any(getattr(each.target, "_name", "") in _CONTROL_FLOW for each in nodes)


@contextmanager
def _not_traced() -> Iterator[None]:
    """Operations inside run on fake tensors, and are no part of the graph that is made."""
    mode = detect_fake_mode()
    assert mode is not None and mode.shape_env is not None
    with disable_proxy_modes_tracing(), mode.shape_env.ignore_fresh_unbacked_symbols():
        yield
