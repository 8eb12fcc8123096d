"""Both sides of the comparison: the model on one process, and the plan on spawned ones, in training and in evaluation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from autopar.capture import capture
from autopar.capture.bind import BoundInputs, bind_inputs
from autopar.capture.results.returned import asked_of
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, BatchError, CaptureError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate, Precision
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.control_flow import OPAQUE
from autopar.plan_inputs import ExampleInputs, registry, split_inputs
from autopar.program.build import program_text
from autopar.runtime.plain.plain_model import preserved_modes
from autopar.variants.planner import plan_variant
from autopar.verification.apart import apart, in_dtype, moved_by_a_rounding
from autopar.verification.differences import Difference, compare
from autopar.verification.draws import Draw, match_draws, with_draws
from autopar.verification.locate import first_gradient, first_output, with_module_outputs
from autopar.verification.rank import work
from autopar.verification.single import LEARNING_RATE, SingleRun, has_casts, lift_casts, run_single

Say = Callable[[str], None]
Job = dict[str, Any]
Launch = Callable[[Job, int], list[dict[str, Any]]]

_MOVES = 3
"""The number of times that one process is run with numbers that are off by a rounding."""


@dataclass(slots=True)
class Subject:
    """A model with values, its example inputs, and the graph that is planned. `lift`: its casts to float32 are lifted to float64,
    on both sides."""

    model: nn.Module
    bound: BoundInputs
    tensors: dict[str, Tensor]
    master: torch.dtype
    graph: Graph
    capture: Callable[[], Graph]
    lift: bool = False
    reference: SingleRun | None = None
    source: str = ""
    sizes: tuple[int | None, int | None] = (None, None)
    """The source that the model is loaded from, with its batch and length: ranks need the code of opaque modules."""

    def single(
        self,
        *,
        backward: bool,
        exact: SingleRun | None = None,
        given: Sequence[Draw] | None = None,
        record_modules: bool = False,
        moved: int = 0,
    ) -> SingleRun:
        """The model on one process. `exact`: in float64, with the draws of that run. `given`: the draws of another run. `moved`:
        all its numbers are off by a rounding, drawn anew for each number of it (0: none)."""
        model, tensors, lift = self.model, self.tensors, self.lift
        with ExitStack() as stack:
            if moved:
                model, tensors = moved_by_a_rounding(stack.enter_context(apart(model)), tensors, moved)
            if exact is not None:
                model, lift = in_dtype(stack.enter_context(apart(model)), torch.float64), True
                tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
            return run_single(
                model, self.bound, tensors, asked_of(self.graph), backward=backward, lift=lift,
                draws=given if exact is None else exact.draws, record_modules=record_modules,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModeProof:
    """The comparisons of one mode. `left_out` says why nothing was."""

    training: bool
    differences: tuple[Difference, ...] = ()
    losses: tuple[float, float] = (0.0, 0.0)
    draws: int = 0
    left_out: str = ""
    unsteady: bool = False
    """Whether one process was run beside itself with numbers that are off by a rounding, and was as far from itself."""
    departs: str = ""
    """The place where they differ: the first module whose output or gradient departs, and by how much."""

    @property
    def equal(self) -> bool:
        return all(difference.equal for difference in self.differences)


@dataclass(frozen=True, slots=True)
class Proof:
    """Everything that was compared. `exact`: whether one process ran in float64 too, for its rounding."""

    modes: tuple[ModeProof, ...]
    exact: bool
    lifted: bool

    @property
    def equal(self) -> bool:
        return all(mode.equal for mode in self.modes)


def subject(
    model: nn.Module,
    example: ExampleInputs,
    compute: str,
    master: str,
    *,
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
    batch_dim: int | Mapping[str, int] | None = None,
    planned: Graph | None = None,
) -> Subject:
    """The model in the plan's dtype, captured. In float64 a model that casts to float32 itself has these casts lifted."""
    args, kwargs = split_inputs(example)

    def captured(dtype: str) -> Graph:
        return capture(model, args, kwargs, compute_dtype=dtype, outputs=outputs, batch_norm=batch_norm, batch_dim=batch_dim)

    chosen = compute
    try:
        graph = planned if planned is not None else captured(compute)
    except CaptureError as problem:
        if compute != "float64":
            raise
        try:
            chosen, graph = "float32", captured("float32")  # it casts to float32 itself, and meets its own parameters
        except CaptureError:
            raise problem from None  # what stands in the way in either dtype, not that a model in float64 meets float32
    lift = compute == "float64" and has_casts(graph)
    graph = lift_casts(graph) if lift else graph
    dtype = getattr(torch, master)
    dims = graph.interface.said_batch_dims if graph.interface is not None else ()
    bound = bind_inputs(model, args, kwargs, batch_dim=dims)
    tensors = {name: x.detach().to(dtype) if x.is_floating_point() else x for name, x in bound.tensors.items()}

    def recapture() -> Graph:
        return lift_casts(captured(chosen)) if lift else captured(chosen)

    return Subject(in_dtype(model, dtype), bound, tensors, dtype, graph, recapture, lift)


