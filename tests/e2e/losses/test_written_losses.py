"""Losses that a model writes out over a sharded vocabulary train like one process, on real ranks."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_calls
from support.harness.training_loop import train
from support.plans.captured_models import case_of
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor, nn

from autopar.checker.certificate import certify
from autopar.ir.plan import Precision
from autopar.program.build import program_text

CLASSES, WIDTH = 16, 8
F64 = Precision("float64", "float64")


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class PolicyLoss(nn.Module):
    """PPO's clipped ratio."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, before: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.words(tokens))))
        ratio = (log_probs(logits, tokens) - before).exp()
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return (losses * mask).sum() / mask.sum()


class PreferenceLoss(PolicyLoss):
    """DPO's: sums of rows, chosen and not."""

    def forward(self, tokens: Tensor, before: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.words(tokens))))
        chosen = ((log_probs(logits, tokens) - before) * mask).sum(-1)
        other = (logits.logsumexp(-1) - logits.gather(-1, (tokens.unsqueeze(-1) + 1) % CLASSES).squeeze(-1)) * mask
        return -F.logsigmoid(chosen + other.sum(-1)).mean()


class SquaredNormalizer(PolicyLoss):
    """Cross entropy, and PaLM's z-loss, the square of the logarithm of the softmax's denominator."""

    def forward(self, tokens: Tensor, before: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.words(tokens))))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss + 0.1 * (logits.logsumexp(-1).square() * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("make", "function"),
    [(PolicyLoss, "token_log_probs"), (PreferenceLoss, "token_log_probs"), (SquaredNormalizer, "logsumexp")],
)
def test_trains_like_one_process(make: type[PolicyLoss], function: str, ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = make().double()
    draw = partial(torch.rand, 8, 4, dtype=torch.float64)
    batches = [(torch.randint(CLASSES, (8, 4)), -draw(), draw() - 0.5, (draw() > 0.3).double()) for _ in range(3)]
    case = case_of(model, batches[0])
    programs = []
    for axes in ({"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}):
        for seed in count():
            candidate = drawn_candidate(case.graph, mesh_of(**axes), seed, zero=3, wild=0.0, precision=F64)
            text = program_text(case.graph, candidate)
            if f"C.{function}_sharded(" in text:
                break
        certificate = certify(text, case.graph, candidate)
        assert certificate.holds, certificate.refused
        programs.append(text)
    calls = [(batch, {}) for batch in batches]
    expected = train(model, calls)
    for outcomes in ranks.run(train_calls, [(text, case.state, calls) for text in programs], timeout=120):
        for found in outcomes:
            assert not training_differences(found, expected)
