"""The tags of a directory, newest first, and which of them are whole as far as one look can tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.checkpoint.layout import LATEST
from ds_toolkit.checkpoint.manifest import MANIFEST_NAME, WEIGHTS_ONLY, Manifest
from ds_toolkit.checkpoint.tag_folders import every_tag_folder
from ds_toolkit.checkpoint.verify import LATEST_LOST, NOT_WHOLE, UNREADABLE_FILE, verify_sizes
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding, Severity, Where


@dataclass(frozen=True)
class Candidate:
    """A tag that looks whole: its files are there with the right sizes."""

    tag: str
    step: int
    folder: Path
    manifest: Manifest | None

    @property
    def kind(self) -> str:
        """Why it was written; `deepspeed` if it has no manifest because DeepSpeed alone wrote it."""
        return "deepspeed" if self.manifest is None else self.manifest.kind


@dataclass(frozen=True)
class PassedOver:
    """A tag that is not whole, and what was found wrong with it."""

    tag: str
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        reasons = [
            f"{Path(finding.where.file).name}: {finding.message}" if finding.where.file else finding.message
            for finding in self.findings
        ]
        return f"{self.tag}: {'; '.join(reasons)}"


def survey(directory: Path) -> tuple[list[Candidate], list[PassedOver]]:
    """Candidates to resume from, newest first, and the tags that are none; reads no tensor data.

    A tag that DeepSpeed alone wrote has no manifest; it counts if every shard that its layout asks for is
    there, undamaged as a zip archive, and of the same step.
    """
    candidates: list[Candidate] = []
    passed_over: list[PassedOver] = []
    for folder in every_tag_folder(directory):
        judged = _judge(folder)
        if isinstance(judged, Candidate):
            candidates.append(judged)
        else:
            passed_over.append(judged)
    candidates.sort(key=_age, reverse=True)
    return candidates, passed_over + _lost_latest(directory, candidates, passed_over)


def _age(candidate: Candidate) -> tuple[int, str]:
    return candidate.step, candidate.manifest.created_at if candidate.manifest else ""


def _judge(folder: Path) -> Candidate | PassedOver:
    if not (folder / MANIFEST_NAME).exists():
        return _judge_layout(folder)
    try:
        manifest = Manifest.read(folder)
    except ToolkitError as error:
        return PassedOver(folder.name, (_finding(UNREADABLE_FILE, error),))
    findings = verify_sizes(folder, manifest)
    if manifest.kind == WEIGHTS_ONLY:
        findings.append(_weights_only(folder))
    if findings:
        return PassedOver(folder.name, tuple(findings))
    return Candidate(folder.name, manifest.step, folder, manifest)


def _weights_only(folder: Path) -> Finding:
    # A finding and no silence: whoever has nothing else must not start from nothing without a word.
    message = "holds the weights alone: training cannot be resumed from it"
    fix = "to begin anew from these weights, consolidate them and load them into the model"
    return Finding(NOT_WHOLE, Severity.ERROR, message, Where(file=str(folder)), fix=fix)


def _judge_layout(folder: Path) -> Candidate | PassedOver:
    # Rarely needed, and the readers of tensor data are much more code than the rest of this.
    from ds_toolkit.checkpoint.weights import read_weights

    try:
        weights = read_weights(folder)
    except ToolkitError as error:
        return PassedOver(folder.name, (_finding(NOT_WHOLE, error),))
    return Candidate(folder.name, weights.step, folder, None)


def _lost_latest(
    directory: Path, candidates: list[Candidate], passed_over: list[PassedOver]
) -> list[PassedOver]:
    """A tag that `latest` names and that is gone: no reason to start from nothing without a word."""
    try:
        tag = (directory / LATEST).read_bytes()[:4096].decode(errors="replace").strip()
    except OSError:
        return []
    known = {candidate.tag for candidate in candidates} | {broken.tag for broken in passed_over}
    if tag in known:
        return []
    message = f"`{LATEST}` names it, and there is no such checkpoint"
    where = Where(file=str(directory / LATEST))
    return [PassedOver(tag, (Finding(LATEST_LOST, Severity.ERROR, message, where),))]


def _finding(code: str, error: ToolkitError) -> Finding:
    message = f"{error.what}: {error.why}" if error.why else error.what
    return Finding(code, Severity.ERROR, message, Where(file=error.where), fix=error.fix)