def run_reference(subject: Subject) -> SingleRun:
    """The model on one process in the mode that it has, before anything is planned; its draws must be those of the program."""
    run = subject.single(backward=True)
    match_draws(subject.graph, run.draws)
    subject.reference = run
    return run


def prove(subject: Subject, plan: Plan, cluster: Cluster, say: Say, launch: Launch | None = None) -> Proof:
    """Run both sides in the mode that the model has, and in the other one; and compare. `launch` makes a job's runs on
    ranks (by default on spawned processes)."""
    launch = launch or spawned
    _check_batch(plan)
    graph = lift_casts(plan.graph) if subject.lift else plan.graph
    first = subject.reference or run_reference(subject)
    own = subject.model.training
    programs: list[tuple[bool, Graph, Candidate, SingleRun]] = [(own, graph, plan.candidate, first)]
    left_out = ""
    try:
        with in_mode(subject.model, not own):
            other = subject.capture()
            reference = subject.single(backward=not own)
        chosen = plan.candidate
        if other.fingerprint == plan.graph.fingerprint:
            other = graph  # with the blocks of the plan: a pipeline cuts those of the capture
        else:
            say(f"planning the model in {mode_name(not own)}")
            other, chosen = plan_variant(other, plan.with_graph(graph), cluster, registry())
        programs.append((not own, other, chosen, reference))
    except AutoparError as problem:
        left_out = str(problem)
    say(f"running the plan on {plan.candidate.devices} local processes")
    runs, counts = [], []
    for training, each, candidate, reference in programs:
        run, names = _run_of(subject, each, candidate, reference, backward=training or reference is first)
        runs.append(run)
        counts.append(names)
    results = launch(job_of(subject, runs), plan.candidate.devices)
    compute = _coarsest(plan.candidate.precision)
    modes = []
    exact_all = compute == "float32"
    for (training, each, candidate, reference), found, count in zip(programs, results, counts, strict=True):
        exact = _exact(subject, reference, training, training or reference is first) if compute == "float32" else None
        exact_all &= exact is not None
        differences = tuple(compare(reference.result, found, compute, exact))
        losses = (float(reference.result["loss"]), float(found["loss"]))
        proof = ModeProof(training, differences, losses, count)
        if not proof.equal and exact is None:
            backward = training or reference is first
            with in_mode(subject.model, training):
                moved = [
                    subject.single(backward=backward, given=reference.draws, moved=number) for number in range(1, _MOVES + 1)
                ]
            compared = [compare(reference.result, found, compute, each.result) for each in moved]
            differences = tuple(max(each, key=lambda d: d.allowed) for each in zip(*compared, strict=True))
            proof = replace(proof, differences=differences, unsteady=all(each.equal for each in differences))
        if not proof.equal:
            say("looking for the first module that departs")
            with in_mode(subject.model, training):
                departs = first_departure(subject, each, candidate, reference, differences, launch)
            proof = replace(proof, departs=departs)
        modes.append(proof)
    if left_out:
        modes.append(ModeProof(not own, left_out=left_out))
    return Proof(tuple(modes), exact_all, subject.lift)


