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
from ds_toolkit.config.members import known_keys
from ds_toolkit.config.reader import Document, read_config
from ds_toolkit.config.schema import REMOVED_TOP_LEVEL_KEYS, REMOVED_ZERO_KEYS, DsConfig
from ds_toolkit.config.subject import json_pointer
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, has_errors

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
    recorder = ReadRecorder(_acceptable(data))
    raw = {
        key: ReadRecorder(value)
        for key, value in recorder.items()
        if isinstance(value, dict)
        and key in DsConfig.model_fields
        and (subsection := known_keys(DsConfig)[key].subsection) is not None
        and subsection.read_raw
    }
    recorder.update(raw)
    error = _raised(parse, recorder)
    assert error is None, f"what was refused could not be taken out: {error!r}"
    private = ("_", "x-", "$schema", "ds_toolkit")
    paths = [((), recorder), *(((section,), values) for section, values in raw.items())]
    for path, values in paths:
        # To ask a recorder would be noted too.
        asked = set(values.asked) | _READ_ELSEWHERE
        for key in dict.keys(values):
            merged_whole = path == ("pipeline",)
            if key not in asked and not key.startswith(private) and not merged_whole:
                yield json_pointer(*path, key)


def _acceptable(data: dict[str, Any]) -> dict[str, Any]:
    """The data without what makes the parser stop before it has read everything."""
    kept = copy.deepcopy({key: value for key, value in data.items() if key not in REMOVED_TOP_LEVEL_KEYS})
    for key in ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        kept.pop(key, None)
    kept["train_micro_batch_size_per_gpu"] = 1
    for section, subsection in ((key, known_keys(DsConfig)[key].subsection) for key in DsConfig.model_fields):
        values = kept.get(section)
        if subsection is not None and isinstance(values, dict) and not subsection.read_raw:
            table = known_keys(subsection)
            kept[section] = {
                key: value
                for key, value in values.items()
                if key in table
                and key not in REMOVED_ZERO_KEYS
                and (value == "auto" or not table[key].fault(value))
            }
            for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
                if new in values:
                    kept[section].pop(old, None)
    return kept


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
