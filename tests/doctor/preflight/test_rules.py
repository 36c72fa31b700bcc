from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

import fleets
import pytest
from fleets import (
    GB,
    NAMES,
    SOUND_FLEET,
    with_all,
    with_answer,
    with_host,
    with_intent,
    with_lines,
)

from ds_toolkit.cli.preflight_report import print_report, report_as_json
from ds_toolkit.doctor.preflight import probe
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, Clock, Fleet
from ds_toolkit.doctor.preflight.judging import CHECKS, RULES, judge, table
from ds_toolkit.findings import Severity

Change = Callable[[Fleet], Fleet]
E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741
LAST = NAMES[-1]


def answer(index: int = 2, **changes: object) -> Change:
    return lambda fleet: with_answer(fleet, index, **changes)


def host(index: int = 2, **changes: object) -> Change:
    return lambda fleet: with_host(fleet, index, **changes)


def intent(**changes: object) -> Change:
    return lambda fleet: with_intent(fleet, **changes)


def lines(text: str) -> Change:
    return lambda fleet: with_lines(fleet, text)


def one_host(fleet: Fleet) -> Fleet:
    return with_intent(Fleet(fleet.intent, fleet.hosts[:1]), slots={NAMES[0]: 8}, checkpoint_bytes=10 * GB)


def version(name: str, value: str | None) -> Change:
    versions = {**fleets.SOUND["software"]["versions"], name: value}
    return answer(software__versions={key: text for key, text in versions.items() if text is not None})


def everywhere(**changes: object) -> Change:
    return lambda fleet: with_all(fleet, lambda each, index: with_answer(each, index, **changes))


def both(first: Change, second: Change) -> Change:
    return lambda fleet: second(first(fleet))


