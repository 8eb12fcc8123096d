"""A fit ends where the runs err least, also where a rate is at its cap and tangents mislead."""

from __future__ import annotations

from support.oracles.published_rows import row, session

from autopar.validate.constants import Fitter, Tangent, loss, step_seconds


def test_of_all_rounds_the_one_is_taken_whose_runs_err_least() -> None:
    """Products in float8 reach their cap of 0.71 of the peak: rounds end there and back. The other ends are worse."""
    names = ("tt-001", "tt-010", "tt-019", "tt-022", "tt-031", "tt-037")
    items = [(row(name), session().setup(row(name))) for name in names]

    class Watched(Fitter):
        """Remembers every end that is compared."""

        ends: list[tuple[float, ...]] = []

        def _run(self, index: int, at: dict[str, float]) -> Tangent:  # type: ignore[override]
            self.ends.append(tuple(at.values()))
            return super()._run(index, at)

    fitter = Watched(items)
    found = fitter.fit()
    assert found is not None

    def off(values: tuple[float, ...]) -> float:
        at = dict(zip(fitter.names, values, strict=True))
        runs = [Tangent(r.source, r.step_seconds or 1.0, step_seconds((r, s), at), (0.0,) * 3) for r, s in items]
        return loss(runs, at)

    ends = set(fitter.ends)
    assert len(ends) > 1 and off(tuple(found.values())) == min(map(off, ends))
