"""Capture and search as one function, also of the prefill of a prompt and what is decoded after it, on one set of weights. Needs
no process group, and nothing of what runs a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture.options import LossFunction
from autopar.capture.tracing.decode import capture_decode, inference
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.ir.plan_file.document import InferenceInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.ops.quantized import with_plain_storage
from autopar.options import Beside, DocumentLengthsLike, PlanOptions, held_bytes
from autopar.plan_inputs import (
    ExampleInputs,
    Progress,
    capture_for,
    check_batch,
    check_model,
    cluster_for,
    name_batch_dims,
    plan_folder,
    registry,
    search_options_for,
    split_inputs,
    warn_of_missing_rules,
)
from autopar.precision import PrecisionLike, compute_dtype_of, precision_of
from autopar.runtime.progress import advance, working
from autopar.software.by_hand import seeds_of, with_expert_prices, with_reasons, with_stage_seeds
from autopar.solve.choice import robust_choice, with_synthesized_schedule
from autopar.solve.fixed.baselines import PricedRecipe, baselines
from autopar.solve.fixed.candidate import may_seed, price_configuration, with_seeds
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.forked import Lookahead
from autopar.solve.inference import search_inference
from autopar.solve.plan_cache import PlanCache, question_of
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.result import PlanResult, other_results
from autopar.solve.search import search
from autopar.solve.space.force import Force, with_forced_offload
from autopar.solve.space.options import SearchOptions


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
    cache: bool | str | os.PathLike[str] | None = None,
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

    Arguments are those of `parallelize`. `batch` is the global batch, where it is not that of `example_inputs`; `seq`, `name`
    and `source` only go into the plan's description; `progress` gets a line per candidate that is solved; `cache` is a folder
    of plans that were found before (True: that of `parallelize`). `expert_load` is what the busiest rank of dealt-out experts
    is expected to get over the mean, or the path of a JSON list of tokens per expert. `document_lengths` prices attention
    within documents of packed sequences: a length of all, a list, a histogram ``{length: count}``, or the path of a JSON file
    with one of these (None: every sequence is one document). `memory_margin` is the share of each device's memory that the
    plan leaves free (None: that of the cluster's file, else `MEMORY_MARGIN`); `beside` are plans, or parallel models, of the
    same devices, to which it leaves the peaks that they predict. `compile`: price the program as torch.compile makes it
    (None: on GPUs). A `force` that spells out a whole configuration (`solve.space.force`) is priced as it is. `graph` is the
    model as it was captured before. `processes`: of the search, forked from this one; more than one only where nothing else
    runs here (no CUDA, no process group).

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
    kept = Path(cache) if isinstance(cache, (str, os.PathLike)) else plan_folder() if cache else None
    return plan_with(model, cluster, example_inputs, options, progress=progress, cache=kept, graph=graph)


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
    planned = partial(nearest_plans, model, cluster, example_inputs, options, 1, cache=cache, graph=graph)
    if progress is not None:
        return planned(progress=progress)[0]
    with working(f"planning {options.name or type(model).__name__} for {getattr(cluster, 'name', cluster)}"):
        advance(0, "capturing the model")
        return planned(progress=partial(advance, 0))[0]


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
    model = with_plain_storage(model)
    if options.infers:
        with inference(model):
            return (plan_inference(model, cluster, example_inputs, options, progress, cache),)
    precision = precision_of(options.precision, model)
    cluster = cluster_for(cluster, options, precision, progress)
    graph = graph or capture_for(model, example_inputs, options, precision)
    check_batch(graph, options)
    replicated_ops = warn_of_missing_rules(graph, registry(), options.strict)

    devices = with_compilation(cluster, _is_compiled(options, precision, cluster))
    with name_batch_dims(graph, options):
        return _search_plans(graph, devices, options, precision, replicated_ops, count, progress=progress, cache=cache)


def _search_plans(
    graph: Graph, cluster: Cluster, options: PlanOptions, precision: Precision, replicated_ops: tuple[str, ...], count: int, *,
    progress: Progress | None, cache: Path | None,
) -> tuple[Plan, ...]:  # fmt: skip
    """Return the plans of one search for devices as they are: compiled or not."""
    forced, rules = options.forced, registry()
    search_options = with_forced_offload(search_options_for(options, forced, precision, graph, rules), forced)
    batched = replace(graph, batch=search_options.batch)

    def by_hand() -> Sequence[PricedRecipe]:
        on_device = replace(search_options, precision=precision)
        return with_expert_prices(baselines(graph, cluster, on_device), graph, cluster, on_device)

    def described(result: PlanResult, recipes: Sequence[PricedRecipe]) -> Plan:
        recipes = with_reasons(recipes, result.evaluation.step_seconds)
        return plan_of_result(
            graph, cluster, result, recipes, optimizer=options.optimizer, replicated_ops=replicated_ops,
            name=options.name, source=options.source, seq=options.seq, constrained=search_options.pins,
        )  # fmt: skip

    if forced.is_configuration:
        fixed = configuration_of(forced, search_options.precision, options.optimizer)
        return (described(price_configuration(batched, cluster, fixed, rules), by_hand()),)
    plans = PlanCache(cache) if cache is not None and count == 1 else None
    question = question_of(graph, cluster, options.resolved(precision), search_options) if plans else None
    if plans and question and (stored := plans.load(question, graph, cluster, search_options)) is not None:
        if progress is not None:
            progress(f"the search was done before: plan from {cache}")
        return (stored,)
    search_here = partial(search, graph, cluster, search_options, progress)
    with Lookahead[Callable[[], Any], Any](lambda function: function(), options.processes) as ahead:
        result: PlanResult = ahead.result(search_here, [by_hand])
        recipes: Sequence[PricedRecipe] = ahead.result(by_hand)
    if may_seed(search_options):
        recipes = with_stage_seeds(recipes, graph, cluster, search_options, result.evaluation.step_seconds)
    result = with_seeds(search_options, result, seeds_of(recipes))
    result = robust_choice(batched, cluster, search_options, result, recipes)
    plan = described(_with_schedule(cluster, search_options, forced, result, progress), recipes)
    if plans and question:
        plans.store(question, plan)
    return plan, *(described(each, recipes) for each in other_results(batched, result, count - 1))


def _is_compiled(options: PlanOptions, precision: Precision, cluster: Cluster) -> bool:
    """Return whether the blocks of the program are compiled: as the options say, else on GPUs, and where products are in float8,
    whose casts cost more in eager mode than the products save."""
    if options.compile is not None:
        return options.compile
    return precision.float8 or cluster.device.kind == "cuda"


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


def plan_inference(
    model: nn.Module, named: str | Cluster, example_inputs: ExampleInputs, options: PlanOptions, progress: Progress | None,
    cache: Path | None,
) -> Plan:  # fmt: skip
    """Return the plan of the prefill, with what was planned of decoding. The model is in evaluation, and frozen."""
    asked = precision_of(options.precision, model)
    chosen = Precision(asked.compute, asked.compute, float8=asked.float8)
    cluster, rules = cluster_for(named, options, chosen, progress), registry()
    cluster = with_compilation(cluster, bool(options.compile))  # lengths grow, and each would be compiled: not by default
    graph = capture_for(model, example_inputs, options, chosen)
    check_batch(graph, options)
    notes = warn_of_missing_rules(graph, rules, options.strict)
    search_options = search_options_for(options, options.forced, chosen, graph, rules)
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
