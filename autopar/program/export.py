"""Exports a folder that trains with torch only: the program, a copy of the runtime, the plan, a training script and a batch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

import torch

from autopar.errors import FileError, PlanError
from autopar.files import part_of, remove_left_over
from autopar.ir import dims
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Shard, parse_placement
from autopar.operations.control_flow import OPAQUE
from autopar.operations.table import operation
from autopar.passes.lowered import Lowered
from autopar.program.build import render
from autopar.program.templates import README, TRAIN
from autopar.runtime.checkpoint.folder_sync import sync_folder
from autopar.runtime.state.weight_source import memory_of

MARKER = ".autopar-export.json"
"""Lists the files of an export: what a later one may replace."""


def export_program(
    lowered: Lowered,
    plan_json: str,
    directory: str | Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    batch: Mapping[str, torch.Tensor] | None = None,
    learning_rate: float = 3e-4,
    compiled: bool = False,
    overwrite: bool = False,
    certificate: str = "",
) -> Path:
    """Writes the folder and returns its path. FileError where the folder has files; those of an earlier export are replaced under
    `overwrite`, files of the user in it are left alone.

    `weights` are full tensors by original name, buffers included, tied ones under all their names; without them the script
    initialises parameters by name.
    `batch` is a global batch by input name; without it a random one is written. `compiled`: the script
    compiles blocks on GPUs, unless it is told not to. `certificate` is the text of certificate.json.
    """
    name, mesh, ranks = lowered.graph.name, lowered.whole_mesh, lowered.candidate.devices
    if not lowered.graph.has_loss:
        raise PlanError(f"{name} returns no loss, which its training script needs: return it from the model's forward")
    whole = next((str(node.args[1]) for block in lowered.blocks for node in block.block.nodes if node.op == OPAQUE), "")
    if whole:
        raise PlanError(
            f"{name} calls the module {whole}, which autopar.opaque left whole: an exported folder cannot hold "
            "its code; run the plan with autopar.parallelize(model, ..., plan=...), or write it without control flow on data"
        )
    with export_folder(directory, overwrite) as folder:
        (folder / "program.py").write_text(render(lowered, "runtime"), encoding="utf-8")
        (folder / "plan.json").write_text(plan_json, encoding="utf-8")
        _copy_runtime(folder / "runtime")
        script = TRAIN.format(learning_rate=learning_rate, ranks=ranks, compiled=compiled)
        (folder / "train.py").write_text(script, encoding="utf-8")
        (folder / "README.md").write_text(README.format(name=name, mesh=mesh, ranks=ranks), encoding="utf-8")
        torch.save(dict(batch) if batch is not None else random_batch(lowered), folder / "batch.pt")
        if certificate:
            (folder / "certificate.json").write_text(certificate, encoding="utf-8")
        if weights is not None:
            copies = {memory_of(tensor): tensor.detach().cpu().clone() for tensor in weights.values()}
            torch.save({name: copies[memory_of(tensor)] for name, tensor in weights.items()}, folder / "weights.pt")
    return Path(directory)


def _copy_runtime(target: Path) -> None:
    with resources.as_file(resources.files("autopar.runtime")) as runtime:
        shutil.copytree(runtime, target, ignore=lambda _, names: [name for name in names if name == "__pycache__"])


def global_input_shapes(lowered: Lowered) -> dict[str, tuple[int, ...]]:
    """The shapes of the planned global batch by input name."""
    ranks = lowered.candidate.mesh.size_of(DATA_AXIS) * lowered.candidate.micro_batches
    out = {}
    for value, (name, texts) in zip(lowered.inputs, lowered.input_placements, strict=True):
        shape = list(dims.shape_at(value.shape, lowered.batch))
        where = parse_placement(dict(texts).get(DATA_AXIS, "R"))
        if isinstance(where, Shard):
            shape[where.dim] *= ranks
        out[name] = tuple(shape)
    return out


def random_batch(lowered: Lowered) -> dict[str, torch.Tensor]:
    """A random global batch of the planned shapes. Integers that index an embedding or classes are in range, others are 1."""
    generator = torch.Generator().manual_seed(0)
    bounds = dict[str, int]()
    for name, bound in _index_bounds(lowered):
        bounds[name] = min(bound, bounds.get(name, bound))
    out = {}
    shapes = global_input_shapes(lowered)
    for value in lowered.inputs:
        dtype, shape = getattr(torch, value.dtype), shapes[value.name]
        if dtype.is_floating_point:
            out[value.name] = torch.randn(shape, generator=generator).to(dtype)
        elif value.name in bounds:
            out[value.name] = torch.randint(bounds[value.name], shape, generator=generator).to(dtype)
        else:
            out[value.name] = torch.ones(shape, dtype=dtype)
    return out


def _index_bounds(lowered: Lowered) -> Iterator[tuple[str, int]]:
    """(input, bound) for each integer input of the batch that indexes an embedding table or the classes of a loss."""
    inputs = {value.name for value in lowered.inputs}
    for call in lowered.graph.calls:
        each = lowered.block(call.block)
        block, values = each.block, each.block.values()
        specs = {p.value.name: spec for p, spec in zip(block.parameters, each.specs, strict=True)}
        roots = {value.name: {name} & inputs for value, name in zip(block.inputs, call.inputs, strict=True)}
        for node in block.nodes:
            operands = node.operands()
            found = set().union(*(roots.get(name, set()) for name in operands))
            roots.update((value.name, found if value.dtype.startswith(("int", "uint")) else set()) for value in node.outputs)
            if operation(node.op).embedding:
                for name in operands:
                    rows = [specs[other].shape[0] for other in operands if other in specs]
                    rows = rows or [
                        dims.size_at(values[other].shape[0], 1) for other in operands if values[other].dtype[:3] != "int"
                    ]
                    yield from ((root, rows[0]) for root in roots.get(name, set()))
            elif operation(node.op).loss:
                axis = dict(node.kwargs).get("axis")
                classes = values[operands[0]].shape[-1]
                ranks = lowered.candidate.mesh.size_of(axis) if isinstance(axis, str) else 1
                yield from ((root, dims.size_at(classes, 1) * ranks) for root in roots.get(operands[1], set()))


# -- the folder: written aside, then put in place as a whole; only files of an earlier export are ever replaced


@contextlib.contextmanager
def export_folder(directory: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `directory` when the context ends without an error.

    FileError where `directory` has files and is no export, or is one and `overwrite` is off. Files of the user in an earlier
    export are left alone; so is everything where writing fails.
    """
    part = None
    try:
        target = Path(os.path.realpath(directory))
        _recover(target)
        written = _check(target, overwrite)
        remove_left_over(target)
        part = part_of(target)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        files = sorted(str(path.relative_to(part)) for path in part.rglob("*") if path.is_file())
        (part / MARKER).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        _put_in_place(part, target, written)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write to {str(directory)[:200]}: {reason}; what was there before is unchanged") from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _check(target: Path, overwrite: bool) -> frozenset[str]:
    """The files of the export that is there."""
    if not target.exists():
        return frozenset()
    if not target.is_dir():
        raise FileError(f"cannot write to {target}: it is a file; name a folder")
    if not any(target.iterdir()):
        return frozenset()
    try:
        files = json.loads((target / MARKER).read_text(encoding="utf-8"))["files"]
        written = frozenset(str(name) for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        raise FileError(f"{target} has files that no export wrote: name a new folder, or an empty one") from None
    if not overwrite:
        raise FileError(f"{target} is an earlier export: write --overwrite to replace its files, or name a new folder")
    return written | {MARKER}


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name[:100]}.previous")


def _recover(target: Path) -> None:
    """Gives the earlier export its name again, where a process was killed between the two renames that replace it."""
    previous = _previous(target)
    if not target.exists() and (previous / MARKER).exists():
        previous.rename(target)


def _put_in_place(part: Path, target: Path, written: frozenset[str]) -> None:
    if not target.exists() or not any(target.iterdir()):
        part.replace(target)
        sync_folder(target.parent)
        return
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(target))
        if path.is_file() and name not in written and "__pycache__" not in path.parts:
            beside = part / name
            if beside.exists():
                raise FileError(f"{path} is in the way, and no export wrote it: move it, or name a new folder")
            beside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, beside)
    previous = _previous(target)
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)  # whole under this name, should the process end before the next line
    part.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)
