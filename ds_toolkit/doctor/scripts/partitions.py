"""DS102x: what ZeRO stage 3 makes of calls that were written for whole weights, and where checkpoints go."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ds_toolkit.doctor.scripts.names import argument, start, takes_unknown_keywords
from ds_toolkit.doctor.scripts.registry import at, rule
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_SAVERS = {
    "torch.save": 0,
    "safetensors.torch.save_file": 0,
    "safetensors.torch.save_model": 0,
    "accelerate.utils.save": 0,
}
_GATHER = "GatheredParameters"
_GATHER_ON_SAVE = (
    'set "stage3_gather_16bit_weights_on_model_save" and call engine.save_16bit_model on every rank'
)
# What is one thing on each process; a clock may differ by a second.
_OF_A_PROCESS = {
    *("os.getpid", "uuid.uuid4", "uuid.uuid1", "secrets.token_hex", "socket.gethostname", "platform.node"),
    *("random.random", "random.randint"),
}
_STEP = 3


@rule("DS1021", "state-dict-of-partitions", Severity.ERROR)
def state_dict_of_partitions(script: Script) -> Iterator[Problem]:
    """At ZeRO stage 3 `model.state_dict()` holds empty tensors, and the file that is saved of it no weights.

    Each rank has a part of every weight, outside of forward and backward. Told only where the script, a
    config beside it or `--config` says that the stage is 3.

    Bad (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        torch.save(model.state_dict(), "model.pt")
    Good (stage=2):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        torch.save(model.state_dict(), "model.pt")
    Good (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.save_16bit_model("out", "model.pt")
    """
    if script.config.stage != _STEP:
        return
    for call in script.calls:
        place = _SAVERS.get(script.dotted(call))
        saved = argument(call, "obj", place) if place is not None else argument(call, "state_dict")
        if saved is None or not (place is not None or script.dotted(call).endswith("save_pretrained")):
            continue
        for taken in _calls_in(script, saved):
            is_taken = isinstance(taken.func, ast.Attribute) and taken.func.attr == "state_dict"
            if is_taken and isinstance(taken.func, ast.Attribute) and script.is_model(taken.func.value):
                if not _is_gathered(script, taken):
                    yield at(call, "at stage 3 the tensors of this state_dict are empty", _GATHER_ON_SAVE)
                break


@rule("DS1022", "save-pretrained-of-partitions", Severity.ERROR)
def save_pretrained_of_partitions(script: Script) -> Iterator[Problem]:
    """At ZeRO stage 3 `save_pretrained` of an engine's model writes files without the weights.

    It takes the model's own `state_dict`, whose tensors are empty; the Trainer and Accelerate hand it a
    gathered one. Told only where the stage is known to be 3.

    Bad (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.module.save_pretrained("out")
    Good (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        weights = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            engine.module.save_pretrained("out", state_dict=weights)
    """
    if script.config.stage != _STEP:
        return
    for call, model in script.methods("save_pretrained"):
        given = argument(call, "state_dict") is not None or takes_unknown_keywords(call)
        if script.is_model(model) and not given and not _is_gathered(script, call):
            fix = (
                "gather them on every rank first and hand them over: save_pretrained(..., state_dict=weights)"
            )
            yield at(call, "at stage 3 the model's weights are empty here", fix)


@rule("DS1023", "generate-out-of-step", Severity.ERROR)
def generate_out_of_step(script: Script) -> Iterator[Problem]:
    """At ZeRO stage 3 `generate` without `synced_gpus=True` hangs when one rank has finished its text first.

    Each token is a forward pass, for which all ranks gather the weights together. transformers sets it by
    itself where the script keeps an `HfDeepSpeedConfig`, or under the Trainer. Told only where the stage is
    known to be 3.

    Bad (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.module.generate(tokens, max_new_tokens=64)
    Good (stage=3):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.module.generate(tokens, max_new_tokens=64, synced_gpus=True)
    """
    if script.config.stage != _STEP:
        return
    is_set_by_itself = any(script.dotted(call).endswith("HfDeepSpeedConfig") for call in script.calls)
    for call, model in script.methods("generate"):
        synced = argument(call, "synced_gpus")
        unset = synced is None and not takes_unknown_keywords(call) and not is_set_by_itself
        is_off = isinstance(synced, ast.Constant) and synced.value is False
        if (unset or is_off) and script.is_model(model) and not _is_gathered(script, call):
            message = "ranks that have finished their text leave the others alone in a gathering of weights"
            yield at(call, message, "write synced_gpus=True")


@rule("DS1024", "process-group-begun-twice", Severity.ERROR)
def process_group_begun_twice(script: Script) -> Iterator[Problem]:
    """`init_process_group` comes after `zero.Init` or `deepspeed.initialize`, which have begun it already.

    torch ends the run with "trying to initialize the default process group twice", and what was asked for
    (backend, time-out) would have come too late for the partitioned model.

    Bad:
        with deepspeed.zero.Init():
            model = Model()
        torch.distributed.init_process_group("nccl")
    Good:
        torch.distributed.init_process_group("nccl")
        with deepspeed.zero.Init():
            model = Model()
    Good:
        with deepspeed.zero.Init():
            model = Model()
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl")
    """
    begins = [call for call in script.calls if _begins_the_group(script, call)]
    for call in script.calls_named("torch.distributed.init_process_group"):
        if any(isinstance(parent, ast.If | ast.Try) for parent in script.names.above(call)):
            continue
        here = script.names.function_of(call)
        before = [each for each in begins if start(each) < start(call)]
        same = [
            each for each in before if script.names.function_of(each) is here and _is_certain(script, each)
        ]
        if same:
            message = (
                f"`{ast.unparse(same[0].func)}` in line {same[0].lineno} has begun the process group already"
            )
            yield at(call, message, "call it first of all")


def _begins_the_group(script: Script, call: ast.Call) -> bool:
    dotted = script.dotted(call)
    if dotted in {"deepspeed.initialize", "deepspeed.init_distributed"}:
        return True
    if not (dotted.startswith("deepspeed.") and dotted.endswith("zero.Init")):
        return False
    return argument(call, "enabled") is None


def _is_certain(script: Script, call: ast.Call) -> bool:
    return not any(isinstance(parent, ast.If | ast.Try) for parent in script.names.above(call))


def _is_gathered(script: Script, call: ast.Call) -> bool:
    for parent in script.names.above(call):
        if isinstance(parent, ast.With):
            for item in parent.items:
                made = script.names.origin(item.context_expr)
                calls = [node for node in ast.walk(made) if isinstance(node, ast.Call)]
                if any(_GATHER in script.dotted(each) or "summon" in script.dotted(each) for each in calls):
                    return True
    return False


def _calls_in(script: Script, node: ast.expr) -> list[ast.Call]:
    """The calls that make a value or the parts of a dictionary, names followed."""
    found: list[ast.Call] = []
    waiting = [node]
    while waiting and len(found) < 50:
        value = script.names.origin(waiting.pop())
        if isinstance(value, ast.Call):
            found.append(value)
        elif isinstance(value, ast.Dict):
            waiting += value.values
        elif isinstance(value, ast.DictComp):
            waiting.append(value.generators[0].iter)
    # `{name: tensor.cpu() for name, tensor in model.state_dict().items()}`
    inner = [
        call.func.value
        for call in found
        if isinstance(call.func, ast.Attribute) and call.func.attr == "items"
    ]
    return found + [call for value in inner for call in _calls_in(script, value)]


@rule("DS1025", "checkpoint-named-by-rank", Severity.ERROR)
def checkpoint_named_by_rank(script: Script) -> Iterator[Problem]:
    """The folder or the tag of `save_checkpoint` differs from rank to rank: a checkpoint in pieces.

    All ranks must give the same of both; DeepSpeed puts the rank into the names of the files. With
    `"tag_validation": "Fail"` it stops at a tag that differs, else it warns; of a folder it notices nothing.
    `latest` names what rank 0 wrote, and no resume finds the rest.

    Bad:
        import deepspeed
        engine.save_checkpoint("checkpoints", tag=f"step{step}_rank{torch.distributed.get_rank()}")
    Good:
        import deepspeed
        engine.save_checkpoint("checkpoints", tag=f"step{step}")
    """
    for call, engine in script.methods("save_checkpoint", "load_checkpoint", "save_16bit_model"):
        if not script.is_engine(engine):
            continue
        is_model = isinstance(call.func, ast.Attribute) and call.func.attr == "save_16bit_model"
        second = "save_filename" if is_model else "tag"
        for what, name, place in (
            ("folder", "save_dir", 0),
            ("folder", "load_dir", None),
            ("tag", second, 1),
        ):
            value = argument(call, name, place)
            differs = _differing(script, value) if value is not None else None
            if value is not None and differs is not None:
                message = f"the {what} holds `{differs}`, which differs from rank to rank"
                yield at(value, message, "leave it out: DeepSpeed puts the rank into the names of its files")


def _differing(script: Script, node: ast.expr) -> str | None:
    """The part of an expression that is another one on each rank."""
    waiting, seen = [node], 0
    while waiting and seen < 200:
        value = waiting.pop()
        seen += 1
        is_part = isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        if is_part and script.ranks.is_rank(value):
            return ast.unparse(value)[:60]
        if isinstance(value, ast.Call) and script.dotted(value) in _OF_A_PROCESS:
            return ast.unparse(value)[:60]
        if isinstance(value, ast.Name | ast.Attribute):
            if _is_broadcast(script, value):
                continue
            reached = script.names.origins(value)
            # What has more than one origin may have been agreed upon in between.
            if len(reached) == 1 and reached[0][0] is not value:
                waiting.append(reached[0][0])
                continue
        waiting += [child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]
    return None


def _is_broadcast(script: Script, node: ast.expr) -> bool:
    """Whether a name is handed to a broadcast, after which it is the same on all ranks."""
    text = ast.unparse(node)
    return any(
        script.dotted(call).rpartition(".")[2].startswith("broadcast")
        and any(ast.unparse(value) == text for value in call.args)
        for call in script.calls
    )
