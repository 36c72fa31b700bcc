"""A launch over two nodes that are one machine: generated files reach real ranks through pdsh and sshd."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import nodes
import pytest

from ds_toolkit.advise.environment import advise_environment
from ds_toolkit.advise.launching import Launch, hostfile_text, launch_script
from ds_toolkit.env.envfile import parse_env_text
from ds_toolkit.env.fabric import detect_host
from ds_toolkit.env.launchers import Launcher

HOSTS = list(nodes.HOSTS)
RANK = """
import json, os, sys
import deepspeed, torch
from ds_toolkit import skip_cpu_extension_builds
skip_cpu_extension_builds()
deepspeed.init_distributed(verbose=False)
total = torch.ones(1) * (deepspeed.comm.get_rank() + 1)
deepspeed.comm.all_reduce(total)
names = json.loads(open("names.json").read())
seen = {name: os.environ.get(name) for name in names}
line = json.dumps({"rank": deepspeed.comm.get_rank(), "node": os.environ["CROSS_RANK"], "sum": total.item(),
                   "seen": seen, "arguments": sys.argv[1:]})
os.write(1, f"\\nRANK {line}\\n".encode())
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
os._exit(0)
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """An ssh server of our own for both addresses, and a home folder whose ssh trusts it."""
    with nodes.ssh_server(tmp_path / "home") as home:
        yield home


def test_two_nodes_get_the_generated_environment(ssh: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    # What a person has to say on a machine without GPUs; the rest is generated.
    own = "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n"
    existing = parse_env_text(f"{own}PYTHONPATH={jobs.REPOSITORY}\n")
    advice = advise_environment(detect_host(), hosts=HOSTS, existing=existing)
    variables = parse_env_text(advice.text).variables
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in variables
    launch = Launch(
        Launcher.PDSH,
        num_nodes=2,
        gpus_per_node=1,
        python=sys.executable,
        folder=str(folder),
        script="rank.py",
        master_port=jobs.free_port(),
        # Both hosts are this one, whose own name leads to neither address.
        master_addr=HOSTS[0],
    )
    files = {
        ".deepspeed_env": advice.text,
        "hostfile": hostfile_text(HOSTS, 1),
        "rank.py": RANK,
        "names.json": json.dumps(sorted(variables)),
        "launch.sh": launch_script(launch),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    environment = {
        "PATH": f"{ssh / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(ssh),
        "PDSH_RCMD_TYPE": "ssh",
    }
    finished = jobs.run(
        ["bash", folder / "launch.sh", "--lr", "1"], environment=environment, timeout_seconds=90
    )
    lines = [
        json.loads(line.partition("RANK ")[2])
        for line in finished.check().output.splitlines()
        if "RANK {" in line
    ]
    assert sorted(line["rank"] for line in lines) == [0, 1], finished.output[-3000:]
    assert sorted(line["node"] for line in lines) == ["0", "1"]
    for line in lines:
        assert line["sum"] == 3.0
        assert line["seen"] == variables
        assert line["arguments"][-2:] == ["--lr", "1"]
