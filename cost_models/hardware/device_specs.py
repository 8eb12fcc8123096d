"""Devices, network links and offload targets by the numbers of their data sheets; and the links that one mesh axis runs over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.cost_models.hardware.measured_collectives import MeasuredCollective, PiecewiseLinear

LINK_KINDS = ("switch", "mesh", "ring", "torus")
"""Ways of a link to join its members: through a switch; pair by pair (each pair has ``bandwidth / (devices - 1)`` for itself); as
a ring of neighbours; or as rings along each of several `dimensions`."""

ALGORITHMS = ("ring", "tree", "switch", "hierarchical")
"""Algorithms that a collective library may choose from; see comm/collectives.py."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or a process of a CPU machine.

    peak: dense FLOP/s per dtype as the data sheet prints it (``float8`` stands for both of its formats).
    measured_peak: FLOP/s that the best matrix product of any shape was measured to reach, where known. No product is faster.
    matmul_fraction, attention_fraction: share of `peak` that matrix products and attention reach.
    product_bytes_per_second: at which matrix products on a CPU read, pack and write their operands and results (0: as streaming
        operations).
    causal_attention_fraction: what attention reaches where not every query sees all keys, of the FLOPs of those pairs alone
        (0: as other attention): kernels for CPUs compute masked scores too.
    convolution_fraction: share of `peak` that convolutions without groups reach (0: as matrix products).
    vector_bits: of a CPU's registers, to whose width convolutions pad their channels (0: they do not).
    ranks_per_core: how many ranks share a core of a CPU machine; what one takes is stated for all of them at work, so that a rank
        that waits gives its share to the others (1: no core is shared).
    bandwidth_fraction: share of the memory bandwidth that streaming kernels reach.
    launch_seconds: the floor below which no operation ends.
    tf32: products and attention in float32 run in TF32, as ``torch.set_float32_matmul_precision("high")`` asks for.
    host_launch_seconds: of the host, for one launch where it launches kernels one by one; a layer takes the larger of host and
        device (0: the host is ahead).
    base_bytes: what the process takes before the model and its communicators: context, kernels of libraries (see `allocator`).
    generation: name of the architecture (``hopper``); empty where unknown.
    multiprocessors: what a kernel's tiles are distributed over; 0 where unknown, and on a CPU.
    fused: neighbouring streaming operations run as one kernel, as a compiler makes them, and the backward recomputes them.
    communicator_bytes: buffers of one communicator of the collective library (where a GPU's file does not say:
        `allocator.COMMUNICATOR_BYTES`).
    memory_margin: share of the memory that plans leave free.
    held_bytes: what other models of the process take of it, which a plan leaves to them.
    transcendental_seconds: seconds per element of a transcendental function (gelu, softmax) besides its memory traffic; 0 on a
        GPU.
    update_seconds: one pass of an optimizer over a small distributed tensor on a CPU (0: as a launch).
    update_bytes_per_second: memory traffic of an update of large tensors on a CPU, whose temporary results are fresh pages (0: as
        other streaming operations).
    fresh_page_bytes_per_second: at which a CPU's system maps the pages of new tensors, where they are so large that freed memory
        is not used again (compute/kernels.py), besides the traffic (0: no such cost).
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
    fused: bool = False
    communicator_bytes: int = 0
    memory_margin: float = 0.0
    held_bytes: int = 0
    transcendental_seconds: float = 0.0
    update_seconds: float = 0.0
    update_bytes_per_second: float = 0.0
    measured_peak: tuple[tuple[str, float], ...] = ()
    convolution_fraction: float = 0.0
    causal_attention_fraction: float = 0.0
    product_bytes_per_second: float = 0.0
    vector_bits: int = 0
    ranks_per_core: float = 1.0
    fresh_page_bytes_per_second: float = 0.0
    host_launch_seconds: float = 0.0
    tf32: bool = False

    @property
    def budget_bytes(self) -> int:
        """The memory that a plan may take: all but the margin."""
        return int(self.memory_bytes * (1 - self.memory_margin))

    def peak_flops_per_second(self, dtype: str) -> float:
        """Return the data-sheet peak of dense matrix products in `dtype`; an unlisted dtype counts as float32."""
        peaks = dict(self.peak)
        return peaks.get("float8" if dtype.startswith("float8") else dtype, peaks["float32"])

    def matrix_peak_flops_per_second(self, dtype: str) -> float:
        """Return the data-sheet peak of products and attention in `dtype`: of TF32 for float32 where the run asks for it."""
        tf32_peak = dict(self.peak).get("tf32", 0.0) if self.tf32 and dtype == "float32" else 0.0
        return tf32_peak or self.peak_flops_per_second(dtype)

    def product_flops_per_second(self, dtype: str) -> float:
        """Return what large matrix products in `dtype` reach: ``peak x fraction``, and no more than the measured peak."""
        return self._reached(dtype, self.matmul_fraction)

    def convolution_flops_per_second(self, dtype: str) -> float:
        """Return what large convolutions in `dtype` reach, likewise."""
        return self._reached(dtype, self.convolution_fraction or self.matmul_fraction)

    def attention_share(self, whole: bool) -> float:
        """Return the share of `peak` that attention reaches; `whole`: every query sees all keys."""
        return self.attention_fraction if whole else self.causal_attention_fraction or self.attention_fraction

    def _reached(self, dtype: str, fraction: float) -> float:
        rate = self.matrix_peak_flops_per_second(dtype) * fraction
        measured = dict(self.measured_peak)
        return min(rate, measured.get("float8" if dtype.startswith("float8") else dtype, rate))


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network. Bandwidths are those of one device in one direction, as collectives reach them (of a ring or torus:
    of one cable).

    devices: how many devices one switch of this level joins.
    latency_seconds: of one step of a ring.
    low_latency_seconds, low_latency_bandwidth_bytes_per_second: the library's protocol for small messages (NCCL's LL and LL128);
        a bandwidth of 0: none.
    switch_seconds, switch_bandwidth_bytes_per_second: reductions inside the switch (NVLink SHARP); a bandwidth of 0: none.
    oversubscription: how much more its members could send than this level carries (1: none); it divides the bandwidth.
    port: the level whose cable at the device this level's traffic uses too, where it is not its own (a spine is reached through
        the network card of the leaf).
    dimensions: widths of the rings of a torus.
    factors: per kind of collective, how many times longer than its formula the library takes, in latency and in transfer (a
        reduce-scatter that is run as an all-reduce: 2 and 2).
    measured: seconds by message size, per kind of collective, as they were measured on this level; what is not there is priced by
        latency, bandwidth and factors.
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
    measured: tuple[MeasuredCollective, ...] = ()

    def scaled(self, share: float) -> Link:
        """Return the link with `share` of its bandwidth, for messages of every size. What was measured stays."""
        return replace(
            self,
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second * share,
            low_latency_bandwidth_bytes_per_second=self.low_latency_bandwidth_bytes_per_second * share,
            switch_bandwidth_bytes_per_second=self.switch_bandwidth_bytes_per_second * share,
        )

    @property
    def physical(self) -> str:
        """The cable at the device that carries this level's traffic."""
        return self.port or self.name


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """Memory that a device can offload to: the host's, or NVMe. All figures are one device's share; a read goes to the device."""

    name: str
    capacity_bytes: float
    read_bytes_per_second: float
    write_bytes_per_second: float
    latency_seconds: float = 0.0

    def copy_seconds(self, size_bytes: float) -> tuple[float, float]:
        """Return the seconds of a copy from the device to there, and of one back."""
        return size_bytes / self.write_bytes_per_second, size_bytes / self.read_bytes_per_second


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A group of `size` equal devices of a heterogeneous cluster."""

    device: Device
    links: tuple[Link, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Level:
    """The part of a process group that one link joins: `width` subgroups of the next inner level. The bandwidths of `link` are
    those that one member has for a collective over this width, its `devices` and `oversubscription` do not count any more.
    `peer_bandwidth_bytes_per_second` is what one member has towards one other (0: the same)."""

    link: Link
    width: int
    peer_bandwidth_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class AlphaBetaCost:
    """The cost of one algorithm and protocol of a collective in the alpha-beta model: ``latency_seconds + bytes x
    seconds_per_byte``."""

    algorithm: str
    protocol: str
    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, full_bytes: float) -> float:
        return self.latency_seconds + full_bytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class AxisLink:
    """The links of the process groups of one mesh axis: levels from inside the node outwards, whose widths multiply to `size`.
    `algorithms` is what the collective library may choose from."""

    size: int
    levels: tuple[Level, ...]
    launch_seconds: float = 0.0
    algorithms: tuple[str, ...] = ("ring", "tree", "switch")
    cost_cache: dict[str, tuple[AlphaBetaCost, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Filled by comm/alpha_beta.py: the costs of each kind of collective on these links."""
    table_cache: dict[str, PiecewiseLinear | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Filled by comm/collectives.py: the table of each kind, None where the alpha-beta model prices it."""

    def __hash__(self) -> int:
        return hash((self.size, self.launch_seconds, *(level.link.name for level in self.levels)))

    @property
    def names(self) -> frozenset[str]:
        """The physical links in use."""
        return frozenset(level.link.physical for level in self.levels)

    def shares(self, other: AxisLink) -> bool:
        """Return whether both use one physical link."""
        return not self.names.isdisjoint(other.names)
