"""Every host at once, each with its own time limit: one that never answers does not hold up the others."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pydantic import ValidationError

from ds_toolkit.doctor.preflight.answers import Answer
from ds_toolkit.doctor.preflight.carrying import (
    HOST_NAME,
    NO_PYTHON,
    local_command,
    missing_tool,
    remote_command,
)
from ds_toolkit.doctor.preflight.fleet import RELEVANT, Fleet, Host, Intent
from ds_toolkit.doctor.preflight.running import Reply, run_command
from ds_toolkit.env.secret_names import looks_like_a_secret

# DeepSpeed gives pdsh the same number.
_MOST_AT_ONCE = 1024
# Probe files of the first hosts tell who shares their storage; all of a thousand would be a million reads.
_MOST_READ = 64
_WRITE_BYTES, _WRITE_SECONDS = 64 * 2**20, 5.0
# How long hosts have to remove their probe files where somebody waits for the end.
_CLEARING_SECONDS = 3.0


def ask_all(intent: Intent, timeout_seconds: float) -> Fleet:
    """Ask every host, and let them read each other's probe files where there is a checkpoint directory.

    Args:
        intent: the launch that is meant.
        timeout_seconds: how long one host may take for each of the questions.
    """
    asking = _Asking(intent, timeout_seconds)
    hosts, run = intent.hosts, secrets.token_hex(8)
    requests = [_request(intent, run, index, timeout_seconds) for index in range(len(hosts))]
    found = [Host(name) for name in hosts]
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as threads:
        try:
            found = list(threads.map(asking.look, found, requests))
            if intent.checkpoint_dir is not None:
                found = list(threads.map(asking.read, found, requests))
        except BaseException:
            # Somebody wants an end of this: what is on its way is ended, and only the probe files still go.
            asking.stop.set()
            asking = _Asking(intent, min(timeout_seconds, _CLEARING_SECONDS))
            raise
        finally:
            if intent.checkpoint_dir is not None:
                list(threads.map(asking.remove, found, requests))
    return Fleet(intent, tuple(found), None if intent.is_local else missing_tool(intent.launcher))


def _request(intent: Intent, run: str, index: int, timeout_seconds: float) -> dict[str, object]:
    # The values of secrets stay where they are.
    names = [name for name in intent.settings if not looks_like_a_secret(name)]
    pattern = "|".join([RELEVANT.pattern, *(f"{re.escape(name)}$" for name in names)])
    return {
        "action": "look",
        "python": intent.python,
        "folder": intent.folder,
        "script": intent.script,
        "checkpoint_dir": intent.checkpoint_dir,
        "master_port": intent.master_port if index == 0 else None,
        "run": run,
        "index": index,
        "token": f"{run} {index}",
        "num_read": min(len(intent.hosts), _MOST_READ),
        "write_bytes": _WRITE_BYTES,
        # Together less than the whole, so that what is known is said in time.
        "write_seconds": min(_WRITE_SECONDS, timeout_seconds * 0.1),
        "driver_timeout_seconds": timeout_seconds * 0.15,
        "imports_timeout_seconds": timeout_seconds * 0.6,
        "environment": dict(intent.environment),
        "variables": pattern,
    }


class _Asking:
    """The three questions to one host, each within its time."""

    def __init__(self, intent: Intent, timeout_seconds: float) -> None:
        self._intent = intent
        self._timeout_seconds = timeout_seconds
        self.stop = threading.Event()

    def look(self, host: Host, request: Mapping[str, object]) -> Host:
        """The host with its answer, or with why there is none."""
        if not HOST_NAME.fullmatch(host.name):
            return replace(host, unreached="this is not the name of a host")
        reply = self._run(host, request)
        host = replace(host, clock=reply.clock)
        late = f"no answer within {self._timeout_seconds:g} s"
        if len(reply.answers) > 1:
            storage = reply.answers[2] if len(reply.answers) > 2 else _no_storage(self._intent, late)
            try:
                return replace(host, answer=Answer.model_validate({**reply.answers[1], "storage": storage}))
            except ValidationError as error:
                return replace(host, no_python=f"its answer cannot be read: {error.errors()[0]['loc']}")
        if NO_PYTHON in reply.noise:
            return replace(host, no_python="there is neither this Python nor a python3")
        if reply.timed_out:
            return replace(host, no_python=late) if reply.answers else replace(host, unreached=late)
        why = reply.noise[-1] if reply.noise else f"exit code {reply.exit_code} without a word"
        if reply.answers or (reply.exit_code not in (0, 255) and "ssh exited with exit code 255" not in why):
            return replace(host, no_python=why)
        return replace(host, unreached=_reason(reply.noise) or why)

    def read(self, host: Host, request: Mapping[str, object]) -> Host:
        """The host with what it could read of the probe files of all."""
        if host.answer is None:
            return host
        request = {**request, "action": "read"}
        reply = self._run(host, request)
        if reply.clock is not None:
            host = replace(host, clock=reply.clock.narrowed(host.clock))
        tokens = reply.answers[1].get("tokens") if len(reply.answers) > 1 else None
        return replace(host, tokens=frozenset(map(str, tokens))) if isinstance(tokens, list) else host

    def remove(self, host: Host, request: Mapping[str, object]) -> None:
        """Let the host remove what it has left."""
        if host.unreached is None and HOST_NAME.fullmatch(host.name):
            request = {**request, "action": "remove"}
            self._run(host, request)

    def _run(self, host: Host, request: Mapping[str, object]) -> Reply:
        intent, timeout_seconds = self._intent, self._timeout_seconds
        if intent.is_local:
            command = local_command(intent.python, request)
        else:
            command = remote_command(host.name, intent.launcher, intent.python, request, timeout_seconds)
        return run_command(command, timeout_seconds, self.stop)


def _no_storage(intent: Intent, why: str) -> dict[str, object] | None:
    """Of a host that said all but what its disk was to tell."""
    if intent.checkpoint_dir is None:
        return None
    return {
        "folder": intent.checkpoint_dir,
        "error": why,
        "space": None,
        "bytes_per_second": None,
        "largest_tag_bytes": 0,
        "all_tags_bytes": 0,
    }


def _reason(noise: Sequence[str]) -> str | None:
    """Of all that was printed, what ssh itself says, and not pdsh about ssh."""
    said = [line for line in noise if not line.startswith("pdsh@")]
    return said[-1] if said else None
