"""``autopar verify``: runs the plan on local processes and the model on one; compares losses, outputs, gradients and an optimizer
step, in training and in evaluation."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from autopar.cli.commands.plan import options_of, outputs_of, plan_of
from autopar.cli.console import Console
from autopar.errors import AutoparError, ClusterError, PlanMismatch
from autopar.ir.describe import describe, precision_text
from autopar.ir.plan_file.plan_file import Plan, load_plan
from autopar.verification.differences import GROUPS, Difference
from autopar.verification.proof import ModeProof, Proof, Subject, mode_name, prove, run_reference, subject
from autopar.verification.sharding import untested

_LABELS = {"parameters": "parameters after one step", "buffers": "buffers after one step"}


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 0 where all agree, 1 where they do not: a plan that computes something else is a bug."""
    from autopar.cost_models.hardware.cluster import Cluster

    if not arguments.cluster.startswith("local"):
        raise ClusterError(f"verify runs on this machine: write --cluster local:4, not {arguments.cluster}")
    torch.manual_seed(0)
    if arguments.plan is None:
        plan, whole = _planned(arguments, console)
    else:
        plan, whole = _plan_and_subject(arguments)
    cluster = Cluster.parse(f"local:{plan.candidate.devices}")
    proof = prove(whole, plan, cluster, console.progress)
    _report(plan, proof, console)
    return 0 if proof.equal else 1


def _planned(arguments: argparse.Namespace, console: Console) -> tuple[Plan, Subject]:
    """The model is captured and runs on one process before the search, so that what cannot be verified is said first."""
    from autopar.capture.models import load_model
    from autopar.plan_inputs import cache_folder, cluster_named
    from autopar.precision import precision_of

    options_of(arguments)
    cluster_named(arguments.cluster)
    console.progress(f"capturing {arguments.model}")
    loaded = load_model(arguments.model, arguments.batch, arguments.seq, device="cpu")
    chosen = precision_of(arguments.dtype or "float32", loaded.model)
    if chosen.float8:
        raise AutoparError("float8 products round by the scale of each rank's shard, unlike those of one process: verify in bf16")
    whole = subject(
        loaded.model, loaded.example_inputs, chosen.compute, chosen.master,
        outputs=outputs_of(arguments), batch_dim=arguments.batch_dim,
    )  # fmt: skip
    whole.source, whole.sizes = arguments.model, (arguments.batch, arguments.seq)
    console.progress("running the model on one process")
    run_reference(whole)
    cluster = cluster_named(arguments.cluster, cache_folder(), progress=console.progress)
    return plan_of(arguments, console, loaded, cluster, whole.graph), whole


def _plan_and_subject(arguments: argparse.Namespace) -> tuple[Plan, Subject]:
    """The plan of ``--plan``, and a model with values."""
    from autopar.api import check_plan
    from autopar.capture.models import load_model
    from autopar.capture.normalize.batch_norm import LOCAL
    from autopar.capture.results.returned import asked_of
    from autopar.cost_models.hardware.cluster import Cluster

    plan = load_plan(arguments.plan)
    batch = plan.document.batch
    if arguments.batch not in (None, batch.global_):
        raise PlanMismatch(f"the plan is for a batch of {batch.global_}, not {arguments.batch}: leave --batch out, or plan again")
    loaded = load_model(arguments.model, batch.global_, arguments.seq or batch.seq, device="cpu")
    plan = check_plan(plan, loaded.model, Cluster.parse(f"local:{plan.candidate.devices}"), loaded.example_inputs)
    whole = subject(
        loaded.model, loaded.example_inputs, plan.candidate.precision.compute, plan.candidate.precision.master,
        outputs=asked_of(plan.graph), batch_norm="local" if LOCAL in plan.graph.notes else "global", planned=plan.graph,
    )  # fmt: skip
    whole.source, whole.sizes = arguments.model, (batch.global_, arguments.seq or batch.seq)
    return plan, whole


def _report(plan: Plan, proof: Proof, console: Console) -> None:
    from autopar.plan_inputs import registry

    document: dict[str, Any] = {"passed": proof.equal, "mesh": str(plan.candidate.mesh), "modes": {}}
    precision = plan.candidate.precision
    dtype = precision_text(precision)
    for mode in proof.modes:
        document["modes"][mode_name(mode.training)] = _report_mode(plan, mode, dtype, console)
    if proof.exact:
        console.text(
            "rounding: one process in float32 beside one in float64; a difference of 4 times that, or of 1e-5, counts as equal"
        )
    if proof.lifted:
        console.text("casts of the model to float32 were lifted to float64 on both sides")
    if drawn := sum(mode.draws for mode in proof.modes):
        console.text(f"random numbers: both sides had the {drawn} draws of the single process")
    ran = [mode_name(mode.training) for mode in proof.modes if not mode.left_out]
    verdict = "equal" if proof.equal else "DIFFERENT"
    if proof.equal and (nothing := untested(plan.graph, plan.candidate, registry())):
        verdict, document["untested"] = nothing, nothing
    console.text(f"{verdict} in {' and in '.join(ran)}" if "untested" not in document else verdict)
    first = proof.modes[0]
    names = {what: _group(first, what) for what in ("loss", "gradients", "parameters") if _group(first, what)["tensors"]}
    losses = {"single": first.losses[0], "distributed": first.losses[1]}
    console.document(document | {"tolerance": names["loss"]["allowed"], "losses": losses, **names})


def _report_mode(plan: Plan, mode: ModeProof, dtype: str, console: Console) -> dict[str, Any]:
    """The table of one mode, and its part of the JSON document."""
    name = mode_name(mode.training)
    if mode.left_out:
        console.text(f"not run in {name}: {mode.left_out}")
        return {"left_out": mode.left_out}
    rows, data = [], {}
    for what in GROUPS:
        found = _group(mode, what)
        if not found["tensors"]:
            continue
        verdict = f"{len(found['different'])} differ" if found["different"] else "equal"
        rounding = f"{found['rounding']:.1e}" if found["rounding"] else "-"
        rows.append(
            (_LABELS.get(what, what), found["tensors"], f"{found['worst']:.2e}", found["worst_name"], f"{found['allowed']:.1e}",
             rounding, verdict)
        )  # fmt: skip
        data[what] = found
    title = f"{plan.document.model.name} in {name}: {describe(plan.graph, plan.candidate)} against one process, {dtype}"
    header = ("", "tensors", "largest difference", "of", "allowed", "rounding", "")
    console.table(title, header, rows)
    if mode.unsteady:
        console.text(
            f"in {name} one process beside itself, with numbers off by a rounding, differs as much (rounding): 4 times that "
            "counts as equal; example inputs of another size or scale may be steadier"
        )
    if mode.departs:
        console.text(f"in {name}: {mode.departs}")
    return data | {
        "losses": {"single": mode.losses[0], "distributed": mode.losses[1]}, "draws": mode.draws, "departs": mode.departs,
        "unsteady": mode.unsteady,
    }  # fmt: skip


def _group(mode: ModeProof, what: str) -> dict[str, Any]:
    """Return the difference of one kind that is the largest beside what is allowed."""
    group = [each for each in mode.differences if each.what == what]
    worst = max(group, key=lambda d: (d.relative / d.allowed, d.relative), default=Difference(what, "", 0.0))
    return {
        "tensors": len(group),
        "worst": worst.relative,
        "worst_name": worst.name,
        "allowed": worst.allowed,
        "rounding": worst.rounding,
        "different": [each.name for each in group if not each.equal],
    }
