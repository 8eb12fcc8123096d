"""Several models in one call of `parallelize`: planned together, so that they fit on the devices together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

from torch import nn

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.explain.run_time import LOGGER, say_measuring
from autopar.given_plan import check_launch
from autopar.ir.plan_file.plan_file import decode_plan
from autopar.joint_plan import joint_plans
from autopar.options import PlanOptions
from autopar.plan_inputs import cache_folder, check_model, cluster_named, plan_folder
from autopar.planning import plan_with
from autopar.runtime.comm.agreement import on_first_rank
from autopar.runtime.comm.heartbeat import PATIENCE_SECONDS, join, watched
from autopar.runtime.device.mesh import launched_processes
from autopar.runtime.device.rendezvous import JOIN_SECONDS
from autopar.runtime.parallel import Parallel
from autopar.runtime.patches import apply_patches

Arguments = ParamSpec("Arguments")
Models = list[nn.Module] | tuple[nn.Module, ...]


class OneOrSeveral(Protocol[Arguments]):
    """A function of a model that takes several too: then a list is one value for each model, and so is the result."""

    @overload
    def __call__(self, model: nn.Module, /, *args: Arguments.args, **options: Arguments.kwargs) -> Parallel: ...
    @overload
    def __call__(self, model: Models, /, *args: Any, **options: Any) -> list[Parallel]: ...


def one_or_several(parallelize: Callable[Concatenate[nn.Module, Arguments], Parallel]) -> OneOrSeveral[Arguments]:
    """Make a function of one model one of several as well."""

    @wraps(parallelize)
    def call(model: nn.Module | Models, *args: Any, **options: Any) -> Parallel | list[Parallel]:
        if isinstance(model, list | tuple):
            return _parallelize_several(parallelize, model, *args, **options)
        return parallelize(model, *args, **options)

    return cast("OneOrSeveral[Arguments]", call)


def _parallelize_several(
    parallelize: Callable[..., Parallel], models: Models, cluster: str | Cluster, example_inputs: Any = None, **options: Any
) -> list[Parallel]:
    """Return the parallel models, in order."""
    for each in models:
        check_model(each)
    if not models or len({id(each) for each in models}) < len(models):
        raise AutoparError("several models are planned together: pass a list of models, each of them once")
    _refuse_shared_weights(models)
    if not isinstance(example_inputs, list):
        raise AutoparError("several models are planned before the first call: pass example_inputs=[...], one for each model")
    if options.get("beside"):
        raise AutoparError("beside= is for one model: put all models into the list, and they are planned together")
    every = _for_each(len(models), options | {"example_inputs": example_inputs})
    if options.get("plan") is None:
        texts = _joint_plan_texts(models, cluster, every)
        every = [each | {"plan": decode_plan(text), "force": ""} for each, text in zip(every, texts, strict=True)]
    return [parallelize(model, cluster, **each) for model, each in zip(models, every, strict=True)]


def _for_each(count: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each model: of a list its entry, of all else the same. AutoparError where a list is too short or too
    long."""
    for name, value in options.items():
        if isinstance(value, list) and len(value) != count:
            raise AutoparError(
                f"{name}= has {len(value)} entries for {count} models: write a list with one for each, or a value that is no list"
            )
    return [{name: value[i] if isinstance(value, list) else value for name, value in options.items()} for i in range(count)]


def _refuse_shared_weights(models: Models) -> None:
    """AutoparError where two models have a parameter in common: each parallel model trains weights of its own."""
    first: dict[int, int] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            other = first.setdefault(id(parameter), index)
            if other != index:
                raise AutoparError(
                    f"models {other} and {index} share the parameter {name}, of which each would train its own copy: put both "
                    "into one module whose forward calls them"
                )


def _joint_plan_texts(models: Models, named: str | Cluster, every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the plan of each model as text, which rank 0 makes."""
    known = {each.name for each in fields(PlanOptions)}
    asked = [PlanOptions(**{name: value for name, value in each.items() if name in known} | _compiled(each)) for each in every]
    size = launched_processes()
    cluster = cluster_named(named, processes=size)
    check_launch(cluster)
    apply_patches()
    first = every[0]
    heartbeat = join(
        size, {cluster.name: size}, lambda rank: f"rank {rank}",
        patience_seconds=first.get("patience_seconds", PATIENCE_SECONDS), join_seconds=first.get("join_seconds", JOIN_SECONDS),
    )  # fmt: skip

    def plan_texts() -> list[str]:
        priced = cluster_named(named, cache_folder(), size, say_measuring)
        names = [f"{type(model).__name__} ({index})" for index, model in enumerate(models)]
        LOGGER.info("planning %s together for %s", ", ".join(names), priced.name)

        def planner(index: int, held_bytes: int) -> Any:
            options, cached = replace(asked[index], held_bytes=held_bytes), every[index].get("cache", True)
            inputs = every[index]["example_inputs"]
            return plan_with(models[index], priced, inputs, options, cache=plan_folder() if cached else None)

        planners = [partial(planner, index) for index in range(len(models))]
        return [plan.to_json() for plan in joint_plans(planners, names, [each.optimizer for each in asked])]

    try:
        with watched(heartbeat, "planning"):
            return on_first_rank(plan_texts)
    finally:
        if heartbeat is not None:
            heartbeat.close()


def _compiled(options: Mapping[str, Any]) -> dict[str, Any]:
    compile = options.get("compile")
    return {"compile": None if compile is None else bool(compile)}
