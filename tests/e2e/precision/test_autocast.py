"""``torch.autocast`` around a parallel model and inside it: the program has its casts, and computes what the model does."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.character_model import CharacterModel
from support.models.zoo.output_model import convolutions, pictures
from torch import Tensor, nn

import autopar

ROUNDING = 2e-2


class Inside(nn.Module):
    """Casts in its own forward, with an island in float32."""

    def __init__(self, inside: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16) if self.inside else nullcontext():
            h = self.norm(torch.relu(self.up(x)))
            with torch.autocast(x.device.type, enabled=False):
                h = h.float().softmax(-1) * 8
            out = self.down(h)
        return nn.functional.cross_entropy(out.float(), y)


def example(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)


def steps(model: Any, dtype: torch.dtype | None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for seed in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(*example(seed))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def parallel_of(model: nn.Module, force: str, batch: tuple[Tensor, ...], outputs: tuple[str, ...] = ()) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return autopar.parallelize(model, "local:4", batch, force=force, cache=False, outputs=outputs)


def dtypes_of(parallel: Any) -> list[str]:
    """What each program of the model casts to, by autocast."""
    return sorted({key.autocast for key, _ in parallel.variants.programs})


def near(found: list[float], expected: list[float], tolerance: float = ROUNDING) -> None:
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= tolerance * abs(other), (found, expected)


def script(force: str) -> None:
    exact = steps(Inside(inside=False), None)
    for dtype in (torch.bfloat16, torch.float16):
        expected = steps(Inside(inside=False), dtype)
        assert expected != exact, "autocast rounds"
        around = parallel_of(Inside(inside=False), force, example())
        near(steps(around, dtype), expected)
        start = Inside(inside=False).state_dict()
        around.load_state_dict(start)
        near(steps(around, None), exact, 1e-5)
        assert dtypes_of(around) == ["", str(dtype).removeprefix("torch.")]
        with torch.autocast("cpu", dtype=dtype):
            planned = parallel_of(Inside(inside=False), force, example())
        assert len(planned.variants.programs) == 2, "one program, with gradients and without"
        near(steps(planned, dtype), expected)
        planned.load_state_dict(start)
        near(steps(planned, None), exact, 1e-5)
    near(steps(parallel_of(Inside(), force, example()), None), steps(Inside(), None))
    assert all(p.dtype is torch.float32 and (p.grad is None or p.grad.dtype is torch.float32) for p in around.parameters())


@pytest.mark.parametrize("force", ["dp=2,tp=2", pytest.param("pp=2,dp=2", marks=pytest.mark.slow),
                                   pytest.param("dp=4,zero=3", marks=pytest.mark.slow)])  # fmt: skip
def test_a_call_under_autocast_equals_one_process(force: str, ranks: RankPool) -> None:
    ranks.run(script, force, timeout=300)


def different(force: str) -> str:
    parallel = parallel_of(Inside(inside=False), force, example())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.distributed.get_rank() == 1):
        try:
            parallel(*example())
        except autopar.AutoparError as error:
            return str(error)
    return ""


def test_autocast_on_some_ranks_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(different, "dp=2,tp=2"):
        assert "under torch.autocast(bfloat16)" in said and "call it alike on every rank" in said and "\n" not in said


def language(force: str) -> None:
    """Evaluation outside of autocast, a model of layers that are captured once."""

    def model() -> CharacterModel:
        torch.manual_seed(0)
        return CharacterModel(layers=4)

    ids = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, parallel = model(), parallel_of(model(), force, batch, ("0",))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = parallel(*batch)
        expected_logits, expected = plain(*batch)
        assert logits.dtype is expected_logits.dtype and loss.dtype is expected.dtype
    loss.backward()
    near([float(loss.detach())], [float(expected.detach())])
    parallel.eval()
    plain.eval()
    with torch.no_grad():
        near([float(parallel(*batch)[1])], [float(plain(*batch)[1])], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2,tp=2", "tp=4"])
def test_a_language_model(force: str, ranks: RankPool) -> None:
    ranks.run(language, force, timeout=300)


def lower_precision(force: str) -> None:
    """bf16 as the precision of the plan: the evaluation of batch norm has statistics in float32."""
    plain = convolutions()
    parallel = autopar.parallelize(convolutions(), "local:4", pictures(), force=force, precision="bf16", cache=False)
    parallel.eval()
    plain.eval()
    near([float(parallel(**pictures()).detach())], [float(plain(**pictures()).detach())])


def test_batch_norm_of_a_plan_in_bf16(ranks: RankPool) -> None:
    ranks.run(lower_precision, "dp=2,tp=2")
