"""Comparisons of what all ranks must have alike (model, program, versions, batch), before the first collective that depends on
it: a difference ends in one line on every rank, and not in an abort or in wrong weights."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..device.groups import several_ranks
from ..device.mesh import MeshHandle
from ..errors import AutoparError, MismatchProblem, PeerProblem, StateError
from .heartbeat import present_place
from .peer_watch import why_crossed

T = TypeVar("T")


class Stated(NamedTuple):
    """The value that this rank has of something, and how to mend a difference."""

    value: str
    remedy: str


def require_agreement(stated: Mapping[str, Stated], describe: Callable[[int], str]) -> None:
    """Raise a MismatchProblem on all ranks if one has another value than most have. Only ranks that state a thing are compared in
    it. All ranks must call."""
    everywhere: list[Mapping[str, Stated]] = gather(dict(stated))
    for name in dict.fromkeys(name for each in everywhere for name in each):
        values = {rank: each[name].value for rank, each in enumerate(everywhere) if name in each}
        usual = Counter(values.values()).most_common(1)[0][0]  # of equally frequent values that of the first rank
        odd = next((rank for rank, value in values.items() if value != usual), None)
        if odd is not None:
            other = next(rank for rank, value in values.items() if value == usual)
            remedy = everywhere[odd][name].remedy
            raise MismatchProblem(f"{describe(odd)} has {name} {values[odd]}, {describe(other)} has {usual}: {remedy}")


def require_equal_models(model: nn.Module, describe: Callable[[int], str]) -> None:
    """Raise a MismatchProblem on all ranks if the parameters or buffers of one rank's model have other names, shapes or dtypes.
    All ranks must call."""
    lines = _state_lines(model)
    digests = gather(_digest(lines))
    usual = Counter(digests).most_common(1)[0][0]
    if len(set(digests)) == 1:
        return
    tables: list[Mapping[str, str]] = gather(lines)
    odd = next(rank for rank, digest in enumerate(digests) if digest != usual)
    other = digests.index(usual)
    first = next(name for name in {**tables[other], **tables[odd]} if tables[odd].get(name) != tables[other].get(name))
    has, wants = (tables[rank].get(first, "none") for rank in (odd, other))
    raise MismatchProblem(
        f"{describe(odd)} has another model: {first} is {has}, that of {describe(other)} is {wants}: "
        "build the same model on all ranks"
    )


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank (of a group), which all must call. PeerProblem on all ranks where one calls it in another
    section of its work, and the values would be taken for each other."""
    if not several_ranks():
        return [value]
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, (present_place(), value), group)
    places = [place for place, _ in out if place is not None]
    for place in places[1:]:
        if crossed := why_crossed(places[0], place):
            raise PeerProblem(crossed)
    return [each for _, each in out]


def bounds_on_ranks(numbers: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest of each of these integers on all ranks of the groups (of a mesh), which all must call."""
    bounds = torch.stack([-numbers, numbers])
    for group in groups:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    return -bounds[0], bounds[1]


def stated_versions() -> dict[str, Stated]:
    """The versions of torch and, unless this is an exported copy, of autopar."""
    remedy = "install the same version on all ranks"
    out = {"torch": Stated(str(torch.__version__), remedy)}
    if __name__.startswith("autopar."):
        try:
            out["autopar"] = Stated(metadata.version("autopar"), remedy)
        except metadata.PackageNotFoundError:
            out["autopar"] = Stated("of a source tree", remedy)
    return out


def stated_step(mesh: MeshHandle, program_digest: str, batch: Mapping[str, torch.Tensor], *, own_part: bool) -> dict[str, Stated]:
    """Return what all ranks must have alike in a step. `own_part`: the batch is a data rank's own, and compared with those of its
    model axes."""
    again = "start all ranks with one plan"
    stated = stated_versions() | {
        "program": Stated(program_digest, again),
        "mesh": Stated(repr({**mesh.pipeline_axes, **mesh.axes}), again),
        "a batch that is": Stated("local" if own_part else "global", "pass the whole batch, or a local_batch, on every rank"),
    }
    part = f" of data rank {mesh.dp.coordinate}" if own_part else ""
    remedy = "pass the same batch on these ranks" if own_part else "pass the whole batch on every rank, or a local_batch"
    return stated | {f"input {name}{part}": Stated(tensor_words(tensor), remedy) for name, tensor in batch.items()}


def program_digest(program: nn.Module) -> str:
    """A digest of the text of a generated program."""
    path = next((each.__code__.co_filename for each in vars(type(program)).values() if hasattr(each, "__code__")), "")
    return _digest("".join(linecache.getlines(path)) or type(program).__qualname__)[:12]


@contextlib.contextmanager
def refused_together(
    describe: Callable[[int], str], *, asked: bool = True, problem: type[AutoparError] = StateError, words: str = ""
) -> Iterator[None]:
    """Refuse on all ranks what one rank refuses inside, where it is `asked` of all (a collective). The others raise `problem`,
    whose message has `words` between the name of that rank and what it says."""
    refused: AutoparError | None = None
    try:
        yield
    except AutoparError as error:
        refused = error
    texts: Sequence[str] = gather(str(refused or "")) if asked else ()
    if refused is not None:
        raise refused
    for rank, text in enumerate(texts):
        if text:
            raise problem(f"{describe(rank)}{words}: {text}")


def _state_lines(model: nn.Module) -> dict[str, str]:
    """Return each parameter and buffer in words."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        name: f"{'frozen ' if name in parameters and not tensor.requires_grad else ''}{tensor_words(tensor)}"
        for name, tensor in {**parameters, **buffers}.items()
    }


def tensor_words(tensor: torch.Tensor) -> str:
    """The dtype and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def on_first_rank(make: Callable[[], T]) -> T:
    """Return rank 0's result of `make` on every rank; an error there is raised on all of them, so that none waits for ever."""
    made: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made = [make()]
        except AutoparError as error:
            made = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], AutoparError):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]
