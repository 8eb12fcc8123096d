"""What trips rewriting tools: no_grad regions, 0-d, tied, frozen and differently typed parameters, heads that do not divide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.harness.comparison import differences
from support.harness.end_to_end import check_programs, plan, prepare, prepare_model, program
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import parallel_model
from support.models.small_models import VOCABULARY, token_batch
from torch import Tensor, nn

FORCES: dict[str, dict[str, int]] = {
    "dp=4": {"dp": 4, "zero": 0},
    "dp=4,zero=3": {"dp": 4, "zero": 3},
    "tp=4": {"tp": 4},
    "dp=2,tp=2,zero=2": {"dp": 2, "tp": 2, "zero": 2},
}


class Layer(nn.Module):
    """A residual block with a scale that is a 0-d parameter, a frozen projection and a mask made without gradient."""

    def __init__(self, width: int, low: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.low = nn.Linear(width, width, dtype=low)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.frozen(x))
        h = self.down(F.gelu(self.up(self.norm(x)))) * gate
        h = h + self.low(x.to(self.low.weight.dtype)).to(x.dtype)
        return x + h * self.scale


class Hard(nn.Module):
    """A tied head over two such layers."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Layer(32, low) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize(("low", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_equals_one_process(low: torch.dtype, tolerance: float, ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = Hard(low)
    for name, parameter in model.named_parameters():
        if ".low." not in name:
            parameter.data = parameter.data.double()
    case = prepare_model("hard", model, token_batch(8))
    texts = [program(case, plan(case, force)) for force in FORCES.values()]
    check_programs(ranks, case, texts, FORCES, tolerance=tolerance, parameters=low is torch.float64)


class TwoHeads(nn.Module):
    """Attention with two heads only: four ways do not divide it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], 2, 16).transpose(1, 2) for t in self.qkv(self.embedding(input_ids)).chunk(3, dim=-1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def test_heads_that_do_not_divide_leave_the_sequence_to_cut(ranks: RankPool) -> None:
    torch.manual_seed(0)
    case = prepare_model("two heads", TwoHeads().double(), token_batch(8))
    result = plan(case, {"tp": 4})
    share = dict(result.evaluation.redundant_share)["tp"]
    assert share <= 0.02
    text = program(case, result)
    assert "C.attention_r" in text, "two heads on four ranks: by a ring, or by rows"
    found = ranks.run(train_programs, [(text, case.state, case.batch)], timeout=120)[0][0]
    assert not differences(found, case.expected, 1e-9)


def answer(text: str, state: dict[str, Tensor], batch: dict[str, Tensor], training: bool) -> str:
    """On a rank: what the program says of a batch that it must refuse."""
    from autopar.runtime.errors import RuntimeProblem

    parallel = parallel_model(text, state).train(training)
    try:
        parallel(**batch)
    except RuntimeProblem as problem:
        return f"{type(problem).__name__}: {problem}"
    return "ran"


def test_batch_norm_is_not_evaluated_by_the_batch(ranks: RankPool) -> None:
    case = prepare("convnet_bn")
    text = program(case, plan(case, {"dp": 4, "zero": 0}))
    assert "statistics of batch norm" in ranks.run(answer, text, case.state, case.batch, False)[0]


def test_another_sequence_length_is_refused(ranks: RankPool) -> None:
    case = prepare("gpt2")
    text = program(case, plan(case, {"dp": 4, "zero": 0}))
    shorter = {name: tensor[:, :1] for name, tensor in case.batch.items()}
    said = ranks.run(answer, text, case.state, shorter, True)[0]
    assert said.startswith("BatchError") and "(16, 1), the plan is for (batch, 16)" in said
