"""Packed sequences of transformers' models: attention within documents by heads, by queries and by examples, against one process
whose model makes the mask of all scores; and packed, padded and one by one the documents have one loss."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, check_programs, plan, prepare_model, program, sharding_wins
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_compiled
from support.models.model_families import GROUPED, families, hugging_face
from support.models.small_models import VOCABULARY, make, make_case, token_batch
from support.plans.sequence_sharding import sequence_plan
from torch import Tensor

import autopar
from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.planning import make_plan
from autopar.program.build import program_text, prove_program
from autopar.verification.single import LiftCasts, lift_casts

LENGTHS = ((5, 7, 12), (24,), (3, 1, 20), (11, 13))
"""Lengths of the documents of each row."""
SHALLOW_LLAMA = hugging_face("LlamaForCausalLM", token_batch, **GROUPED | {"num_hidden_layers": 1})
"""For ranks that plan by themselves: an export of masks takes seconds for each layer."""


def packed_batch(rows: tuple[tuple[int, ...], ...] = LENGTHS) -> dict[str, Tensor]:
    """A batch as `DataCollatorWithFlattening` makes it, of several rows: position ids that restart, no loss at first tokens."""
    torch.manual_seed(1)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    ids = torch.randint(0, VOCABULARY, positions.shape)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@cache
def packed(name: str) -> Prepared:
    model, _ = make_case(families()[name], torch.float64, 4)
    batch = packed_batch()
    graph = lift_casts(capture(model, (), batch, compute_dtype="float64"))
    assert {node.op for block in graph.blocks for node in block.nodes if "attention" in node.op} == {"ap.attention_documents"}
    shapes = [value.shape for block in graph.blocks for value in block.values().values()]
    assert not any(len(shape) > 3 and shape[-2:] == (24, 24) for shape in shapes)
    return prepare_model(name, model, batch, graph, lift=True)


FURTHER = ("qwen3", "mistral", "gemma3", "mixtral", "deepseek_v3")
"""With normed heads, a sliding window, one in every other layer, experts, and latent attention whose values are narrower."""


@pytest.mark.parametrize("name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER)])
def test_degrees_equal_one_process(name: str, ranks: RankPool) -> None:
    prepared = packed(name)
    forces: tuple[dict[str, int], ...] = ({"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 2})
    check_programs(ranks, prepared, [program(prepared, plan(prepared, force)) for force in forces])


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("llama", 4), pytest.param("mistral", 4, marks=pytest.mark.slow)])
def test_a_sharded_sequence_equals_one_process(name: str, size: int, ranks: RankPool) -> None:
    """A shard of the queries begins and ends within documents."""
    graph = packed(name).graph
    kinds = ("exchange", "queries", "documents_ring")[size != 2 :]
    texts = [program_text(graph, sequence_plan(graph, size, kind, sharding_wins(size))) for kind in kinds]
    functions = ["attention_documents_ring" if kind == "documents_ring" else "attention_documents" for kind in kinds]
    assert all(f"C.{function}(" in text for function, text in zip(functions, texts, strict=True))
    check_programs(ranks, packed(name), texts, world=size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "deepseek_v3"])
def test_eight_ranks_equal_one_process(name: str, ranks: RankPool) -> None:
    """Examples, heads and experts, and sequences, on meshes that mix them."""
    prepared = packed(name)
    forces: tuple[dict[str, int], ...] = ({"dp": 2, "tp": 4, "zero": 3}, {"dp": 4, "tp": 2, "zero": 2})
    plans = [plan(prepared, force, Cluster.parse("local:8")).candidate for force in forces]
    plans += [sequence_plan(prepared.graph, 4, kind, sharding_wins(8), 2) for kind in ("queries", "documents_ring")]
    check_programs(ranks, prepared, [program_text(prepared.graph, each) for each in plans], world=8)


def test_a_sharded_sequence_is_proven() -> None:
    """Queries whose keys are gathered, and the ring."""
    prepared, cluster = packed("llama"), Cluster.parse("local:4")
    model, _ = make_case(families()["llama"], torch.float64, 4)
    found = make_plan(model, cluster, packed_batch(), force="dp=2,tp=2", precision="float64", graph=prepared.graph)
    for kind in ("queries", "documents_ring"):
        certificate = prove_program(replace(found, candidate=sequence_plan(prepared.graph, 2, kind, cluster, 2)))
        assert certificate.holds, certificate.line()


def test_compiled_layers_equal_one_process(ranks: RankPool) -> None:
    """One graph of each block: a layer that recomputes has to be."""
    prepared = packed("llama")
    plain = plan(prepared, {"dp": 2, "tp": 1}, Cluster.parse("local:2")).candidate
    whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    cases = [(program_text(prepared.graph, each), prepared.state, prepared.batch) for each in (plain, whole)]
    for outcomes, said in ranks.run(train_compiled, cases, "aot_eager_decomp_partition", world=2, timeout=300):
        assert not said
        for outcome in outcomes:
            wrong = differences(outcome, prepared.expected, 1e-9)
            assert not wrong, wrong[:5]


def test_packed_padded_and_one_by_one_have_one_loss() -> None:
    """The losses of one process, with transformers' own masks."""
    (model, _), batch = make("llama", torch.float64, 4), packed_batch()
    documents = [piece for ids, row in zip(batch["input_ids"], LENGTHS, strict=True) for piece in ids.split(list(row))]
    assert packed("llama").expected.loss == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in documents], batch_first=True)
    labels = padded.masked_fill(mask == 0, -100)
    with LiftCasts():
        alone = [model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1) for ids in documents if len(ids) > 1]
        one_by_one = sum(alone) / sum(len(ids) - 1 for ids in documents)
        losses = one_by_one, model(input_ids=padded, attention_mask=mask, labels=labels).loss.item()
        assert losses == (pytest.approx(model(**batch).loss.item(), rel=1e-12),) * 2
        assert model(**ended(batch)).loss.item() == pytest.approx(losses[0], rel=1e-12)
        masked = model(**ended(batch), attention_mask=(torch.arange(32) < 24).long().expand(4, -1)).loss.item()
        assert abs(masked - losses[0]) > 1e-4, "beside a mask transformers lets documents see each other"


