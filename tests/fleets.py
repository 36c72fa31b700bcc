"""Answers of hosts without a fault, to plant one in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.fleet import Clock, Fleet, Host, Intent
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.launchers import Launcher

GB = 10**9
NAMES = ("worker-0", "worker-1", "worker-2")
SOUND: dict[str, Any] = {
    "host_name": "worker",
    "user_id": 1000,
    "executable": {"exists": True, "can_run": True},
    "folder_exists": True,
    "script_sha256": "ab",
    "software": {
        "versions": {
            "python": "3.11.7",
            "torch": "2.6.0",
            "deepspeed": "0.19.8",
            "ds_toolkit": "0.1.0",
            "cuda": "12.4",
            "nccl": "2.21.5",
        },
        "errors": {},
        "gpus": 8,
        "failure": None,
    },
    "gpus": 8,
    "shared_memory": {"total_bytes": 500 * GB, "free_bytes": 500 * GB},
    "limits": {"memlock_bytes": None, "open_files": 65536},
    "memory": {"total_bytes": 1000 * GB, "free_bytes": 900 * GB, "limit_bytes": None},
    "interfaces": {"lo": "unknown", "eth0": "up", "eth1": "down"},
    "infiniband": {"mlx5_0:1": "ACTIVE", "mlx5_1:1": "ACTIVE"},
    "port_error": None,
    "variables": {},
    "storage": {
        "folder": "/data/checkpoints",
        "error": None,
        "space": {"total_bytes": 9000 * GB, "free_bytes": 5000 * GB},
        "bytes_per_second": 3.0 * GB,
        "largest_tag_bytes": 100 * GB,
        "all_tags_bytes": 300 * GB,
    },
}
INTENT = Intent(
    slots=dict.fromkeys(NAMES, 8),
    launcher=Launcher.PDSH,
    python="/opt/venv/bin/python",
    folder="/home/me",
    script="/home/me/train.py",
    checkpoint_dir="/data/checkpoints",
    env_file=parse_env_text("NCCL_SOCKET_IFNAME=eth0\nGLOO_SOCKET_IFNAME=eth0\nNCCL_IB_HCA=mlx5\n"),
    arena_slots=2,
)
SOUND_HOSTS = tuple(
    Host(name, Answer.model_validate(SOUND), clock=Clock(-0.1, 0.1), tokens=frozenset("012"))
    for name in NAMES
)
SOUND_FLEET = Fleet(INTENT, SOUND_HOSTS)


def with_answer(fleet: Fleet, index: int, **changes: object) -> Fleet:
    """One host says something else; a change of `a__b` is one of a member."""
    answer = fleet.hosts[index].answer
    assert answer is not None
    data = answer.model_dump()
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = data
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return with_host(fleet, index, answer=Answer.model_validate(data))


def with_host(fleet: Fleet, index: int, **changes: Any) -> Fleet:
    """One host came out otherwise."""
    hosts = list(fleet.hosts)
    hosts[index] = replace(hosts[index], **changes)
    return replace(fleet, hosts=tuple(hosts))


def with_intent(fleet: Fleet, **changes: Any) -> Fleet:
    """The launch is another one."""
    return replace(fleet, intent=replace(fleet.intent, **changes))


def with_all(fleet: Fleet, change: Callable[[Fleet, int], Fleet]) -> Fleet:
    """Every host is changed."""
    for index in range(len(fleet.hosts)):
        fleet = change(fleet, index)
    return fleet


def with_lines(fleet: Fleet, text: str, slots: Mapping[str, int] | None = None) -> Fleet:
    """Another environment file."""
    fleet = with_intent(fleet, env_file=parse_env_text(text))
    return fleet if slots is None else with_intent(fleet, slots=slots)
