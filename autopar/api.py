"""The whole system as one function: capture, search, lower, render, load, run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from autopar import errors
from autopar.capture import capture
from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError, BatchError, PlanMismatch, StateError, UnsupportedOp
from autopar.ir import planfile
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.ir.planfile import Plan
from autopar.passes.pipeline import lower
from autopar.program.build import load
from autopar.program.source import render
from autopar.rules.check import check_strategies
from autopar.rules.expand import missing_rules
from autopar.rules.registry import Registry, default_registry
from autopar.runtime.errors import LaunchProblem
from autopar.runtime.mesh import MeshHandle, join
from autopar.runtime.parallel import Parallel
from autopar.runtime.source import FirstRank, state_of
from autopar.solve.report import make_report
from autopar.solve.search import SearchOptions, search

ExampleInputs = Mapping[str, Any] | tuple[Any, ...]
Progress = Callable[[str], None]

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}
_DEGREES = ("dp", "tp", "tp2", "zero")


def parallelize(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | str | Path | None = None,
    precision: str | Precision | None = None,
    force: str | Mapping[str, int] = "",
    optimizer: str = "adamw",
    strict: bool = False,
    compile: bool | str = False,
    state: Mapping[str, torch.Tensor] | None = None,
    time_limit_seconds: float = 60.0,
) -> Parallel:
    """The model as a program for the cluster: an `nn.Module` whose call takes the global batch and returns the loss.

    Run it under ``torchrun`` with one process per device; rank 0 plans and tells the others. `example_inputs` are the forward's
    keyword arguments (a dict) or arguments (a tuple); without them the first call is the example, and `parameters()` before it
    is a `StateError`. `plan` (a `Plan` or the path of a plan.json) skips the search. `precision` is ``"float32"``, ``"bf16"``
    (bf16 compute over float32 master shards) or a `Precision`; by default the model's own dtype. `force` fixes degrees
    (``"tp=4,zero=3"``). `state` gives full tensors by name for a model on the meta device. Raises `AutoparError`.
    """
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster, cache=_cache())
    options: dict[str, Any] = dict(precision=precision, force=force, optimizer=optimizer, strict=strict)
    if example_inputs is None:
        rest: dict[str, Any] = dict(plan=plan, compile=compile, state=state, time_limit_seconds=time_limit_seconds)
        return Deferred(lambda inputs: parallelize(model, cluster, inputs, **options, **rest))
    _join(cluster)
    tensors = {**state_of(model), **(state or {})}

    def chosen() -> Plan:
        _check_state(tensors)
        if plan is None:
            return make_plan(model, cluster, example_inputs, **options, time_limit_seconds=time_limit_seconds)
        return check_plan(plan, model, cluster, example_inputs)

    agreed = _on_first_rank(chosen)
    program = load(render(lower(agreed.graph, agreed.candidate)))
    mesh = MeshHandle({axis.name: axis.size for axis in agreed.candidate.mesh.axes})
    return Parallel(program.Program(mesh), FirstRank(tensors), compile=compile)


def make_plan(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs,
    *,
    precision: str | Precision | None = None,
    force: str | Mapping[str, int] = "",
    optimizer: str = "adamw",
    strict: bool = False,
    time_limit_seconds: float = 60.0,
    batch: int | None = None,
    seq: int | None = None,
    name: str = "",
    source: str = "",
    progress: Progress | None = None,
) -> Plan:
    """Plans without running: needs no process group, and the model may be on the meta device. `autopar.plan` is this function.

    Arguments are those of `parallelize`. `batch` is the global batch, where it is not that of `example_inputs`; `seq`, `name` and
    `source` only go into the plan's description; `progress` gets a line per mesh.
    """
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster, cache=_cache())
    chosen = _precision(precision, model)
    args, kwargs = _split(example_inputs)
    graph = capture(model, args, kwargs, compute_dtype=chosen.compute)
    if batch not in (None, graph.batch) and not graph.batch_is_symbolic:
        raise BatchError(f"{graph.name} was captured at a batch of {graph.batch} only: give example inputs of batch {batch}")
    registry = _registry()
    unruled = _unruled(graph, registry, strict)
    options = SearchOptions(
        batch=batch or graph.batch,
        precision=chosen,
        optimizer=optimizer,
        force=parse_force(force),
        strict=strict,
        time_limit_seconds=time_limit_seconds,
        registry=registry,
    )
    found = search(graph, cluster, options, progress)
    return make_report(graph, cluster, found, options, name=name, source=source, seq=seq, replicated_ops=unruled)


plan = make_plan


class Deferred(Parallel):
    """A parallel model that is built by its first call, when it sees a batch. Then it *becomes* that `Parallel`."""

    def __init__(self, build: Callable[[ExampleInputs], Parallel]) -> None:
        nn.Module.__init__(self)
        self.__dict__["build"] = build

    def forward(self, *args: Any, **batch: Any) -> torch.Tensor:
        training = self.training
        built = self.__dict__["build"](args or batch)
        self.__class__ = Parallel  # type: ignore[assignment]
        self.__dict__ = built.__dict__
        self.train(training)
        return self(*args, **batch)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Self:
        nn.Module.train(self, mode)
        return self

    def _too_early(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            "this model is built by its first call and has no parameters yet: "
            "pass example_inputs=batch to autopar.parallelize, and make the optimizer after that"
        )

    parameters = named_parameters = buffers = named_buffers = state_dict = load_state_dict = _too_early
    _apply = local_batch = sampler = clip_grad_norm_ = load_full_state = reseed = zero_grad = _too_early


# -- rules of the user

_USER_RULES: dict[str, str] = {}


def register_rule(op: str, line: str) -> None:
    """Adds a sharding rule for an operation: ``register_rule("mylib::rope", "b s (h d!) , s d! -> b s (h d!)")``.

    The line is in factor notation (README, "A sharding rule"). ValueError where it does not parse. Holds for this process.
    """
    default_registry().register(op, line)
    _USER_RULES[op] = line


def _registry() -> Registry:
    registry = default_registry()
    for op, line in _USER_RULES.items():
        registry = registry.register(op, line)
    return registry


# -- the steps


def _cache() -> Path:
    """Where measurements of this machine are kept."""
    return Path.home() / ".cache" / "autopar"


def _join(cluster: Cluster) -> None:
    """Joins the process group; PlanMismatch where the launch does not have one process per device."""
    try:
        join(cluster.size, {cluster.name: cluster.size})
    except LaunchProblem:
        launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        raise PlanMismatch(
            f"the cluster {cluster.name} has {cluster.size} devices but {launched} processes were launched: "
            f"use torchrun --nproc-per-node {cluster.size}, or name a cluster of {launched}"
        ) from None


def _on_first_rank(make: Callable[[], Plan]) -> Plan:
    """Rank 0's plan on every rank; an error there is raised on all of them, so that none waits for ever."""
    said: list[Any] = [None]
    made: Plan | None = None
    if dist.get_rank() == 0:
        try:
            made = make()
            said = [("plan", made.to_json())]
        except AutoparError as error:
            said = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(said, src=0)
    kind, text = said[0]
    if kind != "plan":
        raise getattr(errors, kind, AutoparError)(text)
    return made or planfile.decode(text)


