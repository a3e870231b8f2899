"""What holds in every test: no unexpected log line, a known seed, nothing left behind.

A test's folder says what it may touch: unit (nothing), pair (two ends in memory), sim (virtual time),
rules (the tree itself), system (sockets, mounts, processes), lab (a kernel in QEMU). They run in that
order, so that the quick answer comes first.
"""

from __future__ import annotations

import gc
import importlib
import logging
import lzma
import os
import random
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import hypothesis.core
import pytest

from tests.support import processes as process_support
from tests.support.rungs.log_watch import LogWatch

NEEDS_INTERPRETED = (
    "no interpreted modules (G35_COMPILED is set): it puts something else in the place of what compiled code "
    "is bound to"
)
RUNGS = ("unit", "pair", "sim", "rules", "system", "lab")
HERE = Path(__file__).parent
_watch_key = pytest.StashKey[LogWatch]()

# In this process nothing is compiled, because tests put other methods into our objects, which compiled
# classes do not let them. What the tests start is compiled. With G35_COMPILED set (it may be empty) it
# decides for both (tests/support/rungs/all_rungs.py runs some so).
if "G35_COMPILED" not in os.environ:
    os.environ["G35_COMPILED"] = "no"
    importlib.import_module("nvmeof")
    del os.environ["G35_COMPILED"]

hypothesis.settings.register_profile("local", max_examples=100, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("local"), derandomize=True, max_examples=30
)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("local"), max_examples=3000)


def _seed() -> int:
    """G35_SEED: a number, or `random`. The default is fixed, so that a failure is seen by everybody."""
    wish = os.environ.get("G35_SEED", "35")
    return random.SystemRandom().randrange(1 << 32) if wish == "random" else int(wish)


SEED = _seed()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "expects_log(*patterns): log lines of WARNING and above that this test may cause"
    )
    config.addinivalue_line(
        "markers", "nightly: slower than it is worth each time; left out unless -m says otherwise"
    )
    config.addinivalue_line("markers", "interpreted: not with compiled modules, whose classes are fixed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a job that a script put into the background: the programs under test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    profile = os.environ.get("G35_HYPOTHESIS", "ci" if os.environ.get("CI") else "local")
    hypothesis.settings.load_profile(profile)
    hypothesis.core.global_force_seed = SEED
    process_support.mark_this_run()
    gc.disable()  # until all is collected: nothing of it is garbage


def pytest_report_header(config: pytest.Config) -> str:
    return f"g35: seed {SEED} (G35_SEED={SEED} repeats this run, G35_SEED=random rolls the dice)"


def _rung(item: pytest.Item) -> int:
    try:
        return RUNGS.index(item.path.relative_to(HERE).parts[0])
    except ValueError:
        return len(RUNGS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rung)
    from nvmeof import compiled  # not before it is settled above what is compiled

    if compiled.state == "compiled":
        why = pytest.mark.skip(reason=NEEDS_INTERPRETED)
        for item in items:
            if item.get_closest_marker("interpreted") is not None:
                item.add_marker(why)


def pytest_collection_finish() -> None:
    # Every module and test is here now and stays, so that who looks for garbage need not walk through them;
    # at the end of each system test that took longer than many a test.
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    watch = item.stash[_watch_key] = LogWatch()
    for mark in item.iter_markers("expects_log"):
        watch.announce(*mark.args)
    root = logging.getLogger()
    root.addHandler(watch)
    try:
        return (yield)
    finally:
        root.removeHandler(watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    _fail_on_unexpected_lines(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    _fail_on_unexpected_lines(item)
    return result


def _fail_on_unexpected_lines(item: pytest.Item) -> None:
    lines = item.stash[_watch_key].unexpected()
    if lines:
        pytest.fail("log lines that the test did not expect:\n" + "\n".join(lines), pytrace=False)


@pytest.fixture
def expects_log(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Announce log lines of WARNING and above: `expects_log(r"enclosure .* is gone")`."""
    watch: LogWatch = request.node.stash[_watch_key]
    return watch.announce


@pytest.fixture
def seed() -> int:
    """The seed of this run, for everything that rolls dice."""
    return SEED


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[process_support.Processes]:
    """Starts processes; whatever happens, they are gone when the test is over."""
    guard = process_support.Processes(tmp_path)
    try:
        yield guard
    finally:
        guard.end_all()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return HERE.parent


@pytest.fixture(scope="session")
def real_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An hour of a production service's requests (tests/vectors/README.md), as a file of lines."""
    file = tmp_path_factory.mktemp("trace") / "conversation_trace.jsonl"
    file.write_bytes(lzma.decompress((HERE / "vectors" / "conversation_trace.jsonl.xz").read_bytes()))
    return file
