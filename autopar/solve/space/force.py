"""The parts of a plan that a user fixes, parsed once: degrees and a schedule for the search, or a whole configuration that is
only priced; and where the optimizer's state lies.

With the state in host memory the update of a step waits for copies of it, and what is sharded, recomputed and offloaded of
activations is searched without it: so such plans are looked for only where nothing else fits, or where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.errors import AutoparError
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS, MODEL_AXES
from autopar.ir.plan import OFFLOAD_DEVICES
from autopar.schedules.pipeline_schedule import INTERLEAVED, builder_named
from autopar.solve.space.options import SearchOptions

AXES = (DATA_AXIS, *MODEL_AXES, EXPERT_AXIS)
DEGREES = (*AXES, "pp", "virtual", "zero", "zero_group", "micro")
"""Numbers that can be fixed, one by one."""

CONFIGURATION = ("tp", "pp", "zero", "micro_batches", "recompute", "zero_group", "sequence_parallel")
"""The parts of a fixed configuration. The data degree is what the cluster leaves."""

_CONFIGURATION_MORE = ("virtual", "dp", "schedule", "weight_versions")
_ONLY_CONFIGURATION = ("micro_batches", "recompute", "sequence_parallel")

RECOMPUTE = ("none", "modules", "selective", "products", "full", "everything")
"""Recomputation of a fixed configuration; `fixed.configuration.FixedConfiguration` says what each is."""

OFFLOAD, NO_OFFLOAD = "offload_optimizer", "none"
"""The place of the optimizer's state between steps: one of `ir.plan.OFFLOAD_DEVICES`, or always on the device."""

SYNTHESIZED = "synthesized"
"""The schedule that is solved for, instead of a named one."""

_FROM_ZERO = ("zero", "zero_group", "sequence_parallel")


@dataclass(frozen=True, slots=True)
class Force:
    """The parts of a plan that are forced. `degrees` by name. `schedule` is that of a builder, or `INTERLEAVED` where the search
    decides on the number of chunks; it is empty where the search decides, or where the user asks for a synthesized one
    (`synthesize`). `recompute` is empty unless everything is fixed. `offload_optimizer` is ``cpu``, ``nvme`` or ``none``; empty
    where the planner decides."""

    degrees: Mapping[str, int]
    schedule: str = ""
    synthesize: bool = False
    recompute: str = ""
    offload_optimizer: str = ""

    @property
    def is_configuration(self) -> bool:
        """Whether nothing is left to the search."""
        return bool(self.recompute)


def parse_force(force: str | Mapping[str, int | str] | None) -> Force:
    """Parse ``"tp=4,zero=3,schedule=zb-h1"`` for the search, or a configuration:
    ``tp=8,pp=2,zero=1,micro_batches=4,recompute=full,zero_group=0,sequence_parallel=1`` (and ``virtual=2``, ``schedule=gpipe``,
    ``weight_versions=2``). AutoparError on another key, a value that makes no sense, or a part of a configuration."""
    if force is not None and not isinstance(force, str | Mapping):
        raise AutoparError(f'force={repr(force)[:40]} says no degrees: write "tp=4,zero=3" or {{"tp": 4, "zero": 3}}')
    force = force or ""
    pairs = force.items() if isinstance(force, Mapping) else [item.partition("=")[::2] for item in force.split(",") if item]
    words: dict[str, str] = {}
    for name, value in pairs:
        key = str(name).strip()
        if key in words:
            raise AutoparError(f"force: {key[:40]} is written twice, as {words[key][:40]} and {_text(value)[:40]}: write it once")
        words[key] = _text(value)
    offload = _offload(words.pop(OFFLOAD, None))
    fixed = [key for key in _ONLY_CONFIGURATION if key in words]
    if fixed:
        _check_configuration(words, fixed[0])
    else:
        _check_keys(words)
    degrees = {key: _degree(key, text) for key, text in words.items() if key not in ("schedule", "recompute")}
    schedule = words.get("schedule", "")
    synthesize = schedule == SYNTHESIZED and not fixed
    if schedule == INTERLEAVED:
        schedule = _interleaved(degrees, bool(fixed))
    elif schedule and not synthesize:
        builder_named(schedule, "give its actions" if fixed else f"write {SYNTHESIZED}", (INTERLEAVED,))
    if synthesize and degrees.get("pp", 1) < 2:
        raise AutoparError(f"force: schedule={SYNTHESIZED} is one of a pipeline: write its stages too, as in pp=2")
    return Force(degrees, "" if synthesize else schedule, synthesize, words.get("recompute", ""), offload)


