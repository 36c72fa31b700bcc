"""What gen-config asks where nothing was said: one question at a time, each with a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_toolkit.env.fabric import Host
from ds_toolkit.plan.network import EXAMPLES
from ds_toolkit.units import format_bytes

# Answers as text, by the name of their flag without dashes.
Said = Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """One thing to ask.

    Attributes:
        flag: the flag that answers it beforehand, without dashes.
        text: what to ask.
        default: what an empty answer means, given what was said before; None where an answer is needed.
        applies: whether it is worth asking, given what was said before and what this machine has.
    """

    flag: str
    text: str
    default: Callable[[Said, Host], str | None]
    applies: Callable[[Said, Host], bool] = lambda _said, _host: True


def _for_gpus(said: Said, host: Host) -> bool:
    return bool(host.gpus) or said.get("gpu-memory", "none") != "none"


QUESTIONS: tuple[Question, ...] = (
    Question(
        "model", "Parameters (7B), or the path of a Hugging Face config.json?", lambda _said, _host: None
    ),
    Question("num-nodes", "Hosts?", lambda _said, _host: "1"),
    Question(
        "gpu-memory",
        "Memory of one GPU (80GB; none: the CPU does the work)?",
        lambda _said, host: format_bytes(host.gpus[0].memory_bytes).replace(" ", "") if host.gpus else "none",
    ),
    Question(
        "gpus-per-node",
        "GPUs a host (on a CPU: processes)?",
        lambda said, host: str(len(host.gpus) or (8 if _for_gpus(said, host) else host.num_cpus)),
    ),
    Question(
        "host-memory",
        "Memory of one host?",
        lambda _said, host: format_bytes(host.memory_bytes or 256e9).replace(" ", ""),
    ),
    Question(
        "interconnect",
        f"Network between the hosts ({EXAMPLES})?",
        lambda _said, _host: "10GbE",
        lambda said, _host: said.get("num-nodes", "1") != "1",
    ),
    Question(
        "precision", "bf16, fp16 or fp32?", lambda said, host: "bf16" if _for_gpus(said, host) else "fp32"
    ),
    Question("sequence-length", "Tokens of one sample?", lambda _said, _host: "2048"),
    Question("micro-batch-size", "Samples of one forward pass on one rank?", lambda _said, _host: "1"),
    Question(
        "global-batch-size",
        "Samples of one optimizer step over all ranks?",
        lambda said, _host: str(_product(said, "num-nodes", "gpus-per-node", "micro-batch-size")),
    ),
    Question("for", "Who reads it: native, hf, accelerate or lightning?", lambda _said, _host: "native"),
)


def next_question(said: Said, host: Host) -> Question | None:
    """The first that applies and has no answer yet; None when all is said."""
    return next(
        (question for question in QUESTIONS if question.flag not in said and question.applies(said, host)),
        None,
    )


def missing_flags(said: Said, host: Host) -> list[str]:
    """The flags without which nothing can be advised: what has no default, and GPUs of another machine."""
    missing = [
        f"--{question.flag}"
        for question in QUESTIONS
        if question.flag not in said and question.default(said, host) is None
    ]
    if "gpu-memory" in said and not host.gpus and "gpus-per-node" not in said:
        missing.append("--gpus-per-node")
    return missing


def _product(said: Said, *flags: str) -> int:
    product = 1
    for flag in flags:
        text = said.get(flag, "1")
        product *= int(text) if text.isdigit() else 1
    return product
