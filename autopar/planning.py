"""Capture and search as one function. Needs no process group, and nothing of what runs a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.capture import capture
from autopar.capture.tracing.trace import LossFunction
from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.hardware.expert_load import ExpertLoad
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.errors import AutoparError, BatchError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.plan import REDUCTIONS, Precision
from autopar.ir.plan_file.names import LONGEST
from autopar.ir.plan_file.plan_file import Plan
from autopar.rules.expand import missing_rules
from autopar.rules.registry import Registry, default_registry
from autopar.solve.fixed.baselines import PricedRecipe, baselines
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.fixed.seeds import may_seed, with_seeds
from autopar.solve.forked import Meanwhile
from autopar.solve.offload_state import with_forced_offload
from autopar.solve.plan_cache import PlanCache, cache_key
from autopar.solve.refine_schedule import with_synthesized_schedule
from autopar.solve.report import plan_of_result
from autopar.solve.result import PlanResult
from autopar.solve.robust_choice import robust_choice
from autopar.solve.search import search
from autopar.solve.space.force import Force, parse_force
from autopar.solve.space.options import SearchOptions
from autopar.validate.recipes.by_hand import seeds_of, with_expert_prices, with_reasons, with_stage_seeds

ExampleInputs = Mapping[str, Any] | tuple[Any, ...]
Progress = Callable[[str], None]

_FLOAT8 = ("fp8", "float8")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}


def make_plan(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs,
    *,
    precision: str | Precision | MixedPrecisionPolicy | None = None,
    force: str | Mapping[str, int | str] | None = "",
    optimizer: str = "adamw",
    strict: bool = False,
    time_limit_seconds: float = 60.0,
    batch: int | None = None,
    seq: int | None = None,
    name: str = "",
    source: str = "",
    progress: Progress | None = None,
    cache: Path | None = None,
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
    expert_load: float | str = 1.0,
    loss_fn: LossFunction | None = None,
    memory_margin: float | None = None,
    batch_dim: int | Mapping[str, int] | None = None,
    graph: Graph | None = None,
    processes: int = 1,
) -> Plan:
    """Plans without running: needs no process group, and the model may be on the meta device. `autopar.plan` is this function.

    Arguments are those of `parallelize`. `batch` is the global batch, where it is not that of `example_inputs`; `seq`,
    `name` and `source` only go into the plan's description; `progress` gets a line per candidate that is solved; `cache` is a
    folder of plans that were found before. `expert_load` is what the busiest rank of dealt-out experts is expected to get over
    the mean, or the path of a JSON list of tokens per expert. `memory_margin` is the share of each device's memory that the plan
    leaves free (None: that of the cluster's file, else `MEMORY_MARGIN`). A `force` that spells out a whole configuration
    (`solve.space.force`) is priced as it is. `graph` is the model as it was captured before. `processes`: of the
    search, forked from this one; more than one only where nothing else runs here (no CUDA, no process group).
    """
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster, cache=cache_folder())
    if expert_load != 1.0:
        cluster = replace(cluster, expert_load=ExpertLoad.parse(str(expert_load)))
    cluster = with_memory_margin(cluster, memory_margin)
    _check_texts(optimizer=optimizer, name=name, source=source)
    chosen = precision_of(precision, model)
    cluster = _with_float8(chosen, cluster)
    forced = parse_force(force)
    args, kwargs = split_inputs(example_inputs)
    if graph is None:
        options_of_capture: dict[str, Any] = dict(outputs=outputs, batch_norm=batch_norm, loss_fn=loss_fn, batch_dim=batch_dim)
        compute = compute_dtype_of(chosen, model)
        graph = capture(model, args, kwargs, compute_dtype=compute, float8=chosen.float8, **options_of_capture)
    if batch not in (None, graph.batch) and not graph.batch_is_symbolic:
        raise BatchError(f"{graph.name} was captured at a batch of {graph.batch} only: give example inputs of batch {batch}")
    rules = registry()
    unruled = _unruled(graph, rules, strict)
    options = SearchOptions(
        batch=batch or graph.batch,
        precision=chosen,
        optimizer=optimizer,
        force={} if forced.is_configuration else forced.degrees,
        schedule="" if forced.is_configuration else forced.schedule,
        strict=strict,
        time_limit_seconds=time_limit_seconds,
        registry=rules,
        processes=processes,
    )
    options = with_forced_offload(options, forced)
    said: dict[str, Any] = dict(name=name, source=source, seq=seq)

    batched = replace(graph, batch=options.batch)

    def by_hand() -> Sequence[PricedRecipe]:
        on_device = replace(options, precision=chosen)
        return with_expert_prices(baselines(graph, cluster, on_device), graph, cluster, on_device)

    def described(found: PlanResult, recipes: Sequence[PricedRecipe]) -> Plan:
        recipes = with_reasons(recipes, found.evaluation.step_seconds)
        return plan_of_result(graph, cluster, found, recipes, optimizer=optimizer, replicated_ops=unruled, **said)

    if forced.is_configuration:
        fixed = configuration_of(forced, options.precision, optimizer)
        return described(price_configuration(batched, cluster, fixed, rules), by_hand())
    plans = PlanCache(cache) if cache is not None else None
    key = cache_key(graph, cluster, options, _USER_RULES, dict(said, synthesized=forced.synthesize)) if plans else ""
    known = plans.load(key, graph, cluster, options) if plans else None
    if known is not None:
        if progress is not None:
            progress(f"the search was done before: plan from {cache}")
        return known
    with Meanwhile(by_hand, processes) as priced:
        found = search(graph, cluster, options, progress)
        recipes = priced.result()
    if may_seed(options):
        recipes = with_stage_seeds(recipes, graph, cluster, options, found.evaluation.step_seconds)
    found = with_seeds(options, found, seeds_of(recipes))
    found = robust_choice(batched, cluster, options, found, recipes)
    made = described(_scheduled(cluster, options, forced, found, progress), recipes)
    if plans:
        plans.store(key, made)
    return made


def _scheduled(
    cluster: Cluster, options: SearchOptions, forced: Force, found: PlanResult, progress: Progress | None
) -> PlanResult:
    """With a schedule of its own where that is faster and no named one is forced."""
    if options.schedule:
        return found
    least = 0.0 if forced.synthesize else options.indifference
    return with_synthesized_schedule(
        cluster, found, options.optimizer, asked=forced.synthesize, min_improvement=least, progress=progress
    )


plan = make_plan


# -- rules of the user

_USER_RULES: dict[str, str] = {}


def register_rule(op: str, line: str) -> None:
    """Adds a sharding rule for an operation: ``register_rule("mylib::rope", "b s (h d!) , s d! -> b s (h d!)")``.

    The line is in factor notation (README, "A sharding rule"). ValueError where it does not parse. Holds for this process.
    """
    default_registry().register(op, line)
    _USER_RULES[op] = line


def registry() -> Registry:
    """The rules of autopar and of the user."""
    found = default_registry()
    for op, line in _USER_RULES.items():
        found = found.register(op, line)
    return found


def cache_folder() -> Path | None:
    """Where measurements of this machine are kept; None where the user has no home."""
    try:
        return Path.home() / ".cache" / "autopar"
    except RuntimeError:
        return None


def plan_folder() -> Path | None:
    """Where plans are kept; None where the user has no home."""
    folder = cache_folder()
    return folder / "plans" if folder is not None else None


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise BatchError(f"example_inputs is a {type(example_inputs).__name__}: pass a dict of keyword arguments or a tuple")


def _check_texts(**texts: str) -> None:
    """AutoparError where a text cannot stand in a plan, which is one line of printable characters."""
    for what, text in texts.items():
        if not isinstance(text, str) or len(text) > LONGEST or not (text == "" or text.isprintable()):
            raise AutoparError(f"{what} {str(text)[:40]!r} is no text that a plan can hold: write printable characters")


def precision_of(precision: str | Precision | MixedPrecisionPolicy | None, model: nn.Module) -> Precision:
    """What was asked for; by default the dtype that most of the model's parameters have."""
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, MixedPrecisionPolicy):
        return _precision_of_policy(precision, model)
    if precision is None:
        counts: dict[torch.dtype, int] = {}
        for parameter in model.parameters():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        own = str(max(counts, key=lambda dtype: counts[dtype], default=torch.float32)).removeprefix("torch.")
        return Precision(own, own)
    name = _DTYPES.get(precision, precision)
    if name in _FLOAT8:
        return Precision("bfloat16", "float32", float8=True)
    if name.startswith(("float8", "mxfp8", "fp8")):
        raise AutoparError(
            f'precision {precision!r} is not known: "fp8" is bf16 with products in float8 (torchao, dynamic scaling)'
        )
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise AutoparError(f"dtype {precision!r} is not known: write float32, bf16, fp16 or float64")
    return Precision(name, "float32" if name in ("bfloat16", "float16") else name)


