"""What all tests share: checkpoints that DeepSpeed wrote, and that no test is left out in silence."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

ZOO_SCRIPT = Path(__file__).with_name("zoo.py")
LAYOUTS_ZOO_SCRIPT = Path(__file__).with_name("zoo_layouts.py")
MANY_RANKS_SCRIPT = Path(__file__).with_name("zoo_many_ranks.py")
TP_ZOO_SCRIPT = Path(__file__).with_name("zoo_tensor_parallel.py")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints by case (tests/zoo.py says what stands in it), made once for all tests."""
    folder = tmp_path_factory.mktemp("zoo")
    for num_ranks in (2, 3):
        jobs.run(jobs.torchrun_command(ZOO_SCRIPT, folder, num_ranks=num_ranks), timeout_seconds=250).check()
    jobs.run([jobs.BIN / "python", MANY_RANKS_SCRIPT, folder], timeout_seconds=250).check()
    return folder


@pytest.fixture(scope="session")
def tp_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tensor-parallel checkpoints by case (tests/zoo_tensor_parallel.py), made once."""
    folder = tmp_path_factory.mktemp("tp_zoo")
    for num_ranks in (4, 3):
        jobs.run(
            jobs.torchrun_command(TP_ZOO_SCRIPT, folder, num_ranks=num_ranks), timeout_seconds=250
        ).check()
    return folder


@pytest.fixture(scope="session")
def layouts_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pipelines and mixtures of experts by case (tests/zoo_layouts.py), made once."""
    folder = tmp_path_factory.mktemp("layouts_zoo")
    for num_ranks in (2, 4):
        command = jobs.torchrun_command(LAYOUTS_ZOO_SCRIPT, folder, num_ranks=num_ranks)
        jobs.run(command, timeout_seconds=250).check()
    return folder


class NothingLeftOut:
    """Turns a run green only if every test that is not marked `gpu` was really run and expected to pass."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = yield
        expected_to_fail = hasattr(report, "wasxfail")
        if (report.skipped or expected_to_fail) and item.get_closest_marker("gpu") is None:
            self.left_out.append(report.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.left_out.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.left_out and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.left_out:
            terminalreporter.write_line(f"LEFT OUT {nodeid}: only tests marked `gpu` may be", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NothingLeftOut(), "nothing-left-out")
