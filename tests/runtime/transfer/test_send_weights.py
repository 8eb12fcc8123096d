"""Weights from a job that trains to another that generates, on the processes of both: bit by bit, call after call, and refused
in one line on all ranks where anything does not fit."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.harness.end_to_end import Prepared, program
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.plans.bundled_cases import prepare_bundled
from support.plans.forced_plans import forced_plan, world_of
from torch import Tensor

from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.errors import TransferProblem
from autopar.weight_transfer import plan_weight_transfer

State = dict[str, Tensor]
KV_HEADS = 2


@pytest.fixture(scope="module")
def generators(ranks: RankPool) -> Iterator[RankPool]:
    """The processes of the other job."""
    pool = RankPool(ranks.template)
    yield pool
    pool.close()


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def both(send: Any, receive: Any) -> tuple[list[Any], list[Any]]:
    """What the ranks of both jobs say, which run at once."""
    with ThreadPoolExecutor(2) as threads:
        sent, received = threads.submit(send), threads.submit(receive)
        return sent.result(), received.result()


def text_of(prepared: Prepared, force: str) -> str:
    return program(prepared, forced_plan(prepared, force))


def trainer(text: str, state: State, batch: Any, address: str, calls: int, options: dict[str, Any]) -> tuple[list[State], Any]:
    """On a rank: the state at every call, with a step of training before each, and the plan of the transfer."""
    parallel = parallel_model(text, state)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    sent: list[State] = []
    for _ in range(calls):
        train(parallel, [batch], optimizer)
        plan = parallel.send_weights(address, join_seconds=60, **options)
        sent.append(parallel.full_state() | {"loss": loss_of(parallel, batch)})
    for name, value in {"dtype": torch.float16, "memory_bytes": 2**20}.items():
        with pytest.raises(TransferProblem, match=f"connected at {address} with {name}="):
            parallel.send_weights(address, **{**options, name: value})
    return sent, plan


def loss_of(parallel: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return parallel(**batch).detach()  # type: ignore[no-any-return]


def generator(text: str, state: State, batch: Any, address: str, calls: int) -> list[State]:
    """On a rank: the state after every call, of weights that begin with zeros, and the loss with what was gathered of them."""
    parallel = parallel_model(text, {name: torch.zeros_like(each) for name, each in state.items()}, check_every=0)
    loss_of(parallel, batch)
    got = []
    for _ in range(calls):
        parallel.receive_weights(address, join_seconds=60)
        got.append(parallel.full_state() | {"loss": loss_of(parallel, batch)})
    return got


def equal(one: State, other: State) -> bool:
    """Bit by bit, but for the loss, which the plans sum in another order."""
    same = [
        torch.equal(one[name], other[name]) if name != "loss" else torch.allclose(one[name], other[name], 1e-12, 1e-12)
        for name in one
    ]
    return one.keys() == other.keys() and all(same)


PAIRS = [
    ("dp=2,zero=3", "tp=2,dp=1"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("tp=2,dp=1", "tp=2,dp=1"), ("tp=2,dp=1", "dp=2,zero=3"), ("dp=2,zero=0", "tp=2,dp=1"), ("dp=2,tp=2,zero=3", "tp=2,dp=1"),
        ("pp=2,dp=1", "tp=2,dp=1"), ("dp=2,zero=2", "tp=4,dp=1"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_to_a_generator(ranks: RankPool, generators: RankPool, address: str, before: str, after: str) -> None:
    """Two transfers over one connection, with a step between them; each element travels once to each rank that has it."""
    prepared = prepare_bundled("llama-tiny")
    first, second = text_of(prepared, before), text_of(prepared, after)
    sent, got = both(
        lambda: ranks.run(trainer, first, prepared.state, prepared.batch, address, 2, {"memory_bytes": 2**14},
                          world=world_of(before), timeout=240),
        lambda: generators.run(generator, second, prepared.state, prepared.batch, address, 2, world=world_of(after), timeout=240),
    )  # fmt: skip
    states, plan = sent[0]
    assert not equal(*states)
    for received in got:
        assert all(equal(a, b) for a, b in zip(received, states, strict=True))
    assert plan.nbytes == plan.lower_bound_bytes
    plans = [Plan(None, each.graph, each.candidate) for each in (forced_plan(prepared, before), forced_plan(prepared, after))]  # type: ignore[arg-type]
    assert plan == plan_weight_transfer(*plans, memory_bytes=2**14), "the plan of plan files is the one that was followed"
    assert max(sum(each.nbytes for each in sends if each.source == 0) for sends in plan.rounds) <= 2**14


def worker(parameters: State, address: str, tp: int, rank: int) -> State:
    """A process of another engine, which has no process group: it fills its own tensors, twice."""
    from autopar.runtime.transfer.vllm_layout import VllmLayout
    from autopar.runtime.transfer.weight_transfer import receive_weights

    transfer = receive_weights(address, parameters, VllmLayout(tp, KV_HEADS), rank=rank, join_seconds=60)
    for each in parameters.values():
        each.zero_()
    transfer.run(parameters)
    return parameters


def test_to_vllm(ranks: RankPool, generators: RankPool, address: str) -> None:
    """In bfloat16, from ranks that train in another dtype, to parameters as vLLM fuses them."""
    prepared = prepare_bundled("llama-tiny")
    text = text_of(prepared, "dp=2,zero=3")
    full = prepared.state
    names = [name for name in full if "inv_freq" not in name]  # a buffer, which vLLM has of its own
    shapes = [_fused(full, names, rank) for rank in range(2)]
    empty = [{name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in own.items()} for own in shapes]
    with ThreadPoolExecutor(3) as threads:
        sent = threads.submit(
            ranks.run, trainer, text, full, prepared.batch, address, 2, {"dtype": torch.bfloat16}, world=2, timeout=240
        )
        got = [threads.submit(generators.run_alone, worker, empty[rank], address, 2, rank, timeout=240) for rank in range(2)]
        states, _ = sent.result()[0]
        for rank, future in enumerate(got):
            expected = {name: each.bfloat16() for name, each in _fused(states[-1], names, rank).items()}
            assert equal(future.result(), expected)


def _fused(full: State, names: list[str], rank: int) -> State:
    """vLLM's parameters of one of two ranks, by hand."""
    half = lambda x, dim: x.chunk(2, dim)[rank]  # noqa: E731
    out: State = {}
    for name in names:
        x = full[name]
        if "q_proj" in name:
            parts = [half(full[name.replace("q_proj", f"{each}_proj")], 0) for each in "qkv"]
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            parts = [half(full[name.replace("gate", each)], 0) for each in ("gate", "up")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif "o_proj" in name or "down_proj" in name:
            out[name] = half(x, 1).contiguous()
        elif "embed_tokens" in name or "lm_head" in name:
            padded = torch.cat([x, x.new_zeros(-len(x) % 64, x.shape[1])])
            out[name] = half(padded, 0).clone()
        elif "k_proj" not in name and "v_proj" not in name and "up_proj" not in name:
            out[name] = x
    return out


# -- what does not fit, and who is missing


def refusal(text: str, state: State, address: str, sends: bool, options: dict[str, Any]) -> str:
    """On a rank: the message."""
    from autopar.errors import AutoparError

    parallel = parallel_model(text, state)
    try:
        (parallel.send_weights if sends else parallel.receive_weights)(address, **{"join_seconds": 60, **options})
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "options", "words"), [
    ("gpt2-tiny", {}, "build the same model in both jobs"),
    ("llama-tiny", {"dtype": torch.bfloat16}, "pass send_weights(dtype=torch.float64)"),
    ("llama-tiny", {"memory_bytes": 10}, "memory_bytes=10"),
])  # fmt: skip
def test_refusals(ranks: RankPool, generators: RankPool, address: str, name: str, options: dict[str, Any], words: str) -> None:
    """On all ranks of both jobs, in one line."""
    first, second = prepare_bundled("llama-tiny"), prepare_bundled(name)
    sent, got = both(
        lambda: ranks.run(refusal, text_of(first, "dp=2,zero=3"), first.state, address, True, options, world=2, timeout=120),
        lambda: generators.run(refusal, text_of(second, "tp=2,dp=1"), second.state, address, False, {}, world=2, timeout=120),
    )
    for text in (*sent, *got):
        assert words in text and "\n" not in text, text


