"""The free choice cuts large images along space where that pays, and leaves small ones alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.models.operations.images import UNet

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate, Precision
from autopar.operations.images import space
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def unet(batch: int, pixels: int, width: int = 32, depth: int = 2) -> Graph:
    with torch.device("meta"):
        model = UNet(width, depth)
        inputs = {"x": torch.empty(batch, 3, pixels, pixels), "y": torch.empty(batch, pixels, pixels, dtype=torch.int64)}
        return capture(model, (), inputs, compute_dtype="bfloat16")


def functions(candidate: Candidate) -> Counter[str]:
    return Counter(each.function for plan in candidate.blocks for each in plan.nodes if each.function)


@pytest.mark.parametrize(("batch", "depth"), [(1, 1), *(pytest.param(batch, 2, marks=pytest.mark.slow) for batch in (1, 2))])
def test_fewer_large_images_than_devices(batch: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all convolutions are cut, and the step is much shorter than what channels alone allow."""
    precision, force = Precision("bfloat16", "float32"), {"pp": 1, "tp": 8 // batch}
    cluster, options = (
        Cluster.parse("dgx-h100:1"),
        SearchOptions(batch=batch, precision=precision, force=force if depth == 1 else {}),
    )
    graph = unet(batch, 1024, depth=depth)
    found = search(graph, cluster, options)
    kinds = functions(found.candidate)
    assert kinds["ap.convolution_halo"] >= 4 * depth, kinds
    monkeypatch.setattr(space, "SMALLEST", 2**62)
    without = search(graph, cluster, options)
    assert not functions(without.candidate)
    assert found.evaluation.step_seconds < 0.8 * without.evaluation.step_seconds
    assert found.evaluation.peak_memory_bytes < without.evaluation.peak_memory_bytes


def strategies(graph: Graph) -> int:
    return sum(
        len(each)
        for block in graph.blocks
        for each in block_strategies(block, 8, batch_axis=False, batch_is_symbolic=True, registry=default_registry()).values()
    )


def test_a_cut_adds_one_strategy_to_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 64 x 64 pixels none, so that classifiers are planned as before."""
    large, small = unet(8, 512, depth=1), unet(8, 60, depth=1)
    counts = strategies(large), strategies(small)
    monkeypatch.setattr(space, "SMALLEST", 2**62)
    before = strategies(large), strategies(small)
    convolutions = sum(node.op.split(".")[1].startswith(("conv", "max_pool")) for block in large.blocks for node in block.nodes)
    assert counts[0] - before[0] == convolutions
    assert counts[1] == before[1]
