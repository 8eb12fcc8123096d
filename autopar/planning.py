"""Capture and search as one function. Needs no process group, and nothing of what runs a plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.capture import capture
from autopar.capture.tracing.decode import capture_decode, inference
from autopar.capture.tracing.trace import LossFunction
from autopar.cost_models.compute.fusion import is_traced
from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.hardware.document_lengths import DocumentLengths
from autopar.cost_models.hardware.expert_load import ExpertLoad
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.errors import BatchError, CaptureError, ClusterError, Infeasible, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.ir.plan_file.document import InferenceInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.control_flow import OPAQUE
from autopar.options import Beside, DocumentLengthsLike, PlanOptions, held_bytes
from autopar.precision import PrecisionLike, check_float8_devices, compute_dtype_of, precision_of
from autopar.rules.expand import missing_rules
from autopar.rules.registry import Registry, default_registry
from autopar.runtime.progress import advance, working
from autopar.software.by_hand import seeds_of, with_expert_prices, with_reasons, with_stage_seeds
from autopar.solve.fixed.baselines import PricedRecipe, baselines
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.fixed.seeds import may_seed, with_seeds
from autopar.solve.forked import Meanwhile
from autopar.solve.ilp.solver import Status
from autopar.solve.inference import search_inference
from autopar.solve.offload_optimizer import with_forced_offload
from autopar.solve.plan_cache import PlanCache, question_of
from autopar.solve.refine_schedule import with_synthesized_schedule
from autopar.solve.report import plan_of_result
from autopar.solve.result import PROVEN_GAP, PlanResult, other_results
from autopar.solve.robust_choice import robust_choice
from autopar.solve.search import search
from autopar.solve.space.force import Force
from autopar.solve.space.options import SearchOptions

ExampleInputs = Mapping[str, Any] | tuple[Any, ...]
Progress = Callable[[str], None]


def make_plan(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs,
    *,
    precision: PrecisionLike | None = None,
    force: str | Mapping[str, int | str] | None = "",
    constrain: Mapping[str, Mapping[str, Any]] | None = None,
    optimizer: str = "adamw",
    strict: bool = False,
    time_limit_seconds: float = 300.0,
    batch: int | None = None,
    seq: int | None = None,
    name: str = "",
    source: str = "",
    progress: Progress | None = None,
    cache: Path | None = None,
    outputs: Sequence[str] = (),
    batch_norm: str = "global",
    expert_load: float | str = 1.0,
    document_lengths: DocumentLengthsLike = None,
    loss_fn: LossFunction | None = None,
    memory_margin: float | None = None,
    beside: Beside = (),
    batch_dim: int | Mapping[str, int] | None = None,
    compile: bool | None = None,
    graph: Graph | None = None,
    processes: int = 1,
    mode: str = "training",
    new_tokens: int = 0,
    objective: str = "latency",
) -> Plan:
    """Plans without running: needs no process group, and the model may be on the meta device. `autopar.plan` is this function.

    Arguments are those of `parallelize`. `batch` is the global batch, where it is not that of `example_inputs`; `seq`,
    `name` and `source` only go into the plan's description; `progress` gets a line per candidate that is solved; `cache` is a
    folder of plans that were found before. `expert_load` is what the busiest rank of dealt-out experts is expected to get over
    the mean, or the path of a JSON list of tokens per expert. `document_lengths` prices attention within documents of packed
    sequences: a length of all, a list, a histogram ``{length: count}``, or the path of a JSON file with one of these (None: every
    sequence is one document). `memory_margin` is the share of each device's memory that the plan leaves free (None: that of the
    cluster's file, else `MEMORY_MARGIN`); `beside` are plans, or parallel models, of the same devices, to which it leaves the
    peaks that they predict. `compile`: price the program as torch.compile makes it (None: on GPUs, where it makes one graph
    of each block). A `force` that spells out a whole configuration
    (`solve.space.force`) is priced as it is. `graph` is the model as it was captured before. `processes`: of the
    search, forked from this one; more than one only where nothing else runs here (no CUDA, no process group).

    With `mode="inference"` the model is planned in evaluation and without gradients, with its weights stored in the dtype of
    `precision`. The example inputs are a prompt, after which `new_tokens` are decoded with a key-value cache: the plan has the
    shortest time from a prompt to its last token, or, for `objective="throughput"`, the most tokens a second of any batch.
    """
    options = PlanOptions(
        precision=precision, force=force, constrain=constrain, optimizer=optimizer, strict=strict,
        time_limit_seconds=time_limit_seconds, batch=batch, seq=seq, name=name, source=source, outputs=outputs,
        batch_norm=batch_norm, expert_load=expert_load, loss_fn=loss_fn, memory_margin=memory_margin, batch_dim=batch_dim,
        held_bytes=held_bytes(beside),
        document_lengths=document_lengths, compile=compile, processes=processes, mode=mode, new_tokens=new_tokens,
        objective=objective,
    )  # fmt: skip
    return plan_with(model, cluster, example_inputs, options, progress=progress, cache=cache, graph=graph)


plan = make_plan


def plan_with(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs,
    options: PlanOptions,
    *,
    progress: Progress | None = None,
    cache: Path | None = None,
    graph: Graph | None = None,
) -> Plan:
    """The plan of `make_plan`, for options that were checked. Without `progress` a search that takes long shows a bar."""
    if progress is not None:
        return nearest_plans(model, cluster, example_inputs, options, 1, progress=progress, cache=cache, graph=graph)[0]
    with working(f"planning {options.name or type(model).__name__} for {getattr(cluster, 'name', cluster)}"):
        advance(0, "capturing the model")
        shown = partial(advance, 0)
        return nearest_plans(model, cluster, example_inputs, options, 1, progress=shown, cache=cache, graph=graph)[0]


def nearest_plans(
    model: nn.Module,
    cluster: str | Cluster,
    example_inputs: ExampleInputs,
    options: PlanOptions,
    count: int,
    *,
    progress: Progress | None = None,
    cache: Path | None = None,
    graph: Graph | None = None,
) -> tuple[Plan, ...]:
    """Return the plan, and up to `count` - 1 others of the search that fit, the shortest predicted steps first: one of each mesh,
    state group, number of micro-batches and schedule. Only a single one comes from the `cache`."""
    check_model(model)
    if options.infers:
        with inference(model):
            return (_plan_inference(model, cluster, example_inputs, options, progress, cache),)
    forced = options.forced
    chosen = precision_of(options.precision, model)
    named, cluster = cluster, _cluster_for(cluster, options, chosen, progress)
    graph = graph or _capture(model, example_inputs, options, chosen)
    cluster = with_compilation(cluster, _is_compiled(options, chosen, cluster, graph))
    _check_batch(graph, options)
    rules = registry()
    rule_notes = _warn_of_missing_rules(graph, rules, options.strict)
    search_options = with_forced_offload(_search_options(options, forced, chosen, graph, rules), forced)
    batched = replace(graph, batch=search_options.batch)

    offload_instead = options.compile is None and cluster.device.fused and cluster.host is not None

    def without_compilation() -> tuple[Plan, ...]:
        """Plans that may offload what they save: compiled ones recompute it, and where memory is short that may be slower."""
        eager = replace(options, compile=False)
        return nearest_plans(model, named, example_inputs, eager, count, progress=progress, cache=cache, graph=graph)

    def fastest_of(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
        if offload_instead and _recomputes(plans[0]):
            with suppress(Infeasible):
                return _faster(plans, without_compilation())
        return plans

    def by_hand() -> Sequence[PricedRecipe]:
        on_device = replace(search_options, precision=chosen)
        return with_expert_prices(baselines(graph, cluster, on_device), graph, cluster, on_device)

    def described(result: PlanResult, recipes: Sequence[PricedRecipe]) -> Plan:
        recipes = with_reasons(recipes, result.evaluation.step_seconds)
        return plan_of_result(
            graph, cluster, result, recipes, optimizer=options.optimizer, replicated_ops=rule_notes,
            name=options.name, source=options.source, seq=options.seq, constrained=search_options.pins,
        )  # fmt: skip

    if forced.is_configuration:
        fixed = configuration_of(forced, search_options.precision, options.optimizer)
        return (described(price_configuration(batched, cluster, fixed, rules), by_hand()),)
    plans = PlanCache(cache) if cache is not None and count == 1 else None
    question = question_of(graph, cluster, options.resolved(chosen), search_options) if plans else None
    if plans and question and (stored := plans.load(question, graph, cluster, search_options)) is not None:
        if progress is not None:
            progress(f"the search was done before: plan from {cache}")
        return fastest_of((stored,))
    try:
        with Meanwhile(by_hand, options.processes) as priced:
            result = search(graph, cluster, search_options, progress)
            recipes = priced.result()
    except Infeasible:
        if not offload_instead:
            raise
        return without_compilation()
    if may_seed(search_options):
        recipes = with_stage_seeds(recipes, graph, cluster, search_options, result.evaluation.step_seconds)
    result = with_seeds(search_options, result, seeds_of(recipes))
    result = robust_choice(batched, cluster, search_options, result, recipes)
    plan = described(_with_schedule(cluster, search_options, forced, result, progress), recipes)
    if plans and question:
        plans.store(question, plan)
    found = plan, *(described(each, recipes) for each in other_results(batched, result, count - 1))
    return fastest_of(found)


def _recomputes(plan: Plan) -> bool:
    return any(each.recompute or each.recompute_nodes or each.recompute_conversions for each in plan.candidate.blocks)


def _step_seconds(plans: tuple[Plan, ...]) -> float:
    return plans[0].document.predicted.step_seconds or inf


def _faster(one: tuple[Plan, ...], other: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return the plans whose first is faster, which no plan of either search is better than by more than its gap."""
    best = min(one, other, key=_step_seconds)
    document, step = best[0].document, _step_seconds(best)
    bound = min(each[0].document.predicted.lower_bound_seconds or 0.0 for each in (one, other))
    gap = 1 - min(bound, step) / step
    predicted = msgspec.structs.replace(document.predicted, lower_bound_seconds=bound, gap=gap)
    status = document.search.status if gap <= PROVEN_GAP else str(Status.FEASIBLE)
    searched = msgspec.structs.replace(document.search, status=status)
    return replace(best[0], document=replace(document, predicted=predicted, search=searched)), *best[1:]


