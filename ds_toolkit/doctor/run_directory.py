"""What a run's directory holds beside checkpoints: logs, incidents, Flight Recorder dumps, configuration."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_toolkit.checkpoint.incident import FOLDER_NAME
from ds_toolkit.doctor.evidence import Evidence
from ds_toolkit.doctor.flight_recorder import dumps_in, missing_ranks
from ds_toolkit.errors import ToolkitError, printable

MAX_LOGS = 1000
_MAX_JSON_BYTES = 2**24
_LOG = re.compile(
    r".*\.(?:log|out|err|txt)(?:\.gz|\.\d+)?|std(?:out|err)|(?:slurm|nohup|train|rank|dmesg|kern)[\w.-]*\.?(?:log|out|txt)?",
    re.IGNORECASE,
)
_NO_LOG = re.compile(r".*\.(?:py|json|pt|bin|safetensors|yaml|yml|sh|md)", re.IGNORECASE)


@dataclass(frozen=True)
class RunDirectory:
    """What a directory holds that may tell of a failure."""

    folder: Path

    def logs(self) -> list[Path]:
        """Files that by their names are logs; not those inside checkpoints."""
        found = [
            path
            for path in sorted(self.folder.rglob("*"))
            if _LOG.fullmatch(path.name)
            and not _NO_LOG.fullmatch(path.name)
            and path.name not in ("requirements.txt", "vocab.txt", "merges.txt")
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(self.folder).parts)
        ]
        return found[:MAX_LOGS]

    def config(self) -> dict[str, Any] | None:
        """The newest configuration of DeepSpeed that lies there; None if there is none that can be read."""
        candidates = [*self.folder.glob("*ds*config*.json"), *self.folder.glob("*deepspeed*.json")]
        for path in sorted(candidates, key=_modified, reverse=True):
            data = _read_json(path)
            if isinstance(data, dict):
                return data
        return None

    def hf_config(self) -> dict[str, Any] | None:
        """The model's `config.json` of Hugging Face."""
        data = _read_json(self.folder / "config.json")
        return data if isinstance(data, dict) else None

    def add_to(self, evidence: Evidence) -> None:
        """Add what incident files and dumps of the Flight Recorder tell."""
        for path in sorted(self.folder.rglob(f"{FOLDER_NAME}/[!.]*.json"))[:MAX_LOGS]:
            _add_incident(path, evidence)
        try:
            missing = missing_ranks(dumps_in(self.folder), evidence.notes)
        except ToolkitError as error:
            evidence.notes.append(str(error))
            return
        if missing is not None:
            evidence.facts["flight-recorder:missing"] = printable(str(missing))
            evidence.facts["file:flight-recorder:missing"] = missing.file


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _read_json(path: Path) -> object:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _add_incident(path: Path, evidence: Evidence) -> None:
    """One incident file, as this version writes it or a newer one: what is not known is passed over."""
    data = _read_json(path)
    if not isinstance(data, dict):
        evidence.notes.append(f"{path} cannot be read as an incident")
        return
    hang, ended = data.get("hang"), data.get("ended")
    is_hang = isinstance(hang, dict) or data.get("event") == "hang" or data.get("kind") == "hang"
    if is_hang:
        said = hang.get("what") if isinstance(hang, dict) else None
        fact, what = "incident:hang", str(said or data.get("why") or "nothing moved any more")
    elif isinstance(ended, list) and ended and all(isinstance(end, dict) for end in ended):
        failed = [end for end in ended if end.get("how") != "end"]
        if not failed:
            return
        first = failed[0]
        evidence.facts.setdefault("first-rank", str(_integer(first.get("rank"))))
        what = (
            f"rank {first.get('rank')} (process {first.get('pid')}) ended first: {first.get('how')}"
            f" {first.get('detail') or ''}".rstrip()
        )
        fact = "incident:end"
    else:
        return
    evidence.facts[fact] = printable(what)[:2000]
    evidence.facts[f"file:{fact}"] = str(path)


def _integer(value: object) -> int:
    return value if isinstance(value, int) else -1