# One fault each, and all that may be found then: code, severity, host, and a part of what is said.
FAULTS: list[tuple[Change, str, Severity, str, str]] = [
    (host(answer=None, unreached="Permission denied (publickey)"), "DS1101", E, LAST, "Permission denied"),
    (lambda fleet: Fleet(fleet.intent, fleet.hosts, "pdsh"), "DS1102", E, ALL_HOSTS, "`pdsh` is not"),
    (host(answer=None, no_python="Killed"), "DS1103", E, LAST, "did not answer: Killed"),
    (answer(executable__can_run=False, executable__exists=False), "DS1103", E, LAST, "is not there"),
    (answer(executable__can_run=False), "DS1103", E, LAST, "cannot be run"),
    (answer(software__failure="Exec format error"), "DS1103", E, LAST, "does not start: Exec"),
    (answer(script_sha256=None), "DS1104", E, LAST, "`/home/me/train.py` cannot be read"),
    (answer(script_sha256="cd"), "DS1105", W, LAST, "another text"),
    (answer(software__errors={"torch": "ImportError: libcudart"}), "DS1106", E, LAST, "libcudart"),
    (version("deepspeed", None), "DS1106", E, LAST, "DeepSpeed is not installed"),
    (version("ds_toolkit", None), "DS1107", I, LAST, "ds_toolkit is not installed, others have it"),
    (answer(user_id=1001), "DS1108", W, LAST, "user id 1001, others have 1000"),
    (host(clock=Clock(59.0, 61.0)), "DS1109", W, LAST, "at least 59.0 s ahead"),
    (host(clock=Clock(-61.0, -59.0)), "DS1109", W, LAST, "at least 59.0 s behind"),
    (answer(storage__error="Permission denied"), "DS1110", E, LAST, "Permission denied"),
    (host(tokens=frozenset("2")), "DS1111", E, LAST, "another storage here than on worker-0"),
    (host(tokens=frozenset()), "DS1111", E, LAST, "another storage here than on worker-0"),
    (host(tokens=None), "DS1111", E, LAST, "did not say"),
    (answer(storage__space={"total_bytes": GB, "free_bytes": 99 * GB}), "DS1112", E, LAST, "need 400.0 GB"),
    (answer(storage__bytes_per_second=1.0 * GB), "DS1113", W, LAST, "takes 33.3 s"),
    (answer(shared_memory__free_bytes=64 * 2**20), "DS1114", E, LAST, "67.1 MB free on /dev/shm"),
    (answer(shared_memory__free_bytes=60 * GB), "DS1114", W, LAST, "snapshots need 66.7 GB"),
    (answer(shared_memory=None), "DS1114", E, LAST, "no /dev/shm"),
    (answer(limits__memlock_bytes=65536), "DS1115", W, LAST, "`ulimit -l` is 64 kB"),
    (answer(limits__open_files=1023), "DS1116", W, LAST, "is 1023, and ranks may need 1024"),
    (answer(memory__free_bytes=82 * GB), "DS1117", W, LAST, "8 ranks need 82.7 GB"),
    (answer(memory__free_bytes=GB, memory__limit_bytes=2 * GB), "DS1117", W, LAST, "a cgroup allows 2.0 GB"),
    (answer(interfaces={"lo": "unknown", "ens3": "up"}), "DS1118", E, LAST, "no such interface"),
    (answer(interfaces={"lo": "unknown", "eth0": "down"}), "DS1118", E, LAST, "eth0 is down"),
    (answer(infiniband={"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN"}), "DS1119", W, LAST, "1 active InfiniBand"),
    (
        both(lines("NCCL_IB_HCA=mlx5_0\n"), answer(infiniband={"mlx5_1:1": "ACTIVE", "mlx5_0:1": "DOWN"})),
        "DS1119",
        E,
        LAST,
        "names mlx5_0: mlx5_0:1 is DOWN",
    ),
    (answer(0, port_error="in use"), "DS1120", E, NAMES[0], "port 29500 cannot be used: in use"),
    (answer(gpus=7), "DS1121", E, LAST, "7 GPUs for 8 slots"),
    (answer(gpus=None, software__gpus=None), "DS1121", E, LAST, "0 GPUs for 8 slots"),
    (everywhere(gpus=None, software__gpus=None), "DS1122", I, ALL_HOSTS, "no GPU was seen"),
    (one_host, "DS1123", W, ALL_HOSTS, "NCCL_IB_HCA: the launcher reads the file for several hosts only"),
    (
        answer(variables={"NCCL_IB_DISABLE": "1"}),
        "DS1124",
        W,
        LAST,
        "NCCL_IB_DISABLE is `1` here, not set on",
    ),
    (answer(variables={"NCCL_TOKEN": "xyz"}), "DS1124", W, LAST, "NCCL_TOKEN is ******** here"),
    (answer(folder_exists=False), "DS1125", E, LAST, "`/home/me` is not there"),
    (
        intent(shell_variables={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}),
        "DS1126",
        I,
        ALL_HOSTS,
        "OMP_NUM_THREADS:",
    ),
    *(
        (
            version(name, "9.9"),
            "DS1107",
            E,
            LAST,
            f"{shown} 9.9, others have",
        )
        for name, shown in (
            ("python", "Python"),
            ("torch", "torch"),
            ("deepspeed", "DeepSpeed"),
            ("ds_toolkit", "ds_toolkit"),
            ("cuda", "CUDA"),
            ("nccl", "NCCL"),
        )
    ),
]


def test_sound_hosts_are_clean() -> None:
    assert judge(SOUND_FLEET) == []


@pytest.mark.parametrize(("change", "code", "severity", "where", "said"), FAULTS)
def test_one_fault_is_found_as_itself(
    change: Change, code: str, severity: Severity, where: str, said: str
) -> None:
    found = judge(change(SOUND_FLEET))
    assert {finding.code for finding in found} == {code}, found
    assert {finding.where.pointer for finding in found} == {where}
    assert found[0].severity is severity
    assert any(said in finding.message for finding in found), found
    assert all(finding.fix for finding in found)


def test_every_rule_has_a_fault_and_a_column() -> None:
    codes = {rule.code for rule in RULES}
    assert {code for _, code, *_ in FAULTS} == codes
    columns = [code for check in CHECKS for code in check.codes]
    assert sorted(columns) == sorted(codes)


