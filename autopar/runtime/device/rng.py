"""Random masks from one seed that differ between shards and agree between replicas.

A stream of seeds belongs to a rank's coordinates on the axes that shard the tensor, and each random operation takes the next
seed. Ranks with equal coordinates there draw the same numbers, since all ranks run the same program. Recomputation in the
backward draws the numbers of the forward: `RngRecorder` records the positions of the streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.types import Number

from ..compat.autograd import apply
from ..compat.collectives import coordinate_in
from ..errors import RuntimeProblem
from .axis import AxisHandle


class SeedSource(Protocol):
    """The part of a mesh that random operations need."""

    seed: int
    seed_tensor: torch.Tensor
    """The seed, on the CPU: an input of compiled code."""

    def axis(self, name: str) -> AxisHandle: ...


class SeedStream:
    """The seeds of one shard: a function of its key and of how many were taken before."""

    def __init__(self, key: int, count: int = 0) -> None:
        self.key, self.count = key, count

    def next_seed(self) -> int:
        recorder = _recorder.get()
        if recorder is not None:
            recorder.counts.setdefault(self, self.count)
        self.count += 1
        return hash((self.key, self.count)) % (1 << 62)  # of whole numbers: the same in every process


MOVED, SEEDED = 1, 2
"""What a script has done to torch's generator since: ``set_rng_state`` and ``fork_rng`` put back a state; ``manual_seed``."""

_DRAWS = 1 << 32
"""More than a call draws from one stream."""


class SeedStreams:
    """The streams of this process, made at first use. `place`: where the next call of a program begins in all of them, as the
    state of a generator says where a plain model draws on. `order` changes with each draw of a program."""

    def __init__(self) -> None:
        self.streams: dict[int, SeedStream] = {}
        self.place = self.start = 0
        self.manual_seeds = self.moves = 0  # the calls of torch.manual_seed, and of set_rng_state
        self.moved_to: int | None = None  # the place that the script went to since the last call
        self.followed: tuple[int, int] | None = None
        self.restarts = 0
        self.order = torch.zeros((), dtype=torch.int64, device="cpu")  # under a default device too

    def __call__(self, key: int) -> SeedStream:
        """The stream of a shard."""
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = SeedStream(key, self.start)
        return stream

    def restart(self, place: int = 0) -> None:
        """Begin all streams anew."""
        self.streams, self.place, self.start, self.moved_to = {}, place, place * _DRAWS, None
        self.restarts += 1

    @contextmanager
    def call(self, training: bool) -> Iterator[None]:
        """A call of a program. An evaluation that draws nothing leaves the place, as it leaves a generator."""
        self.start = self.place * _DRAWS
        for stream in self.streams.values():
            stream.count = self.start
        yield
        if training or any(stream.count > self.start for stream in self.streams.values()):
            self.place += 1
        self.moved_to = None  # a checkpoint inside of the call has put back a state from before its end

    def count_manual_seed(self) -> None:
        """Note that the script has called ``torch.manual_seed``."""
        self.manual_seeds, self.moved_to = self.manual_seeds + 1, 0

    def move(self, place: int) -> None:
        """Note that the script has put back a state of torch's generator from this place."""
        self.moves, self.moved_to = self.moves + 1, place

    def place_of_script(self) -> int:
        """Return where the script wants the next call to begin."""
        return self.place if self.moved_to is None else self.moved_to

    def script_seed(self) -> tuple[int, int, int]:
        """Return how often the script has called ``torch.manual_seed``, the seed of torch's generator, and how often it put back
        a state."""
        return self.manual_seeds, torch.initial_seed() % (1 << 62), self.moves

    def follow(self, place: int, seed: int | None) -> None:
        """Go on at a place. Of another seed (None: of the same) all streams begin anew, once for all models."""
        if seed is not None and self.followed != (self.manual_seeds, seed):
            self.restart()
            self.followed = (self.manual_seeds, seed)
        self.place, self.moved_to = place, None

    def counts(self) -> dict[int, int]:
        """Return the number of seeds that each stream has given."""
        return {key: each.count for key, each in self.streams.items()}


seed_stream = SeedStreams()


class RngRecorder:
    """Records the positions of the random streams at their first use by a part of the forward, which runs inside. A recomputation
    inside `restored` draws the same numbers, and leaves the streams as it found them."""

    def __init__(self) -> None:
        self.counts: dict[SeedStream, int] = {}
        self.outer: RngRecorder | None = None
        self.restarts = 0

    def __enter__(self) -> RngRecorder:
        self.outer, self.restarts = _recorder.get(), seed_stream.restarts
        _recorder.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _recorder.set(self.outer)
        if self.outer is not None:
            for each, count in self.counts.items():
                self.outer.counts.setdefault(each, count)
        self.outer = None

    @property
    def restored(self) -> RestoredRng:
        return RestoredRng(self)


class RestoredRng:
    """Sets streams back for a recomputation; may be entered more than once."""

    def __init__(self, forward: RngRecorder) -> None:
        self.forward, self.counts = forward, forward.counts
        self.now: dict[SeedStream, int] = {}

    def __enter__(self) -> None:
        if self.counts and self.forward.restarts != seed_stream.restarts:
            raise RuntimeProblem(
                "random numbers were seeded (torch.manual_seed, parallel.reseed), or another model was parallelized, between a "
                "forward and its backward, which recomputes dropout with other numbers: call backward before"
            )
        self.now = {each: each.count for each in self.counts}
        for each, count in self.counts.items():
            each.count = count

    def __exit__(self, *error: object) -> None:
        for each, count in self.now.items():
            each.count = count


