"""The guardian is to be small and to start at once: nothing but the standard library is loaded for it."""

from __future__ import annotations

import sys

import jobs

SCRIPT = """
import pkgutil, sys
before = set(sys.modules)
import ds_toolkit.guardian
for module in pkgutil.iter_modules(ds_toolkit.guardian.__path__):
    __import__(f"ds_toolkit.guardian.{module.name}")
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - sys.stdlib_module_names))
"""


def test_the_guardian_loads_the_standard_library_alone() -> None:
    finished = jobs.run([sys.executable, "-c", SCRIPT], cwd=jobs.REPOSITORY).check()
    assert finished.output.split() == ["ds_toolkit"]