def _coarsest(precision: Precision) -> str:
    """The dtype whose rounding differences are judged by."""
    return precision.reduce if precision.compute in ("float32", "float64") and precision.reduce else precision.compute


def mode_name(training: bool) -> str:
    return "training" if training else "evaluation"


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model into this mode, and afterwards each module back; one that is in it already keeps its frozen parts."""
    with preserved_modes(model):
        if model.training != training:
            model.train(training)
        yield


def _exact(subject: Subject, reference: SingleRun, training: bool, backward: bool) -> Mapping[str, Any] | None:
    """The same run of one process in float64; None where the model does not run in it."""
    with in_mode(subject.model, training):
        try:
            return subject.single(backward=backward, exact=reference).result
        except (AutoparError, RuntimeError, TypeError):
            return None


def _check_batch(plan: Plan) -> None:
    if plan.graph.batch != plan.candidate.batch:
        raise BatchError(
            f"the plan is for a batch of {plan.candidate.batch}, the example inputs hold {plan.graph.batch}: let the factory "
            "take `batch`, or leave --batch out"
        )


def first_departure(
    subject: Subject, graph: Graph, candidate: Candidate, reference: SingleRun, differences: Sequence[Difference], launch: Launch
) -> str:
    """The first module in order of execution whose output departs, else the first of the backward whose gradient does, and by how
    much. Runs a forward of both sides once more, with the outputs of modules as further results."""
    least = max((each.allowed for each in differences if each.what == "loss"), default=0.0)
    single = subject.single(backward=False, given=reference.draws, record_modules=True)
    try:
        watched, plans, watches = with_module_outputs(graph, candidate, {path: x.shape for path, x in single.modules.items()})
        run, _ = _run_of(subject, watched, plans, reference, backward=False)
        outputs = launch(job_of(subject, [run]), candidate.devices)[0]["outputs"]
    except AutoparError as problem:
        return f"{first_gradient(differences, list(single.modules))} (outputs of modules could not be compared: {problem})"
    return first_output(watches, single.modules, outputs, least) or first_gradient(differences, list(single.modules))


def _run_of(
    subject: Subject, graph: Graph, candidate: Candidate, reference: SingleRun, backward: bool
) -> tuple[dict[str, Any], int]:
    """Return what ranks get of one mode, and how many draws are given."""
    batch = {value.name: subject.tensors[value.name].to(getattr(torch, value.dtype)) for value in graph.inputs}
    graph, candidate, inputs = with_draws(graph, candidate, match_draws(graph, reference.draws))
    dtypes = {value.name: getattr(torch, value.dtype) for value in graph.inputs}
    batch |= {name: tensor.to(dtypes[name]) for name, tensor in inputs.items()}
    text = program_text(graph, candidate)
    return {"program": text, "batch": batch, "given": list(inputs), "training": True, "backward": backward}, len(inputs)


def job_of(subject: Subject, runs: Sequence[Mapping[str, Any]]) -> Job:
    """Return what ranks get: the programs' texts and full tensors."""
    model = subject.model
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return {
        "runs": [dict(run) for run in runs],
        "state": {name: tensor.detach() for name, tensor in state.items()},
        "learning_rate": LEARNING_RATE,
        "default_dtype": "float64" if subject.lift else "",
        "source": subject.source if any(node.op == OPAQUE for each in subject.graph.blocks for node in each.nodes) else "",
        "sizes": subject.sizes,
    }


def spawned(job: Job, devices: int) -> list[dict[str, Any]]:
    """The runs of a job on spawned processes, which import no model library."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(job, Path(folder) / "job.pt")
        spawn(work, args=(devices, folder), nprocs=devices)
        result: list[dict[str, Any]] = torch.load(Path(folder) / "result.pt", weights_only=True)
        return result
