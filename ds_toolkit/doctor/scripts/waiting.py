"""DS101x: calls that only some ranks make, and for which the others never come."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.doctor.scripts.calls_of_all_ranks import Meeting, Meetings
from ds_toolkit.doctor.scripts.ranks import Branch
from ds_toolkit.doctor.scripts.registry import at, rule
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@rule("DS1011", "checkpoint-on-some-ranks", Severity.ERROR)
def checkpoint_on_some_ranks(script: Script) -> Iterator[Problem]:
    """A checkpoint is saved or loaded under `if rank == 0`: that rank waits in a barrier, and nobody comes.

    `save_checkpoint`, `load_checkpoint` and `save_16bit_model` are for every rank, at every ZeRO stage: each
    holds a part, and DeepSpeed lets rank 0 alone write what is needed once. So are the calls of a
    `CheckpointGuard`.

    Bad:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        if torch.distributed.get_rank() == 0:
            engine.save_checkpoint("checkpoints")
    Bad:
        from ds_toolkit import CheckpointGuard
        guard = CheckpointGuard(engine, "checkpoints")
        if engine.global_rank == 0:
            guard.save()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.save_checkpoint("checkpoints")
        if torch.distributed.get_rank() == 0:
            print("saved")
    """
    yield from _unmatched(script, saves=True)


@rule("DS1012", "collective-on-some-ranks", Severity.ERROR)
def collective_on_some_ranks(script: Script) -> Iterator[Problem]:
    """A collective stands in a branch that only some ranks enter: they wait there for the others.

    So do `engine.backward`, `engine.step` and, at stage 3, the forward pass, `GatheredParameters` and
    `safe_get_full_fp32_param`, all of which hold collectives. A collective in the other arm of the branch is
    its counterpart, and one with a group of its own is for its members.

    Bad:
        if torch.distributed.get_rank() == 0:
            torch.distributed.barrier()
    Bad (stage=3):
        if torch.distributed.get_rank() == 0:
            with deepspeed.zero.GatheredParameters(model.parameters()):
                print(model)
    Good:
        if torch.distributed.get_rank() == 0:
            download()
        torch.distributed.barrier()
    Good:
        if torch.distributed.get_rank() == 0:
            torch.distributed.broadcast(weights, 0)
        else:
            torch.distributed.broadcast(empty, 0)
    """
    yield from _unmatched(script, saves=False)


@rule("DS1013", "early-leave-on-some-ranks", Severity.ERROR)
def early_leave_on_some_ranks(script: Script) -> Iterator[Problem]:
    """Some ranks leave by `return`, `break` or `continue`, and a collective comes after it.

    Bad:
        def report(loss):
            if torch.distributed.get_rank() != 0:
                return
            torch.distributed.all_reduce(loss)
    Good:
        def report(loss):
            torch.distributed.all_reduce(loss)
            if torch.distributed.get_rank() != 0:
                return
            print(loss)
    """
    meetings = Meetings(script)
    for leaving, branch in script.ranks.exits():
        missed = meetings.after(leaving, branch)
        if missed is not None:
            place = f"`{missed.name}` in line {missed.call.lineno}"
            message = f"{branch.arm.value} may leave here and never reach {place}"
            yield at(leaving, message, "leave behind it, or let every rank leave")


def _unmatched(script: Script, *, saves: bool) -> Iterator[Problem]:
    meetings = Meetings(script)
    seen: set[int] = set()
    for meeting in meetings.all:
        if meeting.saves is saves and id(meeting.call) not in seen:
            branch = meetings.unmatched(meeting)
            if branch is not None:
                seen.add(id(meeting.call))
                yield at(meeting.call, _told(meeting, branch), "call it on every rank, outside the branch")


def _told(meeting: Meeting, branch: Branch) -> str:
    what = f"`{meeting.name}`" + (f", called by `{meeting.through}`," if meeting.through else "")
    return (
        f"{what} is for every rank, but only {branch.arm.value} may come here: it waits for the rest for ever"
    )
