"""T5 of packed documents: its model takes one mask for each attention, which stays an operand beside the relative positions."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.harness.end_to_end import Prepared, check_programs, plan, prepare_model, program
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

from autopar.capture import capture
from autopar.verification.single import LiftCasts, lift_casts

LENGTHS = (((5, 3), (7, 6), (4, 3)), ((16, 12),), ((10, 1), (6, 11)), ((8, 4), (8, 8)))
"""Tokens of source and target of the documents of each row."""


class PackedT5(nn.Module):
    """T5 on rows of documents: ``forward`` of transformers has one mask for the encoder and for the keys from it."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_document: Tensor, target: Tensor, target_document: Tensor, labels: Tensor) -> Tensor:
        keys, at = source_document[:, None, None, :], torch.arange(target.shape[1], device=target.device)
        own = (target_document[:, None, :, None] == target_document[:, None, None, :]) & (at[:, None] >= at)
        encoded = self.model.encoder(input_ids=source, attention_mask=source_document[:, None, :, None] == keys)
        decoded = self.model.decoder(
            input_ids=target, attention_mask=own, encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=target_document[:, None, :, None] == keys,
        ).last_hidden_state  # fmt: skip
        scale = self.model.model_dim**-0.5 if self.model.config.tie_word_embeddings else 1.0
        return F.cross_entropy(self.model.lm_head(decoded * scale).flatten(0, -2), labels.flatten())


def model_of() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).double()


def documents() -> list[list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(1)
    return [[(torch.randint(2, 64, (a,)), torch.randint(2, 64, (b,))) for a, b in row] for row in LENGTHS]


def packed_batch() -> dict[str, Tensor]:
    rows = documents()

    def numbers(side: int) -> Tensor:
        return torch.stack([torch.cat([torch.full((len(pair[side]),), n) for n, pair in enumerate(row)]) for row in rows])

    labels = torch.stack([torch.cat([target for _, target in row]) for row in rows])
    starts = torch.stack([torch.cat([F.pad(target[:-1], (1, 0)) for _, target in row]) for row in rows])
    source = torch.stack([torch.cat([source for source, _ in row]) for row in rows])
    return {
        "source": source, "source_document": numbers(0), "target": starts, "target_document": numbers(1), "labels": labels
    }  # fmt: skip


@cache
def prepared() -> Prepared:
    model, batch = PackedT5(model_of()), packed_batch()
    graph = lift_casts(capture(model, (), batch, compute_dtype="float64"))
    assert any("explicit mask" in note for note in graph.notes), "relative positions are a mask of numbers"
    return prepare_model("T5", model, batch, graph, lift=True)


def test_packed_padded_and_one_by_one_have_one_loss() -> None:
    model, pairs = model_of(), [pair for row in documents() for pair in row]
    tokens = sum(len(target) for _, target in pairs)
    with LiftCasts(), torch.no_grad():
        alone = [model(input_ids=source[None], labels=target[None]).loss.item() * len(target) for source, target in pairs]
        mask = pad_sequence([torch.ones_like(source) for source, _ in pairs], batch_first=True)
        padded = model(
            input_ids=pad_sequence([source for source, _ in pairs], batch_first=True), attention_mask=mask,
            labels=pad_sequence([target for _, target in pairs], batch_first=True, padding_value=-100),
        ).loss.item()  # fmt: skip
        assert PackedT5(model)(**packed_batch()).item() == pytest.approx(padded, rel=1e-12)
    assert padded == pytest.approx(sum(alone) / tokens, rel=1e-12)
    assert prepared().expected.loss == pytest.approx(padded, rel=1e-12)


def test_degrees_equal_one_process(ranks: RankPool) -> None:
    case = prepared()
    forces: tuple[dict[str, int], ...] = ({"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 2})
    texts = [program(case, plan(case, force)) for force in forces]
    check_programs(ranks, case, texts)
