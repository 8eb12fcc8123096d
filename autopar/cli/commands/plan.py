"""``autopar plan``: searches for the best plan, prints the summary, and writes plan.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from autopar.cli.console import Console, percent, seconds, size
from autopar.cli.tables.plan import baseline_table, document_rows, expert_rows, stage_table
from autopar.errors import AutoparError
from autopar.files import check_target
from autopar.ir.describe import cut_short_text, describe, precision_text, unit_of
from autopar.ir.plan_file.document import MeshResult
from autopar.ir.plan_file.plan_file import Plan, load_plan
from autopar.solve.problem.pins import constraint_texts

if TYPE_CHECKING:
    from torch import nn

    from autopar.capture.models import LoadedModel
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.ir.graph import Graph
    from autopar.ir.plan import Precision
    from autopar.options import PlanOptions


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plans MODEL, prints the summary, and writes the plan where `-o` says."""
    if arguments.software != "autopar":
        from autopar.cli.commands.software.plan_for import run_for

        return run_for(arguments, console)
    if arguments.output is not None:
        check_target(arguments.output)  # before the search whose result goes there
    plan = make(arguments, console)[0]
    if arguments.output:
        plan.save(arguments.output)
    summary(plan, console)
    console.text(_proof(plan))
    if arguments.output:
        console.text(f"written to {arguments.output}")
    console.document(json.loads(plan.to_json()))
    return 0


def _proof(plan: Plan) -> str:
    """The line that says whether the plan's program is proven."""
    from autopar.program.build import prove_program

    try:
        return prove_program(plan).line()
    except AutoparError as error:
        return f"not proven: {error}"


def make(
    arguments: argparse.Namespace, console: Console, device: str = "meta"
) -> tuple[Plan, Any, dict[str, Any] | tuple[Any, ...]]:
    """(plan, model, example inputs) for the planning arguments of a command."""
    from autopar.capture.models import load_model
    from autopar.plan_inputs import cache_folder, cluster_named

    options_of(arguments)
    cluster_named(arguments.cluster)  # what is wrong is said before the model is loaded and the machine is measured
    console.progress(f"capturing {arguments.model}")
    loaded = load_model(arguments.model, arguments.batch, arguments.seq, device=device)
    cluster = cluster_named(arguments.cluster, cache_folder(), progress=console.progress)
    return plan_of(arguments, console, loaded, cluster), loaded.model, loaded.example_inputs


def options_of(arguments: argparse.Namespace) -> PlanOptions:
    """The options that the planning arguments of a command say. AutoparError where one makes no sense."""
    from autopar.options import PlanOptions, held_bytes

    options = PlanOptions(
        batch=arguments.batch,
        force=arguments.force,
        constrain=constraints_of(arguments),
        optimizer=getattr(arguments, "optimizer", "adamw"),
        strict=arguments.strict,
        time_limit_seconds=arguments.time_limit,
        source=arguments.model,
        seq=arguments.seq,
        batch_norm=getattr(arguments, "batch_norm", "global"),
        expert_load=getattr(arguments, "expert_load", 1.0),
        document_lengths=getattr(arguments, "lengths", None),
        memory_margin=arguments.memory_margin,
        held_bytes=held_bytes(list(map(load_plan, getattr(arguments, "beside", None) or ()))),
        outputs=outputs_of(arguments),
        batch_dim=getattr(arguments, "batch_dim", None),
        compile=getattr(arguments, "compile", None),
        processes=getattr(arguments, "processes", 1),
        mode=getattr(arguments, "mode", "training"),
        new_tokens=getattr(arguments, "new_tokens", 0),
        objective=getattr(arguments, "objective", "latency"),
    )
    return replace(options, force=options.forced)


def plan_of(
    arguments: argparse.Namespace, console: Console, loaded: LoadedModel, cluster: Cluster, graph: Graph | None = None
) -> Plan:
    """The plan of a loaded model for the planning arguments of a command. `graph`: as it was captured before."""
    from autopar.plan_inputs import plan_folder
    from autopar.planning import plan_with

    precision, seq = precision_asked(arguments, loaded.model), arguments.seq or _sequence(loaded.example_inputs)
    options = replace(options_of(arguments), precision=precision, name=loaded.name, seq=seq)
    kept = None if arguments.no_cache else plan_folder()
    inputs = loaded.example_inputs
    if options.infers and isinstance(inputs, dict) and options.new_tokens:
        inputs = {name: each for name, each in inputs.items() if name != "labels"}
    return plan_with(
        loaded.model, cluster, inputs, options, progress=console.progress, cache=kept, graph=graph
    )  # fmt: skip


