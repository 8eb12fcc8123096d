"""Plans near the chosen one, and the race between them."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.end_to_end import prepare
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

from autopar import tune
from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.stack_entries import TunedRates
from autopar.cost_models.step.evaluate import evaluate
from autopar.dryrun.run import make_optimizer
from autopar.ir.plan import Precision
from autopar.ir.plan_file.plan_file import Plan, decode_plan, load_plan
from autopar.options import PlanOptions
from autopar.planning import nearest_plans
from autopar.solve.result import other_results
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.tune import RacedPlan, fastest, learn

SCRIPT = "import sys; from autopar.cli import main; raise SystemExit(main(sys.argv[1:]))"


def near_plans(count: int) -> tuple[Plan, ...]:
    loaded = load_model("mlp", 32, None, device="cpu")
    return nearest_plans(loaded.model, Cluster.parse("local:4"), loaded.example_inputs, PlanOptions(batch=32), count)


def test_other_plans_are_the_next_ones_of_the_search() -> None:
    """One of each point, in the order of their predicted steps, which are those of the evaluator; never the chosen one."""
    graph, cluster = prepare("gpt2").graph, Cluster.parse("local:4")
    result = search(graph, cluster, SearchOptions(batch=graph.batch, precision=Precision("float64", "float64")))
    others = other_results(graph, result, 5)
    assert 0 < len(others) <= 5
    steps = [each.evaluation.step_seconds for each in others]
    assert steps == sorted(steps)
    points = {(each.candidate.mesh, each.candidate.micro_batches, str(each.candidate.pipeline)) for each in others}
    assert (result.candidate.mesh, result.candidate.micro_batches, str(result.candidate.pipeline)) not in points
    assert all(each.candidate is not result.candidate for each in others)
    for each in others:
        assert evaluate(each.graph, each.candidate, cluster).step_seconds == pytest.approx(each.evaluation.step_seconds)
        assert each.gap == pytest.approx(
            1 - min(each.lower_bound_seconds, each.evaluation.step_seconds) / each.evaluation.step_seconds
        )


def test_the_first_plan_stays_unless_another_is_faster_by_more_than_noise() -> None:
    plan = near_plans(1)[0]
    first = RacedPlan(plan, (1.0, 1.0, 5.0))
    slow, close, fast = (RacedPlan(plan, (seconds,) * 3) for seconds in (1.2, 0.995, 0.98))
    broken = RacedPlan(plan, (0.1,), "out of memory")
    assert broken.median_seconds == math.inf
    assert fastest([first, slow, close, broken]) is first
    assert fastest([first, slow, close, fast]) is fast


def test_load_on_the_machine_is_not_learnt() -> None:
    """A step that nothing else disturbed says what the cluster can do."""
    plan = near_plans(1)[0]
    calm, busy = RacedPlan(plan, (1.0,) * 6), RacedPlan(plan, (3.0, 4.0, 1.0, 3.5, 2.0, 5.0))
    assert learn([busy]).rates == learn([calm]).rates


def test_a_race_writes_the_plan_that_was_fastest(ranks: RankPool, tmp_path: Path) -> None:
    """On two ranks, as torchrun starts them: every plan ran all of its steps, and the file is the kept one."""
    script, path = tmp_path / "tune.py", tmp_path / "tuned.json"
    script.write_text(SCRIPT)
    words = [
        "tune",
        "mlp",
        "--cluster",
        "local:2",
        "--batch",
        "32",
        "-o",
        str(path),
        "--candidates",
        "2",
        "--steps",
        "2",
        "--json",
    ]
    ended = launch(ranks, script, 2, *words)
    assert [each.status for each in ended] == [0, 0], ended[0].stderr
    found: dict[str, Any] = json.loads(ended[0].stdout)
    assert ended[1].stdout == ""
    assert [len(each["step_seconds"]) for each in found["plans"]] == [4, 4]
    assert all(seconds > 0 for each in found["plans"] for seconds in each["step_seconds"])
    (kept,) = [each for each in found["plans"] if each["kept"]]
    assert load_plan(path).document.predicted.step_seconds == kept["predicted_step_seconds"]
    learnt, cluster = found["learnt"], Cluster.parse(found["cluster"])
    assert found["cluster"] == str(tmp_path / "tuned.cluster.yaml") and cluster.size == 2
    assert distance(learnt["after"]) <= distance(learnt["before"])
    plan = load_plan(path)
    again = evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer).step_seconds
    place = [each["kept"] for each in found["plans"]].index(True)
    assert again / kept["least_step_seconds"] == pytest.approx(learnt["after"][place], rel=1e-3)


def distance(ratios: list[float]) -> float:
    return sum(math.log(ratio) ** 2 for ratio in ratios)


@pytest.mark.parametrize("more", ["", "name: ours\n"])
@pytest.mark.parametrize("named", ["cluster.yaml", "./cluster.yaml", "folder/../cluster.yaml", "link.yaml"])
def test_what_is_learnt_goes_on_top_of_what_the_file_has(
    named: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the file is called, and whatever it calls its cluster."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    Path("folder").mkdir()
    Path("link.yaml").symlink_to(path)
    path.write_text(f"# ours\nlike: l4\n{more}tuned: {{device: 0.5, network: 0.8}}  # by hand\n")
    cluster, kept = Cluster.parse(named), tune.cluster_file(named, "plan.json")
    assert kept.samefile(path)
    tune.keep(tune.Lesson(TunedRates(0.5, 1.5), (0.5,), (1.0,)), named, cluster, kept, "a test")
    assert Path("link.yaml").is_symlink()
    found = Cluster.parse(named)
    assert found.device.matmul_fraction == pytest.approx(cluster.device.matmul_fraction / 2)
    assert path.read_text().startswith("# ours\n") and "by hand" not in path.read_text()
    assert "0.50 to 0.50" in path.read_text()


def test_what_ran_without_compilation_is_compared_with_such_a_price() -> None:
    """No Triton, or no GPUs, as here: the plan is priced as compiled, and does not run so."""
    loaded = load_model("gpt2-tiny", 16, None, device="cpu")
    priced = {
        compile: nearest_plans(
            loaded.model, "dgx-h100:1", loaded.example_inputs, PlanOptions(force="tp=1,zero=2", compile=compile), 1
        )[0]
        for compile in (False, True)
    }
    seconds = priced[False].document.predicted.step_seconds
    assert seconds is not None and seconds > (priced[True].document.predicted.step_seconds or 0)
    lesson = tune.learn([RacedPlan(priced[False], (seconds,))])
    assert lesson.before == (pytest.approx(1.0),)
    eager = evaluate(priced[True].graph, priced[True].candidate, Cluster.parse("dgx-h100:1"), "adamw").step_seconds
    assert tune.learn([RacedPlan(priced[True], (eager,))]).before == (pytest.approx(1.0),)


@pytest.mark.parametrize(
    ("words", "said"), [(["nothing", "local:2"], "no model 'nothing'"), (["mlp", "nowhere"], "no cluster 'nowhere'"),
                        (["mlp", "local:4"], "for 4 processes"), (["mlp", "local:2", "--force", "tp=3"], "tp=3")],
)  # fmt: skip
def test_one_rank_says_what_all_ranks_meet(words: list[str], said: str, ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "tune.py"
    script.write_text(SCRIPT)
    model, cluster, *more = words
    ended = launch(
        ranks, script, 2, "tune", model, "--cluster", cluster, "--batch", "32", "-o", str(tmp_path / "plan.json"), *more
    )
    assert [each.status for each in ended] == [2, 2]
    assert sum(said in each.stderr for each in ended) == 1 and said in ended[0].stderr
    assert ended[0].stderr.count("error:") == 1 and "error:" not in ended[1].stderr


def race_with_a_failure(texts: list[str], rank: int, where: str) -> list[tuple[int, str]]:
    """On a rank: a race in which one rank (-1: all) has no memory for the second plan. Counted steps and error of each plan."""
    made = count()

    def failing_optimizer(name: str, parallel: Any, foreach: bool | None) -> torch.optim.Optimizer:
        optimizer = make_optimizer(name, parallel, foreach)
        if next(made) == 1 and rank in (-1, dist.get_rank()):
            setattr(*{"step": (optimizer, "step"), "forward": (parallel.program, "forward")}[where], fail)
        return optimizer

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    loaded = load_model("mlp", 32, None, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "make_optimizer", failing_optimizer)
        plans = [decode_plan(text) for text in texts]
        found = tune.race(loaded.model, plans, Cluster.parse("local:2"), loaded.example_inputs, 2, 2)
    return [(len(each.step_seconds), each.error) for each in found]


@pytest.mark.parametrize(("rank", "where"), [(-1, "forward"), (-1, "step"), (1, "step")])
def test_a_plan_that_does_not_run_ends_alone(rank: int, where: str, ranks: RankPool) -> None:
    """On all ranks, also where one rank alone has no memory for it; the others are raced on."""
    loaded = load_model("mlp", 32, None, device="cpu")
    near = nearest_plans(loaded.model, Cluster.parse("local:2"), loaded.example_inputs, PlanOptions(batch=32), 2)
    texts = [each.to_json() for each in (*near, near[0])]
    first, second = ranks.run(race_with_a_failure, texts, rank, where, world=2)
    assert first == second
    assert [steps for steps, _ in first] == [4, 0, 4]
    assert "out of memory" in first[1][1].lower() and "\n" not in first[1][1]


def test_needs_a_launcher(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["tune", "mlp", "--cluster", "local:2", "-o", str(tmp_path / "plan.json")]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
