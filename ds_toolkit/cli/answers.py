"""Answers as text, from flags or asked for on a terminal, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ds_toolkit.advise.answers import Answers, check_global_batch
from ds_toolkit.advise.hf_counting import read_hf_model
from ds_toolkit.advise.questions import missing_flags, next_question
from ds_toolkit.config.consumers import Consumer
from ds_toolkit.env.fabric import Host
from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.job import Model, Precision
from ds_toolkit.plan.network import parse_network
from ds_toolkit.units import parse_count, parse_memory_bytes, parse_seconds

Value = TypeVar("Value")


def ask(said: Mapping[str, str], host: Host) -> dict[str, str]:
    """What was said, completed on a terminal by asking for the rest if the model is not among it.

    An answer that is none, or does not go with those before it, is explained, and the question asked again.

    Raises:
        ToolkitError: an answer is needed, and there is no terminal to ask on; or what was said by flags is
            wrong whatever the rest will be.
    """
    answers = dict(said)
    if "model" in answers:
        return answers
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        missing = missing_flags(answers, host)
        verb = "is" if len(missing) == 1 else "are"
        raise ToolkitError(
            f"{', '.join(missing)} {verb} missing",
            why="there is no terminal to ask on",
            fix="give the number of parameters or a config.json, such as --model 7B",
        )
    _check(answers)
    while (question := next_question(answers, host)) is not None:
        default = question.default(answers, host)
        prompt = question.text if default is None else f"{question.text} [{default}]"
        answer = input(f"{prompt} ").strip() or default
        if answer is None:
            continue
        try:
            _check({**answers, question.flag: answer})
        except ToolkitError as error:
            print(error, file=sys.stderr)
            continue
        answers[question.flag] = answer
    return answers


def ask_choice(flag: str, question: str, choices: Sequence[str], default: str) -> str:
    """One of the choices, asked for on a terminal until it is one; an empty answer means the default.

    Raises:
        ToolkitError: there is no terminal to ask on; it names the flag.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ToolkitError(
            f"--{flag} is missing",
            why="there is no terminal to ask on",
            fix=f"give --{flag} and one of {', '.join(choices)}",
        )
    while True:
        answer = input(f"{question} [{default}] ").strip().lower() or default
        if answer in choices:
            return answer
        print(f"`{answer}` is none of {', '.join(choices)}", file=sys.stderr)


def _check(said: Mapping[str, str]) -> None:
    check_global_batch(answers_from({"model": "1", **said}))


def answers_from(said: Mapping[str, str]) -> Answers:
    """What the text of each answer means.

    Raises:
        ToolkitError: one of them is not a size, a count or a choice; it names the flag.
    """

    def get(flag: str, parse: Callable[[str], Value]) -> Value | None:
        if flag not in said or said[flag] == "none":
            return None
        return parse(said[flag])

    def whole(flag: str) -> int | None:
        return get(flag, lambda text: _whole(flag, text))

    return Answers(
        model=parse_model(said["model"]),
        num_nodes=whole("num-nodes") or 1,
        gpus_per_node=whole("gpus-per-node"),
        gpu_memory_bytes=get("gpu-memory", lambda text: parse_memory_bytes(text, "GPU memory")),
        host_memory_bytes=get("host-memory", lambda text: parse_memory_bytes(text, "host memory")),
        precision=get("precision", lambda text: _choice("precision", text, Precision)),
        global_batch_size=whole("global-batch-size"),
        micro_batch_size=whole("micro-batch-size"),
        sequence_length=whole("sequence-length"),
        stage=whole("stage") if "stage" in said else None,
        nvme_path=said.get("nvme"),
        network=get("interconnect", parse_network),
        preset=said.get("preset", "pretrain"),
        consumer=get("for", lambda text: _choice("for", text, Consumer)) or Consumer.NATIVE,
        mttf_per_gpu_seconds=get("mttf-per-gpu", parse_seconds),
    )


def parse_model(text: str) -> Model | int:
    """A number of parameters such as 7B, or the model that a Hugging Face config.json describes.

    Raises:
        ToolkitError: it is neither.
    """
    path = Path(text)
    if path.is_dir() or path.suffix == ".json" or "/" in text:
        return read_hf_model(path)
    return parse_count(text)


def _whole(flag: str, text: str) -> int:
    # Zero and less are refused where they are used, with the same words for Python and for the command.
    try:
        number = int(text)
    except ValueError:
        raise ToolkitError(f"--{flag}: `{text}` is not a whole number") from None
    if number < 1 and flag != "stage":
        raise ToolkitError(f"--{flag} is {number}", fix="give 1 or more")
    return number


Choice = TypeVar("Choice", Precision, Consumer)


def _choice(flag: str, text: str, choices: type[Choice]) -> Choice:
    try:
        return choices(text)
    except ValueError:
        names = ", ".join(choice.value for choice in choices)
        raise ToolkitError(f"--{flag}: `{text}` is none of {names}") from None
