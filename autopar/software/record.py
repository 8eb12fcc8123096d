"""What a software is to the planner: a record of what it can be set to, what it forbids, and how it writes that down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.decoders.recognize import RecognizedDecoder
from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.space import Space


@dataclass(frozen=True, slots=True)
class Source:
    """Where a fact stands: a public repository, the file in it, and the commit (or the release) that was read."""

    repository: str
    path: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}:{self.path}"


@dataclass(frozen=True, slots=True)
class Job:
    """A run as a configuration file has it: its configuration, and what else the file says or the caller adds.

    devices, batch, seq: of the whole run; batch is in sequences (0: not said).
    precision: ``bf16``, ``fp16``, ``fp32`` or ``fp8`` (linear layers in float8, all else in bf16).
    model, decoder: a name of `decoders.recognize`, or sizes that the file states.
    compiled, async_tp, ep_overlap: switches of overlap and compilation (None: the software's default).
    cpu: the devices are processes on CPUs.
    assumed: what the file leaves open, in words.
    """

    configuration: Configuration = Configuration()
    devices: int = 0
    batch: int = 0
    seq: int = 0
    precision: str = "bf16"
    model: str = ""
    decoder: RecognizedDecoder | None = None
    optimizer: str = "adamw"
    compiled: bool | None = None
    async_tp: bool | None = None
    ep_overlap: bool | None = None
    cpu: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def data(self) -> int:
        """The data degree, 0 where the devices do not divide."""
        each = self.configuration
        model = each.tensor * each.stages * each.context
        return self.devices // model if self.devices % model == 0 else 0

    @property
    def size(self) -> str:
        """The batch in words: ``128 x 8192`` where there are sequences."""
        return f"{self.batch} x {self.seq}" if self.seq else str(self.batch)

    @property
    def steps(self) -> int:
        """Micro-batches of a step."""
        return max(1, -(-self.batch // max(1, self.data * self.configuration.micro)))


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller says beside a file: it counts where the file is silent."""

    devices: int = 0
    batch: int = 0
    seq: int = 0
    micro: int = 0
    recompute: str = ""


Holds = Callable[[Job, RecognizedDecoder | None], bool]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint: `holds` of a job and its model (None: no decoder), the `reason` for people (with fields of `facts`), and
    where the software says so."""

    reason: str
    holds: Holds
    source: Source

    def broken(self, job: Job, model: RecognizedDecoder | None) -> str:
        """The reason with its numbers, where the rule does not hold; else empty."""
        return "" if self.holds(job, model) else self.reason.format(**facts(job, model))


def facts(job: Job, model: RecognizedDecoder | None) -> dict[str, Any]:
    """The numbers that reasons may name."""
    each = job.configuration
    sizes = model.sizes if model is not None else None
    out = {
        name: getattr(each, name)
        for name in ("tensor", "context", "experts", "stages", "virtual", "zero", "group", "micro", "host_layers")
    }
    out |= {"devices": job.devices, "batch": job.batch, "seq": job.seq, "data": job.data, "steps": job.steps}
    out |= {"precision": job.precision, "schedule": each.schedule, "layers": model.layers if model is not None else 0}
    names = {"heads": "heads", "kv_heads": "kv_heads", "all_experts": "experts", "ffn": "ffn", "hidden": "hidden"}
    return out | {name: getattr(sizes, attribute, 0) for name, attribute in names.items()}


@dataclass(frozen=True, slots=True)
class Lack:
    """What a plan of our own may have and a software has no key for: in `words`, and as fields of its `Space` that would have it
    (none: it is not priced). `sequence_parallel`: it would have that too."""

    words: str
    space: Mapping[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Software:
    """A software.

    title: for people. style, file: how its configuration is written, and the name of the file.
    space: what is searched; rules: what it forbids.
    stack: (name of constants, device generation of them) for a generation and whether the model is a mixture of experts.
    recognizes: whether a file is one of this software's.
    read, write: a file's entries to a job, and a job to the values of its keys (None: the key is left out).
    run: how the file is used, a line of shell or Python.
    lacks: what plans of our own may have and it has no key for.
    whole_experts: the tensor axis does not cut inside experts.
    precisions: what it computes in.
    beside: files that belong to the first one, by name: a job is both.
    also: the same in other spellings, by name of the file.
    spelling: how a file spells keys of `write`, where it has several spellings.
    """

    name: str
    title: str
    style: str
    file: str
    space: Space
    rules: tuple[Constraint, ...]
    stack: Callable[[str, bool], tuple[str, str]]
    recognizes: Callable[[Entries], bool]
    read: Callable[[Entries, Given], Job]
    write: Callable[[Job], dict[str, Any]]
    run: str
    lacks: tuple[Lack, ...]
    whole_experts: bool = False
    sequence_parallel: bool = True
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    beside: Callable[[Job], dict[str, str]] = lambda _: {}
    also: Callable[[Job], dict[str, str]] = lambda _: {}
    spelling: Callable[[Entries], Mapping[str, str]] | None = None

    def problems(self, job: Job, model: RecognizedDecoder | None) -> list[tuple[str, Source]]:
        """What keeps a job from starting: reasons with their sources."""
        broken = ((rule.broken(job, model), rule.source) for rule in self.rules)
        return [(reason, source) for reason, source in broken if reason]