_recorder: ContextVar[RngRecorder | None] = ContextVar("rng_recorder", default=None)


@lru_cache(maxsize=16)
def _generator(device: str) -> torch.Generator:
    return torch.Generator(device)


# Opaque operations. A compiled seed changes `order`, so that torch.compile neither merges nor moves draws (R-Drop drops one
# tensor twice); it is saved for the backward, which may draw the numbers of that seed again.
@torch.library.custom_op("autopar::next_seed", mutates_args=("order",))
def _next_seed(order: torch.Tensor, seed: torch.Tensor, axes: str) -> torch.Tensor:
    """Draw the next seed of a shard. `axes`: a line each, of its name and that of its group (none on an axis of one rank)."""
    order.add_(1)
    groups = (line.partition(" ") for line in axes.splitlines())
    key = _key(int(seed), ((name, coordinate_in(group) if group else 0) for name, _, group in groups))
    return torch.tensor(seed_stream(key).next_seed(), device="cpu")


@_next_seed.register_fake
def _(order: torch.Tensor, seed: torch.Tensor, axes: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def next_seed(mesh: SeedSource, sharded_axes: Iterable[str]) -> torch.Tensor:
    """Draw the next seed of a shard: a number on the CPU. Compiled code knows the shard when it runs, so that all ranks have one
    graph."""
    if torch.compiler.is_compiling():
        axes = "\n".join([f"{name} {mesh.axis(name).group_name}" for name in sharded_axes])
        return _next_seed(seed_stream.order, mesh.seed_tensor, axes)  # type: ignore[no-any-return]
    # fake in a dry run, which `order` is not
    return torch.tensor(seed_stream(shard_key(mesh, sharded_axes)).next_seed(), device="cpu")


@torch.library.custom_op("autopar::keep_mask", mutates_args=())
def _keep_mask(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return keep.bernoulli_(1 - p, generator=_generator(str(x.device)).manual_seed(int(seed)))


@_keep_mask.register_fake
def _(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _number(name: str) -> int:
    """A hash of an axis' name by plain arithmetic, the same in every process."""
    number = 0
    for letter in name:
        number = number * 131 + ord(letter)
    return number


def shard_key(mesh: SeedSource, sharded_axes: Iterable[str]) -> int:
    """A key that differs between ranks that hold different elements and agrees between replicas. Axes enter by name: rank 0 of
    one axis must not share a stream with rank 0 of another, since other ranks would not advance it."""
    return _key(mesh.seed, ((name, mesh.axis(name).coordinate) for name in sharded_axes))


def _key(seed: int, coordinates: Iterable[tuple[str, int]]) -> int:
    key = seed
    for name, coordinate in coordinates:
        key = (key * 65_537 + _number(name)) * 65_537 + coordinate + 1
    return key % (1 << 62)


class _Dropout(torch.autograd.Function):
    """Saves a mask of one byte an element, as torch's own dropout does on CUDA."""

    @staticmethod
    def forward(ctx: Any, p: float, seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = _keep_mask(x, p, seed)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return (x * mask).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return None, None, (grad * mask).mul_(ctx.scale)


def dropout(x: torch.Tensor, p: float, training: bool, mesh: SeedSource, sharded_axes: Iterable[str] = ()) -> torch.Tensor:
    """Dropout of a local tensor. `sharded_axes`: the mesh axes on which `x` is Shard; on all others the mask is the same."""
    if not training or p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x) * x
    return apply(_Dropout, p, next_seed(mesh, sharded_axes), x)  # type: ignore[no-any-return]


@torch.library.custom_op("autopar::random_numbers", mutates_args=())
def _random_numbers(like: torch.Tensor, kind: str, a: Number, b: Number, dtype: torch.dtype, seed: torch.Tensor) -> torch.Tensor:
    generator = _generator(str(like.device)).manual_seed(int(seed))
    out = torch.empty(like.shape, dtype=dtype, device=like.device)
    if kind == "uniform":
        return out.uniform_(a, b, generator=generator)
    if kind == "normal":
        return out.normal_(a, b, generator=generator)
    if kind == "exponential":
        return out.exponential_(a, generator=generator)
    if kind == "bernoulli":
        return out.bernoulli_(a, generator=generator)
    return out.random_(int(a), int(b), generator=generator)


@_random_numbers.register_fake
def _(like: torch.Tensor, kind: str, a: Number, b: Number, dtype: torch.dtype, seed: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def random(
    like: torch.Tensor, kind: str, a: float, b: float, dtype: torch.dtype, mesh: SeedSource, sharded_axes: Iterable[str] = ()
) -> torch.Tensor:
    """Random numbers for every element of a local tensor, from the streams that `dropout` uses: ``uniform`` (from a to b),
    ``normal`` (mean a, deviation b), ``exponential`` (rate a), ``bernoulli`` (probability a), ``integers`` (from a to b,
    exclusive)."""
    return _random_numbers(like.detach(), kind, a, b, dtype, next_seed(mesh, sharded_axes))  # type: ignore[no-any-return]
