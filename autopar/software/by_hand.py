"""Recipes as experts run them, beside a plan: on which software, with which knobs, at which price, and what was measured.

The price has the constants, the overlap, the state layout and the saved tensors of that software (`hardware.software_stacks`),
and the decoder in the form in which it writes it. It is a comparison only: what bounds the search is `solve.fixed.baselines`,
with the constants of our own programs. Runs that are shown beside a price are in ``data/measured_runs.csv``, which is drawn from
the table of published runs, which planning does not read (``python tests/benchmarks/store_measured_runs.py`` writes it again, and
a test compares).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

import msgspec

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.decoders.decoder import Architecture
from autopar.decoders.graphs import RunOptions
from autopar.decoders.recognize import RecognizedDecoder, recognize, same_model
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.rules.registry import default_registry
from autopar.software.choose import rank
from autopar.software.configuration import Configuration, Workload
from autopar.software.pricer import PricedConfiguration, Pricer
from autopar.software.space import recipe_space
from autopar.software.stacks import SENDS_ONCE, WHOLE_EXPERTS, cluster_with, software_of, written_by
from autopar.software.stage_points import stage_point, stage_seed
from autopar.solve.fixed.baselines import ExpertPrice, PricedRecipe
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.result import PlanResult
from autopar.solve.space.options import SearchOptions

_VOCABULARY = 0.02
"""Vocabularies are padded: they are equal to this share."""


def with_expert_prices(
    recipes: Sequence[PricedRecipe], graph: Graph, cluster: Cluster, options: SearchOptions, plan_seconds: float | None = None
) -> tuple[PricedRecipe, ...]:
    """The recipes with the prices that experts get. Unchanged where the model is no decoder that is known, or the devices are
    none that software was measured on. `plan_seconds`: the step of the plan that they are compared with (`with_reasons`)."""
    decoder = recognize(graph)
    if decoder is None or len({group.device.name for group in cluster.groups}) > 1:
        return tuple(recipes)
    batch = options.batch or graph.batch
    pricers: dict[str, Pricer | None] = {}
    out = []
    for each in recipes:
        key = each.recipe.key
        found = software_of(key, cluster.device.generation, bool(decoder.sizes.experts))
        if found is None:
            out.append(each)
            continue
        name, known = found
        if name not in pricers:
            pricers[name] = _pricer(decoder, graph, cluster_with(name, known, cluster), name, batch, options)
        pricer = pricers[name]
        of = replace(graph, batch=batch)
        price = _expert_price(key, name, pricer, cluster, of, options) if pricer is not None else None
        out.append(replace(each, expert=price))
    return tuple(out) if plan_seconds is None else with_reasons(out, plan_seconds)


def with_reasons(recipes: Sequence[PricedRecipe], plan_seconds: float) -> tuple[PricedRecipe, ...]:
    """The recipes with a word on why experts are faster than a plan of this step, where they are."""
    return tuple(
        replace(each, expert=replace(each.expert, reason=_reason(each.expert, plan_seconds))) if each.expert is not None else each
        for each in recipes
    )


def with_stage_seeds(
    recipes: Sequence[PricedRecipe], graph: Graph, cluster: Cluster, options: SearchOptions, seed_seconds: float
) -> tuple[PricedRecipe, ...]:
    """The recipes with pipelines with context or expert parallelism as candidates too, where these take less than
    `seed_seconds` by our programs."""
    of = replace(graph, batch=options.batch or graph.batch)

    def seeded(each: PricedRecipe) -> PricedRecipe:
        expert = each.expert
        if expert is None or expert.stage is None or expert.own is None or expert.own.step_seconds >= seed_seconds:
            return each
        return replace(each, expert=replace(expert, seed=stage_seed(*expert.stage, of, cluster, options)))

    return tuple(map(seeded, recipes))


def seeds_of(recipes: Sequence[PricedRecipe]) -> list[PlanResult]:
    """What experts run, as candidates of the search."""
    return [each.expert.seed for each in recipes if each.expert is not None and each.expert.seed is not None]


def _pricer(
    decoder: RecognizedDecoder, graph: Graph, cluster: Cluster, software: str, batch: int, options: SearchOptions
) -> Pricer | None:
    work = Workload(
        decoder=written_by(software, decoder),
        layers=decoder.layers,
        batch=batch,
        cluster=cluster,
        precision=options.precision,
        optimizer=options.optimizer,
        options=RunOptions(once=software in SENDS_ONCE),
        whole_experts=software.startswith(WHOLE_EXPERTS),
    )
    pricer = Pricer(work)
    try:
        return pricer if same_model(pricer.graph(Configuration()), graph) else None
    except AutoparError:
        return None


def _expert_price(
    recipe: str, software: str, pricer: Pricer, cluster: Cluster, graph: Graph, options: SearchOptions
) -> ExpertPrice | None:
    work = pricer.work
    assert work.decoder is not None
    try:
        found = rank(pricer, recipe_space(recipe).configurations(work)).best
    except AutoparError as error:
        return ExpertPrice(software, problem=str(error))
    runs = [run for run in runs_of(work.decoder, work.layers, cluster, work.batch) if run.recipe == recipe]
    runs.sort(key=lambda run: (run.batch != work.batch, run.precision not in ("bf16", "fp16")))
    measured = _run_text(runs[0], work.batch) if runs else ""
    exact = runs[0] if runs and runs[0].batch == work.batch and runs[0].precision in ("bf16", "fp16") else None
    if found is None:
        return ExpertPrice(software, problem=f"a batch of {work.batch} divides by no such degrees", measured=measured)
    seed = _seed(found, pricer, cluster, graph, options) if found.fits else None
    own = seed.evaluation if seed is not None else _on_our_kernels(found, pricer, cluster) if found.fits else None
    stage = stage_point(found.configuration, graph, cluster) if seed is None and own is not None and own.fits else None
    return ExpertPrice(
        software,
        found.configuration.describe(work),
        found.evaluation,
        measured=measured,
        measured_seconds=exact.step_seconds if exact is not None else None,
        own=own,
        seed=seed,
        stage=stage,
        better=_better_kernels(found, pricer, cluster),
    )


def _run_text(run: MeasuredRun, batch: int) -> str:
    precision = f" in {run.precision}" if run.precision != "bf16" else ""
    if run.batch == batch:
        return f"{run.step_seconds:.4g} s ({run.software}{precision}, {run.id})"
    rate = f"{run.tokens_per_second_per_device:.0f} tokens/s a device"
    return f"{rate} at batch {run.batch} ({run.software}{precision}, {run.id})"


def _better_kernels(found: PricedConfiguration, pricer: Pricer, cluster: Cluster) -> str:
    before, after = cluster.device, pricer.work.cluster.device
    pairs = (
        ("matrix products", before.matmul_fraction, after.matmul_fraction, "the peak"),
        ("attention", before.attention_fraction, after.attention_fraction, "the peak"),
        ("streaming kernels", before.bandwidth_fraction, after.bandwidth_fraction, "the memory bandwidth"),
    )
    better = [f"{what} at {then:.2f} of {of}, ours at {now:.2f}" for what, now, then, of in pairs if then > now * 1.02]
    overlap = ["collectives of the tensor axis overlapped"] * (
        pricer.work.cluster.overlap.model_parallel and not cluster.overlap.model_parallel and found.configuration.tensor > 1
    )
    return "; ".join([*better, *overlap])


def _reason(price: ExpertPrice, plan_seconds: float) -> str:
    """By how much an expert is faster than the plan, and why; empty where he is not."""
    if price.evaluation is None or not price.fits or price.evaluation.step_seconds >= plan_seconds:
        return ""
    seconds = price.evaluation.step_seconds
    text = f"{price.software} is {plan_seconds / seconds - 1:.0%} faster than this plan"
    if price.own is None:
        return text
    ours = price.own.step_seconds
    kernels = f"its kernels and overlap give {ours - seconds:.3g} s ({price.better or 'together'})"
    if not price.own.fits:
        return f"{text}: {kernels}; on our programs' kernels the same configuration does not fit with the memory margin"
    if ours < plan_seconds:
        return f"{text}: {kernels}, its configuration {plan_seconds - ours:.3g} s"
    return f"{text}: {kernels}; the same configuration on our programs' kernels would take {ours:.3g} s"


def _seed(
    found: PricedConfiguration, pricer: Pricer, cluster: Cluster, graph: Graph, options: SearchOptions
) -> PlanResult | None:
    """The configuration on the model itself, by our programs. None with context or expert parallelism, which a fixed
    configuration of a captured model has not (`stage_points`)."""
    if found.configuration.context > 1 or found.configuration.experts > 1:
        return None
    try:
        return price_configuration(graph, cluster, found.configuration.fixed(pricer.work), options.registry or default_registry())
    except AutoparError:
        return None


def _on_our_kernels(found: PricedConfiguration, pricer: Pricer, cluster: Cluster) -> Evaluation | None:
    try:
        graph, candidate = pricer.candidate(found.configuration)
        return evaluate(graph, candidate, cluster, pricer.work.optimizer)
    except AutoparError:
        return None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a `recipe` on `devices` of the name `device`, with the sizes of its decoder (as in `Architecture`)."""

    id: str
    software: str
    precision: str
    recipe: str
    device: str
    devices: int
    layers: int
    batch: int
    step_seconds: float
    hidden: int
    seq: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    experts: int
    top_k: int
    shared_ffn: int

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.batch * self.seq / self.step_seconds / self.devices

    def is_of(self, decoder: Architecture) -> bool:
        """Whether the run is one of this decoder; key-value heads may be twice as many."""
        names = ("hidden", "seq", "ffn", "heads", "head_dim", "gated", "experts", "top_k", "shared_ffn")
        alike = all(getattr(self, name) == getattr(decoder, name) for name in names)
        heads = max(self.kv_heads, decoder.kv_heads) <= 2 * min(self.kv_heads, decoder.kv_heads)
        return alike and heads and abs(self.vocab - decoder.vocab) <= _VOCABULARY * decoder.vocab


def runs_of(decoder: Architecture, layers: int, cluster: Cluster, batch: int) -> tuple[MeasuredRun, ...]:
    """The runs of a model on a cluster, of every software and precision, those of the same batch first."""
    place = cluster.device.name, cluster.size, layers
    found = [run for run in stored_runs() if (run.device, run.devices, run.layers) == place and run.is_of(decoder)]
    return tuple(sorted(found, key=lambda run: (run.batch != batch, run.step_seconds)))


@lru_cache(maxsize=1)
def stored_runs() -> tuple[MeasuredRun, ...]:
    """All of the file, in the order of the table."""
    text = (files("autopar.software") / "data" / "measured_runs.csv").read_text(encoding="utf-8")
    return msgspec.convert(list(csv.DictReader(text.splitlines())), tuple[MeasuredRun, ...], strict=False)
