"""`parallelize(mode="inference")`: the plan of prefill and decoding, run on ranks, gives what one process does. The script is
that of docs/inference.md."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.variants.test_generate import WORDS, language_model
from support.harness.rank_pool import RankPool

PAGE = Path(__file__).parents[3] / "docs" / "inference.md"


def serve(text: str, kind: str, force: str) -> Any:
    """On a rank: what the page's script does, beside the plain model; what was planned."""
    import autopar

    plain, model = language_model(kind).eval(), language_model(kind)
    prompt = torch.randint(3, WORDS, (4, 16), generator=torch.Generator().manual_seed(2))
    made = autopar.parallelize

    def parallelize(*args: Any, **options: Any) -> Any:
        return made(*args, **options, force=force, cache=False)

    names: dict[str, Any] = {"autopar": type("autopar", (), {"parallelize": parallelize}), "model": model, "prompt": prompt}
    with warnings.catch_warnings(action="ignore"):
        exec(text, names)
        parallel = names["model"]
        assert torch.equal(names["tokens"], plain.generate(prompt, max_new_tokens=12, do_sample=False))
        with torch.no_grad():
            torch.testing.assert_close(parallel(input_ids=prompt).logits, plain(input_ids=prompt).logits, rtol=1e-9, atol=1e-9)
    assert not parallel.training and not any(each.requires_grad for each in parallel.parameters())
    assert not parallel.cache_record.refusal
    assert parallel(input_ids=prompt).logits.grad_fn is None
    return parallel.plan.document.inference, str(parallel.plan.candidate.mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "force"), [
    ("llama", "tp=2"), ("llama", ""), ("llama", "tp=1"), ("gpt2", "tp=2"), ("qwen3", "tp=2"),
])  # fmt: skip
def test_generates_like_one_process(ranks: RankPool, kind: str, force: str) -> None:
    script = re.search(r"```python\n# serve.py\n(.*?)```", PAGE.read_text(), re.S)
    assert script is not None
    for info, mesh in ranks.run(serve, script[1], kind, force, world=2, timeout=400):
        assert info.new_tokens == 12 and info.decode_seconds > 0
        assert "tp=2" not in force or mesh == "dp=1 x tp=2"
