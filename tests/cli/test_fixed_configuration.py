"""`plan` with a row's fixed configuration predicts what `validate` predicts for the row."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.decoders.modules import Decoder
from autopar.validate.architectures import architecture_of
from autopar.validate.configuration import configuration_of, workload_of
from autopar.validate.price import Session
from autopar.validate.rows import Row, bundled_table, read_table


def rows() -> list[Row]:
    """Small models of different recipes, each configuration once."""
    found: dict[object, Row] = {}
    for row in read_table(bundled_table()):
        if row.precision != "bf16" or (row.cp or 1) > 1 or (row.ep or 1) > 1 or row.act_ckpt == "selective":
            continue
        try:
            wanted = configuration_of(row).fixed(workload_of(row))
            architecture = architecture_of(row)
        except autopar.AutoparError:
            continue
        if architecture.experts or (row.layers or 99) > 32:
            continue
        found.setdefault((wanted.tp > 1, wanted.pp > 1, wanted.zero, wanted.recompute), row)
    return list(found.values())[:3]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_plan_and_validate_agree(row: Row) -> None:
    (priced,) = Session().price([row])
    assert priced.evaluation is not None and priced.cluster is not None and priced.candidate is not None, priced.skipped
    wanted, architecture = configuration_of(row).fixed(workload_of(row)), architecture_of(row)
    with torch.device("meta"):
        model = Decoder(architecture, row.layers or 0)
        ids = torch.empty(4, architecture.seq, dtype=torch.int64)
    force = (
        f"tp={wanted.tp},pp={wanted.pp},virtual={wanted.virtual},zero={wanted.zero},zero_group={wanted.zero_group},"
        f"micro_batches={wanted.micro_batches},recompute={wanted.recompute},sequence_parallel={int(wanted.sequence_parallel)}"
    )
    plan = autopar.plan(
        model, priced.cluster, (ids, ids.clone()), precision=wanted.precision, force=force, batch=priced.candidate.batch,
        compile=priced.cluster.device.fused,
    )
    predicted = plan.document.predicted
    assert predicted.step_seconds == pytest.approx(priced.evaluation.step_seconds, rel=1e-9)
    assert predicted.peak_memory_bytes == pytest.approx(priced.evaluation.peak_memory_bytes, rel=1e-9)