def _check_batch(graph: Graph, options: PlanOptions) -> None:
    """Raise BatchError where the options ask for a batch that the graph has not."""
    if options.batch not in (None, graph.batch) and not graph.batch_is_symbolic:
        raise BatchError(
            f"{graph.name} was captured at a batch of {graph.batch} only: give example inputs of batch {options.batch}"
        )


def _plan_inference(
    model: nn.Module, named: str | Cluster, example_inputs: ExampleInputs, options: PlanOptions, progress: Progress | None,
    cache: Path | None,
) -> Plan:  # fmt: skip
    """Return the plan of the prefill, with what was planned of decoding. The model is in evaluation, and frozen."""
    asked = precision_of(options.precision, model)
    chosen = Precision(asked.compute, asked.compute, float8=asked.float8)
    cluster, rules = _cluster_for(named, options, chosen, progress), registry()
    cluster = with_compilation(cluster, bool(options.compile))  # lengths grow, and each would be compiled: not by default
    graph = _capture(model, example_inputs, options, chosen)
    _check_batch(graph, options)
    notes = _warn_of_missing_rules(graph, rules, options.strict)
    search_options = _search_options(options, options.forced, chosen, graph, rules)
    plans = PlanCache(cache) if cache is not None else None
    question = question_of(graph, cluster, options.resolved(chosen), search_options) if plans else None
    if plans and question and (stored := plans.load(question, graph, cluster, search_options)) is not None:
        return stored
    decode = None
    if options.new_tokens:
        arguments = signature(model.forward).bind(*split_inputs(example_inputs)[0], **split_inputs(example_inputs)[1]).arguments
        prompt = {**arguments, **arguments.get("kwargs", {})}
        decode = capture_decode(
            model, prompt, options.new_tokens, compute_dtype=compute_dtype_of(chosen, model), float8=chosen.float8
        )
    result = search_inference(
        graph, decode, cluster, search_options, options.new_tokens,
        throughput=options.objective == "throughput", progress=progress,
    )  # fmt: skip
    plan = plan_of_result(
        graph, cluster, result.plan_result, (), optimizer="sgd", replicated_ops=notes, name=options.name, source=options.source,
        seq=options.seq, constrained=search_options.pins,
    )  # fmt: skip
    info = InferenceInfo(
        options.new_tokens, result.prefill.evaluation.step_seconds,
        result.decode.evaluation.step_seconds if result.decode is not None else None, result.seconds, result.bound_seconds,
        result.tokens_per_second, result.cache_bytes,
        int(result.decode.evaluation.peak_memory_bytes) if result.decode is not None else None,
    )  # fmt: skip
    plan = replace(plan, document=replace(plan.document, inference=info))
    if plans and question:
        plans.store(question, plan)
    return plan


