"""`autopar doctor`: what it lists of a model, each with file, line and remedy, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.harness.processor_seconds import processor_seconds

from autopar.cli import main
from autopar.cost_models.hardware.workload import DocumentLengths

MODEL = """
import torch
from torch import nn


class Gate(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return x


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Net(nn.Module):
    def __init__(self, gates=0, widths=(16, 32, 48, 64), odd=True):
        super().__init__()
        self.gates = nn.ModuleList(Gate(16, 16) for _ in range(gates))
        self.layers = nn.ModuleList(Layer(width) for width in widths)
        self.odd = odd

    def forward(self, x):
        for gate in self.gates:
            x = gate(x)
        for layer in self.layers:
            x = layer(x)
        if self.odd:
            x = torch.special.i0(x)
            x = x @ torch.eye(16).to(x.device)
        return x.float().square().mean()


def good():
    return Net(widths=(16, 16, 16), odd=False), {"x": torch.randn(8, 16)}


def poor():
    return Net(), {"x": torch.randn(8, 16)}


def refused():
    return Net(gates=2), {"x": torch.randn(8, 16)}


def casts():
    class Casts(nn.Linear):
        def forward(self, x):
            return (x.float() @ self.weight.float().T).square().mean()

    return Casts(16, 16), {"x": torch.randn(8, 16)}


def fixed():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(int(x.shape[0]) * 2, 16, device=x.device)[: len(x) : 1].reshape(8, 16)

    return Fixed(16, 16), {"x": torch.randn(8, 16)}


def constant():
    class Constant(nn.Linear):
        def forward(self, x):
            return (super().forward(x) * torch.tensor([float(i * i) for i in range(16)])).square().mean()

    return Constant(16, 16), {"x": torch.randn(8, 16)}


def whole():
    import autopar

    net = Net(gates=1, widths=(32, 32), odd=False)
    autopar.opaque(net.gates[0])
    return net, {"x": torch.randn(8, 16)}


def deep():
    return Net(widths=(256,) * 48, odd=False), {"x": torch.randn(8, 16)}
"""


def examined(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    path = folder / "people.py"
    path.write_text(MODEL)
    status = main(["doctor", f"{path}:{name}", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["can_be_planned"] == (status == 0)
    for each in document["findings"]:
        assert each["where"] and each["remedy"] and "\n" not in "".join(map(str, each.values()))
    return status, document["findings"]


def line_of(text: str) -> str:
    return f"people.py:{1 + MODEL.split(text)[0].count(chr(10))}"


def test_a_good_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "good", capsys)
    assert status == 0
    assert {each["kind"] for each in found} <= {"fixed"} and not [each for each in found if "batch" in each["what"]], found


def test_replicated_slow_and_unfolded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "poor", capsys)
    assert status == 0
    kinds = {(each["kind"], each["what"]): each for each in found}
    (odd,) = [each for (kind, what), each in kinds.items() if kind == "replicated" and "aten.special_i0" in what]
    assert odd["where"] == line_of("x = torch.special.i0") and "register_rule" in odd["remedy"]
    (layers,) = [each for (kind, what), each in kinds.items() if kind == "slow" and "layers Layer are not folded" in what]
    assert layers["where"].startswith(line_of("class Layer")), layers


def test_all_refusals_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "refused", capsys)
    assert status == 1
    refused = [each for each in found if each["kind"] == "refused"]
    line = line_of("if x.sum() > 0")
    assert [each["where"] for each in refused] == [f"{line} (module gates.0)", f"{line} (module gates.1)"]
    assert all("autopar.opaque(module)" in each["remedy"] for each in refused)
    assert any("aten.special_i0" in each["what"] for each in found), "what comes after a refusal is examined too"


def test_a_fixed_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "fixed", capsys)
    assert status == 0
    (batch,) = [each for each in found if each["what"].startswith("the batch is fixed at 8")]
    assert batch["where"] == line_of("return super().forward(x) + torch.ones"), batch


def test_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "constant", capsys)
    assert status == 0
    (held,) = [each for each in found if "neither parameter nor buffer" in each["what"]]
    assert held["where"].startswith(line_of("torch.tensor([float")) and "register_buffer" in held["remedy"], held


def test_what_is_left_whole_is_replicated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "whole", capsys)
    assert status == 0
    assert any(each["kind"] == "replicated" and "gates.0 is opaque" in each["what"] for each in found), found


def test_it_takes_less_than_ten_seconds_of_the_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 48 layers; what grows with depth is the export of one layer's copies only."""
    assert processor_seconds(lambda: examined(tmp_path, "deep", capsys)) < 10


@pytest.mark.slow  # imports transformers
def test_a_large_model_takes_less_than_ten_seconds_of_the_processor(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice: what torch and transformers import counts once."""
    assert processor_seconds(lambda: main(["doctor", "gpt2-xl", "--batch", "8"]), 2) < 10


@pytest.mark.usefixtures("forked_ranks")
def test_verify_of_a_model_with_a_part_left_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks are processes of their own, which build the model for the code of this part."""
    path = tmp_path / "people.py"
    path.write_text(MODEL)
    status = main(["verify", f"{path}:whole", "--cluster", "local:2", "--force", "dp=2", "--dtype", "float64"])
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert "equal" in said.out


def test_products_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(tmp_path, "casts", capsys)
    assert status == 0
    (slow,) = [each for each in found if each["kind"] == "slow"]
    assert "runs in float32 under bf16" in slow["what"] and slow["where"] == line_of("return (x.float() @")


@pytest.mark.slow  # imports transformers
def test_a_bundled_model_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "llama-tiny", "--batch", "8"]) == 0
    said = capsys.readouterr().out
    assert "a plan can be made" in said and "captured: " in said


DATA = """
import torch


def packed():
    row = [0, 1, 2, 0, 1, 2, 3, 4]
    for _ in range(3):
        yield {"input_ids": torch.zeros(2, 8, dtype=torch.long), "position_ids": torch.tensor([row, list(range(8))])}


def padded():
    return [{"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])}]


def whole():
    return [{"input_ids": torch.ones(2, 4)}]


def none():
    return [{"x": torch.ones(2)}]


def number():
    return 3


def broken():
    yield from open("nowhere")
"""


@pytest.mark.parametrize(
    ("loader", "expected"), [("packed", {"3": 3, "5": 3, "8": 3}), ("padded", {"2": 1, "3": 1}), ("whole", {"4": 2})]
)
def test_lengths_of_the_data_are_what_plans_take(
    loader: str, expected: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.py").write_text(DATA)
    file = tmp_path / "lengths.json"
    assert main(["doctor", "mlp", "--json", "--data", f"{tmp_path}/data.py:{loader}", "-o", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == json.loads(file.read_text()) == expected
    total = sum(int(length) * count for length, count in expected.items())
    squares = sum(int(length) ** 2 * count for length, count in expected.items())
    assert DocumentLengths.parse(str(file)).tokens == squares / total


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ("none", "yield dicts with"),
        ("number", "another iterable"),
        ("missing", "has no function 'missing'"),
        ("broken", "No such file"),
    ],
)
def test_data_without_lengths_is_one_line(loader: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.py").write_text(DATA)
    assert main(["doctor", "mlp", "--data", f"{tmp_path}/data.py:{loader}"]) == 2
    *before, last = capsys.readouterr().err.strip().splitlines()
    assert words in last and not any("Traceback" in line for line in before)
