"""Whether the files of a tag are the ones that its manifest promises."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ds_toolkit.checkpoint.manifest import Manifest, ManifestFile
from ds_toolkit.files import crc32_of
from ds_toolkit.findings import Finding, Severity, Where

MISSING_FILE = "DS901"
WRONG_SIZE = "DS902"
WRONG_CRC = "DS903"
UNREADABLE_FILE = "DS904"
NOT_WHOLE = "DS905"
LATEST_LOST = "DS906"


def verify_sizes(folder: Path, manifest: Manifest) -> list[Finding]:
    """Findings for every file of the manifest that is missing or has another size; reads no data."""
    return [finding for file in manifest.files for finding in _size_findings(folder, file)]


def verify_crcs(folder: Path, files: Iterable[ManifestFile]) -> list[Finding]:
    """Findings for those of `files` that are missing, cut, altered or unreadable; reads every byte of them.

    Ranks share this work: each calls it with its part of the manifest's files.
    """
    findings = []
    for file in files:
        wrong_size = _size_findings(folder, file)
        findings += wrong_size or _crc_findings(folder, file)
    return findings


def _size_findings(folder: Path, file: ManifestFile) -> list[Finding]:
    path = folder / file.name
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return [_finding(MISSING_FILE, path, "the file is missing")]
    except OSError as error:
        return [_finding(UNREADABLE_FILE, path, f"the file cannot be read: {error.strerror}")]
    if size_bytes != file.size_bytes:
        sizes = f"it has {size_bytes:,} bytes and was written with {file.size_bytes:,}"
        return [_finding(WRONG_SIZE, path, sizes)]
    return []


def _crc_findings(folder: Path, file: ManifestFile) -> list[Finding]:
    path = folder / file.name
    try:
        crc32 = crc32_of(path)
    except OSError as error:
        return [_finding(UNREADABLE_FILE, path, f"the file cannot be read: {error.strerror}")]
    if crc32 != file.crc32:
        crcs = f"its content has changed: CRC-32 {crc32:08x}, written as {file.crc32:08x}"
        return [_finding(WRONG_CRC, path, crcs)]
    return []


def _finding(code: str, path: Path, message: str) -> Finding:
    return Finding(code, Severity.ERROR, message, Where(file=str(path)), fix="use another tag")
