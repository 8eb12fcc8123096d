"""``autopar compare-clusters`` and ``plan --for`` on the command line: their numbers hold together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fuzzing.one_line import answer

from autopar.cli import main


def documented(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


RUN = ["compare-clusters", "qwen3-4b", "dgx-h100:1@2.5", "dgx-a100:2@1.5", "--tokens", "1e11", "--batch", "64", "--seq", "4096"]


def test_time_and_money_follow_from_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = documented([*RUN, "--for", "megatron,torchtitan"], capsys)
    runs = found["runs"]
    assert {(each["cluster"], each["software"]) for each in runs} == {
        (cluster, name) for cluster in ("dgx-h100:1", "dgx-a100:2") for name in ("megatron", "torchtitan")
    }
    assert [each["cost"] for each in runs] == sorted(each["cost"] for each in runs)
    for each in runs:
        devices = 8 if each["cluster"] == "dgx-h100:1" else 16
        rate = devices * each["price_per_device_hour"]
        assert each["hours"] == pytest.approx(each["step_seconds"] * 1e11 / (64 * 4096) / 3600)
        assert each["cost"] == pytest.approx(each["hours"] * rate)
        assert each["tokens_per_second"] == pytest.approx(64 * 4096 / each["step_seconds"])
        assert each["tokens_per_money"] == pytest.approx(each["tokens_per_second"] * 3600 / rate)
        assert each["cost_interval"] == pytest.approx([hours * rate for hours in each["hours_interval"]])
        assert each["hours_interval"][0] < each["hours"] < each["hours_interval"][1]


def test_twice_the_price_is_twice_the_cost_and_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "compare-clusters",
        "qwen3-4b",
        "dgx-h100:1@2",
        "dgx-h100:1@4",
        "--tokens",
        "1e11",
        "--batch",
        "64",
        "--for",
        "megatron",
    ]
    cheap, dear = documented(run, capsys)["runs"]
    assert dear["cost"] == pytest.approx(2 * cheap["cost"])
    assert (dear["hours"], dear["configuration"]) == (cheap["hours"], cheap["configuration"])


def test_what_fits_nowhere_is_infeasible_and_what_fits_somewhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["compare-clusters", "llama3-405b", "--tokens", "1e11", "--batch", "64", "--for", "megatron"]
    assert main([*large, "dgx-h100:1@2"]) == 3
    assert "fits on none of dgx-h100:1" in capsys.readouterr().err
    assert main([*large, "dgx-h100:1@2", "dgx-h100:32@2"]) == 0
    said = capsys.readouterr()
    assert "dgx-h100:1: llama3-405b does not fit" in said.err and "dgx-h100:32" in said.out


@pytest.mark.parametrize("words", [["dgx-h100:1"], ["dgx-h100:1@-1"], ["nothing:1@2"], ["dgx-h100:1@2", "--for", "nano"]])
def test_odd_offers_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-clusters", "qwen3-4b", *words, "--tokens", "1e11", "--batch", "64"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_what_a_software_lacks_has_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a mixture expert parallelism is worth something; what is worth nothing says so, and the largest comes first."""
    found = documented(["plan", "mixtral-8x7b", "--cluster", "dgx-h100:4", "--batch", "64", "--for", "deepspeed"], capsys)
    shares = {each["what"]: each["step_share"] for each in found["lacks"]}
    assert shares["expert parallelism"] > 0 and all(0 <= share < 1 for share in shares.values())
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_a_model_without_tokens_is_a_line(tmp_path: Path) -> None:
    """Found by odd words: a division by zero."""
    (tmp_path / "net.py").write_text("import torch\ndef f(): return torch.nn.Linear(2, 2), (torch.ones(2, 2),)\n")
    said = answer("compare-clusters", f"{tmp_path}/net.py:f", "dgx-h100:1@2", "--tokens", "1e9", "--batch", "16")
    assert said.status == 2 and "say --seq" in str(said)
