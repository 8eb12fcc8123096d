"""A measured step beside the predicted one: per stage, block and collective, what is off, and which constant to calibrate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..quantities import seconds_words, size_words


def ratio_words(measured: float | None, predicted: float | None) -> str:
    """Measured over predicted."""
    return f"{measured / predicted:.2f}" if measured is not None and predicted else "-"


def as_text(comparison: dict[str, Any]) -> str:
    """Return the findings of `compare.comparison` as lines."""
    lines = list(comparison["summary"])
    for title, header, rows in comparison["tables"]:
        lines += ["", title, *_table(header, rows)]
    if comparison["advice"]:
        lines += ["", "What is off", *(f"- {each}" for each in comparison["advice"])]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]


PARTS = {
    "compute_seconds": "compute",
    "model_wait_seconds": "waits for collectives of the model axes",
    "data_wait_seconds": "waits for the data axis (weights, gradients)",
    "pipeline_wait_seconds": "waits for other stages",
    "optimizer_seconds": "optimizer",
}
"""The parts of a stage's step, which add up to it."""

_CONSTANTS = {
    "compute_seconds": "calibrate the device's matmul_fraction, attention_fraction, bandwidth_fraction and launch_us",
    "model_wait_seconds": "calibrate the link of these axes (links: bandwidth_gb_per_second, latency_us)",
    "data_wait_seconds": "calibrate bandwidth and latency of the link of the data axis, and overlap.contention",
    "pipeline_wait_seconds": "calibrate the link between stages (latency_us), and what makes stages differ in compute",
    "optimizer_seconds": "calibrate the device's update_us and update_gb_per_second (CPU) or bandwidth_fraction (GPU)",
}
OFF = (0.8, 1.25)
"""Measured over predicted: between these it is as predicted."""
SMALLEST_SHARE = 0.05
"""The share of the step below which differences are not spoken of."""

_BUSY = 1.3
"""Seconds over those of the thread's own processor, from which on a CPU was shared with other programs."""

Row = Mapping[str, Any]


def comparison(measured: Row, predicted: Row | None) -> dict[str, Any]:
    """Return `summary` (lines), `tables` (title, header, rows of text) and `advice` (lines)."""
    other = predicted or {}
    return {
        "summary": list(_summary(measured, other)),
        "tables": tables(measured, other),
        "advice": list(_advice(measured, other)) if other else [],
    }


