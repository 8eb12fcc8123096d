"""``plan.json``: a plan with its graph, written and read back exactly, and checked on load. Holds no code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from autopar.errors import AutoparError, PlanError
from autopar.files import read_bytes, write_whole
from autopar.ir.describe import describe
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.split_blocks import split_like
from autopar.ir.pipeline.stage_variants import with_variants_like, without_stage_variants
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.plan_file.codec import checksum, decode, encode, graph_fingerprint, saves_checksum
from autopar.ir.plan_file.document import (
    SCHEMA_VERSION,
    Baseline,
    BatchInfo,
    ClusterInfo,
    MeshInfo,
    ModelInfo,
    Parallelism,
    PlanDocument,
    Predicted,
    SavedTensors,
    SearchInfo,
    StageInfo,
    divide_blocks,
    join_blocks,
)
from autopar.ir.plan_file.verify_graph import verify_graph, verify_texts
from autopar.ir.verify import verify_candidate

PLAN_AGAIN = "plan the model again with `autopar plan MODEL --cluster CLUSTER -o plan.json`"


@dataclass(frozen=True, slots=True)
class Plan:
    """A loaded plan: `document` is the file as structs, `graph` and `candidate` are what the compiler reads."""

    document: PlanDocument
    graph: Graph
    candidate: Candidate

    def to_json(self) -> str:
        """The text of ``plan.json``."""
        return encode_document(self.document)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """The inverse of `to_json`. PlanError on a text that is no valid plan."""
        return decode_plan(text)

    def save(self, path: str | Path) -> None:
        write_whole(path, self.to_json())

    def with_graph(self, graph: Graph) -> Plan:
        """The decisions of this plan, among them where blocks are split or have several plans, on a graph of the same
        fingerprint that was captured here: what the file says of the graph is not used. PlanError where they do not fit."""
        split = split_like(replace(graph, batch=self.graph.batch), self.graph)
        graph = with_variants_like(split, self.graph)
        if graph == self.graph:
            return self
        verify_candidate(graph, self.candidate, self.document.cluster.devices)
        return Plan(replace(self.document, graph=_with_checksum(graph)), graph, self.candidate)

    @property
    def saves(self) -> dict[str, SavedTensors]:
        """Tensors that autograd saves, by operation of the graph; none where somebody edited them: torch is asked then."""
        saves = self.document.saves
        return saves if saves_checksum(saves) == self.document.saves_checksum else {}

    def describe(self) -> str:
        """The plan in one line: ``dp=2 (ZeRO-3) x tp=2 (column- and row-parallel linears, attention heads)``."""
        return describe(self.graph, self.candidate, self.document.predicted.bubble_share or None)

    def _repr_html_(self) -> str:
        """Return the small report, which notebooks show."""
        small: Any = import_module("autopar.report.notebook")  # it imports the evaluator, which imports this module
        return str(small.small_report(self))

    def __str__(self) -> str:
        document = self.document
        stages = self.candidate.pipeline.stages
        mesh = (f"pp={stages} x " if stages > 1 else "") + str(self.candidate.mesh)
        return f"{document.model.name} on {mesh}, {document.cluster.name}"


def assemble_plan(
    graph: Graph,
    candidate: Candidate,
    *,
    model: ModelInfo,
    cluster: ClusterInfo,
    parallelism: Parallelism,
    optimizer: str,
    stage_chunks: Sequence[tuple[int, ...]] = ((0,),),
    seq: int | None = None,
    predicted: Predicted | None = None,
    baselines: dict[str, Baseline | None] | None = None,
    search: SearchInfo | None = None,
    replicated_ops: tuple[str, ...] = (),
    replicated_share: dict[str, float] | None = None,
    saves: dict[str, SavedTensors] | None = None,
) -> Plan:
    """The plan of a graph, a candidate and what is reported beside them. PlanError where the candidate does not fit the graph, so
    that nothing invalid is ever written."""
    verify_graph(graph)
    verify_candidate(graph, candidate, cluster.devices)
    blocks, ops = divide_blocks(graph, candidate)
    document = PlanDocument(
        schema_version=SCHEMA_VERSION,
        model=model,
        cluster=cluster,
        mesh=MeshInfo(candidate.mesh.axes, candidate.zero_group),
        parallelism=parallelism,
        batch=BatchInfo(candidate.batch, candidate.micro_batch // candidate.mesh.size_of("dp"), candidate.micro_batches, seq),
        precision=candidate.precision,
        optimizer=optimizer,
        schedule=candidate.pipeline if candidate.pipeline.stages > 1 else Pipeline(schedule="none"),
        stages=_stages(graph, candidate.pipeline, stage_chunks),
        blocks=blocks,
        ops=ops,
        recompute=tuple(
            plan.block for plan in candidate.blocks if plan.recompute or plan.recompute_nodes or plan.recompute_conversions
        ),
        predicted=predicted or Predicted(),
        baselines=baselines or {"ddp": None, "fsdp": None},
        search=search or SearchInfo(),
        replicated_ops=replicated_ops,
        replicated_share=replicated_share or {},
        graph=_with_checksum(graph),
        saves=saves or {},
        saves_checksum=saves_checksum(saves or {}),
    )
    return Plan(document, graph, candidate)


def _with_checksum(graph: Graph) -> Graph:
    return replace(graph, checksum=checksum(graph))


def _stages(graph: Graph, pipeline: Pipeline, stage_chunks: Sequence[tuple[int, ...]]) -> tuple[StageInfo, ...]:
    chunks = chunk_calls(graph, pipeline)
    if len(stage_chunks) != pipeline.stages:
        raise PlanError(f"{len(stage_chunks)} stages have chunks, the pipeline has {pipeline.stages} stages")
    return tuple(StageInfo(tuple(index for chunk in mine for index in chunks[chunk]), mine) for mine in stage_chunks)


def encode_document(document: PlanDocument) -> str:
    """JSON, two blanks of indentation."""
    return msgspec.json.format(msgspec.json.encode(encode(document)), indent=2).decode() + "\n"


def decode_plan(text: str | bytes, name: str = "plan") -> Plan:
    """The verified plan of a file's text. PlanError, one line, on anything else."""
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{name} is not a whole JSON document ({error}): {PLAN_AGAIN}") from None
    version = head.get("schema_version") if isinstance(head, dict) else None
    if type(version) is not int:
        raise PlanError(f"{name} is not a plan: it has no schema_version; {PLAN_AGAIN}")
    if version != SCHEMA_VERSION:
        mend = PLAN_AGAIN if version < SCHEMA_VERSION else f"update autopar, or {PLAN_AGAIN}"
        raise PlanError(f"{name} has schema version {version}, this autopar reads version {SCHEMA_VERSION} only: {mend}")
    try:
        document = decode(PlanDocument, head)
        verify_texts(document.graph)
        candidate = _candidate(document)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise PlanError(f"{name} is not a valid plan: {error}; {PLAN_AGAIN}") from None
    _verify(document, candidate, name)
    return Plan(document, document.graph, candidate)