def ended(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with rows of 32 tokens, whose padding is one more document."""
    more = {"input_ids": torch.zeros(4, 8), "position_ids": torch.arange(8).expand(4, -1), "labels": torch.full((4, 8), -100)}
    return {name: torch.cat([tensor, more[name].long()], 1) for name, tensor in batch.items()}


def padded_rows(force: str) -> tuple[float, float]:
    """On a rank: the loss of packed rows, and of the same rows with padding."""
    model, _ = make_case(SHALLOW_LLAMA, torch.float64, 4)
    parallel = autopar.parallelize(model, "local:2", packed_batch(), force=force, cache=False)
    return parallel(**packed_batch()).loss.item(), parallel(**ended(packed_batch())).loss.item()


@pytest.mark.parametrize("force", ["tp=2", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_padding_is_one_more_document(force: str, ranks: RankPool) -> None:
    for alone, with_padding in ranks.run(padded_rows, force, world=2, timeout=120):
        assert with_padding == pytest.approx(alone, rel=1e-6)  # llama computes its loss in float32


def bad_batches(force: str) -> list[str]:
    """On a rank: what is said of batches that do not fit together, and that training goes on after each."""
    model, _ = make_case(SHALLOW_LLAMA, torch.float64, 4)
    batch = packed_batch()
    parallel = autopar.parallelize(model, "local:2", batch, force=force, cache=False)
    right = parallel(**batch).loss.item()
    own = 24 - 4 * dist.get_rank()
    bad = (
        batch | {"position_ids": batch["position_ids"][:, :-1]},  # lengths that do not add up to the tokens
        {name: tensor[:, :own] for name, tensor in batch.items()},  # other lengths on other ranks
        {name: tensor[:, :0] for name, tensor in batch.items()},  # no tokens
    )
    said = []
    for each in bad:
        with pytest.raises(AutoparError, match=r"^[^\n]+$") as caught:
            parallel(**each)
        said.append(str(caught.value))
        assert parallel(**batch).loss.item() == right
    long = {name: torch.cat([tensor, tensor], 1) for name, tensor in batch.items()}  # longer than the rows of the example
    assert parallel(**long).loss.item() == pytest.approx(right, rel=1e-6)  # llama computes its loss in float32
    return said


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2", "tp=2"])
def test_batches_that_do_not_fit_together_are_one_line(force: str, ranks: RankPool) -> None:
    for said in ranks.run(bad_batches, force, world=2, timeout=120):
        assert "23" in said[0] and "call it alike on every rank" in said[1] and "0 elements" in said[2]
