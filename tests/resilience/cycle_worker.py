"""Run alone: forks a rank for each line on its input; the rank resumes, and trains until it is killed.

Importing torch and DeepSpeed takes longer than all the rest of a rank's life, and is done once. A line
has the checkpoint directory, a port and a log; what comes back is the rank's process id and, when it has
ended, its exit code. The rank writes the step that it resumed from into its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

from training import ds_config, new_engine, new_sampler, start, train_until

from ds_toolkit import CheckpointGuard


def train(directory: str) -> None:
    start()
    engine = new_engine(ds_config(2, "fp32"))
    sampler = new_sampler(engine)
    guard = CheckpointGuard(engine, directory, save_every=3)
    guard.track("sampler", sampler)
    resumed = guard.resume()
    print(f"\nRESUMED {resumed.step if resumed else 0}", flush=True)
    train_until(engine, sampler, 10**9)


def become_a_rank(directory: str, port: int, log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["MASTER_PORT"] = str(port)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(directory)


def main() -> None:
    # By the descriptor: a forked rank must not find lines that were read ahead.
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            become_a_rank(**order)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


main()
