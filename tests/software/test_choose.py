"""What software should be set to: the ranking is by price, obeys the rules, and its best is found by evaluating few."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, Infeasible
from autopar.software.choose import choose, files_of, rank
from autopar.software.configuration import Configuration
from autopar.software.fit import fit, read_job
from autopar.software.known.registry import known_software
from autopar.software.models import Model, model_of, workload_of
from autopar.software.pricer import Pricer
from autopar.software.record import Given, Job
from autopar.software.spending import measurement, offer_of, spending_of


def no_capture(source: str, seq: int) -> None:
    pytest.fail(f"{source} was captured")


def small(name: str = "llama3-8b", layers: int = 8) -> Model:
    """A published model with fewer layers."""
    found = model_of(name, 4096, no_capture)  # type: ignore[arg-type]
    assert found.decoder is not None
    return replace(found, decoder=replace(found.decoder, layers=layers))


@pytest.mark.parametrize("name", sorted(known_software()))
def test_the_ranking_is_by_price_and_within_the_rules(name: str) -> None:
    software, model, cluster = known_software()[name], small(), Cluster.parse("dgx-h100:1")
    found = choose(software, model, cluster, 16, most=6)
    fitting = [each.evaluation.step_seconds for each in found.ranking.priced if each.fits]
    assert fitting and fitting == sorted(fitting)
    for each in found.ranking.priced:
        assert not software.problems(found.job_of(each), model.decoder)
        assert each.configuration.zero in (0, *software.space.zero)
    best = found.ranking.best
    assert best is not None and software.file in files_of(found, best)


def test_what_is_left_out_is_not_faster() -> None:
    """Every configuration of a small space, by evaluating all of them."""
    software, model, cluster = known_software()["accelerate"], small(layers=4), Cluster.parse("dgx-h100:1")
    job = Job(devices=8, batch=16, seq=4096, decoder=model.decoder)
    pricer = Pricer(workload_of(software, job, model, cluster))
    every = list(software.space.configurations(pricer.work))
    found = rank(pricer, every, most=100)
    assert found.left == 0 and len(found.priced) < len(every)
    least = min(priced.evaluation.step_seconds for each in every if (priced := pricer.price(each)).fits)
    assert found.best is not None and found.best.evaluation.step_seconds <= least * 1.001


def test_the_least_is_below_the_price() -> None:
    """Up to the distribution of layers that do not divide, no configuration takes less than its bound, and half of them at most
    half as much memory again: accumulated gradients and weights that stay gathered are in it."""
    software, model, cluster = known_software()["megatron"], small(layers=32), Cluster.parse("dgx-h100:2")
    job = Job(devices=16, batch=32, seq=4096, decoder=model.decoder)
    pricer = Pricer(workload_of(software, job, model, cluster))
    shares = []
    for each in list(software.space.configurations(pricer.work))[::80]:
        least, priced = pricer.least(each), pricer.price(each)
        shares.append(least.bytes / priced.needed_bytes)
        assert least.seconds <= priced.evaluation.step_seconds * 1.02, each
        assert least.bytes <= priced.needed_bytes * 1.02, each
    assert median(shares) > 0.68, shares


def test_what_is_recommended_leaves_the_memory_margin() -> None:
    """ZeRO-2 with micro-batches of one would reserve 94 GiB of the 80 here, and be fastest."""
    model, cluster = model_of("llama3-8b", 8192, no_capture), Cluster.parse("dgx-h100:1")  # type: ignore[arg-type]
    for margin, share in ((None, 0.91), (0.3, 0.7)):
        best = choose(known_software()["torchtitan"], model, cluster, 64, most=10, margin=margin).ranking.best
        assert best is not None and best.fits
        assert best.evaluation.peak_memory_bytes <= share * cluster.device.memory_bytes


def test_what_cannot_be_is_said_in_one_line() -> None:
    model, cluster = model_of("llama3-405b", 8192, no_capture), Cluster.parse("dgx-h100:1")  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match="does not fit"):
        choose(known_software()["transformers"], model, cluster, 8, most=4)
    with pytest.raises(AutoparError, match="no degrees"):
        choose(known_software()["deepspeed"], small(), cluster, 7, most=4)
    with pytest.raises(AutoparError, match="has no fp8"):
        choose(known_software()["deepspeed"], small(), cluster, 8, "fp8")


def test_better_configurations_are_better(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    sizes = '"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1'
    path.write_text(f'{{{sizes},\n "zero_optimization": {{"stage": 3}}, "bf16": {{"enabled": true}}}}')
    software, entries, job = read_job(str(path), Given(devices=8, seq=4096, recompute="full"))
    found = fit(str(path), software, entries, job, small(), Cluster.parse("dgx-h100:1"))
    assert found.fits and found.better and found.priced is not None
    for each in found.better:
        assert each.priced.fits and each.priced.evaluation.step_seconds < found.priced.evaluation.step_seconds
        assert each.changed and each.diff.startswith("---")


def test_problems_name_their_source(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --tensor-model-parallel-size 3")
    software, entries, job = read_job(str(path), Given(devices=8))
    assert job.decoder is not None
    found = fit(str(path), software, entries, job, Model("x", 2048, job.decoder), Cluster.parse("dgx-h100:1"))
    assert not found.fits and found.priced is None
    assert any("do not divide 8 devices" in reason and "NVIDIA/Megatron-LM@" in str(source) for reason, source in found.problems)


def test_spending_names_what_to_measure() -> None:
    software = [known_software()["megatron"]]
    runs = [spending_of(small(), offer_of(text), software, 1e11, 32, "bf16")[0] for text in ("dgx-h100:1@2.5", "dgx-h100:1@2.6")]
    assert runs[0].cost < runs[1].cost and runs[0].cost_interval[0] < runs[0].cost < runs[0].cost_interval[1]
    assert "the step of megatron on dgx-h100:1" in measurement(runs)
    assert not measurement(runs[:1])
    with pytest.raises(AutoparError, match="has no price"):
        offer_of("dgx-h100:1")


def test_statuses_of_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0: all fit; 3: one does not; 2: one cannot be read, and the others are judged all the same."""
    fits, large, wrong = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    fits.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    large.write_text('{"train_batch_size": 512, "gradient_accumulation_steps": 1, "bf16": {"enabled": true}}')
    wrong.write_text("{")
    rest = ["--model", "qwen3-0.6b", "--seq", "2048", "--cluster", "rtx-3090:1", "--quick", "--json"]
    assert main(["fit", str(fits), *rest]) == 0
    assert main(["fit", str(fits), str(large), *rest]) == 3
    assert main(["fit", str(wrong), str(fits), *rest]) == 2
    assert '"fits": true' in capsys.readouterr().out


def test_words_of_a_configuration() -> None:
    work = workload_of(known_software()["megatron"], Job(devices=8, batch=16), small(), Cluster.parse("dgx-h100:1"))
    text = Configuration(tensor=2, stages=2, virtual=2, zero=1, micro=1, recompute="everything", share=0.5).describe(work)
    assert text == (
        "tp=2 pp=2 x 2 chunks dp=2, ZeRO-1, sequence parallel, 8 micro-batches of 1, full recomputation of 50% of the layers"
    )


def test_a_model_that_is_no_decoder_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert-tiny", "--cluster", "local:4", "--batch", "16", "--for", "transformers", "--json"]) == 0
    assert '"per_device_train_batch_size"' in capsys.readouterr().out.replace("\\", "")


def test_a_decoder_is_judged_without_capture(tmp_path: Path) -> None:
    """What a price does not need is not imported."""
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    names = ["autopar.capture.capture", "transformers"]
    code = (
        "import sys; from autopar.cli import main; "
        f"main(['fit', {str(path)!r}, '--model', 'qwen3-0.6b', '--cluster', 'dgx-h100:1']); "
        f"print([name for name in {names} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
