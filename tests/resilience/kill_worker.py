"""Run under a launcher: trains what its orders say, one run after the other, and knows nothing of what comes.

    kill_worker.py ORDERS.json

`ORDERS.json` is a list of `killing.Order` as JSON. Each phase lasts long enough to be hit from outside, and
a rank has some tens of megabytes of state, so that its copy does as well. Two signals provoke what only a
process itself can do: on SIGRTMIN it calls `os._exit`, on SIGRTMIN + 1 the code that runs next in the
training loop raises. Each rank writes losses and a fingerprint to `<result>_rank<R>.json` when a run has come
to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
import training

from ds_toolkit import CheckpointGuard

EXIT_SIGNAL, RAISE_SIGNAL = signal.SIGRTMIN, signal.SIGRTMIN + 1
EXIT_CODE = 7
PHASE_SECONDS = 0.012
_LINEAR = torch.nn.functional.linear
_raise_soon = threading.Event()


class ProvokedError(Exception):
    """Raised in the training loop because somebody outside wanted it."""


def dawdle() -> None:
    """Let the phase last a while."""
    end = time.monotonic() + PHASE_SECONDS
    while time.monotonic() < end:
        if _raise_soon.is_set():
            raise ProvokedError("provoked from outside")
        time.sleep(0.001)


def listen() -> None:
    """Hear the two signals, whatever the main thread does. Before any other thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {EXIT_SIGNAL, RAISE_SIGNAL})

    def hear() -> None:
        while True:
            if signal.sigwait({EXIT_SIGNAL, RAISE_SIGNAL}) == EXIT_SIGNAL:
                os._exit(EXIT_CODE)
            _raise_soon.set()

    threading.Thread(target=hear, daemon=True).start()


class SlowSampler(training.Sampler):
    def draw(self, dtype: Any) -> Any:
        dawdle()
        return super().draw(dtype)


def slow_engine(config: dict[str, object], seed: int) -> Any:
    """An engine whose forward, backward and optimizer step dawdle."""
    engine = training.new_engine(config, seed)
    engine.module.register_forward_pre_hook(lambda *_: dawdle())
    engine.module.register_forward_hook(lambda *call: call[-1].register_hook(lambda _: dawdle()) and None)
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    optimizer.register_step_post_hook(lambda *_: dawdle())
    return engine


def obey(order: dict[str, Any]) -> None:
    # DeepSpeed's stage 3 puts its own in place for the rest of the process; the last bit differs.
    torch.nn.functional.linear = _LINEAR
    training.WIDTH = order["width"]
    training.ACCUMULATION_STEPS = order["accumulation"]
    # Another seed for a run that is to resume: everything that counts must come from the checkpoint.
    engine = slow_engine(training.ds_config(order["stage"], order["precision"]), order["seed"])
    sampler = SlowSampler(seed=1000 + engine.global_rank)
    resumed = None
    if order["directory"] is None:
        losses = training.train_until(engine, sampler, order["steps"])
        fingerprint = training.fingerprint(engine)
    else:
        guard = CheckpointGuard(engine, order["directory"], save_every=order["save_every"])
        # An exception that leaves a block and one that ends a program are heard by different means.
        with guard if order["in_a_block"] else contextlib.nullcontext():
            guard.track("sampler", sampler)
            resumed = guard.resume()
            losses = training.train_until(engine, sampler, order["steps"])
            fingerprint = training.fingerprint(engine)
        guard.close()
    result = {"resumed": resumed and resumed.step, "losses": losses, "fingerprint": fingerprint}
    path = Path(f"{order['result']}_rank{dist.get_rank()}.json")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def main() -> None:
    listen()
    training.start()
    # DeepSpeed's launcher puts --local_rank first.
    (orders,) = [word for word in sys.argv[1:] if not word.startswith("--")]
    for order in json.loads(Path(orders).read_text()):
        obey(order)
    training.finish()


main()
