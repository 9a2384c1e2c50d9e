"""Options, profiles and the header of the suite's pytest runs."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.errors import InvalidArgument

from ci import pytest_gpus as gpus
from ci.database import open_database, redacted
from ci.failures import CORPORA
from ci.journal import recover
from ci.known import LIST, read_known
from ci.reporting import plugin as reporting
from ci.reporting.record import Record
from impl.contract import UnavailableError
from impl.devices.registry import NAMES, default
from impl.registry import split
from tests.profiles import chosen, register, time_box
from tests.subject import Subject, offer_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdafuzz")
    group.addoption(
        "--impl", default="triton", help="implementations to test, comma-separated [default: triton]"
    )
    group.addoption("--device", choices=NAMES, help="where kernels run [default: the best at hand]")
    group.addoption("--corpus", type=Path, default=CORPORA, help="folder of saved cases to replay")
    group.addoption("--replay", action="append", default=[], help="replay only this case file or id")
    group.addoption(
        "--save-failures", type=Path, default=Path(".kdafuzz/failures"), help="where minimal failing cases go"
    )
    group.addoption(
        "--database",
        help="where failing examples are remembered: a folder or redis://.. that runs may share, readonly: "
        "before it if this one must not write [default: KDAFUZZ_DATABASE, else .hypothesis/examples]",
    )
    reporting.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    gpus.steal_work(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    return gpus.auto_workers(_device(config))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """A worker was killed: say what it was judging."""
    del crashitem
    for path in recover(sched.config.getoption("--save-failures")):
        report.longrepr = f"{report.longrepr}; it was judging {path}: kdafuzz replay {path}"


_SUSPECTS = pytest.StashKey[list[Path]]()
"""What killed processes of earlier runs were judging."""


def pytest_configure(config: pytest.Config) -> None:
    gpus.take_seat(config)
    why = _forgetful(config)
    if why and config.getoption("--database"):
        raise pytest.UsageError(f"--database is of no use where nothing is remembered: {why}")
    try:
        register(open_database("" if why else _database(config)))
        hypothesis.settings.load_profile(_profile(config))
    except (UnavailableError, InvalidArgument) as error:
        raise pytest.UsageError(str(error)) from None
    device = _device(config)
    gpus.register(config, device)
    worker = hasattr(config, "workerinput")
    config.stash[_SUSPECTS] = [] if worker else recover(config.getoption("--save-failures"))
    names = split(config.getoption("--impl"))
    template = Record(device=device, profile=_profile(config), seed=_seed(config) or "its own")
    reporting.register(config, names, lambda name: offer_of(name, device), template)


def _device(config: pytest.Config) -> str:
    return str(config.getoption("--device") or default())


def _profile(config: pytest.Config) -> str:
    return chosen(config.getoption("--hypothesis-profile"))


def _database(config: pytest.Config) -> str:
    return str(config.getoption("--database") or os.environ.get("KDAFUZZ_DATABASE", ""))


def _forgetful(config: pytest.Config) -> str:
    """Why the run uses no database, if so: Hypothesis's rules."""
    if _profile(config) == "ci":
        return "the profile ci draws the same examples each time (CI machines use it by default)"
    return "with --hypothesis-seed the seed alone says what is drawn" if _seed(config) else ""


def _seed(config: pytest.Config) -> str:
    return str(config.getoption("--hypothesis-seed") or "")


def pytest_report_header(config: pytest.Config) -> list[str]:
    database = "none" if _forgetful(config) else redacted(_database(config))
    device = _device(config)
    lines = [
        f"kdafuzz: device {device}, profile {_profile(config)}, seed {_seed(config) or 'its own'}, "
        f"database {database}"
    ]
    for name in split(config.getoption("--impl")):
        offer = offer_of(name, device)
        lines.append(f"kdafuzz: {offer.error}" if offer.error else f"kdafuzz: {name} {offer.version}")
    for path in config.stash[_SUSPECTS]:
        lines.append(f"kdafuzz: an earlier run was killed while it judged {path}: kdafuzz replay {path}")
    return lines


def _asks(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Saved cases first: they tell most in the least time. Then what else is of an implementation, which stays
    # together, since another one means another process. Then files with slow tests: none may come last.
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        firsts = (_asks(item, "case_file"), _asks(item, "subject"), item.path in slow, True)
        return firsts.index(True)

    items.sort(key=rank)
    if config.getoption("--replay"):
        kept = [item for item in items if _asks(item, "case_file")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # Hypothesis collects garbage before every run; a tenth of a second for what is imported


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        names = split(metafunc.config.getoption("--impl"))
        metafunc.parametrize("subject", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    found = _device(pytestconfig)
    reporting.reporter(pytestconfig).check_device(found)  # a worker may not see the GPU
    return found


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, device: str) -> Iterator[Subject]:
    config = request.config
    seconds = time_box(_profile(config))
    known = read_known(config.getoption("--corpus") / LIST.name)
    ledger = reporting.reporter(config).ledger
    folder, seed = config.getoption("--save-failures"), _seed(config)
    made = Subject(request.param, device, folder, seconds, known, ledger, seed)
    if made.offer.error:
        pytest.fail(made.offer.error, pytrace=False)
    yield made
    made.close()
