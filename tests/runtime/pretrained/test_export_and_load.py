"""Weights in Hugging Face's layout: written under any plan, read by safetensors' own library and under any other plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from support.models.handwritten_program import batch, make, state
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.parallel import Parallel

State = dict[str, Tensor]
PLANS = [({"dp": 4}, 0), ({"dp": 4}, 3), ({"tp": 4}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 4, "state": 2}, 3)]


def export(axes: dict[str, int], zero: int, folder: str, size: int | str, slices: int, dtype: torch.dtype | None = None) -> State:
    """On a rank: trains, and exports, large tensors in slices of so many bytes."""
    from autopar.runtime.pretrained import export as module

    module.SLICE_BYTES = slices
    parallel = Parallel(make(axes, zero), state())
    train(parallel, [batch(0)])
    assert parallel.save_pretrained(folder, size, dtype=dtype) == Path(folder)
    return parallel.full_state()


def load(axes: dict[str, int], zero: int, folder: str) -> State:
    parallel = Parallel(make(axes, zero), {name: torch.zeros_like(value) for name, value in state().items()})
    found = parallel.load_pretrained(folder)
    assert not found.missing_keys and not found.unexpected_keys
    return parallel.full_state()


def refused(folder: str, strict: bool = True) -> list[str]:
    """On a rank: what is said, and what has changed in spite of it."""
    parallel = Parallel(make({"dp": 2, "tp": 2}, 3), state())
    before = parallel.full_state()
    said = []
    try:
        said.append(str(parallel.load_pretrained(folder, strict=strict)))
    except AutoparError as error:
        said.append(str(error))
    after = parallel.full_state()
    return said + [name for name, value in before.items() if not torch.equal(value, after[name])]


def read(folder: Path) -> State:
    """By safetensors' own library."""
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    said = json.loads(index.read_text())
    out: State = {}
    for file in sorted(set(said["weight_map"].values())):
        found = load_file(folder / file)
        assert all(said["weight_map"][name] == file for name in found)
        out |= found
    assert out.keys() == said["weight_map"].keys()
    assert said["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in out.values())
    return out


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("before", "size", "slices"),
    [(PLANS[3], 800, 300), *(pytest.param(each, "1MB", 300, marks=pytest.mark.slow) for each in PLANS)],
)
def test_to_safetensors_and_to_other_plans(ranks: RankPool, tmp_path: Path, before: Any, size: int | str, slices: int) -> None:
    exported = ranks.run(export, *before, str(tmp_path), size, slices)[0]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert ("model.safetensors" in files and len(files) == 1) if size == "1MB" else len(files) > 3, files
    assert_same(read(tmp_path), exported)
    for after in PLANS:
        for found in ranks.run(load, *after, str(tmp_path)):
            assert_same(found, exported)


def test_an_earlier_export_is_replaced(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for size in (900, "5GB", 700):
        exported = ranks.run(export, *PLANS[1], str(tmp_path), size, 2**20)[0]
        assert_same(read(tmp_path), exported)
        parts = list(tmp_path.glob("model-*"))
        assert not list(tmp_path.glob(".*")) and (size == "5GB") == (not parts), sorted(tmp_path.iterdir())
        assert {path.name[-17:-12] for path in parts} <= {f"{len(parts):05d}"} and (tmp_path / "tokenizer.json").exists()


def test_in_another_dtype(ranks: RankPool, tmp_path: Path) -> None:
    exported = ranks.run(export, *PLANS[3], str(tmp_path), "5GB", 300, torch.bfloat16)[0]
    assert_same(read(tmp_path), {name: value.to(torch.bfloat16) for name, value in exported.items()})
    [found] = ranks.run(load, *PLANS[3], str(tmp_path))[:1]  # a shorter type is exact in a longer one
    assert_same(found, {name: value.to(torch.bfloat16).double() for name, value in exported.items()})


def crafted(case: str, folder: Path) -> None:
    from safetensors.torch import save_file

    weights = {name: value.contiguous() for name, value in state().items()}
    first = next(iter(weights))
    path = folder / "model.safetensors"
    if case == "missing":
        del weights[first]
    if case == "unexpected":
        weights["another.weight"] = torch.zeros(3)
    if case == "shape":
        weights[first] = weights[first][:-1].contiguous()
    if case == "kind":
        weights[first] = weights[first].long()
    if case == "float8":
        weights[first] = weights[first].to(torch.float8_e4m3fn)
    save_file(weights, path)
    content = path.read_bytes()
    if case == "cut":
        path.write_bytes(content[:-5])
    if case == "cut header":
        path.write_bytes(content[:40])
    if case == "no header":
        path.write_bytes(b"\x80\x02}q\x00." * 50)
    if case == "pickled":
        path.unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    if case == "index":
        path.rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {first: "../a.safetensors"}}))
    if case == "index without file":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {first: "b.safetensors"}}))
        path.unlink()


CASES = {
    "missing": "name the folder of this model's weights, or pass strict=False",
    "unexpected": "has, which the model has not, another.weight",
    "shape": "build that file's model",
    "kind": "int64 in model.safetensors, and float64 in the model",
    "float8": "float8_e4m3fn in model.safetensors, and float64 in the model",
    "cut": "it is cut or no safetensors file",
    "cut header": "it is cut or no safetensors file",
    "no header": "it is cut or no safetensors file",
    "pickled": "is pickled, which is not read",
    "index": "has no weight_map of safetensors files beside it",
    "index without file": "name a folder that all nodes share",
    "none": "download the model first",
}


def all_refused(cases: list[tuple[str, str]]) -> list[list[str]]:
    return [refused(folder) for _, folder in cases]


def test_what_does_not_fit_is_refused_in_one_line(ranks: RankPool, tmp_path: Path) -> None:
    cases = [(case, str(tmp_path / case)) for case in CASES]
    for case, folder in cases:
        if case != "none":
            Path(folder).mkdir()
            crafted(case, Path(folder))
    for answers in ranks.run(all_refused, cases):
        for (case, _), found in zip(cases, answers, strict=True):
            assert len(found) == 1 and CASES[case] in found[0] and "\n" not in found[0], (case, found)


def test_without_strict(ranks: RankPool, tmp_path: Path) -> None:
    crafted("missing", tmp_path)
    for found in ranks.run(refused, str(tmp_path), strict=False):
        assert "missing_keys=" in found[0] and len(found) == 1, found


def test_headers_with_any_byte_changed_are_refused_or_read(tmp_path: Path) -> None:
    """Never another error, and never bytes beyond the file's."""
    import random

    from autopar.runtime.pretrained.stacked import mapped
    from autopar.runtime.pretrained.weight_files import list_files

    crafted("whole", tmp_path)
    path, generator = tmp_path / "model.safetensors", random.Random(0)
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    said = set()
    for _ in range(400):
        place, other = generator.randrange(length), generator.randrange(256)
        path.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
        try:
            for weight in list_files(tmp_path).weights.values():
                mapped(path, weight).flatten()[-1:].tolist()
        except AutoparError as error:
            said.add(str(error))
            assert "\n" not in str(error)
    assert len(said) > 5
