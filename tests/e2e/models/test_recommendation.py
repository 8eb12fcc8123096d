"""DLRM in its public layout (lists of tensors, bags of any length, sparse gradients): `verify` on real processes."""

from __future__ import annotations

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.zoo.recommendation import dlrm
from support.models.zoo.verified import FORCES, verdict

from autopar.capture import capture
from autopar.planning import make_plan

SLOW = [
    pytest.param(layout, mode, force, marks=pytest.mark.slow)
    for layout, mode in (("even", "sum"), ("ragged", "mean"), ("ragged", "max"), ("stacked", "sum"))
    for force in (*FORCES, "dp=4,zero=3")
]


@pytest.mark.filterwarnings("ignore:sparse=True")
@pytest.mark.parametrize(("layout", "mode", "force"), [("stacked", "sum", "dp=2,tp=2"), *SLOW])
def test_equals_one_process_or_is_refused(layout: str, mode: str, force: str, ranks: RankPool) -> None:
    found = verdict(*dlrm(layout, mode), force, ranks)
    if force == "pp=2":  # one stack of different layers, whose loss is of the whole batch
        assert found == "equal" or "blocks, pp=2" in found or "of the whole batch" in found, found
    else:
        assert found == "equal"


def test_sparse_gradients_are_said_to_be_dense() -> None:
    model, batch = dlrm("ragged")
    with pytest.warns(UserWarning, match=r"sparse=True of dlrm.emb_l.0, .* their gradients are dense; use Adam or SGD"):
        graph = capture(model, (), batch)
    assert graph.batch == 8 and graph.batch_is_symbolic


@pytest.mark.filterwarnings("ignore:sparse=True")
def test_stacked_offsets_have_their_batch_at_dimension_1() -> None:
    model, batch = dlrm("stacked")
    graph = capture(model, (), batch)
    assert graph.batch_is_symbolic and graph.interface is not None and graph.interface.batch_dims == {"lS_o": 1}


def test_a_flat_list_of_ids_is_no_batch() -> None:
    """Ids, and offsets with the last one (9 of 8 bags): the batch is that of the floating-point input."""

    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = torch.nn.EmbeddingBag(20, 8, include_last_offset=True), torch.nn.Linear(8, 1)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.out(self.bag(ids, offsets)), y)

    batch = {"ids": torch.randint(0, 20, (13,)), "offsets": torch.tensor([0, 2, 2, 5, 6, 9, 9, 11, 13]), "y": torch.randn(8, 1)}
    assert capture(Bags(), (), batch).batch == 8
    plan = make_plan(Bags(), "local:2", batch, force="dp=2")
    assert plan.candidate.batch == 8
