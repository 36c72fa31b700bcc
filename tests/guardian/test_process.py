"""The guardian as a process: what it survives, what it costs, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_rank
import jobs
import psutil
import pytest

from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.arenas import arenas, sweep_arenas
from ds_toolkit.guardian.client import GuardianClient, start_guardian
from ds_toolkit.guardian.processes import is_alive, start_ticks
from ds_toolkit.guardian.server import Ended, Said, Server

JOB_ID = "0000abcd"
MODULES = """
import sys
import ds_toolkit.guardian.process
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""


def ticks_of(pid: int) -> int:
    ticks = start_ticks(pid)
    assert ticks is not None
    return ticks


class TestSurviving:
    @pytest.mark.parametrize("way", ["children of the launcher", "process group"])
    def test_what_a_launcher_does_to_its_ranks(self, tmp_path: Path, root: Path, way: str) -> None:
        """`deepspeed` ends the descendants of each rank, torchrun its process group."""
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root, start=False) as job:
            assert job.ranks[0].start() is None
            job.start()
            job.write(3)
            rank = psutil.Process(job.ranks[0].process.pid)
            assert rank.children(recursive=True) == []
            assert os.getsid(job.guardian[0]) != os.getsid(rank.pid)
            if way == "process group":
                os.killpg(rank.pid, signal.SIGKILL)
            else:
                for process in [*rank.children(recursive=True), rank]:
                    process.kill()
            assert job.ranks[1].hear(15)["tag"] == "global_step3"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
    def test_it_is_deaf(self, tmp_path: Path, root: Path, number: signal.Signals) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            os.kill(job.guardian[0], number)
            job.save("0000000a", "global_step1", 1)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2

    def test_when_it_is_killed_the_ranks_notice_and_start_another(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            job.write(3)
            first = job.guardian
            os.kill(first[0], signal.SIGKILL)
            for rank in job.ranks:
                assert "GuardianGoneError" in rank.hear(15)["error"]
                assert "GuardianGoneError" in rank.send("hello")["error"]
            job.start()
            assert job.guardian != first
            job.save("0000000a", "global_step4", 4)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2
            job.ranks[1].kill()
            assert job.ranks[0].hear(15)["tag"] == "global_step4"

    def test_a_rank_that_died_while_there_was_none(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            job.write(3)
            os.kill(job.guardian[0], signal.SIGKILL)
            fake_rank.await_end(*job.guardian)
            job.ranks[1].kill()
            start_guardian(job.arena)
            fake_rank.await_file(tmp_path / "latest")
        assert [candidate.step for candidate in survey(tmp_path)[0]] == [3]


class TestWatching:
    def test_what_a_rank_has_forked_does_not_hide_its_death(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            job.write(3)
            child = job.ranks[1].fork(60)
            try:
                job.ranks[1].kill()
                assert job.ranks[0].hear(15)["tag"] == "global_step3"
                assert psutil.pid_exists(child)
            finally:
                os.kill(child, signal.SIGKILL)

    def test_the_end_of_a_connection_is_no_death(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            job.write(3)
            job.ranks[1].disconnect()
            assert job.ranks[0].hear(0.7) is None
            job.ranks[1].connect()
            job.save("0000000a", "global_step4", 4)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2

    def test_a_forked_child_has_no_connection(self, root: Path) -> None:
        root.mkdir()
        server = Server(root / "socket")
        client = GuardianClient(root / "socket")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                client.send({"event": "hello", "rank": 0})
            os._exit(0)
        os.waitpid(child, 0)
        client.send({"event": "hello", "rank": 1})
        deadline = time.monotonic() + 10
        events: list[Said | Ended] = []
        while not events and time.monotonic() < deadline:
            events = server.poll(0.1)
        assert events == [Said(1, {"event": "hello", "rank": 1})]
        client.close()
        server.close()

    @pytest.mark.parametrize("has_pidfds", [True, False])
    def test_the_end_of_a_process(
        self, root: Path, has_pidfds: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_pidfds(pid: int) -> int:
            raise OSError(errno.ENOSYS, "none here")

        if not has_pidfds:
            monkeypatch.setattr(os, "pidfd_open", no_pidfds)
        root.mkdir()
        server = Server(root / "socket")
        with subprocess.Popen(["sleep", "60"]) as process:
            server.watch(3, process.pid, ticks_of(process.pid))
            assert server.poll(0.2) == []
            # The process that has the number now is not the one that was meant.
            server.watch(4, process.pid, ticks_of(process.pid) - 1)
            assert server.poll(5) == [Ended(4)]
            process.kill()
            process.wait()
            assert server.poll(5) == [Ended(3)]
        server.close()

    def test_what_a_rank_said_last_is_heard_before_its_end(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root.mkdir()
        server = Server(root / "socket")
        with subprocess.Popen(["sleep", "60"]) as process:
            server.watch(3, process.pid, ticks_of(process.pid))
            client = GuardianClient(root / "socket")
            client.send({"event": "hello", "rank": 3})
            assert [*server.poll(5), *server.poll(0.2)] == [Said(3, {"event": "hello", "rank": 3})]
            client.send({"event": "goodbye"})
            process.kill()
            process.wait()
        real_select = server._selector.select
        # The kernel promises no order.
        monkeypatch.setattr(server._selector, "select", lambda timeout: real_select(timeout)[::-1])
        assert server.poll(5) == [Said(3, {"event": "goodbye"}), Ended(3)]
        client.close()
        server.close()

    def test_what_is_not_understood_ends_nothing(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            client = GuardianClient(job.arena.socket_path)
            client._socket.sendall(b'[1]\n{"event": 7}\n{\xff\n{"event": "hello", "rank": 99}\n')
            client.send({"event": "save", "save_id": "zz"})
            job.ranks[0].send("save")
            job.ranks[0].send("dance")
            job.save("0000000a", "global_step1", 1)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2
            client.close()


class TestStarting:
    def test_twice_finds_the_first(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            starters = [threading.Thread(target=start_guardian, args=(job.arena,)) for _ in range(3)]
            for starter in starters:
                starter.start()
            for starter in starters:
                starter.join()
            assert job.arena.guardian() == job.guardian
            job.save("0000000a", "global_step1", 1)
            assert [heard["event"] for heard in job.hear()] == ["saved"] * 2

    def test_nobody_else_may_connect(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            assert stat.S_IMODE(job.arena.socket_path.stat().st_mode) == 0o600
            assert stat.S_IMODE(job.arena.folder.stat().st_mode) == 0o700

    def test_it_keeps_nothing_open_that_its_starter_had(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root, start=False) as job:
            ours, theirs = os.pipe()
            command = [sys.executable, "-m", "ds_toolkit.guardian", str(job.arena.folder)]
            environment = {**os.environ, "PYTHONPATH": str(jobs.REPOSITORY)}
            subprocess.run(command, pass_fds=[theirs], env=environment, check=True, timeout=30)
            os.close(theirs)
            assert select.select([ours], [], [], 5)[0]
            assert os.read(ours, 1) == b""
            os.close(ours)
            assert job.arena.has_guardian()

    def test_an_arena_that_says_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ToolkitError, match="cannot be started") as caught:
            start_guardian(Arena(tmp_path))
        assert "job is not described" in str(caught.value)
        with pytest.raises(ToolkitError, match="cannot be started"):
            start_guardian(Arena(tmp_path / "nowhere"))

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path, root: Path) -> None:
        (tmp_path / "file").write_text("")
        arena = Arena.create(fake_rank.job(tmp_path / "file" / "below", JOB_ID), root)
        with pytest.raises(ToolkitError, match="cannot be started") as caught:
            start_guardian(arena)
        assert "file" in str(caught.value)
        assert not arena.has_guardian()


class TestCost:
    def test_memory_and_modules(self, tmp_path: Path, root: Path) -> None:
        with fake_rank.FakeJob(fake_rank.job(tmp_path, JOB_ID), root) as job:
            job.save("0000000a", "global_step1", 1)
            job.hear()
            process = psutil.Process(job.guardian[0])
            assert process.memory_info().rss < 30 * 2**20
            libraries = {Path(mapped.path).name for mapped in process.memory_maps()}
            assert not [name for name in libraries if "torch" in name or "numpy" in name]
            places = (str(job.arena.folder), str(tmp_path), "/dev/null")
            assert all(file.path.startswith(places) for file in process.open_files())
            assert process.cwd() == "/"
        command = [sys.executable, "-S", "-c", MODULES]
        loaded = jobs.run(command, environment={"PYTHONPATH": str(jobs.REPOSITORY)}).check().output.split()
        assert not {"torch", "numpy", "pydantic", "pickle", "deepspeed", "multiprocessing"} & set(loaded)
        assert "ds_toolkit" in loaded

    def test_twenty_lives_leave_nothing(self, tmp_path: Path, root: Path) -> None:
        lived = []
        for life in range(20):
            of_job = fake_rank.job(tmp_path, f"{life:08x}", nodes=(0,))
            with fake_rank.FakeJob(of_job, root) as job:
                job.write(life)
                job.ranks[0].kill()
                fake_rank.await_end(*job.guardian)
                lived.append(job.guardian)
                assert not job.arena.folder.exists()
        assert not any(is_alive(*guardian) for guardian in lived)
        assert list(root.iterdir()) == []
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"incidents", "latest", "global_step19", "global_step18", "global_step17"}


class TestSweeping:
    def test_only_the_dead_of_this_directory(self, tmp_path: Path, root: Path) -> None:
        mine, other = tmp_path / "mine", tmp_path / "other"
        dead = Arena.create(fake_rank.job(mine, "0000dead"), root)
        # No rank has come for longer than any takes to begin.
        fake_rank.make_older(dead, 301)
        elsewhere = Arena.create(fake_rank.job(other, "0000e15e"), root)
        with (
            fake_rank.FakeJob(fake_rank.job(mine, "0000001f"), root, start=False) as ranks_alone,
            fake_rank.FakeJob(fake_rank.job(mine, "0000002f"), root) as job,
        ):
            for rank in job.ranks:
                rank.goodbye()
            lines = sweep_arenas(mine / "." / ".." / "mine", root)
            assert len(lines) == 1
            assert str(dead.folder) in lines[0]
            assert elsewhere.folder.exists()
            assert ranks_alone.arena.folder.exists()
        elsewhere.remove()
        assert list(arenas(root)) == []


def test_an_arena_may_have_a_longer_path_than_a_socket(tmp_path: Path) -> None:
    """As that of a scratch folder may be; an address of a socket has 107 bytes."""
    root = tmp_path / ("scratch" * 20)
    with fake_rank.FakeJob(fake_rank.job(tmp_path / "ckpt", JOB_ID), root) as job:
        assert len(os.fspath(job.arena.socket_path)) > 107
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        job.save("0000000a", "best", 5)
        assert [event["event"] for event in job.hear()] == ["saved", "saved"]
