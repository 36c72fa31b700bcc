"""Two nodes that are one machine: addresses of the loopback network, and an ssh server of our own."""

from __future__ import annotations

import contextlib
import getpass
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jobs

HOSTS = ("127.0.0.2", "127.0.0.3")
SERVER = "/usr/sbin/sshd"


@contextlib.contextmanager
def ssh_server(
    home: Path, hosts: Sequence[str] = HOSTS, forced: Mapping[str, Path] | None = None
) -> Iterator[Path]:
    """A server for these addresses, and a folder `home/bin` with an ssh that trusts it.

    Args:
        home: a folder that is not there yet; in the block it holds `ssh_config` too.
        hosts: addresses.
        forced: of some hosts, the script that is run instead of what was asked for (ForceCommand).
    """
    (home / ".ssh").mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / ".ssh" / name], check=True
        )
    port = jobs.free_port()
    addresses = "".join(f"ListenAddress {host}\n" for host in hosts)
    matches = "".join(
        f"Match LocalAddress {host}\n  ForceCommand {script}\n" for host, script in (forced or {}).items()
    )
    (home / "sshd_config").write_text(
        f"Port {port}\n{addresses}HostKey {home}/.ssh/host\nAuthorizedKeysFile {home}/.ssh/user.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile {home}/sshd.pid\nPermitRootLogin yes\n{matches}"
    )
    # ssh takes the home folder from the user database, not from HOME, so it is told its configuration.
    (home / "ssh_config").write_text(
        f"Host 127.0.0.*\n  User {getpass.getuser()}\n  IdentityFile {home}/.ssh/user\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        f"  Port {port}\n"
    )
    tools = home / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {home}/ssh_config "$@"\n')
    (tools / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    log = (home / "sshd.log").open("w")
    server = subprocess.Popen([SERVER, "-D", "-e", "-f", home / "sshd_config"], stderr=log)
    try:
        deadline = time.monotonic() + 10
        while subprocess.run([tools / "ssh", hosts[0], "true"], check=False, stderr=log).returncode:
            assert time.monotonic() < deadline, (home / "sshd.log").read_text()
            time.sleep(0.1)
        yield home
    finally:
        server.terminate()
        server.wait(timeout=10)
        log.close()


def port_of(home: Path) -> int:
    """Where that server listens, and where its ssh looks for every host."""
    return int((home / "ssh_config").read_text().split()[-1])
