"""Kernels: tiles and waves by hand, shares that never exceed one, and times that grow with the work but not faster."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.compute.kernels import (
    ATTENTION_BACKWARD,
    attention_efficiency,
    attention_seconds,
    product_efficiency,
    product_seconds,
    streaming_seconds,
)
from autopar.cost_models.hardware.cluster import Cluster

H100 = Cluster.parse("dgx-h100:1").device
A100 = Cluster.parse("dgx-a100:1").device
CPU = Cluster.parse("local:1").device
sizes = st.integers(1, 20000)
counts = st.integers(1, 64)


def product(count: int, m: int, n: int, k: int) -> float:
    return product_seconds(H100, "bfloat16", count, m, n, k)


@given(counts, sizes, sizes, sizes, st.integers(1, 256))
def test_no_product_exceeds_the_rate_of_large_ones(count: int, m: int, n: int, k: int, multiprocessors: int) -> None:
    assert 0 < product_efficiency(count, m, n, k, multiprocessors) <= 1


@given(counts, sizes, sizes, sizes, st.sampled_from([0, 1, 2, 3]), st.integers(2, 9))
def test_times_grow_with_every_size_but_not_faster(count: int, m: int, n: int, k: int, which: int, times: int) -> None:
    """A product that is `times` as large in one dimension takes longer, and never longer than so many of them."""
    shape = [count, m, n, k]
    shape[which] *= times
    one, more = product(count, m, n, k), product(*shape)
    assert one <= more * (1 + 1e-12) and more <= times * one * (1 + 1e-12)


@given(counts, sizes, sizes, sizes, st.sampled_from([0, 1, 2, 3]))
def test_one_more_row_never_takes_less_time(count: int, m: int, n: int, k: int, which: int) -> None:
    shape = [count, m, n, k]
    shape[which] += 1
    assert product(count, m, n, k) <= product(*shape) * (1 + 1e-12)


def test_waves_and_tiles_are_steps() -> None:
    """132 multiprocessors: 132 tiles of 128 x 256 are one wave, which takes as long however little of its last tile is full;
    one row more begins another (NVIDIA, Matrix Multiplication Background User's Guide, sections 3.1 and 3.2)."""
    assert H100.multiprocessors == 132
    full = product(1, 128 * 132, 256, 4096)
    assert product(1, 128 * 132 - 63, 256, 4096) == pytest.approx(full)
    assert product(1, 128 * 132 + 1, 256, 4096) > 1.3 * full
    assert product_efficiency(1, 128 * 132, 256, 10**9, 132) == pytest.approx(1.0, rel=1e-6)
    assert product_efficiency(2, 128 * 66, 256, 4096, 132) == product_efficiency(1, 128 * 132, 256, 4096, 132)


@given(st.integers(1, 400))
def test_only_the_large_tile_counts_where_all_is_large(waves: int) -> None:
    """Whole columns of 128 x 256 tiles in so many waves: exactly full."""
    assert product_efficiency(waves, 128 * 132, 256, 10**9, 132) == pytest.approx(1.0, rel=1e-6)


def test_a_short_inner_dimension_pays_for_the_prologue() -> None:
    long, short = (product_efficiency(1, 128 * 132, 256, k, 132) for k in (8192, 128))
    assert short < 0.75 * long < 0.75


def test_where_tiles_do_not_matter() -> None:
    assert product_efficiency(1, 3, 5, 7, 0) == 1.0
    rate = CPU.peak_flops_per_second("float32") * CPU.matmul_fraction
    assert product_seconds(CPU, "float32", 2, 3, 5, 7) == pytest.approx(2 * 2 * 3 * 5 * 7 / rate)


@given(st.integers(1, 2**17), st.sampled_from([32, 64, 80, 96, 128]), st.booleans())
def test_attention_reaches_no_more_than_long_sequences_of_heads_of_128(queries: int, head: int, backward: bool) -> None:
    share = attention_efficiency(queries, head, backward)
    assert 0 < share <= 1
    assert share <= attention_efficiency(2 * queries, head, backward)
    assert attention_efficiency(queries, head, True) == pytest.approx(
        ATTENTION_BACKWARD * attention_efficiency(queries, head, False)
    )


PUBLISHED = (
    # github.com/pytorch/benchmark, pull request 2391: H100, forward, heads of 128; queries, TFLOP/s of Triton's FlashAttention-2,
    # TFLOP/s of FlashAttention-3
    (512, 328.882, 430.32),
    (1024, 389.723, 517.099),
    (2048, 433.721, 565.544),
    (4096, 458.359, 590.233),
    (8192, 470.732, 614.234),
    (16384, 476.753, 620.73),
)


@pytest.mark.parametrize(("queries", "two", "three"), PUBLISHED)
def test_attention_of_short_sequences_against_measured_kernels(queries: int, two: float, three: float) -> None:
    longest, most_two, most_three = PUBLISHED[-1]
    ours = attention_efficiency(queries, 128, False) / attention_efficiency(longest, 128, False)
    assert ours == pytest.approx(two / most_two, rel=0.1) and ours == pytest.approx(three / most_three, rel=0.1)


@pytest.mark.parametrize(("queries", "measured"), [(512, 252.49), (1024, 294.78), (2048, 308.09), (4096, 311.97)])
def test_attention_of_short_sequences_without_a_mask(queries: int, measured: float) -> None:
    """github.com/Dao-AILab/flash-attention, pull request 2688: TFLOP/s of the forward on H100, not causal, heads of 64."""
    ours = attention_efficiency(queries, 64, False, True) / attention_efficiency(4096, 64, False, True)
    assert ours == pytest.approx(measured / 311.97, rel=0.1)


def test_seconds_of_attention_and_streams() -> None:
    rate = A100.peak_flops_per_second("bfloat16") * A100.attention_fraction
    share = attention_efficiency(2048, 128, False)
    assert attention_seconds(A100, "bfloat16", 1e12, 2048, 128, False) == pytest.approx(1e12 / rate / share)
    assert attention_seconds(CPU, "float32", 1e9, 8, 8, True) == pytest.approx(
        1e9 / (CPU.peak_flops_per_second("float32") * CPU.attention_fraction)
    )
    slow = replace(H100, bandwidth_fraction=0.5)
    assert streaming_seconds(slow, 1e9) == pytest.approx(2e9 / H100.bandwidth_bytes_per_second)


@given(sizes, sizes)
def test_tiles_by_brute_force(m: int, n: int) -> None:
    """The largest tile alone, dealt out one by one: no kernel that the model takes is slower than it."""
    tiles, busy = ceil(m / 128) * ceil(n / 256), [0] * 132
    for tile in range(tiles) if tiles < 3000 else ():
        busy[tile % 132] += 1
    waves = max(busy) or ceil(tiles / 132)
    assert product_efficiency(1, m, n, 64, 132) >= m * n / (waves * 132 * 128 * 256) / 2 * (1 - 1e-12)