@pytest.mark.parametrize(
    "change",
    [
        host(clock=Clock(-1.0, 61.0)),  # a slow answer says nothing about the clock
        lambda fleet: with_all(fleet, lambda each, index: with_host(each, index, clock=Clock(99.0, 99.5))),
        lines("NCCL_SOCKET_IFNAME=^docker\n"),
        # Checkpoints of 300 GB are there already, and four of 100 GB are needed.
        answer(storage__space={"total_bytes": 450 * GB, "free_bytes": 101 * GB}),
        lines("NCCL_SOCKET_IFNAME==eth0\n"),
        lines("NCCL_SOCKET_IFNAME=eth\n"),
        lines("WANDB_NAME=second try\n"),
        both(everywhere(limits__memlock_bytes=65536, infiniband={}), lines("NCCL_DEBUG=WARN\n")),
        intent(script=None),
        both(everywhere(gpus=None, software__gpus=None), lines("DS_ACCELERATOR=cpu\n")),
        both(lines("NCCL_IB_DISABLE=1\n"), answer(variables={"NCCL_IB_DISABLE": "0"})),
        intent(slots=dict.fromkeys(NAMES, 1)),
    ],
)
def test_what_is_no_fault(change: Change) -> None:
    assert judge(change(SOUND_FLEET)) == []


def test_of_two_hosts_the_first_one_is_right() -> None:
    two = Fleet(SOUND_FLEET.intent, SOUND_FLEET.hosts[:2])
    (finding,) = judge(with_answer(two, 1, user_id=7))
    assert (finding.where.pointer, finding.message) == (NAMES[1], "user id 7, others have 1000")


def test_hosts_that_see_no_probe_file_are_wrong_however_many_they_are() -> None:
    fleet = with_host(with_host(SOUND_FLEET, 1, tokens=frozenset()), 2, tokens=frozenset())
    findings = judge(fleet)
    assert [(finding.code, finding.where.pointer) for finding in findings] == [
        ("DS1111", NAMES[1]),
        ("DS1111", NAMES[2]),
    ]
    # What contradicts a finding does not stand beside it.
    cells = {host.name: dict(cells) for host, cells in table(fleet, findings)}
    storage = next(check for check in CHECKS if check.name == "storage")
    assert [cells[name][storage].text for name in NAMES] == ["shared", "", ""]


def test_the_worst_comes_first() -> None:
    fleet = with_answer(with_answer(SOUND_FLEET, 2, folder_exists=False), 1, user_id=7)
    findings = judge(fleet)
    assert [finding.severity for finding in findings] == [E, W]
    rows = table(fleet, findings)
    assert [each.name for each, _ in rows] == [NAMES[2], NAMES[1], NAMES[0]]
    assert [check.name for check, _ in rows[0][1]][:2] == ["folder, script", "user"]
    assert [cell.severity for _, cell in rows[0][1]][:3] == [E, None, None]


def test_the_report_names_hosts_and_masks_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = with_lines(SOUND_FLEET, "HF_TOKEN=hf_abc\nNCCL_DEBUG=WARN\nA=$B\n")
    fleet = with_answer(fleet, 0, variables={"NCCL_TOKEN": "xyz", "HF_TOKEN": "hf_abc"})
    fleet = with_host(fleet, 2, answer=None, unreached="\x1b[31mred")
    fleet = with_intent(fleet, shell_variables={"OMP_NUM_THREADS": "4"})
    findings = judge(fleet)
    print_report(fleet, findings)
    printed = capsys.readouterr().out
    assert "HF_TOKEN=********" in printed
    assert "NCCL_DEBUG=WARN" in printed
    assert "A: the remote shell changes it" in printed
    assert all(name in printed for name in NAMES)
    assert "\x1b" not in printed
    report = report_as_json(fleet, findings)
    text = json.dumps(report)
    for secret in ("hf_abc", "xyz"):
        assert secret not in printed + text
    assert {finding["host"] for finding in report["findings"]} >= {LAST, None}  # type: ignore[attr-defined]


def test_the_probe_needs_an_old_python_and_nothing_else() -> None:
    tree = ast.parse(Path(probe.__file__).read_text(), feature_version=(3, 6))
    imported = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert imported <= set(sys.stdlib_module_names)