def _text(value: object) -> str:
    """A value as text; a huge integer, which has none, as what no degree can be."""
    huge = isinstance(value, int) and value.bit_length() > 128
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and huge else str(value).strip()


def _offload(text: str | None) -> str:
    if text is not None and text not in (*OFFLOAD_DEVICES, NO_OFFLOAD):
        raise AutoparError(f"force: {OFFLOAD}={text[:40]}: write {', '.join(OFFLOAD_DEVICES)} or {NO_OFFLOAD}")
    return text or ""


def _interleaved(degrees: Mapping[str, int], fixed: bool) -> str:
    """The schedule that ``interleaved`` stands for. AutoparError where there is but one chunk a stage."""
    if degrees.get("virtual", 1 if fixed else 2) < 2:
        raise AutoparError(f"force: schedule={INTERLEAVED} has several chunks a stage: write virtual=2 or more")
    return "1f1b" if "virtual" in degrees else INTERLEAVED


def _check_keys(words: Mapping[str, str]) -> None:
    for key in words:
        if key in ("cp", "sp"):
            raise AutoparError(
                f"force: {key!r} cannot be forced: a model axis (tp, tp2) shards the sequence where that is fastest; write tp=2 "
                "for its ranks, and pin a placement with constrain= where it has to be so"
            )
        if key not in (*DEGREES, "schedule"):
            raise AutoparError(
                f"force: {key!r} cannot be forced; write some of {', '.join(DEGREES)}, schedule, {OFFLOAD}, as in tp=4,zero=3"
            )


def _check_configuration(words: Mapping[str, str], fixed: str) -> None:
    missing = [key for key in CONFIGURATION if key not in words]
    unknown = [key for key in words if key not in (*CONFIGURATION, *_CONFIGURATION_MORE)]
    if missing or unknown:
        wrong = f"{', '.join(missing)} missing" if missing else f"{', '.join(unknown)} not among them"
        entry = f"{fixed}={words[fixed]}"
        raise AutoparError(f"force: a configuration with {entry} has to be complete ({', '.join(CONFIGURATION)}): {wrong}")
    check_recompute(words["recompute"])


_DIGITS = 9
"""More than any cluster has devices or any batch examples: longer numbers are refused before divisors are looked for."""


def check_recompute(recompute: str) -> None:
    """Raise AutoparError where a word is none of `RECOMPUTE`."""
    if recompute not in RECOMPUTE:
        raise AutoparError(f"recompute={recompute} is none of {', '.join(RECOMPUTE)}")


def _degree(key: str, text: str) -> int:
    least = 0 if key in _FROM_ZERO else 1
    whole = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    if not whole or int(text) < least or (key == "zero" and int(text) > 3):
        raise AutoparError(f"force: {key}={text} is no degree; write a whole number of at least {least} (zero: 0 to 3)")
    return int(text)


def check_degrees(degrees: Mapping[str, int]) -> None:
    """Check degrees that come from a program. AutoparError names the first that cannot be."""
    _check_keys({key: "" for key in degrees})
    for key, value in degrees.items():
        _degree(key, str(value))


def with_offloaded_optimizer(cluster: Cluster, options: SearchOptions) -> SearchOptions | None:
    """The same search with the optimizer's state in host memory; None where that is no help, or not wanted."""
    useful = cluster.host is not None and optimizer_named(options.optimizer).state_tensors > 0
    if not useful or not options.may_offload_optimizer or options.precision.offload_optimizer:
        return None
    return replace(options, precision=replace(options.precision, offload_optimizer="cpu"))


def with_forced_offload(options: SearchOptions, force: Force) -> SearchOptions:
    """The search with the optimizer's state where `force` says, on the device where it says nothing."""
    device = force.offload_optimizer
    where = "" if device == NO_OFFLOAD else device
    return replace(options, precision=replace(options.precision, offload_optimizer=where), may_offload_optimizer=not device)