def precision_asked(arguments: argparse.Namespace, model: nn.Module) -> Precision:
    """Return the precision that ``--dtype`` and ``--reduce-dtype`` ask for."""
    from autopar.precision import precision_of, with_reduction

    return with_reduction(precision_of(arguments.dtype or "float32", model), getattr(arguments, "reduce_dtype", None) or "")


def constraints_of(arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The placements of ``--constrain``. AutoparError where one name has two on one axis."""
    out: dict[str, dict[str, str]] = {}
    for name, places in getattr(arguments, "constrain", None) or ():
        for axis, place in places.items():
            if out.setdefault(name, {}).setdefault(axis, place) != place:
                both = f"{axis}={out[name][axis]} and {axis}={place}"
                raise AutoparError(f"constrain {name}: {both} contradict each other: write one of them")
    return out


def outputs_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The fields of ``--outputs``."""
    return tuple(filter(None, getattr(arguments, "outputs", "").split(",")))


def _sequence(example: dict[str, Any] | tuple[Any, ...]) -> int | None:
    """S, where an example input is integer tokens of shape [B, S]."""
    tensors = example.values() if isinstance(example, dict) else example
    shapes = (tensor.shape for tensor in tensors if hasattr(tensor, "shape") and not tensor.is_floating_point())
    return next((int(shape[1]) for shape in shapes if len(shape) == 2), None)


def _blocks(plan: Plan) -> str:
    """Whether they are compiled, and the mesh axes whose collectives run in pieces with products."""
    if not plan.document.cluster.compiled:
        return "not compiled"
    from autopar.given_plan import planned_async_tp  # which imports the runtime

    axes = ", ".join(planned_async_tp(plan))
    return "compiled by torch.compile" + (f", collectives of {axes} in pieces with products (asynchronous)" if axes else "")


def summary(plan: Plan, console: Console) -> None:
    """The tables that `plan` and `inspect` share."""
    document, predicted = plan.document, plan.document.predicted
    rows = [
        ("model", f"{document.model.name}, {document.model.params / 1e6:.4g} M parameters"),
        ("cluster", f"{document.cluster.name}, {document.cluster.devices} devices"),
        *([("", str(note))] if (note := document.cluster.description.get("note")) else []),
        ("plan", describe(plan.graph, plan.candidate)),
        ("batch", f"{document.batch.global_} global, {document.batch.micro} per data rank"
         + _parts(document.batch.num_microbatches) + _seq(document.batch.seq)),
        ("precision", precision_text(plan.candidate.precision) + ("" if document.inference else f", {document.optimizer}")),
        ("blocks", _blocks(plan)),
        *_inference(plan),
        ("step", _step(plan)),
        ("memory", _memory(plan)),
        ("search", f"{document.search.status}, gap {percent(predicted.gap)}, {document.search.candidates} candidates"),
        *([("", cut_short_text(document.search.cut_short))] if document.search.cut_short else []),
        *(("constrained", text) for text in constraint_texts(document.search.constrained)),
        ("replicated", ", ".join(f"{axis}: {percent(x)} of FLOPs" for axis, x in document.replicated_share.items()) or "-"),
    ]  # fmt: skip
    if (fastest := document.search.fastest) is not None and predicted.step_seconds:
        ahead = percent(1 - fastest.step_seconds / predicted.step_seconds)
        rows.append(("fastest", f"by prediction {fastest.plan}, {ahead} ahead: too little to tell them apart, so the simpler one "
                     "with more memory left is chosen"))  # fmt: skip
    if document.replicated_ops:
        rows.append(("no sharding rule", ", ".join(document.replicated_ops)))
    rows += document_rows(plan)
    rows += expert_rows(plan)
    rows += _returned(plan)
    console.table(str(plan), ("", "chosen"), rows)
    stage_table(plan, console)
    baseline_table(document.baselines, predicted.step_seconds, predicted.peak_memory_bytes, console)
    if document.search.meshes:
        console.table("Candidates", ("mesh", "status", "lower bound", "step", "peak memory"), _candidates(document.search.meshes))
        for each in _shown(document.search.meshes):
            if each.status == "NOT TRIED" and each.reason:
                console.text(f"not tried: {each.mesh}: {each.reason}")


def _inference(plan: Plan) -> list[tuple[str, str]]:
    """The predicted latency and throughput of a plan for inference."""
    info = plan.document.inference
    if info is None or info.decode_seconds is None:
        return []
    each = f"{seconds(info.prefill_seconds)} for the prompt, {seconds(info.decode_seconds)} for each further token"
    gap = 1 - info.latency_bound_seconds / info.latency_seconds
    return [
        ("inference", f"{info.new_tokens} new tokens in {seconds(info.latency_seconds)} (gap {percent(gap)}): {each}"),
        ("", f"{info.new_tokens_per_second:.4g} new tokens/s; key-value cache {size(info.cache_bytes)} per device, "
         f"{size(info.decode_peak_bytes)} at the peak of decoding"),
    ]  # fmt: skip


def _memory(plan: Plan) -> str:
    """``71.2 GiB of 79.6 GiB per device at the peak, margin 8 %: 73.2 GiB may be taken``."""
    predicted = plan.document.predicted
    peak, capacity, margin = predicted.peak_memory_bytes, predicted.memory_capacity_bytes, predicted.memory_margin
    if peak is None or not capacity or margin is None:
        return f"{size(peak)} per device at the peak"
    budget = int(capacity * (1 - margin))
    held = plan.document.cluster.description.get("device", {}).get("held_bytes")
    others = f" ({size(held)} of other models)" if held else ""
    over = "" if peak <= budget else f", which is {size(peak - budget)} too much"
    taken = f"{size(peak)}{others} of {size(capacity)} per device at the peak"
    return f"{taken}, margin {percent(margin)}: {size(budget)} may be taken{over}"


def _shown(every: Sequence[MeshResult]) -> list[MeshResult]:
    """Candidates with a plan, and of the others those with the smallest lower bounds."""
    solved = [each for each in every if each.step_seconds is not None]
    rest = sorted((each for each in every if each.step_seconds is None), key=lambda each: each.bound_seconds or inf)
    return [*solved, *rest[: max(3, _ROWS - len(solved))]]


def _candidates(every: Sequence[MeshResult]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (m.mesh, m.status, seconds(m.bound_seconds), seconds(m.step_seconds), size(m.peak_memory_bytes)) for m in _shown(every)
    ]
    more = len(every) - len(rows)
    return [*rows, (f"{more} more", "", "", "", "")] if more else rows


_ROWS = 12


def _returned(plan: Plan) -> list[tuple[str, str]]:
    """The fields of the model's result that the program returns beside the loss; and the notes of capture."""
    graph = plan.graph
    left_out = graph.interface.left_out if graph.interface is not None else ()
    notes = [("note", note) for note in graph.notes]
    if not (graph.outputs or left_out):
        return notes
    fields = [output.path or "the model's result" for output in graph.outputs]
    returned = ", ".join(["loss", *fields] if graph.has_loss else fields)
    return [("returns", returned + (f"; None for {', '.join(left_out)} (ask with --outputs)" if left_out else "")), *notes]


def _parts(count: int) -> str:
    return f" in each of {count} micro-batches" if count > 1 else ""


def _seq(seq: int | None) -> str:
    return f", sequences of {seq}" if seq else ""


def _step(plan: Plan) -> str:
    predicted = plan.document.predicted
    parts = [seconds(predicted.step_seconds)]
    if predicted.tokens_per_second_per_device is not None:
        parts.append(f"{predicted.tokens_per_second_per_device:.4g} tokens/s per device")
    elif predicted.samples_per_second is not None:
        parts.append(f"{predicted.samples_per_second:.4g} {unit_of(plan.graph)}/s")
    if predicted.tflops_per_device is not None:
        parts.append(f"{predicted.tflops_per_device:.4g} TFLOP/s per device, {percent(predicted.mfu)} of peak")
    return ", ".join(parts)
