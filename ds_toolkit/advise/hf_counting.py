"""The model that a Hugging Face `config.json` describes: by formula, or counted by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_toolkit.errors import ToolkitError
from ds_toolkit.plan.hf_model import counted_words, hf_config_file, hf_model, read_hf_config
from ds_toolkit.plan.hf_shape import COUNT_INSTEAD, UncountedError
from ds_toolkit.plan.job import Experts, Model

_SECONDS = 120
# By its path, not imported: it needs torch, which this half of the toolkit starts without.
_SCRIPT = Path(__file__).resolve().parents[1] / "integrations" / "hf_parameters.py"
# Nothing is fetched, and no GPU is touched; kernels from the hub are code.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "USE_HUB_KERNELS": "0",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUDA_VISIBLE_DEVICES": "",
}


def read_hf_model(path: Path) -> Model:
    """The model of a `config.json`, or of the one in the folder that is named; its rationale says how.

    Families that are known here are counted by formula. For others transformers builds the model without
    memory for weights, in a process of its own that runs nothing of the checkpoint's and reaches no network.

    Raises:
        ToolkitError: it cannot be read, lacks a size, or neither way can count it.
    """
    where = str(hf_config_file(path))
    data = read_hf_config(path)
    try:
        return hf_model(data, where)
    except UncountedError as error:
        # A model is asked for more than once where questions are asked.
        answer = _counted(json.dumps(data))
        if "error" in answer:
            raise _failure(answer["error"], error, where) from None
    return _model(data, answer, where)


@lru_cache(maxsize=8)
def _counted(text: str) -> Any:
    try:
        done = subprocess.run(
            [sys.executable, str(_SCRIPT)],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, **_ENVIRONMENT},
            check=False,
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        why = f"transformers did not build the model in {_SECONDS} s"
    except OSError as error:
        why = f"{sys.executable}: {error.strerror}"
    except ValueError:
        # It answers whatever happens, unless it was killed or ran out of memory.
        last_line = (done.stderr.strip().splitlines() or [""])[-1]
        why = f"the process that counts ended with {done.returncode}: {last_line}"
    return {"error": {"what": "", "why": why, "fix": ""}}


def _failure(told: Mapping[str, str], uncounted: UncountedError, where: str) -> ToolkitError:
    fix = f"{told['fix']}, or {COUNT_INSTEAD}" if told["fix"] else COUNT_INSTEAD
    return ToolkitError(told["what"] or uncounted.what, where=where, why=told["why"], fix=fix)


def _model(data: Mapping[str, object], answer: Mapping[str, Any], where: str) -> Model:
    sizes = tuple(answer["tensor_sizes"])
    experts = None if answer["experts"] is None else Experts(**answer["experts"])
    layers, hidden = answer["num_layers"], answer["hidden_size"]
    if not sizes or not layers or not hidden:
        raise ToolkitError(
            "the model has no blocks, no width or no parameters", where=where, fix=COUNT_INSTEAD
        )
    how = f"by {answer['version']} as {answer['class']}"
    rationale = f"{where}: {data['model_type']}, {counted_words(layers, hidden, sum(sizes), how, experts)}"
    return Model(
        sum(sizes),
        layers,
        hidden,
        answer["vocabulary_size"],
        "; ".join([rationale, *answer["notes"]]),
        sizes,
        answer["largest_block"],
        experts,
    )
