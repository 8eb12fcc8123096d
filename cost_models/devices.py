"""Devices, links and stores: the numbers of a data sheet; and the part of a network that one group of ranks uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

LINK_KINDS = ("switch", "mesh", "ring", "torus")
"""How a level joins its members: through a switch; pair by pair (each pair has ``bandwidth / (devices - 1)`` for itself); as a
ring of neighbours; or as rings along each of several `dimensions`."""

ALGORITHMS = ("ring", "tree", "switch", "hierarchical")
"""What a collective library may choose from; see collectives.py."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one process of a CPU machine.

    `peak` is dense FLOP/s per dtype as the data sheet prints it (``float8`` stands for both of its formats), `measured_peak` the
    largest matrix product that somebody has published. A fraction tells which share of a peak is reached: of `peak` by
    matrix products and by attention, of the memory bandwidth by streaming kernels. `launch_seconds` is the floor below which
    no operation ends. `base_bytes` is what context, allocator and communicator take before the model. `generation` names the
    architecture (``hopper``), `multiprocessors` counts what a kernel's tiles are dealt to, `l2_bytes` is the last-level cache;
    0 or empty where unknown. `fused`: neighbouring streaming operations run as one kernel, as a compiler makes them.
    `special_seconds` is what an element of a transcendental function (gelu, softmax) takes besides its traffic: on a GPU nothing.
    `update_seconds` is one pass of an optimizer over a small distributed tensor on a CPU (0: as a launch).
    `allocator_slack` is what a caching allocator reserves beyond the tensors in it, as a share of these.
    """

    name: str
    kind: str
    peak: tuple[tuple[str, float], ...]
    memory_bytes: int
    bandwidth_bytes_per_second: float
    launch_seconds: float
    matmul_fraction: float
    attention_fraction: float
    bandwidth_fraction: float
    base_bytes: int
    generation: str = ""
    multiprocessors: int = 0
    l2_bytes: int = 0
    measured_peak: tuple[tuple[str, float], ...] = ()
    fused: bool = False
    allocator_slack: float = 0.0
    special_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def room_bytes(self) -> float:
        """What tensors may take: ``(memory - base) / (1 + slack)``."""
        return (self.memory_bytes - self.base_bytes) / (1 + self.allocator_slack)

    def peak_flops_per_second(self, dtype: str) -> float:
        """The data-sheet peak of dense matrix products in `dtype`; an unlisted dtype counts as float32."""
        known = dict(self.peak)
        return known.get("float8" if dtype.startswith("float8") else dtype, known["float32"])


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network. `devices` are joined by one switch of this level; bandwidth is per device and direction, as
    collectives reach it (for a ring or torus: of one cable), latency is that of one step of a ring.

    `low_latency_*` describes the library's protocol for small messages (NCCL's LL and LL128), `switch_*` reductions inside
    the switch (NVLink SHARP); a bandwidth of 0 says that there is none. `oversubscription` divides the bandwidth: how much more
    its members could send than this level carries (1: none). `port` is the name of the level whose cable at the device this
    level's traffic uses too, where it is not its own: a spine is reached through the network card. A link of kind torus has
    `dimensions`, the widths of its rings. `factors` tells for kinds of collectives how many times longer than by their
    formula the library takes, in latency and in transfer (one that does a reduce-scatter as an all-reduce: 2 and 2).
    """

    name: str
    devices: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    kind: str = "switch"
    low_latency_seconds: float = 0.0
    low_latency_bandwidth_bytes_per_second: float = 0.0
    switch_seconds: float = 0.0
    switch_bandwidth_bytes_per_second: float = 0.0
    oversubscription: float = 1.0
    port: str = ""
    dimensions: tuple[int, ...] = ()
    factors: tuple[tuple[str, float, float], ...] = ()

    def scaled(self, share: float) -> Link:
        """The same link with `share` of its bandwidth, for messages of every size."""
        return replace(
            self,
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second * share,
            low_latency_bandwidth_bytes_per_second=self.low_latency_bandwidth_bytes_per_second * share,
            switch_bandwidth_bytes_per_second=self.switch_bandwidth_bytes_per_second * share,
        )


@dataclass(frozen=True, slots=True)
class Store:
    """Memory behind the device: the host's, or NVMe. All figures are one device's share; read is towards the device."""

    name: str
    capacity_bytes: float
    read_bytes_per_second: float
    write_bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`size` equal devices of a cluster that has several kinds of them."""

    device: Device
    links: tuple[Link, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Level:
    """The part of a group that one link level joins: `width` members, in a ring step of `latency_seconds`. Bandwidth is what
    one member has for a collective over this width, `peer_bandwidth_bytes_per_second` what it has towards one other (0: the
    same). The rest is the link's; see there."""

    name: str
    width: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    kind: str = "switch"
    low_latency_seconds: float = 0.0
    low_latency_bandwidth_bytes_per_second: float = 0.0
    switch_seconds: float = 0.0
    switch_bandwidth_bytes_per_second: float = 0.0
    port: str = ""
    peer_bandwidth_bytes_per_second: float = 0.0
    factors: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One way to run a collective: ``latency_seconds + bytes x seconds_per_byte``."""

    algorithm: str
    protocol: str
    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, full_bytes: float) -> float:
        return self.latency_seconds + full_bytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class AxisLink:
    """What the groups of one mesh axis run over: the levels from inside the node outwards; their widths multiply to `size`.
    `algorithms` is what the library may choose from."""

    size: int
    levels: tuple[Level, ...]
    launch_seconds: float = 0.0
    algorithms: tuple[str, ...] = ("ring", "tree", "switch")
    lines: dict[str, tuple[Line, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """A memory for collectives.py: what was worked out for these links, by kind."""

    def __hash__(self) -> int:
        return hash((self.size, self.launch_seconds, *(level.name for level in self.levels)))

    @property
    def names(self) -> frozenset[str]:
        """The physical links in use."""
        return frozenset(level.port or level.name for level in self.levels)

    def shares(self, other: AxisLink) -> bool:
        """Whether both use one physical link."""
        return not self.names.isdisjoint(other.names)
