"""What a script's own text says about the ds_config: a dictionary in it, or a JSON file beside it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.config.reader import MAX_BYTES, read_config_text
from ds_toolkit.doctor.scripts.names import Names, argument
from ds_toolkit.errors import ToolkitError

_STAGE = ("zero_optimization", "stage")


@dataclass(frozen=True)
class KnownConfig:
    """The facts of a ds_config that rules about scripts depend on; None for what is not known.

    Attributes:
        stage: the ZeRO stage.
        fp16: whether fp16 is on.
    """

    stage: int | None = None
    fp16: bool | None = None


def known_of(data: Mapping[str, object]) -> KnownConfig:
    """The facts of a whole ds_config; what it leaves out has DeepSpeed's default."""
    zero = data.get("zero_optimization", {})
    if isinstance(zero, bool):
        stage: object = int(zero)
    else:
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
    fp16 = data.get("fp16", {})
    enabled = fp16.get("enabled", False) if isinstance(fp16, Mapping) else None
    return KnownConfig(
        stage if isinstance(stage, int) and not isinstance(stage, bool) else None,
        enabled if isinstance(enabled, bool) else None,
    )


class ConfigFinder:
    """Looks a configuration up where a script says that it stands."""

    def __init__(self, names: Names, folder: Path | None) -> None:
        self._names = names
        self._folder = folder

    def find(self, node: ast.expr) -> KnownConfig:
        """What is known of the configuration that an expression stands for."""
        value = self._names.origin(node)
        if isinstance(value, ast.Dict):
            return KnownConfig() if self._is_changed(node) else known_of(self._plain(value))
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return self._of_file(value.value)
        if isinstance(value, ast.Call):
            return self._of_call(value)
        return KnownConfig()

    def _of_call(self, call: ast.Call) -> KnownConfig:
        """`json.load(open("ds.json"))`, `Path("ds.json")`, `json.loads(Path("ds.json").read_text())`."""
        for inner in [call, *call.args]:
            for node in ast.walk(self._names.origin(inner)):
                named = isinstance(node, ast.Call) and self._names.dotted(node.func)
                if not named or named not in {"open", "pathlib.Path", "io.open"}:
                    continue
                first = argument(node, None, 0) if isinstance(node, ast.Call) else None
                value = self._names.origin(first) if first is not None else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    return self._of_file(value.value)
        return KnownConfig()

    def _plain(self, node: ast.Dict) -> dict[str, object]:
        """The dictionary as data; `None` for a value that only a run would know."""
        plain: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                # `**base`: anything may come from there.
                return {"zero_optimization": None, "fp16": None}
            inner = self._names.origin(value)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                if isinstance(inner, ast.Dict):
                    plain[key.value] = self._plain_section(inner)
                else:
                    plain[key.value] = inner.value if isinstance(inner, ast.Constant) else None
        return plain

    def _plain_section(self, node: ast.Dict) -> dict[str, object]:
        section: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                return {"stage": None, "enabled": None}
            inner = self._names.origin(value)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                section[key.value] = inner.value if isinstance(inner, ast.Constant) else None
        return section

    def _is_changed(self, node: ast.expr) -> bool:
        """Whether the script changes a part of the dictionary that counts here, after it was written."""
        if not isinstance(node, ast.Name):
            return False
        for other in self._names.nodes:
            inner: ast.AST = other
            keys: list[object] = []
            while isinstance(inner, ast.Subscript):
                keys.append(inner.slice.value if isinstance(inner.slice, ast.Constant) else None)
                inner = inner.value
            if not (isinstance(inner, ast.Name) and inner.id == node.id):
                continue
            is_stored = isinstance(other, ast.Subscript) and isinstance(other.ctx, ast.Store)
            if is_stored and keys and keys[-1] in (None, "zero_optimization", "fp16"):
                return True
            parent = self._names.parents.get(other)
            if isinstance(parent, ast.Attribute) and parent.attr == "update":
                return True
        return False

    def _of_file(self, name: str) -> KnownConfig:
        """A JSON file beside the script; what cannot be read says nothing here."""
        if self._folder is None or not name.lower().endswith((".json", ".hjson")):
            return KnownConfig()
        path = self._folder / name
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                return KnownConfig()
            return known_of(read_config_text(path.read_text(encoding="utf-8"), str(path)).data)
        except (OSError, ValueError, ToolkitError):
            return KnownConfig()