def _with_float8(precision: Precision, cluster: Cluster) -> Cluster:
    """With products in float8 the cluster as compiled programs use it: in eager mode the casts cost more than the products save.
    AutoparError on a device that has none, or beside another dtype."""
    if not precision.float8:
        return cluster
    if precision.compute != "bfloat16":
        raise AutoparError(
            f"float8 products are beside bfloat16, not {precision.compute}: write Precision('bfloat16', float8=True)"
        )
    for device in (cluster.device, *(group.device for group in cluster.groups)):
        if "float8" not in dict(device.peak):
            raise AutoparError(f'{device.name} has no float8 products: take precision "bf16"')
    return with_stack(cluster, compiled=True)


def _precision_of_policy(policy: MixedPrecisionPolicy, model: nn.Module) -> Precision:
    """That of FSDP2's policy, whose gradients are summed in `param_dtype` unless it has a `reduce_dtype`. AutoparError where it
    asks for what a program does not do."""
    own = precision_of(None, model).master
    compute, reduce = (str(each).removeprefix("torch.") if each else "" for each in (policy.param_dtype, policy.reduce_dtype))
    if policy.output_dtype is not None:
        raise AutoparError(f"MixedPrecisionPolicy(output_dtype={policy.output_dtype}) is not known: cast what the model returns")
    return with_reduction(Precision(compute or own, own), reduce or compute)


