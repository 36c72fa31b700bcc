"""DS110x: whether the ranks would start on every host, and be the same program everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, RULES, THIS_CLOCK, Clock, Fleet
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_NEEDED = ("torch", "deepspeed")
_NAMES = {
    "python": "Python",
    "torch": "torch",
    "deepspeed": "DeepSpeed",
    "ds_toolkit": "ds_toolkit",
    "cuda": "CUDA",
    "nccl": "NCCL",
}
_MOST_APART_SECONDS = 5.0
_UNREACHED_FIXES = (
    ("Permission denied", "put your public key into its ~/.ssh/authorized_keys (ssh-copy-id)"),
    ("Host key verification failed", "connect once by hand, or put its key into ~/.ssh/known_hosts"),
    ("Could not resolve hostname", "correct the name in the hostfile, or in /etc/hosts"),
    ("Connection refused", "start its ssh server, or say its port in ~/.ssh/config"),
    ("no answer within", "look whether the host is up and answers; --timeout gives it longer"),
    ("not the name of a host", "write a name or an address into the hostfile"),
)


@RULES.rule("DS1101", "unreachable-host", Severity.ERROR)
def unreachable_host(fleet: Fleet) -> Iterator[Problem]:
    """A host cannot be reached without a password, and the launcher would wait or stop there.

    It was asked as DeepSpeed's launcher asks: by pdsh over ssh, or by ssh. Nobody is there to answer a
    question for a password or a new host's key, so both count as unreachable.

    Bad:
        ssh: connect to host worker-1 port 22: Connection refused
    Bad:
        worker-1 takes the connection, and never answers
    Good:
        `ssh -o BatchMode=yes worker-1 true` ends with 0
    """
    for host in fleet.hosts:
        if host.unreached is not None:
            fix = next((fix for word, fix in _UNREACHED_FIXES if word in host.unreached), None)
            general = f"make `ssh -o BatchMode=yes {host.name} true` work"
            yield Problem(host.name, f"it cannot be reached: {host.unreached}", fix or general)


@RULES.rule("DS1102", "launcher-not-installed", Severity.ERROR)
def launcher_not_installed(fleet: Fleet) -> Iterator[Problem]:
    """The program that the launcher needs is not installed on the host where the job is started.

    DeepSpeed's own default is pdsh; it stops with `launcher 'pdsh' not installed`.

    Bad:
        `deepspeed --hostfile hostfile train.py`, and no pdsh on the PATH
    Good:
        pdsh is installed
    """
    if fleet.missing_tool is not None:
        message = f"`{fleet.missing_tool}` is not installed here, and {fleet.intent.launcher.value} needs it"
        yield Problem(ALL_HOSTS, message, f"install {fleet.missing_tool}, or give another --launcher")


@RULES.rule("DS1103", "python-not-there", Severity.ERROR)
def python_not_there(fleet: Fleet) -> Iterator[Problem]:
    """The Python that starts the launch is not at the same path on every host, or does not start there.

    DeepSpeed's launcher starts the ranks with its own `sys.executable`; where that is missing the remote
    shell says `No such file or directory`, and the launch ends with exit code 127.

    Bad:
        /opt/venv/bin/python is on worker-0 only
    Good:
        every host has /opt/venv/bin/python
    """
    python = fleet.intent.python
    fix = "install the same environment at the same path on every host, or put it on shared storage"
    for host in fleet.hosts:
        if host.no_python is not None:
            yield Problem(host.name, f"`{python}` did not answer: {host.no_python}", fix)
        elif host.answer is not None:
            if not host.answer.executable.can_run:
                found = "cannot be run" if host.answer.executable.exists else "is not there"
                yield Problem(host.name, f"`{python}` {found}", fix)
            elif host.answer.software.failure is not None:
                yield Problem(host.name, f"`{python}` does not start: {host.answer.software.failure}", fix)


@RULES.rule("DS1104", "script-not-there", Severity.ERROR)
def script_not_there(fleet: Fleet) -> Iterator[Problem]:
    """The training script cannot be read at the same path on every host.

    Bad:
        /data/train.py is on worker-0 only
    Good:
        every host has /data/train.py
    """
    for host, answer in fleet.answers:
        if fleet.intent.script is not None and answer.script_sha256 is None:
            fix = "copy it there, or put it on shared storage"
            yield Problem(host.name, f"`{fleet.intent.script}` cannot be read", fix)


@RULES.rule("DS1105", "script-differs", Severity.WARNING)
def script_differs(fleet: Fleet) -> Iterator[Problem]:
    """The training script is another one on some hosts: ranks that run different code wait for each other.

    Bad:
        /data/train.py was changed on worker-0 alone
    Good:
        the same text everywhere
    """
    there = any(answer.script_sha256 for _, answer in fleet.answers)
    for host, found, usual in fleet.odd_ones(lambda answer: answer.script_sha256):
        if there and found is not None and usual is not None:
            yield Problem(host.name, f"`{fleet.intent.script}` has another text here", "copy it to all hosts")


@RULES.rule("DS1106", "package-not-importable", Severity.ERROR)
def package_not_importable(fleet: Fleet) -> Iterator[Problem]:
    """torch or deepspeed is missing on a host, or its import fails there.

    They are imported as the launch would: by its Python, in its folder, with its PYTHONPATH.

    Bad:
        worker-1: ImportError: libcudart.so.12: cannot open shared object file
    Good:
        torch and deepspeed can be imported on every host
    """
    for host, answer in fleet.answers:
        if answer.software.failure is not None or not answer.executable.can_run:
            continue
        for name, why in answer.software.errors.items():
            fix = "the same installation on every host, and LD_LIBRARY_PATH if it is a library"
            yield Problem(host.name, f"{_NAMES.get(name, name)} cannot be used: {why}", fix)
        for name in _NEEDED:
            if name not in answer.software.versions and name not in answer.software.errors:
                yield Problem(host.name, f"{_NAMES[name]} is not installed", f"install {name} there")


@RULES.rule("DS1107", "versions-differ", Severity.ERROR)
def versions_differ(fleet: Fleet) -> Iterator[Problem]:
    """Python, torch, DeepSpeed, CUDA, NCCL or ds_toolkit has another version on some hosts.

    Ranks of different versions may hang in their first collective, or crash in it.

    Bad:
        torch 2.6.0 on worker-0, 2.5.1 on worker-1
    Good:
        the same versions everywhere
    """
    for name, shown in _NAMES.items():

        def version(answer: Answer, name: str = name) -> str | None:
            return answer.software.versions.get(name)

        for host, found, usual in fleet.odd_ones(version):
            # What cannot be imported has a finding of its own.
            if found is not None and usual is not None:
                yield Problem(host.name, f"{shown} {found}, others have {usual}", f"install {name} {usual}")
            elif name == "ds_toolkit":
                told = "is not installed, others have it" if found is None else "is installed, others lack it"
                yield Problem(host.name, f"ds_toolkit {told}", "the same on every host", None, Severity.INFO)


@RULES.rule("DS1108", "user-ids-differ", Severity.WARNING)
def user_ids_differ(fleet: Fleet) -> Iterator[Problem]:
    """The user has another number on some hosts, so that files on shared storage belong to a stranger.

    Bad:
        user id 1000 on worker-0, 1001 on worker-1
    Good:
        the same user id everywhere
    """
    for host, found, usual in fleet.odd_ones(lambda answer: answer.user_id):
        fix = "give the user the same number on every host"
        yield Problem(host.name, f"user id {found}, others have {usual}", fix)


@RULES.rule("DS1109", "clocks-apart", Severity.WARNING)
def clocks_apart(fleet: Fleet) -> Iterator[Problem]:
    """A clock is more than 5 s from that of most hosts.

    Logs of different hosts cannot be put in order then, and files seem to come from the future. How long the
    answer was under way is taken into account: only what is certainly too far apart is reported.

    Bad:
        worker-1 is 60 s ahead
    Good:
        all clocks follow the same server
    """
    clocks = {host.name: host.clock for host in fleet.hosts if host.clock is not None}

    def close_to(clock: Clock) -> int:
        return sum(abs(other.ahead_seconds(clock)) <= _MOST_APART_SECONDS for other in clocks.values())

    # The clock with which most agree; this host's where as many agree with it as with any other.
    usual = max([THIS_CLOCK, *clocks.values()], key=close_to)
    for name, clock in clocks.items():
        ahead = clock.ahead_seconds(usual)
        if abs(ahead) > _MOST_APART_SECONDS:
            direction = "ahead of" if ahead > 0 else "behind"
            message = f"its clock is at least {abs(ahead):.1f} s {direction} that of others"
            yield Problem(name, message, "let chrony or systemd-timesyncd set the clocks")


@RULES.rule("DS1125", "folder-not-there", Severity.ERROR)
def folder_not_there(fleet: Fleet) -> Iterator[Problem]:
    """The folder in which the launch is started is missing on a host; pdsh goes there before it starts ranks.

    Bad:
        the launch begins in /home/me/project, which worker-1 does not have
    Good:
        every host has the folder
    """
    for host, answer in fleet.answers:
        if not answer.folder_exists and fleet.intent.launcher is Launcher.PDSH:
            fix = "make it there, or start from a folder on shared storage"
            yield Problem(host.name, f"`{fleet.intent.folder}` is not there", fix)
