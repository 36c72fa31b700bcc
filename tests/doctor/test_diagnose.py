"""What is made of logs and of what a run left: ranks, secrets, odd files, incidents, dumps, the command."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_toolkit.checkpoint.incident import Incident, RankEnd, RankPlace
from ds_toolkit.cli.app import make_app
from ds_toolkit.doctor import diagnose as diagnosing
from ds_toolkit.doctor import evidence
from ds_toolkit.doctor.diagnose import Diagnosis, diagnose
from ds_toolkit.doctor.evidence import Evidence, read_log
from ds_toolkit.doctor.exit_codes import exit_of
from ds_toolkit.doctor.kernel import cgroup_kills
from ds_toolkit.doctor.lines import parse, rank_of_file
from ds_toolkit.doctor.masking import masked
from ds_toolkit.doctor.scanning import PIECE_BYTES, Scanner
from ds_toolkit.errors import ToolkitError

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"
    " 79.15 GiB of which 1.00 GiB is free."
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    loss = f(x)\n'
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2000"


@pytest.fixture(autouse=True)
def quiet_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "kernel_log", lambda: b"")
    monkeypatch.setattr(diagnosing, "cgroup_kills", lambda: None)


def of(tmp_path: Path, text: str | bytes, name: str = "job.log") -> Diagnosis:
    log = tmp_path / name
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    return diagnose([log])


def codes(diagnosis: Diagnosis) -> list[str]:
    return [cause.finding.code for cause in diagnosis.causes]


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("codes_of", "name"),
    [
        ((-9, 137, 247), "SIGKILL"),
        ((-6, 134, 250), "SIGABRT"),
        ((-7, 135, 249), "SIGBUS"),
        ((-11, 139, 245), "SIGSEGV"),
        ((-15, 143, 241), "SIGTERM"),
        ((0, 1, 2, 126, 127, 255), None),
    ],
)
def test_all_spellings_of_an_exit_code(codes_of: tuple[int, ...], name: str | None) -> None:
    assert [exit_of(code).signal for code in codes_of] == [name] * len(codes_of)
    assert exit_of(127).fact == "exit:127"


@pytest.mark.parametrize(
    ("raw", "rank", "text"),
    [
        (b"[rank1]: Traceback", 1, "Traceback"),
        (b"[default3]:KeyError: 'a'", 3, "KeyError: 'a'"),
        (b"12: KeyError: 'a'", 12, "KeyError: 'a'"),
        (b"[1,5]<stderr>:KeyError: 'a'", 5, "KeyError: 'a'"),
        (b"worker-1: [rank7]: Traceback", 7, "Traceback"),
        (b"\x1b[31m[rank2]:\x1b[0m \x1b[1mKeyError: 'a'\x1b[0m", 2, "KeyError: 'a'"),
        (b"ValueError: bad", None, "ValueError: bad"),
        (b"srun: error: n1: task 3: Killed", None, "srun: error: n1: task 3: Killed"),
    ],
)
def test_prefixes_of_launchers(raw: bytes, rank: int | None, text: str) -> None:
    line = parse(raw, "job.log", 1, None)
    assert (line.rank, line.text) == (rank, text)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("out/rank_3.log", 3), ("20261201_rank12.log", 12), ("x/attempt_0/5/stderr.log", 5), ("job.log", None)],
)
def test_the_rank_of_a_file(name: str, rank: int | None) -> None:
    assert rank_of_file(name) == rank


def test_the_first_real_exception_and_not_what_follows(tmp_path: Path) -> None:
    text = (
        prefixed("[rank0]: ", TRACEBACK + LOST)
        + prefixed("[rank2]: ", TRACEBACK + "ZeroDivisionError: division by zero")
        + "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f>\n"
        + TRACEBACK
        + "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'\n"
        + "[2026-12-01 02:11:43,002] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'train.py',"
        + " '--local_rank=3'] exits with return code = 1\n"
    )
    diagnosis = of(tmp_path, text)
    assert codes(diagnosis) == ["DS1298"]
    assert diagnosis.first is not None
    assert diagnosis.first.raised is not None
    assert diagnosis.first.rank == 2
    assert diagnosis.first.raised.text == "ZeroDivisionError: division by zero"
    assert diagnosis.first.raised.place == "/w/train.py:7, in step"
    assert len(diagnosis.set_aside) == 2


def test_tracebacks_of_ranks_that_speak_at_once() -> None:
    first, second = TRACEBACK + "KeyError: 'a'", TRACEBACK + "IndexError: list index out of range"
    pairs = zip(first.splitlines(), second.splitlines(), strict=True)
    text = "".join(f"[rank0]: {one}\n[rank1]: {two}\nstep 3\n" for one, two in pairs)
    seen = Evidence()
    read_log(io.BytesIO(text.encode()), "job.log", seen, None, len(text))
    assert [(raised.line.rank, raised.type) for raised in seen.exceptions] == [
        (0, "KeyError"),
        (1, "IndexError"),
    ]
    assert [len(raised.frames) for raised in seen.exceptions] == [1, 1]


def test_times_decide_between_files(tmp_path: Path) -> None:
    for rank, second in ((0, 9), (1, 4)):
        line = f"2026-12-01 02:00:0{second} {TRACEBACK}ValueError: 2026-12-01 02:00:0{second} rank {rank}\n"
        (tmp_path / f"rank{rank}.log").write_text(line)
    diagnosis = diagnose([tmp_path])
    assert diagnosis.first is not None
    assert diagnosis.first.rank == 1


def test_the_table_of_torchrun_names_the_rank(tmp_path: Path) -> None:
    diagnosis = of(
        tmp_path,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====\ntrain.py FAILED\n"
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 31)\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-12-01_02:11:42\n  host      : n1\n"
        "  rank      : 6 (local_rank: 2)\n  exitcode  : -11 (pid: 33)\n  error_file: <N/A>\n",
    )
    assert codes(diagnosis) == ["DS1213"]
    assert diagnosis.first is not None
    assert diagnosis.first.rank == 6


def test_the_process_that_the_kernel_killed_is_a_rank(tmp_path: Path) -> None:
    spawned = "".join(
        f"[launch.py:245:main] process {700 + rank} spawned with command: ['t.py', '--local_rank={rank}']\n"
        for rank in range(4)
    )
    diagnosis = of(
        tmp_path,
        spawned + "[81.1] Out of memory: Killed process 702 (python) total-vm:3kB\nreturn code = -9\n",
    )
    assert codes(diagnosis) == ["DS1201"]
    assert diagnosis.first is not None
    assert diagnosis.first.rank == 2


def test_the_rank_that_said_nothing_is_the_one_that_ended(tmp_path: Path) -> None:
    lost = "".join(prefixed(f"[rank{rank}]: ", TRACEBACK + LOST) for rank in (0, 2))
    ended = (
        "[launch.py:259:sigkill_handler] ['python', 't.py', '--local_rank=2'] exits with return code = 1\n"
    )
    diagnosis = of(tmp_path, "[launch.py:170:main] dist_world_size=3\n" + lost + ended)
    assert codes(diagnosis) == ["DS1251"]
    assert diagnosis.first is not None
    assert diagnosis.first.rank == 1


def test_an_exit_code_is_nowhere() -> None:
    command = [sys.executable, "-m", "ds_toolkit", "diagnose", "--exit-code", "-9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("error DS1204 killed-without-a-word\n")


def test_an_exit_code_alone_and_nothing_wrong(tmp_path: Path) -> None:
    assert codes(diagnose([], exit_code=247)) == ["DS1204"]
    assert codes(diagnose([], exit_code=3)) == ["DS1299"]
    assert codes(diagnose([], exit_code=0)) == []
    assert codes(of(tmp_path, "step 1 loss 2.0\nProcess 12 exits successfully.\n")) == []
    with pytest.raises(ToolkitError, match="nothing to look at"):
        diagnose([])


SECRETS = [
    ("HF_TOKEN=hf_aaaabbbbccccddddeeee", "hf_aaaabbbbccccddddeeee"),
    ("{'wandb_api_key': '0123456789abcdef'}", "0123456789abcdef"),
    ("train.py --hf_token abc123def --lr 1", "abc123def"),
    ("['train.py', '--hf-token', 'abc123def']", "abc123def"),
    ("Authorization: Bearer abcdefghijkl", "abcdefghijkl"),
    ("postgres://user:pa55word@db/x", "pa55word"),
    ('AWS_SECRET_ACCESS_KEY: "abc def"', "abc def"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_are_masked(text: str, secret: str, tmp_path: Path) -> None:
    assert secret not in masked(text)
    diagnosis = of(
        tmp_path, f"RuntimeError: CUDA error: out of memory {text}\n{TRACEBACK}ValueError: {text}\n"
    )
    assert codes(diagnosis)[0] == "DS1230"
    assert secret not in repr([(cause.finding, cause.evidence) for cause in diagnosis.causes])


def test_what_is_no_secret_stays() -> None:
    text = "num_tokens=4096 loss: 2.1 --max_tokens 12 key: value tokenizer=/data/tok"
    assert masked(text) == text


def test_progress_bars_share_a_line(tmp_path: Path) -> None:
    bars = "\n" + "".join(f"\r{n}%|##  | {n}/100" for n in range(100))
    diagnosis = of(tmp_path, f"start\r\n{bars}\r{OOM}\nend\n")
    assert diagnosis.causes[0].finding.where.line == 3


def test_lines_across_pieces_and_very_long_ones(tmp_path: Path) -> None:
    filler = b"x" * 99 + b"\n"
    count = PIECE_BYTES // len(filler)
    text = filler * count + b"y" * (3 * PIECE_BYTES) + b" " + OOM.encode() + b" " + b"z" * 10_000 + b"\n"
    diagnosis = of(tmp_path, text + OOM.encode())
    assert codes(diagnosis)[0] == "DS1230"
    assert diagnosis.causes[0].finding.where.line == count + 1
    assert diagnosis.causes[0].evidence[-1].startswith(f"{tmp_path / 'job.log'}:{count + 2}: ")
    assert max(map(len, diagnosis.causes[0].evidence)) < 500


@pytest.mark.parametrize("offset", range(4))
def test_a_word_is_found_wherever_it_stands(offset: int) -> None:
    stream = io.BytesIO(b"-" * offset + b"an rror\nno\n")
    scanner = Scanner(stream, re.compile(b"rror"), [b"rror"], 100)
    assert [(line.number, line.raw) for line in scanner] == [(1, b"-" * offset + b"an rror")]


def test_dull_shapes_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    noise = "".join(f"UserWarning: error {n} in a sample\n" for n in range(5000))
    assert codes(of(tmp_path, noise + OOM + "\n" + noise)) == ["DS1230"]


def test_reading_ends_where_every_line_looks_like_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_LOOKS", 2000)
    monkeypatch.setattr(evidence, "TAIL_BYTES", PIECE_BYTES)
    words = ["error", "failed", "memory", "loss", *"abcdefghij"]
    chance = random.Random(1)
    noise = "\n".join(" ".join(chance.choices(words, k=30)) for _ in range(100_000))
    diagnosis = of(tmp_path, f"{noise}\n{OOM}\n{noise}\n{noise}\nRuntimeError: Too many open files\n")
    assert codes(diagnosis) == ["DS1281"]
    assert any("passed over" in note for note in diagnosis.notes)


def test_odd_files_are_noted(tmp_path: Path) -> None:
    assert any("empty" in note for note in of(tmp_path, b"").notes)
    junk = bytes(range(256)) * 4000
    diagnosis = of(tmp_path, junk + b"\n" + OOM.encode() + b"\n" + junk)
    assert codes(diagnosis) == ["DS1230"]
    assert any("binary" in note for note in diagnosis.notes)
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(OOM.encode()))
    assert codes(diagnose([packed])) == ["DS1230"]
    for path in (tmp_path / "none.log", Path("/dev/null")):
        with pytest.raises(ToolkitError):
            diagnose([path])


def test_a_log_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(OOM)
    diagnosis = diagnose([tmp_path / "job.log", tmp_path / "none.log"])
    assert codes(diagnosis) == ["DS1230"]
    assert [error.where for error in diagnosis.errors] == [str(tmp_path / "none.log")]


def incident(directory: Path, **changes: object) -> Path:
    path = Incident(
        happened_at="2026-12-01T02:00:00.000000+00:00",
        job_id="a1",
        node=0,
        ended=(RankEnd(3, 77, "died"),),
        ranks=(RankPlace(3, 77, "backward", 9, 9),),
        outcome="complete",
        why="all of it",
    ).write(directory)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_an_incident_names_the_rank(tmp_path: Path) -> None:
    incident(tmp_path)
    diagnosis = diagnose([], tmp_path)
    assert codes(diagnosis) == ["DS1296"]
    assert diagnosis.first is not None
    assert diagnosis.first.rank == 3


def test_an_incident_tells_of_a_hang(tmp_path: Path) -> None:
    what = "rank 1 left its loop after 37 batches; ranks 0, 2, 3 wait in backward of batch 38"
    path = incident(tmp_path, event="hang", ended=[], hang={"what": what, "still_seconds": 61, "ranks": []})
    diagnosis = diagnose([], tmp_path)
    assert codes(diagnosis) == ["DS1295"]
    assert what in diagnosis.causes[0].finding.message
    assert diagnosis.causes[0].finding.where.file == str(path)


def test_an_incident_that_is_none_is_noted(tmp_path: Path) -> None:
    incident(tmp_path).write_text("{")
    (tmp_path / "job.log").write_text(OOM)
    diagnosis = diagnose([], tmp_path)
    assert codes(diagnosis) == ["DS1230"]
    assert any("incident" in note for note in diagnosis.notes)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("it was executed",)


def dump(folder: Path, rank: int, last: int, extra: object = None) -> None:
    entries = [
        {"process_group": ("0", "default_pg"), "collective_seq_id": number, "state": "started",
         "profiling_name": "nccl:all_reduce"}
        for number in range(1, last + 1)
    ]  # fmt: skip
    data = {"version": "2.9", "pg_config": {}, "entries": entries, "extra": extra}
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))


def test_flight_recorder_dumps_tell_who_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, last in ((0, 12), (1, 12), (2, 9), (3, 12)):
        dump(tmp_path, rank, last, Evil() if rank == 1 else None)
    (tmp_path / "nccl_trace_rank_4").write_bytes(b"no pickle")
    diagnosis = diagnose([], tmp_path)
    assert codes(diagnosis) == ["DS1297"]
    assert "rank 2 did not come to nccl:all_reduce number 12" in diagnosis.causes[0].finding.message
    assert any("nccl_trace_rank_4" in note for note in diagnosis.notes)
    assert "executed" not in capsys.readouterr().out


def test_the_ladder_is_climbed_for_the_run(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    model = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
             "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "job.log").write_text(f"dist_world_size=8\n[rank1]: {OOM}\n")
    diagnosis = diagnose([], tmp_path)
    fix = diagnosis.causes[0].finding.fix
    assert fix is not None
    assert re.search(r"`ZeRO 3, micro batch 8 x 1` frees [0-9.]+ GB a GPU", fix)
    assert "and fits" in fix


def test_counters_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n")
    assert cgroup_kills(tmp_path) == 2
    assert cgroup_kills(tmp_path / "none") is None


def test_the_kernel_is_asked_about_processes_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = b"Out of memory: Killed process 99 (python) total-vm:3kB\n"
    own = b"Out of memory: Killed process 700 (python) total-vm:3kB\n"
    text = "[launch.py:253:sigkill_handler] Killing subprocess 700\n exits with return code = -9\n"
    monkeypatch.setattr(diagnosing, "kernel_log", lambda: other)
    assert codes(of(tmp_path, text)) == ["DS1204"]
    monkeypatch.setattr(diagnosing, "kernel_log", lambda: other + own)
    assert codes(of(tmp_path, text)) == ["DS1201"]


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        make_app("diagnose")(["diagnose", *map(str, arguments)])
    return int(end.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text(prefixed("[rank1]: ", TRACEBACK + OOM))
    assert call(log) == 1
    text = capsys.readouterr().out
    assert f"{log}:4: error DS1230 gpu-out-of-memory\n" in text
    assert f"    {log}:4: [rank1]: torch.OutOfMemoryError" in text
    assert "first to fail: rank 1" in text
    assert call(log, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["code"] == "DS1230"
    assert found["findings"][0]["confidence"] == "certain"
    assert found["first_failure"]["rank"] == 1
    log.write_text("all is well\n")
    assert call(log) == 0
    assert "nothing found in 1 file" in capsys.readouterr().out


def test_the_command_says_when_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    log.write_text(TRACEBACK + "FrobnicationError: the widget is odd\n")
    assert call(log) == 1
    text = capsys.readouterr().out
    assert "no known failure; the first exception is FrobnicationError: the widget is odd" in text
    assert re.search(r"looked for \d+ known failures", text)


def test_the_command_that_cannot_look_ends_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_toolkit", "diagnose"]
    for arguments in ([], [str(tmp_path / "none.log")], ["--run-dir", str(tmp_path / "none")]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
