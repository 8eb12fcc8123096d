"""Tables of published training runs: a CSV file with one `Row` per line."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.files import read_text


class TableError(AutoparError):
    """A table of measurements is unreadable."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published run. The fields are the columns of the table; None where the source does not state them.

    `dp` is ``n_gpus / (tp pp cp)``; expert-parallel groups lie within it. `peak_mem_gb` is in the unit `memory_unit`.
    `step_seconds` is the time of one optimizer step.
    """

    id: str
    source: str
    model_family: str
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    n_experts: int | None
    top_k: int | None
    gpu: str
    n_gpus: int | None
    dp: int | None
    tp: int | None
    pp: int | None
    virtual_pp: int | None
    cp: int | None
    ep: int | None
    zero_stage_or_fsdp: str
    sequence_parallel: int | None
    act_ckpt: str
    micro_batch: int | None
    global_batch: int | None
    precision: str
    attention: str
    metric_mfu_pct: float | None
    peak_mem_gb: float | None
    notes: str
    step_seconds: float | None
    tokens_per_step: int | None
    gated_mlp: int | None
    head_dim: int | None
    memory_unit: str
    memory_measure: str
    software_stack: str
    compiled: int | None
    zero_group_size: int | None
    async_tp: int | None
    ep_overlap: int | None
    routing: str
    device_variant: str
    nic_gbit_per_device: float | None

    @property
    def measured_memory_bytes(self) -> float | None:
        """The peak memory in bytes: a gigabyte is 1e9 bytes where `memory_unit` says so, else a GiB (as allocators and nvidia-smi
        count)."""
        if self.peak_mem_gb is None:
            return None
        decimal = "1e9" in self.memory_unit
        return self.peak_mem_gb * (1e9 if decimal else 1024**3)

    @property
    def out_of_memory(self) -> bool:
        """Whether the run was out of memory: the notes say so, and no time was measured."""
        said = re.search(r"\bOOM\b|out[ -]of[ -]memory", self.notes, re.IGNORECASE) is not None
        return said and self.step_seconds is None


def bundled_table() -> Path:
    """The path of the public table of this package (its sources are in ``data/published_train.source.txt``)."""
    return Path(str(files("autopar.validate") / "data" / "published_train.csv"))


def read_table(path: Path) -> tuple[Row, ...]:
    """The rows of a table. TableError names the file, the line and the column that is unreadable."""
    try:
        table = csv.DictReader(StringIO(read_text(path, TableError, "the table of measurements"), newline=""))
        columns = table.fieldnames or ()
        missing = [field.name for field in fields(Row) if field.name not in columns]
        if missing:
            raise TableError(f"{path} lacks the columns {', '.join(missing)}: it must have those of the bundled table")
        rows = tuple(_row(path, number, line) for number, line in enumerate(table, start=2))
    except csv.Error as error:
        raise TableError(f"{path} is no CSV file: {error}") from None
    if not rows:
        raise TableError(f"{path} has no rows: give a table with at least one measurement")
    return rows


def _integer(text: str) -> int:
    number = float(text)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _row(path: Path, number: int, line: Mapping[str, str | None]) -> Row:
    found: dict[str, Any] = {}
    for field in fields(Row):
        text = (line.get(field.name) or "").strip()
        if field.type == "str":
            found[field.name] = text
            continue
        read_as: Callable[[str], float] = _integer if str(field.type).startswith("int") else _number
        try:
            found[field.name] = read_as(text) if text else None
        except (ValueError, OverflowError):
            kind = "a whole number" if read_as is _integer else "a number of at least 0"
            raise TableError(f"{path} line {number}, column {field.name}: {text[:40]!r} is not {kind}") from None
    if not found["id"]:
        raise TableError(f"{path} line {number}: the row has no id")
    return Row(**found)
