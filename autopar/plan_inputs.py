"""The inputs of a search, from what the user passes: graph of the model, cluster, rules and options of the search."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.capture import capture
from autopar.capture.normalize.attention import ATTENTION_ALONE
from autopar.capture.tracing.fake_copy import refuse_uninitialized
from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.hardware.workload import DocumentLengths, ExpertLoad
from autopar.errors import BatchError, CaptureError, ClusterError, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.operations.control_flow import OPAQUE
from autopar.options import PlanOptions
from autopar.precision import check_float8_devices, compute_dtype_of
from autopar.rules.expand import missing_rules
from autopar.rules.registry import Registry, default_registry
from autopar.solve.space.force import Force
from autopar.solve.space.options import SearchOptions

ExampleInputs = Mapping[str, Any] | tuple[Any, ...]
Progress = Callable[[str], None]


def cluster_for(cluster: str | Cluster, options: PlanOptions, precision: Precision, progress: Progress | None) -> Cluster:
    """The cluster with the lengths of documents, expert load, margin and software that the options ask for."""
    cluster = cluster_named(cluster, cache_folder(), progress=progress)
    if options.document_lengths:
        cluster = replace(cluster, document_lengths=DocumentLengths.parse(options.document_lengths))
    if options.expert_load != 1.0:
        cluster = replace(cluster, expert_load=ExpertLoad.parse(str(options.expert_load)))
    check_float8_devices(precision, cluster)
    return with_memory_margin(cluster, options.memory_margin, options.held_bytes)


def capture_for(model: nn.Module, example_inputs: ExampleInputs, options: PlanOptions, precision: Precision) -> Graph:
    args, kwargs = split_inputs(example_inputs)
    compute = compute_dtype_of(precision, model)
    _warn_of_narrowing((args, kwargs), compute)
    graph = capture(
        model, args, kwargs, compute_dtype=compute, float8=precision.float8, outputs=options.outputs,
        batch_norm=options.batch_norm, loss_fn=options.loss_fn, batch_dim=options.batch_dim,
    )  # fmt: skip
    _warn_of_mixed_documents(graph, kwargs)
    return graph


def _warn_of_mixed_documents(graph: Graph, inputs: Mapping[str, Any]) -> None:
    """Warn where documents of a row are mixed, although position ids that restart keep them apart in attention: transformers
    reads these only where no mask is given, and its recurrent layers do not."""
    for note in graph.notes:
        if note.startswith(ATTENTION_ALONE):
            warnings.warn(f"{note}: pad the documents, one a row, where that is not meant", stacklevel=4)
    mask, at = inputs.get("attention_mask"), inputs.get("position_ids")
    if not (isinstance(mask, torch.Tensor) and isinstance(at, torch.Tensor)) or mask.is_meta or at.is_meta:
        return
    if mask.dim() == at.dim() == 2 and mask.shape[1] == at.shape[1]:
        shown = mask.bool()
        if bool((shown[:, 1:] & shown[:, :-1] & (at[:, 1:] <= at[:, :-1])).any()):
            warnings.warn(
                "position_ids restart beside an attention_mask: models of transformers let the documents of a row see each other "
                "then; leave attention_mask out, and pad by one more document", stacklevel=4,
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


def search_options_for(options: PlanOptions, forced: Force, precision: Precision, graph: Graph, rules: Registry) -> SearchOptions:
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


def check_batch(graph: Graph, options: PlanOptions) -> None:
    """Raise BatchError where the options ask for a batch that the graph has not."""
    if options.batch not in (None, graph.batch) and not graph.batch_is_symbolic:
        raise BatchError(
            f"{graph.name} was captured at a batch of {graph.batch} only: give example inputs of batch {options.batch}"
        )


@contextmanager
def name_batch_dims(graph: Graph, options: PlanOptions) -> Iterator[None]:
    """Say in a BatchError where inputs were taken to have the batch, if not at dimension 0, and nobody said so."""
    try:
        yield
    except BatchError as error:
        dims = graph.interface.batch_dims if graph.interface is not None and options.batch_dim is None else {}
        if not dims:
            raise
        guess = ", ".join(f"dimension {dim} of {name}" for name, dim in dims.items())
        raise BatchError(f"{error} (the batch was taken to be {guess}, by the sizes: if it is not, pass batch_dim=0)") from error


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
        for module in nn.Module.modules(model):
            for name in ("parameters", "named_parameters"):
                if getattr(type(module), name) is not getattr(nn.Module, name):
                    raise CaptureError(
                        f"{type(module).__name__}.{name} overrides that of nn.Module, and may leave out parameters, which the "
                        f"parallel model would have: give it another name (trained_{name}), and call that"
                    )
        refuse_uninitialized(model)
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


def warn_of_missing_rules(graph: Graph, registry: Registry, strict: bool) -> tuple[str, ...]:
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
