"""Seconds of a collective over the groups of one mesh axis: the fastest of what the library can do.

Each way (algorithm and protocol) is a formula of collective_formulas.py. All of them are linear in the bytes, so the numbers of
one axis are worked out once, and one collective costs a comparison of a few lines. Which ways there are: a *ring* always; a
*tree* and sums in the *switch* for all_reduce; *hierarchical* (one level after the other) only where the library does so, as on a
torus: NCCL does not, and its measured all-reduces over nodes contradict it (tests/cost_models/test_nccl.py).
Message sizes: a protocol for small messages (less latency, less bandwidth; NCCL's LL and LL128) beside the one for large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, log2, prod

from autopar.cost_models.devices import AxisLink, Level, Line
from autopar.cost_models.formulas import formula

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "point_to_point")
LARGE, SMALL = "", "low latency"
_REFERENCE_BYTES = 2.0**30


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that was taken, and its seconds."""

    algorithm: str
    protocol: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.algorithm} ({self.protocol})" if self.protocol else self.algorithm


def collective_seconds(kind: str, full_bytes: float, link: AxisLink) -> float:
    """Seconds of one collective. `full_bytes` is the unsharded tensor as the group sees it (for all_to_all too: each of the n
    members then holds ``full_bytes / n``; for point_to_point what is sent). ValueError on an unknown kind.
    """
    lines = link.lines.get(kind) or lines_of(kind, link)
    best = inf
    for line in lines:
        seconds = line.latency_seconds + full_bytes * line.seconds_per_byte
        if seconds < best:
            best = seconds
    return best


def chosen(kind: str, full_bytes: float, link: AxisLink) -> Choice:
    """The same with the name of the way."""
    line = min(lines_of(kind, link), key=lambda line: line.seconds(full_bytes))
    return Choice(line.algorithm, line.protocol, line.seconds(full_bytes))