def test_nobody_there(ranks: RankPool, address: str) -> None:
    """Nobody receives, nobody sends, and the port is taken."""
    prepared = prepare_bundled("llama-tiny")
    text, state = text_of(prepared, "dp=2,zero=3"), prepared.state
    for sends, words in ((True, "rank 0 of the receivers never came"), (False, "nobody sends weights at")):
        for each in ranks.run(refusal, text, state, address, sends, {"join_seconds": 0.5}, world=2):
            assert words in each and "within 0.5 s" in each and "\n" not in each, each
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        for each in ranks.run(refusal, text, state, address, True, {"join_seconds": 20}, world=2):
            assert "pass a free port" in each and "\n" not in each, each
    for wrong in ("localhost", "localhost:port", ":80", "localhost:0", "localhost:99999", 29777):
        assert "is no address" in ranks.run(refusal, text, state, wrong, True, {}, world=2)[1]


def absent_worker(address: str, rank: int, seconds: float) -> str:
    """The message of a worker of vLLM whose neighbour never comes."""
    from autopar.errors import AutoparError
    from autopar.runtime.transfer.vllm_layout import VllmLayout
    from autopar.runtime.transfer.weight_transfer import receive_weights

    try:
        receive_weights(address, {}, VllmLayout(2, KV_HEADS), rank=rank, join_seconds=seconds)
    except AutoparError as error:
        return str(error)
    return ""


