"""DS1114 to DS1122: memory, limits, network, port and GPUs of every host."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.fleet import ALL_HOSTS, RULES, Fleet
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem
from ds_toolkit.units import counted, format_bytes

# The NCCL user guide (Troubleshooting, Shared Memory and Memory) asks for --shm-size=1g --ulimit memlock=-1.
NCCL_SHARED_MEMORY_BYTES = 2**30
# Interpreter, torch and a CUDA context of one rank, before it has any data.
RANK_MEMORY_BYTES = 2 * 10**9
# The kernel's own default.
LEAST_OPEN_FILES = 1024
# A rank may hold sockets to every other one, for its store, NCCL and gloo.
_FILES_PER_RANK = 4
_UP = ("up", "unknown")


@RULES.rule("DS1114", "little-shared-memory", Severity.ERROR)
def little_shared_memory(fleet: Fleet) -> Iterator[Problem]:
    """`/dev/shm` is too small for NCCL and DataLoader workers, or, as a warning, for snapshots.

    NCCL asks for 1 GiB in a container; docker gives 64 MB, and ranks end with `No space left on device` or
    SIGBUS. Snapshots need two or three times a host's part of a checkpoint there; without that room the guard
    refuses to start, unless `arena` names another folder.

    Bad:
        a container with a /dev/shm of 64 MB
    Good:
        docker run --shm-size=16g
    """
    fix = "give the container a larger /dev/shm (--shm-size, or a medium: Memory volume)"
    for host, answer in fleet.answers:
        if answer.shared_memory is None:
            yield Problem(host.name, "there is no /dev/shm", "mount a tmpfs there")
            continue
        free_bytes = answer.shared_memory.free_bytes
        if free_bytes < NCCL_SHARED_MEMORY_BYTES:
            needed = format_bytes(NCCL_SHARED_MEMORY_BYTES)
            message = f"{format_bytes(free_bytes)} free on /dev/shm; NCCL and DataLoaders want {needed}"
            yield Problem(host.name, message, fix)
        elif free_bytes < NCCL_SHARED_MEMORY_BYTES + arena_bytes(fleet):
            message = (
                f"{format_bytes(free_bytes)} free on /dev/shm; snapshots need"
                f" {format_bytes(arena_bytes(fleet))} beside NCCL"
            )
            wider = f"{fix}, or set `arena` to a folder on a fast local disk"
            yield Problem(host.name, message, wider, None, Severity.WARNING)


def arena_bytes(fleet: Fleet) -> int:
    """What snapshots take on `/dev/shm` of one host; 0 where there are none, or their size is not known."""
    return fleet.intent.arena_slots * (fleet.checkpoint_bytes or 0) // len(fleet.hosts)


@RULES.rule("DS1115", "locked-memory-limited", Severity.WARNING)
def locked_memory_limited(fleet: Fleet) -> Iterator[Problem]:
    """`ulimit -l` limits locked memory on a host with InfiniBand or RoCE, which pins its buffers.

    NCCL's network plug-in then fails to register memory, and NCCL stops or falls back to sockets.

    Bad:
        `ulimit -l` says 8192 over ssh
    Good:
        * - memlock unlimited in /etc/security/limits.conf
    """
    for host, answer in fleet.answers:
        limit = answer.limits.memlock_bytes
        if limit is not None and answer.infiniband:
            message = f"`ulimit -l` is {limit // 1024} kB, and InfiniBand pins memory"
            yield Problem(host.name, message, "memlock unlimited: limits.conf, or docker --ulimit memlock=-1")


@RULES.rule("DS1116", "few-open-files", Severity.WARNING)
def few_open_files(fleet: Fleet) -> Iterator[Problem]:
    """`ulimit -n` lets a rank open fewer files and sockets than it may need: 1024, or 4 for each rank.

    `Too many open files` then comes from NCCL, gloo or DataLoader workers, often hours into a run.

    Bad:
        `ulimit -n` says 256
    Good:
        `ulimit -n` says 65536
    """
    num_ranks = sum(slots or 0 for slots in fleet.intent.slots.values())
    needed = max(LEAST_OPEN_FILES, _FILES_PER_RANK * num_ranks)
    for host, answer in fleet.answers:
        limit = answer.limits.open_files
        if limit is not None and limit < needed:
            message = f"`ulimit -n` is {limit}, and ranks may need {needed}"
            yield Problem(host.name, message, "raise nofile in limits.conf, or docker --ulimit nofile=65536")


@RULES.rule("DS1117", "little-host-memory", Severity.WARNING)
def little_host_memory(fleet: Fleet) -> Iterator[Problem]:
    """A host, or the cgroup that ranks would run in, has too little memory left.

    Needed are 2 GB for each slot (interpreter, torch, a CUDA context) and what the snapshots take. Data,
    offloaded states and a checkpoint that is being loaded come on top.

    Bad:
        8 slots, and a cgroup's limit leaves 12 GB
    Good:
        8 slots, 200 GB free
    """
    for host, answer in fleet.answers:
        slots = fleet.intent.slots.get(host.name) or 1
        needed_bytes = slots * RANK_MEMORY_BYTES + arena_bytes(fleet)
        free_bytes = answer.memory.free_bytes
        if free_bytes is not None and free_bytes < needed_bytes:
            limit = answer.memory.limit_bytes
            cgroup = f" (a cgroup allows {format_bytes(limit)})" if limit is not None else ""
            message = (
                f"{format_bytes(free_bytes)} of memory are left{cgroup};"
                f" {counted(slots, 'rank')} need {format_bytes(needed_bytes)} to begin with"
            )
            yield Problem(host.name, message, "end what takes the memory, or raise the cgroup's limit")


@RULES.rule("DS1118", "interface-not-up", Severity.ERROR)
def interface_not_up(fleet: Fleet) -> Iterator[Problem]:
    """The environment file names a network interface that a host does not have, or that is down there.

    NCCL takes a list of prefixes, with `=` before it for exact names and `^` for all but these; gloo takes
    exact names.

    Bad:
        NCCL_SOCKET_IFNAME=eth0, and worker-1 calls its interface ens3
    Good:
        NCCL_SOCKET_IFNAME=eth0, which is up on every host
    """
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        said = fleet.intent.settings.get(variable, "")
        if not said or said.startswith("^"):
            continue
        exact = said.startswith("=") or variable.startswith("GLOO")
        names = said.lstrip("=").split(",")
        for host, answer in fleet.answers:
            states = {
                name: state
                for name, state in answer.interfaces.items()
                if (name in names if exact else name.startswith(tuple(names)))
            }
            if not any(state in _UP for state in states.values()):
                found = ", ".join(f"{name} is {state}" for name, state in states.items())
                there = ", ".join(name for name, state in answer.interfaces.items() if state == "up")
                message = f"{variable}={said}: {found or 'there is no such interface'}"
                yield Problem(host.name, message, f"up there: {there or 'none'}")


@RULES.rule("DS1119", "infiniband-not-active", Severity.WARNING)
def infiniband_not_active(fleet: Fleet) -> Iterator[Problem]:
    """A port of InfiniBand or RoCE has no link, or a host has fewer of them than the others.

    NCCL uses the same number of ports on every host and waits for the slowest; with none it takes sockets. A
    device that NCCL_IB_HCA names and that has no active port is an error.

    Bad:
        mlx5_3:1 is DOWN on worker-1
    Good:
        eight ports, all ACTIVE, on every host
    """
    said = fleet.intent.settings.get("NCCL_IB_HCA", "")
    named = [] if said.startswith("^") else [part for part in said.lstrip("=").split(",") if part]
    for host, answer in fleet.answers:
        for device in named:
            ports = {port: state for port, state in answer.infiniband.items() if port.startswith(device)}
            if "ACTIVE" not in ports.values():
                found = ", ".join(f"{port} is {state}" for port, state in ports.items())
                message = f"NCCL_IB_HCA names {device}: {found or 'there is no such device'}"
                yield Problem(host.name, message, "correct the name, or mend the link", None, Severity.ERROR)
        for port, state in answer.infiniband.items():
            if state != "ACTIVE" and not any(port.startswith(device) for device in named):
                yield Problem(
                    host.name, f"{port} is {state}", "mend the link, or leave it out by NCCL_IB_HCA"
                )
    for host, active, usual in fleet.odd_ones(lambda answer: answer.active_ports):
        message = f"{active} active InfiniBand ports, others have {usual}"
        yield Problem(host.name, message, "make the hosts equal, or name the ports in NCCL_IB_HCA")


@RULES.rule("DS1120", "master-port-taken", Severity.ERROR)
def master_port_taken(fleet: Fleet) -> Iterator[Problem]:
    """Something on the first host listens at the port where the ranks are to meet.

    The job would end with `EADDRINUSE`, or join what another job has there.

    Bad:
        another job on worker-0 has taken port 29500
    Good:
        deepspeed --master_port 29501
    """
    for host, answer in fleet.answers:
        if answer.port_error is not None:
            message = f"port {fleet.intent.master_port} cannot be used: {answer.port_error}"
            yield Problem(host.name, message, "give another --master_port, or end what listens there")


@RULES.rule("DS1121", "fewer-gpus-than-slots", Severity.ERROR)
def fewer_gpus_than_slots(fleet: Fleet) -> Iterator[Problem]:
    """A host has fewer GPUs than slots in the hostfile, or none where others have some.

    The ranks above that number end with `invalid device ordinal`.

    Bad:
        worker-1 slots=8, and nvidia-smi lists 7
    Good:
        worker-1 slots=8, and nvidia-smi lists 8
    """
    if not any(answer.num_gpus for _, answer in fleet.answers) or _on_cpu(fleet):
        return
    for host, answer in fleet.answers:
        slots, gpus = fleet.intent.slots.get(host.name) or 1, answer.num_gpus or 0
        if gpus < slots:
            message = f"{counted(gpus, 'GPU')} for {counted(slots, 'slot')}"
            yield Problem(host.name, message, "look at nvidia-smi there, or correct the hostfile")


@RULES.rule("DS1122", "no-gpu-seen", Severity.INFO)
def no_gpu_seen(fleet: Fleet) -> Iterator[Problem]:
    """No host shows a GPU, neither to nvidia-smi nor to torch; so the slots could not be compared.

    That is right for a run on CPUs (`DS_ACCELERATOR=cpu`), and for GPUs of other makers, which preflight does
    not count.

    Bad:
        no nvidia-smi on any host
    Good:
        `DS_ACCELERATOR=cpu` in the environment file
    """
    seen: list[Answer] = [answer for _, answer in fleet.answers]
    if seen and not any(answer.num_gpus for answer in seen) and not _on_cpu(fleet):
        message = "no GPU was seen on any host: slots were not compared with GPUs"
        yield Problem(ALL_HOSTS, message, "for a run on CPUs set DS_ACCELERATOR=cpu in the environment file")


def _on_cpu(fleet: Fleet) -> bool:
    return fleet.intent.settings.get("DS_ACCELERATOR") == "cpu"