def _cluster_for(cluster: str | Cluster, options: PlanOptions, precision: Precision, progress: Progress | None) -> Cluster:
    """The cluster with the lengths of documents, expert load, margin and software that the options ask for."""
    cluster = cluster_named(cluster, cache_folder(), progress=progress)
    if options.document_lengths:
        cluster = replace(cluster, document_lengths=DocumentLengths.parse(options.document_lengths))
    if options.expert_load != 1.0:
        cluster = replace(cluster, expert_load=ExpertLoad.parse(str(options.expert_load)))
    check_float8_devices(precision, cluster)
    return with_memory_margin(cluster, options.memory_margin, options.held_bytes)


def _is_compiled(options: PlanOptions, precision: Precision, cluster: Cluster, graph: Graph) -> bool:
    """Return whether the blocks of the program are compiled: as the options say, else on GPUs where torch.compile makes one graph
    of each block, and where products are in float8, whose casts cost more in eager mode than the products save."""
    if options.compile is not None:
        return options.compile
    return precision.float8 or (cluster.device.kind == "cuda" and all(map(is_traced, graph.blocks)))


def _capture(model: nn.Module, example_inputs: ExampleInputs, options: PlanOptions, precision: Precision) -> Graph:
    args, kwargs = split_inputs(example_inputs)
    compute = compute_dtype_of(precision, model)
    _warn_of_narrowing((args, kwargs), compute)
    return capture(
        model, args, kwargs, compute_dtype=compute, float8=precision.float8, outputs=options.outputs,
        batch_norm=options.batch_norm, loss_fn=options.loss_fn, batch_dim=options.batch_dim,
    )  # fmt: skip


