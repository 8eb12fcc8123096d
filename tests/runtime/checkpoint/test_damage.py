"""Damaged, crafted and foreign checkpoints: refused in one line that names the file; the one before is loaded. One process."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.checkpoint import entry, folders
from autopar.runtime.checkpoint.entry import load_checkpoint
from autopar.runtime.checkpoint.held import held_by_plain
from autopar.runtime.checkpoint.rounds import Rounds
from autopar.runtime.checkpoint.saving import collect, write
from autopar.runtime.errors import CheckpointProblem, RuntimeProblem


def trained(steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2).bfloat16().float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@cache
def remembered(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return trained(steps)


def save(folder: Path, steps: int, *, keep: int | None = None, extra: Any = None) -> Path:
    model, optimizer = trained(steps)
    held, rounds = held_by_plain(model), Rounds(None, str)
    collected = collect(held, rounds, folder, [optimizer], step=steps, extra=extra)
    return write(collected, rounds, step=steps, axes={}, keep=keep)


def loaded(folder: Path) -> int:
    """The step that was loaded, whole."""
    model, optimizer = trained()
    found = load_checkpoint(folder, model, optimizer)
    assert found is not None
    expected, expected_optimizer = remembered(found.step)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    for one, other in zip(optimizer.state.values(), expected_optimizer.state.values(), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return found.step


def damages(content: bytes, draw: random.Random, each: int) -> list[bytes | None]:
    """None: the file is missing."""
    out: list[bytes | None] = [None, b"", content + b"\0", content[:-1], content[1:], b"\0" * len(content)]
    for _ in range(each):
        place = draw.randrange(len(content))
        out.append(content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :])
        out.append(content[: draw.randrange(len(content))])
        start, length = draw.randrange(len(content)), draw.randrange(1, 40)
        out.append(content[:start] + draw.randbytes(length) + content[start + length :])
    return out


@pytest.mark.parametrize("each", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_the_one_before_is_loaded(each: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each file, cut or changed in many ways."""
    save(tmp_path, 1)
    path, draw = save(tmp_path, 2), random.Random(0)
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", "objects.pt", "rank_00000.safetensors"] and loaded(tmp_path) == 2
    count = 0
    for name in names:
        content = (path / name).read_bytes()
        for damaged in damages(content, draw, each):
            if damaged == content:
                continue
            (path / name).unlink(missing_ok=True)
            if damaged is not None:
                (path / name).write_bytes(damaged)
            caplog.clear()
            assert loaded(tmp_path) == 1
            (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert "\n" not in line and name in line and "remove the damaged one" in line
            with pytest.raises(CheckpointProblem) as refused:
                load_checkpoint(tmp_path, trained()[0], step=2)
            assert "\n" not in str(refused.value) and name in str(refused.value) and "name another folder" in str(refused.value)
            count += 1
        (path / name).write_bytes(content)
    assert count > 8 * each and loaded(tmp_path) == 2


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Each place of a JSON value, as what holds it and its key."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [(value, key) for key in keys] + [place for key in keys for place in leaves(value[key])]


def test_crafted_manifests(tmp_path: Path) -> None:
    """Manifests with a right checksum: loaded rightly, or refused by an error of one line."""
    path = save(tmp_path, 1)
    whole = json.loads((path / "manifest.json").read_text())["manifest"]
    odd = [None, -1, 2**70, 1.5, "", "../../etc/passwd", "float16", [], {}, True, [[0], [1], 0, 0], "é\n"]
    draw, refused = random.Random(1), 0
    for number in range(0, len(leaves(whole)), 3):
        for value in draw.sample(odd, 1):
            changed = json.loads(json.dumps(whole))
            holder, key = leaves(changed)[number]
            holder[key] = value
            body = json.dumps(changed, separators=(",", ":")).encode()
            head = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", "manifest": '
            (path / "manifest.json").write_bytes(head + body + b"}\n")
            model, optimizer = trained()
            try:
                load_checkpoint(tmp_path, model, optimizer)
            except CheckpointProblem as error:
                assert str(error).isprintable()
                refused += 1
    assert refused > 50


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def rewrite_objects(path: Path, content: bytes) -> None:
    """Other objects, with a manifest that says so."""
    (path / "objects.pt").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    manifest["files"]["objects.pt"] = [len(content), hashlib.sha256(content).hexdigest()]
    body = json.dumps(manifest, separators=(",", ":")).encode()
    head = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", "manifest": '
    (path / "manifest.json").write_bytes(head + body + b"}\n")


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, file = save(tmp_path / "saved", 1), io.BytesIO()
    torch.save({"extra": Payload()}, file)
    for content in (pickle.dumps(Payload()), file.getvalue(), b""):
        rewrite_objects(path, content)
        with pytest.raises(CheckpointProblem, match=r"objects\.pt cannot be read"):
            load_checkpoint(tmp_path / "saved", *trained())
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(("change", "told"), [
    (lambda: (nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)),), r"has shape \(7, 4\), and \(6, 4\)"),
    (lambda: (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 2)),), "has no 3.weight"),
    (lambda: (model := trained()[0], torch.optim.SGD(model[0].parameters())), "other parameters than that of the checkpoint"),
    (lambda: (model := trained()[0], [torch.optim.SGD(model.parameters())] * 2), "has the state of 1 optimizers"),
])  # fmt: skip
def test_another_model_is_refused(tmp_path: Path, change: Callable[[], Any], told: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    model, *optimizer = change()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointProblem, match=told):
        load_checkpoint(tmp_path, model, *optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_retention_and_leftovers(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", trained()[0]) is None
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    (tmp_path / "step_00000009.tmp").mkdir()
    (tmp_path / "step_00000008").mkdir()  # without a manifest: it was never whole
    (tmp_path / "mine").mkdir()
    assert loaded(tmp_path) == 3
    save(tmp_path, 3)  # in place of the one that is there
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["mine", "step_00000002", "step_00000003", "step_00000008"] and loaded(tmp_path) == 3
    shutil.move(tmp_path / "step_00000003", tmp_path / "step_00000003.old")  # killed while it was replaced
    assert loaded(tmp_path) == 3 and loaded(tmp_path / "step_00000002") == 2
    with pytest.raises(CheckpointProblem, match="no checkpoint of step 7"):
        load_checkpoint(tmp_path, trained()[0], step=7)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointProblem, match=r"extra\['odd'\] cannot be saved \(it has a .*Payload"):
        save(tmp_path, 2, extra={"fine": [1, 2.0, "x", None, torch.ones(2)], "odd": {"inside": Payload}})
    for step, keep in ((-1, None), (1.5, None), (1, 0)):
        with pytest.raises(RuntimeProblem, match="is no number"):
            folders.check_step(step, keep)
    assert loaded(tmp_path) == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointProblem, match=r"step_00000002: .*No space left on device.*make room"):
        save(tmp_path, 2)
    assert loaded(tmp_path) == 1 and len(list(tmp_path.iterdir())) == 1


def test_other_tools_read_the_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    held = safetensors.load_file(save(tmp_path, 1) / "rank_00000.safetensors")
    assert torch.equal(held["model.0.weight@0,0"], trained(1)[0].state_dict()["0.weight"])
    assert entry.Checkpoints().pending is None