def check_plan(plan: Plan | str | Path, model: nn.Module, cluster: Cluster, example_inputs: ExampleInputs) -> Plan:
    """The given plan. PlanMismatch where it was made for another model, batch shape or number of devices."""
    given = plan if isinstance(plan, Plan) else planfile.load(plan)
    if given.candidate.mesh.size != cluster.size:
        raise PlanMismatch(
            f"the plan is for {given.candidate.mesh.size} devices ({given.candidate.mesh}), the cluster {cluster.name} has "
            f"{cluster.size}: plan again, or launch {given.candidate.mesh.size} processes"
        )
    check_strategies(given.graph, given.candidate, _registry())
    args, kwargs = _split(example_inputs)
    graph = capture(model, args, kwargs, compute_dtype=given.candidate.precision.compute)
    if graph.fingerprint != given.graph.fingerprint:
        raise PlanMismatch(
            f"the plan was made for {given.document.model.name} (fingerprint {given.graph.fingerprint[:12]}), this model and "
            f"batch are {graph.name} ({graph.fingerprint[:12]}): plan again with `autopar plan`"
        )
    return given


def _split(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), {name: value for name, value in example_inputs.items() if value is not None}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise BatchError(f"example_inputs is a {type(example_inputs).__name__}: pass a dict of keyword arguments or a tuple")


def _precision(precision: str | Precision | None, model: nn.Module) -> Precision:
    """What was asked for; by default the dtype that most of the model's parameters have."""
    if isinstance(precision, Precision):
        return precision
    if precision is None:
        counts: dict[torch.dtype, int] = {}
        for parameter in model.parameters():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        own = str(max(counts, key=lambda dtype: counts[dtype], default=torch.float32)).removeprefix("torch.")
        return Precision(own, own)
    name = _DTYPES.get(precision, precision)
    if name not in ("float32", "bfloat16", "float64"):
        raise AutoparError(f"dtype {precision!r} is not known: write float32, bf16 or float64")
    return Precision(name, "float32" if name == "bfloat16" else name)


def parse_force(force: str | Mapping[str, int]) -> dict[str, int]:
    """``"tp=4,zero=3"`` as degrees. AutoparError on another key or a number that makes no sense."""
    pairs = dict(force) if isinstance(force, Mapping) else dict(item.partition("=")[::2] for item in force.split(",") if item)
    out: dict[str, int] = {}
    for key, value in pairs.items():
        if key.strip() not in _DEGREES:
            raise AutoparError(f"force: {key.strip()!r} cannot be forced; write some of {', '.join(_DEGREES)}, as in tp=4,zero=3")
        text = str(value).strip()
        if not text.isdigit() or (key.strip() == "zero" and int(text) > 3) or (key.strip() != "zero" and int(text) < 1):
            raise AutoparError(f"force: {key.strip()}={text} is no degree; write a whole number of at least 1 (zero: 0 to 3)")
        out[key.strip()] = int(text)
    return out


def _unruled(graph: Graph, registry: Registry, strict: bool) -> tuple[str, ...]:
    """Operations without a sharding rule, which are computed on every rank: a warning, or UnsupportedOp when `strict`."""
    nodes = {node.op: node for block in graph.blocks for node in missing_rules(block, registry)}
    if not nodes:
        return ()
    said = ", ".join(f"{op} ({node.source or node.module or 'no source'})" for op, node in sorted(nodes.items()))
    remedy = 'add one with autopar.register_rule("ns::op", "...")'
    if strict:
        raise UnsupportedOp(f"no sharding rule for {said}: {remedy}, or leave strict off to compute them on every rank")
    warnings.warn(f"no sharding rule for {said}: computed on every rank; {remedy}", stacklevel=3)
    return tuple(sorted(nodes))


def _check_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """StateError where a tensor has no values."""
    missing = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if missing is not None:
        raise StateError(f"{missing} is on the meta device and has no values: pass state={{name: tensor}} or build it on cpu")