def _warn_of_narrowing(inputs: object, compute: str | None) -> None:
    """Warn of float64 inputs where the step computes in less: one process would refuse them, or compute in float64, where the
    program casts them as any other input."""
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.dtype == torch.float64]
    if tensors and compute not in (None, "float64"):
        warnings.warn(
            f"{len(tensors)} of the example inputs are float64, and are cast to {compute}, in which the step computes: pass "
            'x.float(), or precision="float64"', stacklevel=4,
        )  # fmt: skip


def _search_options(options: PlanOptions, forced: Force, precision: Precision, graph: Graph, rules: Registry) -> SearchOptions:
    return SearchOptions(
        batch=options.batch or graph.batch,
        precision=precision,
        optimizer=options.optimizer,
        force={} if forced.is_configuration else forced.degrees,
        schedule="" if forced.is_configuration else forced.schedule,
        pins=options.constraints,
        strict=options.strict,
        time_limit_seconds=options.time_limit_seconds,
        registry=rules,
        processes=options.processes,
    )


def _with_schedule(
    cluster: Cluster, options: SearchOptions, forced: Force, result: PlanResult, progress: Progress | None
) -> PlanResult:
    """Return the result with a schedule of its own where that is faster and no named one is forced."""
    if options.schedule:
        return result
    least = 0.0 if forced.synthesize else options.indifference
    return with_synthesized_schedule(
        cluster, result, options.optimizer, forced=forced.synthesize, min_improvement=least, progress=progress
    )


