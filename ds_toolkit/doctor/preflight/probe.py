"""What runs on every host. Its text is sent there; it needs the standard library of Python 3.6, no more.

Each answer is one line of JSON behind `MARK`: first the clock, then what was asked for. torch and deepspeed
are imported in a process of their own, which may crash or hang without harm. Values of the environment stay
where they are unless their names were asked for.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

MARK = "DS_TOOLKIT_PREFLIGHT "
FILE_PREFIX = ".ds_toolkit_preflight-"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_FORGOTTEN_SECONDS = 3600
_CHUNK_BYTES = 2**23
_MOST_FILES = 20000
_VERSIONS = """
import json, os, sys
found, errors, gpus = {"python": sys.version.split()[0]}, {}, None
for name in ("torch", "deepspeed", "ds_toolkit"):
    try:
        module = __import__(name)
        found[name] = str(module.__version__)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            continue
        errors[name] = type(error).__name__ + ": " + str(error)[:300]
torch = sys.modules.get("torch")
try:
    found["cuda"] = str(torch.version.cuda or "none")
    if torch.version.cuda:
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        gpus = torch.cuda.device_count()
except Exception as error:
    if torch is not None:
        errors["nccl"] = type(error).__name__ + ": " + str(error)[:300]
answer = json.dumps({"versions": found, "errors": errors, "gpus": gpus})
os.write(1, ("\\n" + sys.argv[1] + answer + "\\n").encode())
os._exit(0)
"""


def main(request: "dict[str, object]") -> None:
    """Answer one request: `look` at the host, `read` the probe files of all hosts, or `remove` them."""
    _say({"clock_seconds": time.time()})
    actions = {"look": look, "read": read_tokens, "remove": remove_tokens}
    action, directory = str(request["action"]), request.get("checkpoint_dir")
    _say(actions[action](request))
    if action == "look" and directory:
        # Last, and a line of its own: it waits for a disk, which may never answer.
        _say(_storage(str(directory), request))


def _say(answer: "dict[str, object]") -> None:
    # A line of its own, whatever the shell's start-up files have printed.
    sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def look(request: "dict[str, object]") -> "dict[str, object]":
    """All there is to know about this host."""
    script, port = request.get("script"), request.get("master_port")
    return {
        "host_name": socket.gethostname(),
        "user_id": os.getuid(),
        "executable": _executable(str(request["python"])),
        "folder_exists": Path(str(request["folder"])).is_dir(),
        "script_sha256": _sha256(str(script)) if script else None,
        "software": _software(request),
        "gpus": _gpus_of_the_driver(float(str(request["driver_timeout_seconds"]))),
        "shared_memory": _space(Path(_SHARED_MEMORY)),
        "limits": {
            "memlock_bytes": _limit(resource.RLIMIT_MEMLOCK),
            "open_files": _limit(resource.RLIMIT_NOFILE),
        },
        "memory": _memory(),
        "interfaces": _interfaces(),
        "infiniband": _infiniband(),
        "port_error": _port_error(int(str(port))) if port else None,
        "variables": _variables(request),
    }


def _executable(path: str) -> "dict[str, object]":
    return {"exists": Path(path).exists(), "can_run": Path(path).is_file() and os.access(path, os.X_OK)}


def _sha256(path: str) -> "str | None":
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return None


def _software(request: "dict[str, object]") -> "dict[str, object]":
    folder, given = str(request["folder"]), request.get("environment")
    environment = dict(os.environ, **(given if isinstance(given, dict) else {}))
    command = [str(request["python"]), "-c", _VERSIONS, MARK]
    where = folder if Path(folder).is_dir() else None
    seconds = float(str(request["imports_timeout_seconds"]))
    output, failure = _output_of(command, seconds, environment, where)
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            try:
                return dict(json.loads(line[len(MARK) :]), failure=None)
            except ValueError:
                break
    last = (output.strip().splitlines() or [""])[-1][:300]
    return {"versions": {}, "errors": {}, "gpus": None, "failure": failure or last or "it printed nothing"}


def _output_of(
    command: "list[str]",
    timeout_seconds: float,
    environment: "dict[str, str] | None" = None,
    folder: "str | None" = None,
) -> "tuple[str, str | None]":
    """What a command printed, and how it failed if it did; its children end with it."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        return "", error.strerror or str(error)
    try:
        printed = process.communicate(timeout=timeout_seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"no answer within {timeout_seconds:g} s"
    return printed.decode("utf-8", "replace"), None


def _gpus_of_the_driver(timeout_seconds: float) -> "int | None":
    """GPUs that nvidia-smi lists; None where there is no such tool, or no driver."""
    output, failure = _output_of(["nvidia-smi", "-L"], timeout_seconds)
    names = re.findall(r"^GPU \d+:", output, re.MULTILINE)
    return len(names) if names and failure is None else None


def _limit(kind: int) -> "int | None":
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _space(folder: Path) -> "dict[str, object] | None":
    try:
        found = os.statvfs(str(folder))
    except OSError:
        return None
    return {"total_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _memory() -> "dict[str, object]":
    """What the host has and what it has left, and the nearest limit of a cgroup above this process."""
    known = dict(re.findall(r"^(\w+):\s*(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE))
    left = [int(known["MemAvailable"]) * 1024] if "MemAvailable" in known else []
    top, limits = Path("/sys/fs/cgroup"), []
    match = re.search(r"^0::/(.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    own = top / (match.group(1) if match else "")
    new = ("memory.max", "memory.current", "inactive_file")
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folders = [
        (folder, new) for folder in [own] + list(own.parents) if folder == top or top in folder.parents
    ]
    for folder, names in folders + [(top / "memory", old)]:
        limit, used = (_text(folder / name).strip() for name in names[:2])
        # Without a limit, version 1 of the cgroups reports the largest page-aligned 64-bit number.
        if limit.isdigit() and used.isdigit() and int(limit) < 2**60:
            idle = re.search(r"^" + names[2] + r" (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            limits.append(int(limit))
            left.append(max(0, int(limit) - int(used) + (int(idle.group(1)) if idle else 0)))
    return {
        "total_bytes": int(known["MemTotal"]) * 1024 if "MemTotal" in known else None,
        "free_bytes": min(left, default=None),
        "limit_bytes": min(limits, default=None),
    }


def _interfaces() -> "dict[str, str]":
    """Every network interface and the state in which the kernel has it (that of `lo` is `unknown`)."""
    paths = sorted(Path("/sys/class/net").glob("*"))
    return {path.name: _text(path / "operstate").strip() for path in paths}


def _infiniband() -> "dict[str, str]":
    """Every port of an InfiniBand or RoCE device, as `mlx5_0:1`, and its state."""
    paths = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return {
        path.parent.parent.name + ":" + path.name: _text(path / "state").strip().rpartition(" ")[2]
        for path in paths
    }


def _port_error(port: int) -> "str | None":
    """Why the rendezvous could not listen at a port; None if it could. Bound as torch's store binds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else error.strerror
    return None


def _variables(request: "dict[str, object]") -> "dict[str, str]":
    wanted = re.compile(str(request["variables"]))
    return {name: value for name, value in sorted(os.environ.items()) if wanted.match(name)}


def _nearest(directory: str) -> Path:
    """The directory itself, or the nearest folder above it that is there: the guard makes the rest."""
    path = Path(directory)
    return next((folder for folder in [path] + list(path.parents) if folder.is_dir()), path)


def _storage(directory: str, request: "dict[str, object]") -> "dict[str, object]":
    """Space and speed of the checkpoint directory; leaves a probe file for the other hosts to read."""
    folder = _nearest(directory)
    error, speed = None, None
    try:
        _forget_old_files(folder)
        with _probe_file(folder, request, request["index"]).open("w") as file:
            file.write(str(request["token"]))
            file.flush()
            os.fsync(file.fileno())
        speed = _write_speed(folder, int(str(request["write_bytes"])), float(str(request["write_seconds"])))
    except OSError as problem:
        error = problem.strerror or str(problem)
    sizes = _tag_sizes(Path(directory))
    return {
        "folder": str(folder),
        "error": error,
        "space": _space(folder),
        "bytes_per_second": speed,
        "largest_tag_bytes": max(sizes, default=0),
        "all_tags_bytes": sum(sizes),
    }


def _forget_old_files(folder: Path) -> None:
    # Of a preflight that was killed.
    for path in folder.glob(FILE_PREFIX + "*"):
        if time.time() - path.lstat().st_mtime > _FORGOTTEN_SECONDS:
            path.unlink()


def _write_speed(folder: Path, num_bytes: int, longest_seconds: float) -> float:
    """Bytes per second that reach the disk, flushed; fewer bytes are written where it is slow."""
    path = folder / f"{FILE_PREFIX}speed-{os.getpid()}-{socket.gethostname()}"
    # Not compressible: some file systems would store zeros for nothing.
    chunk = os.urandom(min(_CHUNK_BYTES, num_bytes))
    started, written = time.monotonic(), 0
    handle = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while written < num_bytes and time.monotonic() - started < longest_seconds:
            written += os.write(handle, chunk)
            os.fsync(handle)
    finally:
        os.close(handle)
        path.unlink()
    return written / max(time.monotonic() - started, 1e-9)


def _tag_sizes(directory: Path) -> "list[int]":
    """The sizes of the folders in a checkpoint directory, as far as so many files can be looked at."""
    sizes, seen = [], 0
    for folder in sorted(path for path in directory.glob("*") if path.is_dir()):
        sizes.append(0)
        for parent, _, names in os.walk(str(folder)):
            for name in names[: max(0, _MOST_FILES - seen)]:
                with contextlib.suppress(OSError):
                    sizes[-1] += Path(parent, name).lstat().st_size
            seen += len(names)
    return sizes


def _probe_file(folder: Path, request: "dict[str, object]", index: object) -> Path:
    return folder / (FILE_PREFIX + str(request["run"]) + "-" + str(index))


def read_tokens(request: "dict[str, object]") -> "dict[str, object]":
    """What the probe files say that can be read here: those of all hosts where the storage is shared."""
    folder = _nearest(str(request["checkpoint_dir"]))
    # By their names: NFS may list a folder as it was half a minute ago.
    indices = range(int(str(request["num_read"])))
    texts = [_text(_probe_file(folder, request, index)) for index in indices]
    return {"tokens": [text for text in texts if text]}


def remove_tokens(request: "dict[str, object]") -> "dict[str, object]":
    """Remove what this host has left."""
    folder = _nearest(str(request["checkpoint_dir"]))
    with contextlib.suppress(OSError):
        _probe_file(folder, request, request["index"]).unlink()
    return {"tokens": []}