def with_reduction(precision: Precision, dtype: str) -> Precision:
    """`precision` with gradients that are summed in `dtype` (empty: as it says)."""
    name = _DTYPES.get(dtype, dtype)
    if name and name not in REDUCTIONS:
        raise AutoparError(f"reduce dtype {dtype[:40]!r} is not known: write one of {', '.join(REDUCTIONS)}")
    return replace(precision, reduce="" if name == precision.master else name) if name else precision


def compute_dtype_of(precision: Precision, model: nn.Module) -> str | None:
    """The dtype in which parameters and inputs enter the forward; None where a model of several dtypes keeps its own."""
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    usual = precision_of(None, model)
    kept = len(own) > 1 and (precision.compute, precision.master) == (usual.compute, usual.master)
    return None if kept else precision.compute


def _unruled(graph: Graph, registry: Registry, strict: bool) -> tuple[str, ...]:
    """Operations without a sharding rule, which are computed on every rank: a warning, or UnsupportedOp when `strict`."""
    nodes = {node.op: node for block in graph.blocks for node in missing_rules(block, registry) if node.op != "ap.opaque"}
    if not nodes:
        return ()
    said = ", ".join(f"{op} ({node.source or node.module or 'no source'})" for op, node in sorted(nodes.items()))
    remedy = 'add one with autopar.register_rule("ns::op", "...")'
    if strict:
        raise UnsupportedOp(f"no sharding rule for {said}: {remedy}, or leave strict off to compute them on every rank")
    warnings.warn(f"no sharding rule for {said}: computed on every rank; {remedy}", stacklevel=3)
    return tuple(sorted(nodes))
