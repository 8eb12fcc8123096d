"""``autopar check-module`` on megatron-core's own modules, where that package is installed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from autopar.checker.modules.module_check import check_module
from autopar.dryrun.compat import fake_group

pytest.importorskip("megatron.core")
MESH = {"dp": 2, "tp": 2}


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    from support.by_hand import megatron_core

    megatron_core.without_gpu(monkeypatch)
    return megatron_core


def test_a_language_model_is_right(megatron: Any) -> None:
    found = check_module(megatron.gpt, MESH, fake_group)
    assert not found.wrong and found.parameters == 29, found.wrong


@pytest.mark.parametrize(
    ("tokens_cut", "summed", "wrong"),
    [(False, (), ()), (True, ("norm", "down.bias"), ()), (True, ("norm",), ("down.bias",)),
     (True, ("down.bias",), ("norm.weight", "norm.bias"))],
)  # fmt: skip
def test_products(tokens_cut: bool, summed: tuple[str, ...], wrong: tuple[str, ...], megatron: Any) -> None:
    found = check_module(partial(megatron.products, tokens_cut, summed), MESH, fake_group)
    assert [each.split()[2] for each in found.wrong] == list(wrong)
    assert not found.assumed