def test_one_receiver_is_missing(ranks: RankPool, generators: RankPool, address: str) -> None:
    prepared = prepare_bundled("llama-tiny")
    text, options = text_of(prepared, "dp=2,zero=3"), {"join_seconds": 3.0}
    sent, got = both(
        lambda: ranks.run(refusal, text, prepared.state, address, True, options, world=2),
        lambda: [generators.run_alone(absent_worker, address, 0, 6.0)],
    )
    assert all("3 of 4 processes joined" in each and "rank 3 never came" in each for each in sent), sent
    assert got[0] and "\n" not in got[0]


def ending_worker(text: str, state: State, address: str) -> None:
    """On a rank: it dies after the first transfer."""
    parallel = parallel_model(text, state, check_every=0)
    parallel.receive_weights(address, join_seconds=60)
    os._exit(1)


def lost_and_found(text: str, state: State, address: str, later: str) -> str:
    """On a rank: a transfer, one whose receivers are gone, and one to others."""
    from autopar.errors import AutoparError

    parallel = parallel_model(text, state)
    parallel.send_weights(address, join_seconds=60)
    message = ""
    try:
        parallel.send_weights(address, join_seconds=60)
    except AutoparError as error:
        message = str(error)
    parallel.send_weights(later, join_seconds=60)
    return message


@pytest.mark.slow
def test_receivers_die(ranks: RankPool, generators: RankPool, address: str) -> None:
    """One line on all ranks that send; and they can send to a new job."""
    from support.harness.rank_pool import RankError

    prepared = prepare_bundled("llama-tiny")
    first, second = text_of(prepared, "dp=2,zero=3"), text_of(prepared, "tp=2,dp=1")

    def receive() -> list[Any]:
        with pytest.raises(RankError):
            generators.run(ending_worker, second, prepared.state, address, world=2, timeout=120)
        return generators.run(generator, second, prepared.state, prepared.batch, address, 1, world=2, timeout=120)

    said, got = both(lambda: ranks.run(lost_and_found, first, prepared.state, address, address, world=2, timeout=200), receive)
    assert all("was broken off" in each and "\n" not in each for each in said), said
    assert equal(got[0][0], got[1][0])
    assert all(torch.equal(got[0][0][name], each) for name, each in prepared.state.items() if name in got[0][0])
