"""DS104x: what the engine does itself, done beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ds_toolkit.doctor.scripts.names import start
from ds_toolkit.doctor.scripts.registry import at, rule
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_OPTIMIZER, _SCHEDULER = 1, 3
_CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad_norm"}
_MANY = 300


@rule("DS1041", "optimizer-stepped-beside-the-engine", Severity.ERROR)
def optimizer_stepped_beside_the_engine(script: Script) -> Iterator[Problem]:
    """`optimizer.step()` is called where `engine.step()` should be.

    With ZeRO the optimizer that was handed over no longer holds the weights: its `step` changes nothing. The
    one that `initialize` returned steps at every micro-batch, and clipping, learning rate schedule and the
    engine's counters, which checkpoints are named by, are left out.

    Bad:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        optimizer.step()
    Good:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        engine.step()
    """
    for call, value in script.methods("step"):
        if script.is_returned(value, _OPTIMIZER) or script.is_given(value, "optimizer", 2):
            message = "the optimizer belongs to the engine, which does not notice this step"
            yield at(call, message, "call engine.step() instead")


@rule("DS1042", "backward-beside-the-engine", Severity.ERROR)
def backward_beside_the_engine(script: Script) -> Iterator[Problem]:
    """`loss.backward()` is called on an engine's loss where `engine.backward(loss)` should be.

    DeepSpeed refuses it at stage 0, and in fp16 where the loss was not scaled with `engine.scale`. At stages
    1 to 3 in other precisions it is allowed, and nothing is said where both are known. Where neither is, this
    is a warning.

    Bad (stage=0):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        loss = engine(batch)
        loss.backward()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        loss = engine(batch)
        engine.backward(loss)
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        loss = engine.scale(engine(batch))
        loss.backward()
    """
    stage, fp16 = script.config.stage, script.config.fp16
    if not script.initializations or (stage in (1, 2, 3) and fp16 is False):
        return
    for call, value in script.methods("backward"):
        if script.is_engine(value) or call.args or not _comes_from_an_engine(script, value):
            continue
        certain = stage == 0 or fp16 is True
        if certain:
            message = "DeepSpeed refuses this " + ("at stage 0" if stage == 0 else "in fp16")
        else:
            message = "DeepSpeed refuses this at stage 0, and in fp16"
        problem = at(call, message, "write engine.backward(loss)")
        severity = None if certain else Severity.WARNING
        yield Problem(problem.pointer, problem.message, problem.fix, severity=severity)


@rule("DS1043", "clipping-beside-the-engine", Severity.WARNING)
def clipping_beside_the_engine(script: Script) -> Iterator[Problem]:
    """`clip_grad_norm_` is called on an engine's weights: with ZeRO the gradients are elsewhere.

    From stage 1 on `backward` moves them into partitions and leaves `grad` None: the norm is 0, and nothing
    is clipped. The engine clips by itself, to 1.0 unless the config says otherwise. Nothing is said where
    the stage is known to be 0.

    Bad:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        engine.step()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config={"gradient_clipping": 1.0})
        engine.backward(loss)
        engine.step()
    """
    if script.config.stage == 0:
        return
    for call in script.calls:
        if script.dotted(call) in _CLIP and call.args and _is_of_an_engine(script, call.args[0]):
            message = "with ZeRO this clips nothing: the engine has the gradients"
            yield at(call, message, 'remove it; "gradient_clipping" in the config is what counts')


@rule("DS1044", "gradients-thrown-away", Severity.WARNING)
def gradients_thrown_away(script: Script) -> Iterator[Problem]:
    """`zero_grad()` stands between `engine.backward` and `engine.step`: the step has no gradients.

    At stage 0 it ends with an `IndexError`. The engine empties them itself after each step, so that no call
    is needed at all. Nothing is said where the stage is known to be 1 to 3: their gradients lie elsewhere.

    Bad:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        optimizer.zero_grad()
        engine.step()
    Good:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        engine.step()
    """
    if script.config.stage in (1, 2, 3):
        return
    for call, value in script.methods("zero_grad"):
        owned = script.is_model(value) or script.is_returned(value, _OPTIMIZER)
        if not owned and not script.is_given(value, "optimizer", 2):
            continue
        before, after = _around(script, call)
        last = next((name for name in reversed(before) if name in ("backward", "step")), None)
        if last == "backward" and "step" in after:
            message = "the gradients of the backward pass are thrown away before the step"
            yield at(call, message, "remove it: the engine does it after the step")


@rule("DS1045", "scheduler-stepped-twice", Severity.WARNING)
def scheduler_stepped_twice(script: Script) -> Iterator[Problem]:
    """The engine's scheduler is stepped by the script as well: the learning rate moves twice as fast.

    `engine.step` steps the scheduler that was handed to `initialize`, or that the config names, at each
    optimizer step.

    Bad:
        engine, _, _, scheduler = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        engine.step()
        scheduler.step()
    Good:
        engine, _, _, scheduler = deepspeed.initialize(model=model, config=config)
        engine.backward(loss)
        engine.step()
    """
    steps = [call for call, value in script.methods("step") if script.is_engine(value)]
    for call, value in script.methods("step"):
        handed = script.is_returned(value, _SCHEDULER) or script.is_given(value, "lr_scheduler", 5)
        if steps and handed:
            message = "the engine steps this scheduler too: the learning rate moves twice as fast"
            yield at(call, message, "remove it, or keep the scheduler from initialize")


def _is_of_an_engine(script: Script, node: ast.expr) -> bool:
    """Whether an expression is `engine.parameters()` or those of its model."""
    made = script.names.origin(node)
    called = made.func if isinstance(made, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "parameters" and script.is_model(called.value)


def _around(script: Script, call: ast.Call) -> tuple[list[str], list[str]]:
    """The methods that an engine is asked for in the same block of statements, before and behind a call."""
    statement: ast.AST = call
    for parent in script.names.above(call):
        block = next((part for part in _blocks(parent) if statement in part), None)
        if block is not None:
            place = block.index(statement)
            return _asked(script, block[:place]), _asked(script, block[place + 1 :])
        statement = parent
    return [], []


def _blocks(node: ast.AST) -> list[list[ast.AST]]:
    return [
        part
        for name in ("body", "orelse", "finalbody")
        if isinstance(part := getattr(node, name, None), list)
    ]


def _asked(script: Script, statements: list[ast.AST]) -> list[str]:
    calls = [call for node in statements for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [
        call.func.attr
        for call in sorted(calls, key=start)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("backward", "step")
        and script.is_engine(call.func.value)
    ]


def _comes_from_an_engine(script: Script, node: ast.expr) -> bool:
    """Whether a value is computed from the forward pass of an engine, and not scaled by it."""
    waiting: list[ast.AST] = [node]
    seen: set[int] = set()
    reached = False
    while waiting and len(seen) < _MANY:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, ast.Call):
            if (
                isinstance(part.func, ast.Attribute)
                and part.func.attr == "scale"
                and script.is_engine(part.func.value)
            ):
                return False
            # `engine.module(batch)` is as good as `engine(batch)` here.
            reached = reached or script.is_engine(part.func)
        if isinstance(part, ast.Name):
            waiting += [binding.value for binding in script.names.bindings(part) if binding.value is not None]
        waiting += ast.iter_child_nodes(part)
    return reached