def tables(measured: Row, predicted: Row) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return the tables that have rows."""
    sides = ("measured", "predicted", "ratio")
    waits = ("times", "bytes", "waited for", "took at most", "predicted", "predicted times")
    candidates = [
        ("Parts of the step", ("stage", "part", *sides), list(_parts(measured, predicted))),
        ("Blocks", ("stage", "block", "modules", "pass", *sides), list(_blocks(measured, predicted))),
        ("Collectives", ("stage", "collective", "axis", *waits), list(_collectives(measured, predicted))),
        ("Peak memory", ("stage", "kind", *sides), list(_memory(measured, predicted))),
    ]
    return [each for each in candidates if each[2]]


def rates(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, float | None]:
    """Examples, tokens, and model FLOPs utilization (`mfu`) of the measured step."""
    examples, seconds = measured["examples"], measured["step_seconds"]
    per_second = examples / seconds if seconds else 0.0
    tokens, flops, peak = (predicted.get(key) for key in ("tokens_per_example", "model_flops", "peak_flops_per_second"))
    mfu = flops * per_second / predicted["examples"] / peak if flops and peak and predicted.get("examples") else None
    return {"examples": per_second, "tokens": per_second * tokens if tokens else None, "mfu": mfu}


def scalars(measured: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> dict[str, float]:
    """The figures of `comparison` by tag."""
    figures = {"step/seconds": measured["step_seconds"], "step/between_seconds": measured["between_seconds"]}
    for name, value in rates(measured, predicted or {}).items():
        if value is not None:
            figures["step/mfu" if name == "mfu" else f"step/{name}_per_second"] = value
    for prefix, table in (("", measured), ("predicted/", predicted or {})):
        if prefix and table:
            figures[f"{prefix}step/seconds"] = table["step_seconds"]
        for row in table.get("stages", ()):
            figures |= {f"{prefix}stage{row['stage']}/{part}": row[part] for part in PARTS}
        for row in table.get("blocks", ()):
            where = f"{prefix}stage{row['stage']}/block/{row['block']}"
            figures |= {f"{where}/{key}": row[key] for key in ("forward_seconds", "backward_seconds")}
        for row in table.get("collectives", ()):
            where = f"{prefix}stage{row['stage']}/collective/{row['kind']}/{row['axis']}"
            figures |= {f"{where}/{key}": row[key] for key in ("seconds", "wait_seconds", "bytes") if key in row}
        for row in table.get("memory", ()):
            figures |= {f"{prefix}stage{row['stage']}/memory/{kind}": row[kind] for kind in row if kind != "stage"}
    return figures


def _summary(measured: Row, predicted: Row) -> Iterator[str]:
    """The step; examples, tokens and utilization a second."""
    step, forecast = measured["step_seconds"], predicted.get("step_seconds")
    of = f"; predicted {seconds_words(forecast)}, measured over predicted {ratio_words(step, forecast)}" if forecast else ""
    yield (
        f"step {seconds_words(step)} (mean of {measured['steps']} on {measured['ranks']} ranks, "
        f"least {seconds_words(measured['least_step_seconds'])}){of}"
    )
    figures = rates(measured, predicted)
    words = [f"{figures['examples']:.4g} examples a second"]
    words += [f"{figures['tokens']:.4g} tokens a second"] if figures["tokens"] is not None else []
    if figures["mfu"] is not None:
        expected = predicted.get("mfu")
        words.append(f"MFU {100 * figures['mfu']:.3g} %" + (f" (predicted {100 * expected:.3g} %)" if expected else ""))
    yield ", ".join(words) + f"; between steps {seconds_words(measured['between_seconds'])}"


def _by(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], Row]:
    return {tuple(row[key] for key in keys): row for row in rows}


def _parts(measured: Row, predicted: Row) -> Iterator[list[str]]:
    by_stage = _by(predicted.get("stages", ()), "stage")
    for row in measured["stages"]:
        other = by_stage.get((row["stage"],), {})
        for key, name in PARTS.items():
            if row[key] or other.get(key):
                yield _line([row["stage"], name], row[key], other.get(key))
            if key == "compute_seconds":
                yield _line(
                    [row["stage"], "  of it outside of blocks (the host's own work)"], row[key] - row["blocks_seconds"], None
                )
        yield _line([row["stage"], "step"], row["seconds"], other.get("seconds"))


def _line(words: list[Any], measured: float, predicted: float | None) -> list[str]:
    return [*map(str, words), seconds_words(measured), seconds_words(predicted), ratio_words(measured, predicted)]


def predicted_block(row: Row, predicted: Row) -> Row | None:
    """The prediction for a block that was measured: by the path of its first module on the stage, else by its name."""
    rows = [each for each in predicted.get("blocks", ()) if each["stage"] == row["stage"]]
    named = [each for each in rows if each["first"] == row["first"]] if row["first"] else []
    named = named or [each for each in rows if row["block"] in (each["block"], f"Model{each['block']}")]
    return named[0] if named else None


def _blocks(measured: Row, predicted: Row) -> Iterator[list[str]]:
    for row in measured["blocks"]:
        other = predicted_block(row, predicted) or {}
        for kind in ("forward", "backward"):
            words = [row["stage"], row["block"], row["modules"], kind]
            yield _line(words, row[f"{kind}_seconds"], other.get(f"{kind}_seconds"))


def _collectives(measured: Row, predicted: Row) -> Iterator[list[str]]:
    by_key = _by(predicted.get("collectives", ()), "stage", "kind", "axis")
    seen = set()
    for row in measured["collectives"]:
        key = row["stage"], row["kind"], row["axis"]
        seen.add(key)
        other = by_key.get(key, {})
        yield [
            *map(str, key), f"{row['times']:g}", size_words(row["bytes"]), seconds_words(row["wait_seconds"]),
            seconds_words(row["seconds"]), seconds_words(other.get("seconds")), f"{other['times']:g}" if other else "-",
        ]  # fmt: skip
    for key, other in by_key.items():
        if key not in seen:
            yield [*map(str, key), "-", "-", "-", "-", seconds_words(other["seconds"]), f"{other['times']:g}"]


MEMORY_KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "inputs": "inputs of the batch",
    "rest": "gradients, activations and temporaries",
    "peak_bytes": "peak of all tensors",
}


def _memory(measured: Row, predicted: Row) -> Iterator[list[str]]:
    by_stage = _by(predicted.get("memory", ()), "stage")
    for row in measured["memory"]:
        other = by_stage.get((row["stage"],), {})
        for kind, name in MEMORY_KINDS.items():
            words = size_words(row[kind]), size_words(other.get(kind)), ratio_words(row[kind], other.get(kind))
            yield [str(row["stage"]), name, *words]


def _advice(measured: Row, predicted: Row) -> Iterator[str]:
    """The largest differences first; then what makes the figures doubtful."""
    step = measured["step_seconds"]
    by_stage = _by(predicted["stages"], "stage")
    lines: list[tuple[float, str]] = []
    for row in measured["stages"]:
        other = by_stage.get((row["stage"],))
        if other is None:
            continue
        of = f" on stage {row['stage']}" if len(measured["stages"]) > 1 else ""
        for key, name in PARTS.items():
            difference = row[key] - other[key]
            if abs(difference) < SMALLEST_SHARE * step or OFF[0] <= row[key] / max(other[key], 1e-12) <= OFF[1]:
                continue
            words = f"{name}{of}: {seconds_words(row[key])}, predicted {seconds_words(other[key])}"
            lines.append((abs(difference), f"{words}: {_constant(key, row, other)}"))
    yield from (line for _, line in sorted(lines, key=lambda each: -each[0]))
    for row in measured["memory"]:
        other_memory = _by(predicted.get("memory", ()), "stage").get((row["stage"],))
        if other_memory and not 0.9 <= row["peak_bytes"] / other_memory["peak_bytes"] <= 1.1:
            sizes = f"{size_words(row['peak_bytes'])}, predicted {size_words(other_memory['peak_bytes'])}"
            yield f"peak memory of stage {row['stage']}: {sizes}: run `autopar dryrun`, which lists the tensors at the peak"
    busy = max(row["compute_seconds"] / max(row["processor_seconds"], 1e-9) for row in measured["stages"])
    if measured["device"] == "cpu" and busy > _BUSY:
        yield (
            f"compute took {busy:.2f} times the processor time of its thread: the cores are shared with other programs or ranks, "
            "and a calibration made on an idle machine does not hold"
        )
    if not lines:
        yield "every part of the step is as predicted, or too small to matter"


def _constant(key: str, row: Row, other: Row) -> str:
    """Return the constants of a row; for compute, those of the host where its own work is what differs."""
    outside = row["compute_seconds"] - row["blocks_seconds"]
    if key == "compute_seconds" and outside > (row["compute_seconds"] - other["compute_seconds"]) / 2 > 0:
        return (
            "most of the difference is outside of blocks, the host's own work for each action and message, which no constant "
            "describes (larger micro-batches make it a smaller share)"
        )
    return f"{_CONSTANTS[key]} (`autopar calibrate`)"