def _candidate(document: PlanDocument) -> Candidate:
    return Candidate(
        mesh=Mesh(document.mesh.axes),
        blocks=join_blocks(document.blocks, document.ops),
        batch=document.batch.global_,
        precision=document.precision,
        micro_batches=document.batch.num_microbatches,
        zero_group=document.mesh.zero_group,
        pipeline=document.schedule if document.schedule.stages != 1 else Pipeline(),
    )


def _verify(document: PlanDocument, candidate: Candidate, name: str) -> None:
    batch, graph = document.batch, document.graph
    try:
        with refuse_misfits(name):
            verify_graph(graph)
            verify_candidate(graph, candidate, document.cluster.devices)
    except PlanError as error:
        raise PlanError(f"{name} does not fit together: {error}") from None
    if batch.micro * batch.num_microbatches * candidate.mesh.size_of("dp") != batch.global_:
        raise PlanError(f"{name}: batch.global is not batch.micro x batch.num_microbatches x dp")
    if document.model.fingerprint != graph.fingerprint:
        raise PlanError(f"{name}: model.fingerprint is not that of the graph; the file was put together from two plans")


_MISFITS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, StopIteration, TypeError, ValueError
)  # fmt: skip


@contextmanager
def refuse_misfits(name: str) -> Iterator[None]:
    """PlanError, one line, for whatever the use of a plan's file runs into. Rules, cost models and lowering rely on shapes and
    arguments that fit, as those of a captured graph do; a file with checksums made anew may hold any."""
    try:
        yield
    except AutoparError:
        raise
    except _MISFITS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = "".join(f"{line[:200]}, " for line in str(error).splitlines()[:1])
        raise PlanError(
            f"{name} holds a graph that does not fit together ({said}at {'/'.join(Path(frame.filename).parts[-2:])}:"
            f"{frame.lineno}): {PLAN_AGAIN}; if that one ends so too, report this line"
        ) from error


def check_graph(plan: Plan, name: str) -> Plan:
    """The plan, to be used without its model. PlanError where its graph is not the one that was captured."""
    said = plan.document.graph
    if not said.checksum:
        raise PlanError(f"{name} has no graph.checksum, as the files of an older autopar: {PLAN_AGAIN}")
    restructured = plan.candidate.pipeline.stages > 1  # blocks are split
    # calls of a block may have two plans, each with a block of its own
    captured = {graph_fingerprint(each) for each in (plan.graph, without_stage_variants(plan.graph))}
    if checksum(said) != said.checksum or not restructured and said.fingerprint not in captured:
        raise PlanError(f"{name}: the graph is not the one of its fingerprint, so it was changed by hand; {PLAN_AGAIN}")
    return plan


def load_plan(path: str | Path) -> Plan:
    """The plan of a file. PlanError where the file is missing or no valid plan."""
    return decode_plan(read_bytes(path, PlanError, "the plan"), str(path))
