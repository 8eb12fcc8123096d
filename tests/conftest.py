"""Fixtures for all tests. `tests` is put on the path so that `support` can be imported under one name everywhere."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.garbage import collect_seldom  # noqa: E402
from support.harness.home import write_local_clusters  # noqa: E402
from support.harness.rank_pool import RankPool  # noqa: E402

POOL = pytest.StashKey[RankPool]()
HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
SECONDS: Counter[str] = Counter()
SLOWEST = 30
CAPTURE_CACHE_ROOMS = (
    *("checker", "cli", "cost_models", "decoders", "docs", "dryrun", "e2e", "explain", "files", "integrations", "ir", "launch"),
    *("machine_report", "passes", "program", "report", "runtime", "software", "solve", "validate", "verification"),
)
"""The rooms whose subject is not what a capture does: they take the export of an earlier test (`support.capture_cache`)."""


def pytest_configure(config: pytest.Config) -> None:
    """A home of its own, before any process is started: see `support.harness.home`."""
    config.stash[HOME] = tempfile.TemporaryDirectory(prefix="autopar_home_")
    os.environ["HOME"] = config.stash[HOME].name
    os.environ.setdefault("AUTOPAR_TEST_RUN", config.stash[HOME].name)  # workers of xdist have that of who starts them
    os.environ.pop("XDG_CACHE_HOME", None)
    # Containers forbid files of bytecode, and every process that a test starts would compile all of the product again: 1.4 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Stores of torch ask for the name of each client, on their only thread: a DNS server that is slow would stop them for 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests that `slow_tests.txt` lists are slow. UsageError for a line of whole folders that names none."""
    lines = (Path(__file__).parent / "slow_tests.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
            listed.remove(item.nodeid)
    ignored = tuple(config.getoption("ignore") or ())
    unknown = sorted(line for line in listed if line.startswith(tuple(config.args)) and not line.startswith(ignored))
    if unknown and all(Path(folder).is_dir() for folder in config.args):
        raise pytest.UsageError(f"slow_tests.txt names no test: {unknown}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The process that ranks are forked from imports torch while the first tests run."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items) and not session.config.option.collectonly:
        session.config.stash[POOL] = RankPool()
    if "torch" in sys.modules:
        from support.seeds import seed_the_processor_alone

        seed_the_processor_alone()
    collect_seldom()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.nodeid.startswith(tuple(f"tests/{room}/" for room in CAPTURE_CACHE_ROOMS)):
        return (yield)
    from support.capture_cache import capture_cache  # only here: it imports torch

    with capture_cache():
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest folders and files, beside pytest's slowest tests."""
    if not terminalreporter.config.getoption("durations"):
        return
    folders = Counter[str]()
    for file, seconds in SECONDS.items():
        folders[file.rpartition("/")[0]] += seconds
    for what, found in (("folders", folders), ("files", SECONDS)):
        terminalreporter.section(f"slowest {what}")
        for name, seconds in found.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f}s {name}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()
    config.stash[HOME].cleanup()


@pytest.fixture(scope="session", autouse=True)
def local_clusters() -> None:
    write_local_clusters(Path.home() / ".cache" / "autopar")


@pytest.fixture(scope="session", autouse=True)
def one_process_a_search() -> Iterator[None]:
    """The command line plans on a process per core, which changes no plan (`tests/solve/processes`); here each core has a worker,
    and copies of it would solve in advance what is not asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.cli.parser._usable_processes", lambda: 1)
        yield


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> RankPool:
    """The one pool of gloo processes."""
    return pytestconfig.stash[POOL]
