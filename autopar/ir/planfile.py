"""``plan.json``: a plan with its graph, written and read back exactly, and checked on load. Holds no code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from autopar.errors import PlanError
from autopar.ir.chunks import chunk_calls, chunks_of_ranks
from autopar.ir.codec import decode_candidate, decode_graph, encode_blocks, encode_graph, encode_mesh, encode_pipeline
from autopar.ir.describe import words
from autopar.ir.document import (
    SCHEMA_VERSION,
    Baseline,
    BatchInfo,
    ClusterInfo,
    ModelInfo,
    Parallelism,
    PlanDocument,
    PrecisionInfo,
    Predicted,
    SearchInfo,
    StageInfo,
)
from autopar.ir.graph import Graph
from autopar.ir.interface import Interface
from autopar.ir.plan import Candidate, Pipeline, Solution
from autopar.ir.verify import verify_candidate


@dataclass(frozen=True, slots=True)
class Plan:
    """The decoded file: `document` is the file as structs, `graph` and `candidate` are what the compiler reads."""

    document: PlanDocument
    graph: Graph
    candidate: Candidate

    @property
    def solution(self) -> Solution:
        return Solution(self.graph, self.candidate)

    def to_json(self) -> str:
        """The text of ``plan.json``."""
        return encode(self.document)

    @staticmethod
    def from_json(text: str | bytes, name: str = "plan") -> Plan:
        """The inverse of `to_json`. PlanError on a text that is no valid plan."""
        return decode(text, name)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def called_as(self, interface: Interface | None) -> Plan:
        """The plan with what this process knows of the model's call: two of one fingerprint may return classes of other names."""
        if interface == self.graph.interface:
            return self
        graph = replace(self.graph, interface=interface)
        return Plan(msgspec.structs.replace(self.document, graph=encode_graph(graph)), graph, self.candidate)

    def words(self) -> str:
        """The plan in words: ``dp=2 (ZeRO-3) x tp=2 (column- and row-parallel linears, attention heads)``."""
        return words(self.graph, self.candidate, self.document.predicted.bubble_share or None)

    def __str__(self) -> str:
        document = self.document
        stages = self.candidate.pipeline.stages
        mesh = (f"pp={stages} x " if stages > 1 else "") + str(self.candidate.mesh)
        return f"{document.model.name} on {mesh}, {document.cluster.name}"


def make_plan(
    graph: Graph,
    candidate: Candidate,
    *,
    model: ModelInfo,
    cluster: ClusterInfo,
    parallelism: Parallelism,
    optimizer: str,
    seq: int | None = None,
    predicted: Predicted | None = None,
    baselines: dict[str, Baseline | None] | None = None,
    search: SearchInfo | None = None,
    replicated_ops: tuple[str, ...] = (),
    replicated_share: dict[str, float] | None = None,
) -> Plan:
    """A plan of its parts. PlanError where candidate and graph do not fit: nothing invalid is ever written."""
    verify_candidate(graph, candidate, cluster.devices)
    blocks, ops = encode_blocks(graph, candidate)
    document = PlanDocument(
        schema_version=SCHEMA_VERSION,
        model=model,
        cluster=cluster,
        mesh=encode_mesh(candidate),
        parallelism=parallelism,
        batch=BatchInfo(candidate.batch, candidate.micro_batch // candidate.mesh.size_of("dp"), candidate.micro_batches, seq),
        precision=PrecisionInfo(candidate.precision.compute, candidate.precision.master),
        optimizer=optimizer,
        schedule=encode_pipeline(candidate.pipeline),
        stages=_stages(graph, candidate.pipeline),
        blocks=blocks,
        ops=ops,
        recompute=tuple(plan.block for plan in candidate.blocks if plan.recompute or plan.again or plan.again_arcs),
        predicted=predicted or Predicted(),
        baselines=baselines or {"ddp": None, "fsdp": None},
        search=search or SearchInfo(),
        replicated_ops=replicated_ops,
        replicated_share=replicated_share or {},
        graph=encode_graph(graph),
    )
    return Plan(document, graph, candidate)


def _stages(graph: Graph, pipeline: Pipeline) -> tuple[StageInfo, ...]:
    chunks = chunk_calls(graph, pipeline)
    out = []
    for mine in chunks_of_ranks(pipeline):
        out.append(StageInfo(tuple(index for chunk in mine for index in chunks[chunk]), mine))
    return tuple(out)


def encode(document: PlanDocument) -> str:
    """JSON, two blanks of indentation."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def decode(text: str | bytes, name: str = "plan") -> Plan:
    """A plan from its text, verified. PlanError, one line, on anything else."""
    again = "write it again with `autopar plan`"
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{name} is not a whole JSON document ({error}): {again}") from None
    version = head.get("schema_version") if isinstance(head, dict) else None
    if not isinstance(version, int):
        raise PlanError(f"{name} is not a plan: it has no schema_version; {again}")
    if version > SCHEMA_VERSION:
        raise PlanError(
            f"{name} has schema version {version}, this autopar reads up to {SCHEMA_VERSION}: update autopar or {again}"
        )
    try:
        document = msgspec.convert(head, PlanDocument)
        graph = decode_graph(document.graph)
        candidate = decode_candidate(document)
    except (msgspec.ValidationError, ValueError) as error:
        raise PlanError(f"{name} is not a valid plan: {error}; {again}") from None
    _verify(document, graph, candidate, name)
    return Plan(document, graph, candidate)


def _verify(document: PlanDocument, graph: Graph, candidate: Candidate, name: str) -> None:
    batch = document.batch
    try:
        verify_candidate(graph, candidate, document.cluster.devices)
    except PlanError as error:
        raise PlanError(f"{name} does not fit together: {error}") from None
    except (ValueError, KeyError, StopIteration, IndexError) as error:
        raise PlanError(
            f"{name} holds a graph that does not fit together ({error}): write it again with `autopar plan`"
        ) from None
    if batch.micro * batch.num_microbatches * candidate.mesh.size_of("dp") != batch.global_:
        raise PlanError(f"{name}: batch.global is not batch.micro x batch.num_microbatches x dp")
    if document.model.fingerprint != graph.fingerprint:
        raise PlanError(f"{name}: model.fingerprint is not that of the graph; the file was put together from two plans")


def load(path: str | Path) -> Plan:
    """The plan in the file. PlanError where there is none or it is not valid."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from None
    return decode(text, str(path))
