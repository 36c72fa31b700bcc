"""What the guardian says while nobody asks: heard by a thread, whatever the main thread is stuck in."""

from __future__ import annotations

import threading

from ds_toolkit.guardian.arena import Arena
from ds_toolkit.guardian.client import GuardianClient, GuardianGoneError
from ds_toolkit.guardian.control import ControlBlock
from ds_toolkit.guardian.stacks import offer_stacks
from ds_toolkit.resilience.reporting import logger

_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 2.0


class Listening:
    """Passes the guardian's words on to this rank's log, and lets it ask for the stacks of this process."""

    def __init__(self, arena: Arena, control: ControlBlock) -> None:
        """Listen from now on, also to a guardian that comes after this one."""
        self._socket_path = arena.socket_path
        self._rank = control.rank
        self._closed = threading.Event()
        offer = offer_stacks()
        if offer is not None:
            control.stacks = offer
        threading.Thread(target=self._listen, name="ds_toolkit-guardian", daemon=True).start()

    def close(self) -> None:
        """Listen no more, a few seconds from now at the latest."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                client = GuardianClient(self._socket_path)
            except GuardianGoneError:
                self._closed.wait(_RETRY_SECONDS)
                continue
            try:
                client.send({"event": "listen", "rank": self._rank})
                self._pass_on(client)
            except GuardianGoneError:
                # It has ended, or another one has taken its place.
                self._closed.wait(_RETRY_SECONDS / 4)
            finally:
                client.close()

    def _pass_on(self, client: GuardianClient) -> None:
        while not self._closed.is_set():
            event = client.receive(_LOOK_SECONDS)
            if event is not None and event.get("event") == "say":
                logger.warning("%s", event.get("text"))