def lines_of(kind: str, link: AxisLink) -> tuple[Line, ...]:
    """Every way of the library, from its formula. One free line for a group of one. ValueError on an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}")
    if kind not in link.lines:
        link.lines[kind] = tuple(_lines(kind, link)) if link.size > 1 else (Line("none", LARGE, 0.0, 0.0),)
    return link.lines[kind]


def _lines(kind: str, link: AxisLink) -> Iterable[Line]:
    ways = ("direct",) if kind in ("all_to_all", "point_to_point") else _algorithms(kind, link)
    small = any(level.low_latency_bandwidth_bytes_per_second for level in link.levels)
    for algorithm in ways:
        for protocol in (LARGE, SMALL) if small else (LARGE,):
            if algorithm != "switch" or protocol == LARGE:
                yield line_of(kind, algorithm, protocol, link)


def _algorithms(kind: str, link: AxisLink) -> tuple[str, ...]:
    able = {"ring", "hierarchical"}
    if kind == "all_reduce":
        able |= {"tree", "switch"} if link.levels[0].switch_bandwidth_bytes_per_second else {"tree"}
    return tuple(name for name in link.algorithms if name in able) or ("ring",)


def line_of(kind: str, algorithm: str, protocol: str, link: AxisLink) -> Line:
    """One way on `link`, whether or not the library would take it."""
    found = formula(f"{kind}.{algorithm}.{1 if kind == 'point_to_point' else len(link.levels)}")
    values = parameters_of(kind, algorithm, protocol, link)
    latency = found.value({**values, "N": 0.0})
    waits = ("launch", "s", *(f"a{index}" for index in range(1, len(link.levels) + 1)))
    moved = found.value({**values, **dict.fromkeys(waits, 0.0), "N": _REFERENCE_BYTES})
    waiting, moving = factors_of(kind, link)
    latency = link.launch_seconds + waiting * (latency - link.launch_seconds)
    return Line(algorithm, protocol, latency, moving * moved / _REFERENCE_BYTES)


def factors_of(kind: str, link: AxisLink) -> tuple[float, float]:
    """How many times longer than by its formula the library takes, in latency and in transfer; 1 where nothing is known."""
    known = [(latency, transfer) for level in link.levels for name, latency, transfer in level.factors if name == kind]
    return max((pair[0] for pair in known), default=1.0), max((pair[1] for pair in known), default=1.0)


def parameters_of(kind: str, algorithm: str, protocol: str, link: AxisLink) -> dict[str, float]:
    """Values for the formula ``kind.algorithm.levels`` but for the bytes `N`."""
    levels = link.levels[-1:] if kind == "point_to_point" else link.levels
    nodes = prod(level.width for level in levels[1:]) if len(levels) > 1 else levels[0].width
    values = {"launch": link.launch_seconds, "c": 1.0 if nodes == 2 else 2.0}
    inside = 1
    for index, level in enumerate(levels, 1):
        values[f"w{index}"] = level.width
        values[f"a{index}"], values[f"b{index}"] = _step(level, protocol)
        values[f"d{index}"] = level.width - 1 if index == 1 < len(levels) else ceil(log2(level.width))
        values[f"h{index}"] = _exchanged(level, inside, link.size)
        inside *= level.width
    if kind == "point_to_point" and level.peer_bandwidth_bytes_per_second:
        values["b1"] *= level.peer_bandwidth_bytes_per_second / level.bandwidth_bytes_per_second
    first = levels[0]
    values["s"], values["bs"] = first.switch_seconds, first.switch_bandwidth_bytes_per_second or first.bandwidth_bytes_per_second
    return values


def _step(level: Level, protocol: str) -> tuple[float, float]:
    if protocol == SMALL and level.low_latency_bandwidth_bytes_per_second:
        return level.low_latency_seconds, level.low_latency_bandwidth_bytes_per_second
    return level.latency_seconds, level.bandwidth_bytes_per_second


def _exchanged(level: Level, inside: int, size: int) -> float:
    """Share of the tensor that a member moves over a level in all_to_all. Along a ring of w a message makes
    ``floor(w**2 / 4) / w`` hops for each member (both ways round; on a part of a ring the middle cable carries as much)."""
    if level.kind == "ring":
        return (level.width**2 // 4) / level.width / size
    return (level.width - 1) * inside / size**2


def busy_seconds(kind: str, full_bytes: float, link: AxisLink) -> dict[str, float]:
    """For how long one collective keeps each physical link busy (by port; bandwidth terms only, of the way that is taken)."""
    way = chosen(kind, full_bytes, link)
    if way.algorithm == "none":
        return {}
    out: dict[str, float] = {}
    silent = line_of(kind, way.algorithm, way.protocol, link).seconds_per_byte
    for index, level in enumerate(link.levels):
        free = AxisLink(
            link.size,
            tuple(each if i == index else _without_limit(each) for i, each in enumerate(link.levels)),
            link.launch_seconds,
            link.algorithms,
        )
        rate = min(silent, line_of(kind, way.algorithm, way.protocol, free).seconds_per_byte)
        port = level.port or level.name
        out[port] = max(out.get(port, 0.0), rate * full_bytes)
    return out


def _without_limit(level: Level) -> Level:
    most = 1e30
    return replace(
        level,
        bandwidth_bytes_per_second=most,
        low_latency_bandwidth_bytes_per_second=most if level.low_latency_bandwidth_bytes_per_second else 0.0,
        switch_bandwidth_bytes_per_second=most if level.switch_bandwidth_bytes_per_second else 0.0,
        peer_bandwidth_bytes_per_second=most if level.peer_bandwidth_bytes_per_second else 0.0,
    )


def together_seconds(jobs: Iterable[tuple[str, float, AxisLink]]) -> float:
    """Seconds of collectives (kind, full bytes, link) that start at once, on several axes: each takes its own time at least, and
    what they send over one physical link adds up (they share its cards)."""
    listed = list(jobs)
    ports: dict[str, float] = {}
    for job in listed:
        for port, seconds in busy_seconds(*job).items():
            ports[port] = ports.get(port, 0.0) + seconds
    return max((0.0, *(collective_seconds(*job) for job in listed), *ports.values()))


def parameter_server_seconds(full_bytes: float, link: AxisLink, servers: int = 1) -> float:
    """For comparison only: the members push `full_bytes` each to `servers` machines on the outermost level, and pull as much."""
    if link.size == 1:
        return 0.0
    values = parameters_of("point_to_point", "direct", LARGE, link)
    return formula("parameter_server.direct.1").value({**values, "N": full_bytes, "n": link.size, "servers": servers})


def explained(kind: str, full_bytes: float, link: AxisLink) -> str:
    """The formula of the way that is taken, without and with numbers."""
    way = chosen(kind, full_bytes, link)
    if way.algorithm == "none":
        return f"{kind}: one member, nothing to send"
    found = formula(f"{kind}.{way.algorithm}.{1 if kind == 'point_to_point' else len(link.levels)}")
    values: Mapping[str, float] = {**parameters_of(kind, way.algorithm, way.protocol, link), "N": full_bytes}
    waiting, moving = factors_of(kind, link)
    more = ""
    if (waiting, moving) != (1.0, 1.0):
        more = f"\n  with {waiting:.3g} x the latency and {moving:.3g} x the transfer as measured = {way.seconds:.6g} seconds"
    return found.explain({name: values[name] for name in found.names}) + more
