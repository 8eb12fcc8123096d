"""Plans for inference: the prefill of a prompt, and what is decoded after it, on one set of weights."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path

from torch import nn

from autopar.capture.tracing.decode import capture_decode
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.ir.plan import Precision
from autopar.ir.plan_file.document import InferenceInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.options import PlanOptions
from autopar.plan_inputs import (
    ExampleInputs,
    Progress,
    capture_for,
    check_batch,
    cluster_for,
    registry,
    search_options_for,
    split_inputs,
    warn_of_missing_rules,
)
from autopar.precision import compute_dtype_of, precision_of
from autopar.solve.inference import search_inference
from autopar.solve.plan_cache import PlanCache, question_of
from autopar.solve.plan_of_result import plan_of_result


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