# -- rules of the user

_USER_RULES: dict[str, str] = {}


def register_rule(op: str, line: str) -> None:
    """Add a sharding rule for an operation: ``register_rule("mylib::rope", "b s (h d!) , s d! -> b s (h d!)")``.

    The line is in factor notation (README, "A sharding rule"). ValueError where it does not parse. Holds for this process.
    """
    default_registry().register(op, line)
    _USER_RULES[op] = line


def registry() -> Registry:
    """The rules of autopar and of the user."""
    rules = default_registry()
    for op, line in _USER_RULES.items():
        rules = rules.register(op, line)
    return rules


def cache_folder() -> Path | None:
    """Return where measurements of this machine are kept: ``$XDG_CACHE_HOME/autopar`` or ``~/.cache/autopar``; None where the
    user has no home."""
    folder = os.path.expandvars("$XDG_CACHE_HOME")  # as it is where the variable is not set
    if os.path.isabs(folder):
        return Path(folder) / "autopar"
    try:
        return Path.home() / ".cache" / "autopar"
    except RuntimeError:
        return None


def plan_folder() -> Path | None:
    """Return where plans are kept; None where the user has no home."""
    folder = cache_folder()
    return folder / "plans" if folder is not None else None


def cluster_named(
    cluster: str | os.PathLike[str] | Cluster, cache: Path | None = None, processes: int = 0, progress: Progress | None = None
) -> Cluster:
    """The cluster of a name or a file, see `Cluster.parse`. ClusterError for what is none of these."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | os.PathLike):
        raise ClusterError(f'cluster={repr(cluster)[:60]} names none: write "local:4", "dgx-h100:1" or the path of a YAML file')
    return Cluster.parse(os.fspath(cluster), cache, processes, progress)


def check_model(model: object) -> None:
    """Raise CaptureError for what is no module to be captured."""
    if isinstance(model, nn.Module):
        if hasattr(model, "full_state") and hasattr(model, "checkpoints"):
            raise CaptureError("this model is parallel already: pass the plain model, and use what parallelize returned as it is")
        return
    name = getattr(model, "__name__", type(model).__name__)
    if isinstance(model, type):
        mend = f"{name} is a class: pass an instance, {name}(...)"
    elif isinstance(model, Mapping):
        mend = "a state dict has no forward: build the model, and call model.load_state_dict(state)"
    elif callable(model):
        mend = f"{name} is a function: write it as the forward of an nn.Module that holds its parameters"
    else:
        mend = f"{repr(model)[:60]} is none"
    raise CaptureError(f"the model has to be an nn.Module; {mend}")


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise BatchError(f"example_inputs is a {type(example_inputs).__name__}: pass a dict of keyword arguments or a tuple")


def _warn_of_missing_rules(graph: Graph, registry: Registry, strict: bool) -> tuple[str, ...]:
    """Operations without a sharding rule, which are computed on every rank: a warning, or UnsupportedOp when `strict`."""
    nodes = {node.op: node for block in graph.blocks for node in missing_rules(block, registry) if node.op != OPAQUE}
    if not nodes:
        return ()
    ops = ", ".join(f"{op} ({node.source or node.module or 'no source'})" for op, node in sorted(nodes.items()))
    remedy = 'add one with autopar.register_rule("ns::op", "...")'
    if strict:
        raise UnsupportedOp(f"no sharding rule for {ops}: {remedy}, or leave strict off to compute them on every rank")
    warnings.warn(f"no sharding rule for {ops}: computed on every rank; {remedy}", stacklevel=3)
    return tuple(sorted(nodes))
