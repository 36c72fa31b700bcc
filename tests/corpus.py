"""Compare the linter with DeepSpeed's parser on a folder of configurations: `make corpus CORPUS=folder`.

For each file: where the parser raises the linter must have an error, and each key that the parser never asks
for must have a finding.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_parser import ReadRecorder, parser

from ds_toolkit.config.linter import lint
from ds_toolkit.config.members import Known, known_keys
from ds_toolkit.config.reader import Document, read_config
from ds_toolkit.config.schema import REMOVED_TOP_LEVEL_KEYS, DsConfig
from ds_toolkit.config.subject import json_pointer
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, has_errors

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Read before the parser is called.
_READ_ELSEWHERE = {"data_parallel_size", "sequence_parallel_size"}


def compare(document: Document, parse: Callable[..., Any]) -> list[str]:
    """Where the linter is silent and should not be; empty if nowhere."""
    findings = lint(document, world_size=1)
    problems = []
    error = _raised(parse, document.data)
    if error is not None and not has_errors(findings):
        problems.append(f"the parser raises {error!r}, the linter has no error")
    pointers = {finding.where.pointer for finding in findings}
    for pointer in keys_never_read(document.data, parse):
        if pointer not in pointers:
            problems.append(f"the parser never asks for {pointer}, the linter has no finding")
    return problems


def keys_never_read(data: dict[str, Any], parse: Callable[..., Any]) -> Iterator[str]:
    """Pointers of keys that the parser does not ask for, at the top level and in sections read key by key."""
    recorder = ReadRecorder(_with_defaults(data))
    sections = {key: ReadRecorder(value) for key, value in recorder.items() if _is_raw(key, value)}
    recorder.update(sections)
    error = _raised(parse, recorder)
    assert error is None, f"what was refused could not be taken out: {error!r}"
    private = ("_", "x-", "$schema", "ds_toolkit")
    for path, values in [((), recorder), *(((key,), values) for key, values in sections.items())]:
        # To ask a recorder would be noted too.
        asked = set(values.asked) | _READ_ELSEWHERE
        # A pipeline is merged whole, whatever its keys.
        for key in dict.keys(values) if path != ("pipeline",) else ():
            if key not in asked and not key.startswith(private):
                yield json_pointer(*path, key)


def _is_raw(key: str, value: object) -> bool:
    known = known_keys(DsConfig).get(key)
    return (
        isinstance(value, dict)
        and known is not None
        and known.subsection is not None
        and known.subsection.read_raw
    )


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """The same keys with values that the parser cannot stop at, so that it goes through all of them."""
    values: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    for key, value in data.items():
        known = known_keys(DsConfig).get(key)
        if key in REMOVED_TOP_LEVEL_KEYS:
            continue
        if known is None:
            values[key] = value
        elif key in _BATCH:
            values[key] = 1
        elif known.subsection is None:
            values[key] = known.field.get_default(call_default_factory=True)
        elif known.subsection.read_raw and isinstance(value, dict):
            table = known_keys(known.subsection)
            values[key] = {name: _default(table.get(name), inner) for name, inner in value.items()}
        else:
            # The boolean form is the only one with which allgather_size is read.
            values[key] = value if isinstance(value, bool) and key == "zero_optimization" else {}
    return values


def _default(known: Known | None, value: object) -> object:
    if known is None:
        return value
    if known.subsection is not None:
        return {}
    # Params are asked for where there is a type, and null is no data type of autocast.
    return {"type": "AdamW", "dtype": "fp32"}.get(
        known.key, known.field.get_default(call_default_factory=True)
    )


def _raised(parse: Callable[..., Any], data: dict[str, Any]) -> Exception | None:
    try:
        parse(data if isinstance(data, ReadRecorder) else copy.deepcopy(data))
    except Exception as error:
        return error
    return None


def main(folder: Path) -> int:
    """Compare all files of a folder; prints one line a file and gives the exit code."""
    num_problems = num_raised = num_never_read = 0
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    with parser() as parse:
        for path in paths:
            try:
                document = read_config(path)
            except ToolkitError as error:
                print(f"{path.name}: unreadable: {error.what}")
                continue
            problems = compare(document, parse)
            num_problems += len(problems)
            num_raised += _raised(parse, document.data) is not None
            num_never_read += len(list(keys_never_read(document.data, parse)))
            print(f"{path.name}: {'; '.join(problems) or _summary(lint(document, world_size=1))}")
    print(
        f"{len(paths)} files: the parser raises on {num_raised} and never asks for {num_never_read} keys;"
        f" the linter misses {num_problems} of these"
    )
    return 1 if num_problems or not paths else 0


def _summary(findings: list[Finding]) -> str:
    return json.dumps(sorted({finding.code for finding in findings}))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
