"""Every known failure is found in excerpts of logs, and not in one that only looks like it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_toolkit.doctor import diagnose as diagnosing
from ds_toolkit.doctor.diagnose import diagnose
from ds_toolkit.doctor.signatures import BY_CODE, BY_NAME, GRAMS, MARKERS, SIGNATURES
from ds_toolkit.doctor.signatures.signature import WORDS, Signature

EXCERPTS = Path(__file__).parent / "excerpts"
# Those are found in files that tests write themselves (test_diagnose.py), or stand for what nobody knows.
FOUND_ELSEWHERE = {"DS1295", "DS1296", "DS1297", "DS1298", "DS1299"}


@dataclass(frozen=True)
class Excerpt:
    code: str
    matches: bool
    text: str


def excerpts() -> list[Excerpt]:
    found = []
    for path in sorted(EXCERPTS.glob("*.txt")):
        for block in re.split(r"^== ", path.read_text(), flags=re.MULTILINE)[1:]:
            head, _, text = block.partition("\n")
            code, kind, *times = head.split()
            found.append(Excerpt(code, kind != "unlike", text * (int(times[0]) if times else 1)))
    return found


ALL = excerpts()


@pytest.fixture(autouse=True)
def quiet_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's kernel has to say is no part of an excerpt."""
    monkeypatch.setattr(diagnosing, "kernel_log", lambda: b"")
    monkeypatch.setattr(diagnosing, "cgroup_kills", lambda: None)


@pytest.mark.parametrize(
    "excerpt", ALL, ids=[f"{one.code}-{'seen' if one.matches else 'unlike'}-{n}" for n, one in enumerate(ALL)]
)
def test_an_excerpt_gives_its_cause(excerpt: Excerpt, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(excerpt.text)
    codes = {cause.finding.code for cause in diagnose([log]).causes}
    assert (excerpt.code in codes) is excerpt.matches, codes


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.code)
def test_a_signature_is_shown_three_times_and_contradicted_once(signature: Signature) -> None:
    if signature.code in FOUND_ELSEWHERE:
        return
    own = [excerpt for excerpt in ALL if excerpt.code == signature.code]
    assert sum(excerpt.matches for excerpt in own) >= 3
    assert sum(not excerpt.matches for excerpt in own) >= 1


def test_codes_and_names_are_used_once() -> None:
    assert len(BY_CODE) == len(BY_NAME) == len(SIGNATURES)
    assert all(re.fullmatch(r"DS12[0-9]{2}", code) for code in BY_CODE)
    assert {excerpt.code for excerpt in ALL} <= set(BY_CODE)


def test_every_pattern_holds_a_word_that_is_looked_for() -> None:
    patterns = [pattern for signature in SIGNATURES for pattern in signature.patterns]
    patterns += [pattern for marker in MARKERS.values() for pattern in marker]
    assert [pattern for pattern in patterns if not any(word in pattern for word in WORDS)] == []
    assert all(len(gram) == 4 for gram in GRAMS)


def test_what_a_signature_asks_for_exists() -> None:
    for signature in SIGNATURES:
        assert set(signature.unless) <= set(BY_NAME)
        for name in (part for need in signature.needs for part in need.split("|")):
            known = (
                name in BY_NAME
                or name in MARKERS
                or re.match(r"exit|incident:|flight-|frame:|exception", name)
            )
            assert known, f"{signature.name} asks for {name}"


def test_a_fix_and_a_cause_fill_only_what_patterns_see() -> None:
    for signature in SIGNATURES:
        groups = set(re.findall(r"\(\?P<(\w+)>", " ".join(signature.patterns))) | {"count", "what"}
        assert set(re.findall(r"\{(\w+)\}", signature.cause + signature.fix)) <= groups, signature.name
