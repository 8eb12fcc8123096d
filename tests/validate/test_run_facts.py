"""Facts of published runs beside their degrees: in which dtype gradients are summed and operands are gathered, packed samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.oracles.published_rows import row, session

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Node, Ref, Value
from autopar.operations.attention import attention_flops
from autopar.validate.configuration import SQUAD_TOKENS, packed_samples, workload_of
from autopar.validate.constants import Constants
from autopar.validate.price import Session
from autopar.validate.rows import Row


def seconds(each: Row, by: Session | None = None) -> float:
    (found,) = (by or session()).price([each])
    assert found.evaluation is not None, found.skipped
    return found.evaluation.step_seconds


@pytest.mark.parametrize(("name", "reduce"), [("fms-019", "bfloat16"), ("lf-001", "bfloat16"), ("tt-001", ""), ("ie-001", "")])
def test_gradients_are_summed_in_the_dtype_of_the_software(name: str, reduce: str) -> None:
    assert workload_of(row(name)).precision.reduce == reduce


def test_a_sum_in_bfloat16_is_half_of_what_crosses_nodes() -> None:
    """Llama-2-13B over 12 nodes with 100 Gbit/s a device: the sum between copies of the state is what the step waits for. As
    another software that sums in float32, with the same constants, it was priced 51 % too slow."""
    each = row("fms-020")
    constants = {"matmul": 0.6, "memory": 0.3, "attention": 0.4}
    halved, whole = (session().price([one], constants)[0] for one in (each, replace(each, software_stack="fsdp")))
    assert halved.evaluation is not None and whole.evaluation is not None
    assert halved.evaluation.stall_seconds < 0.5 * whole.evaluation.stall_seconds
    assert halved.evaluation.compute_seconds == pytest.approx(whole.evaluation.compute_seconds)


@pytest.mark.parametrize(("tokens", "packed"), [(64, 16), (64, 64), (64, 200)])
def test_samples_of_a_packed_sequence_see_themselves(tokens: int, packed: int) -> None:
    """As so many sequences of one sample."""

    def flops(batch: int, length: int, **kwargs: int) -> float:
        shape = (batch, 4, length, 32)
        operands = (Ref("q"), Ref("k"), Ref("v"), None, 0.0, True)
        node = Node("aten.scaled_dot_product_attention", operands, tuple(kwargs.items()), (Value("y", shape, "bfloat16"),))
        return attention_flops(node, [shape] * 3, [shape])

    each = min(tokens, packed)
    assert flops(2, tokens, packed=packed) == flops(2 * tokens // each, each)


def test_packed_fine_tuning_spends_little_on_attention() -> None:
    """Llama-3-8B at 4096 tokens: the causal scores of whole sequences were a tenth of the step."""
    each = row("dg-045")
    assert packed_samples(each) == SQUAD_TOKENS and not packed_samples(row("dg-001"))
    whole = replace(each, notes=each.notes.replace("packed", "whole"))
    assert 0.88 < seconds(each) / seconds(whole) < 0.95


def test_operands_in_float8_are_gathered_as_such() -> None:
    """Over the tensor axis; of a run in bfloat16 nothing changes."""

    def without(cluster: Cluster, each: Row, constants: Constants | None) -> Cluster:
        found = session().stack(cluster, each, constants)
        return replace(found, state_layout=replace(found.state_layout, float8_gathers=False))

    plain = Session(without)
    narrow, wide = (by.price([row("tt-037")])[0].evaluation for by in (session(), plain))
    assert narrow is not None and wide is not None
    saved = 1 - narrow.exposed_seconds / wide.exposed_seconds
    assert 0.1 < saved < 0.5, "of the collectives of the axis some are all-gathers of operands; gradients stay in bfloat16"
    assert seconds(row("tt-019")) == seconds(row("tt-019"), plain)
