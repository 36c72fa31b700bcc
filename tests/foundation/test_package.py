"""The package as people get it: public names, what is imported when, and what a wheel holds."""

from __future__ import annotations

import configparser
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import jobs
import pytest

import ds_toolkit

PACKAGE = jobs.REPOSITORY / "ds_toolkit"
EXAMPLE = str(jobs.REPOSITORY / ".deepspeed_env.example")


def test_public_names() -> None:
    assert ds_toolkit.__all__ == [
        "CheckpointGuard",
        "GuardSettings",
        "Resumed",
        "ToolkitError",
        "consolidate",
        "load",
        "open_checkpoint",
        "skip_cpu_extension_builds",
        "verify_checkpoint",
    ]
    for name in ds_toolkit.__all__:
        assert getattr(ds_toolkit, name).__doc__
        assert name in dir(ds_toolkit)
    with pytest.raises(AttributeError, match="CheckpointGaurd"):
        ds_toolkit.CheckpointGaurd  # noqa: B018


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "ds_toolkit", "gen-config", "--help"],
        ["-m", "ds_toolkit", "gen-config", "--model", "1M", "--dry-run"],
        ["-m", "ds_toolkit", "consolidate", "--help"],
        ["-m", "ds_toolkit", "verify", "--help"],
        ["-m", "ds_toolkit", "inspect", "--help"],
        ["-m", "ds_toolkit", "status", "--help"],
        ["-m", "ds_toolkit", "diagnose", EXAMPLE],
        ["-m", "ds_toolkit", "run", "--", "true"],
        ["-m", "ds_toolkit", "lint", EXAMPLE],
        ["-m", "ds_toolkit", "explain", "DS001"],
        ["-m", "ds_toolkit", "check-script", str(jobs.REPOSITORY / "examples" / "tiny_lm" / "train.py")],
        ["-m", "ds_toolkit", "schema"],
        ["-m", "ds_toolkit", "--version"],
        ["-c", "import ds_toolkit; ds_toolkit.GuardSettings; ds_toolkit.ToolkitError"],
    ],
)
def test_light_commands_import_neither_torch_nor_deepspeed(command: list[str]) -> None:
    finished = jobs.run([sys.executable, "-X", "importtime", *command]).check()
    imported = {
        line.rpartition("|")[2].strip() for line in finished.output.splitlines() if "import time:" in line
    }
    assert "ds_toolkit.errors" in imported
    assert imported.isdisjoint({"torch", "deepspeed"})


def test_the_console_script() -> None:
    finished = jobs.run([jobs.BIN / "ds-toolkit", "--version"]).check()
    assert finished.output.strip() == ds_toolkit.__version__


def test_an_error_is_told_without_a_traceback(tmp_path: Path) -> None:
    finished = jobs.run([jobs.BIN / "ds-toolkit", "consolidate", tmp_path / "none", tmp_path / "out.bin"])
    assert finished.exit_code == 2
    assert "error: " in finished.output
    assert "where:" in finished.output
    assert "Traceback" not in finished.output


def test_the_package_list_is_the_packages_there_are() -> None:
    settings = configparser.ConfigParser()
    settings.read(jobs.REPOSITORY / "setup.cfg")
    listed = set(settings["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(jobs.REPOSITORY).parts) for path in PACKAGE.rglob("__init__.py")
    }
    assert listed == found | {"ds_toolkit.templates"}


def test_no_module_is_too_long_to_be_read_at_once() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: length for path, length in lengths.items() if length > 320} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked tree, so that no leftover of an earlier build is in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("ds_toolkit", "templates"):
        shutil.copytree(jobs.REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(jobs.REPOSITORY / name, source)
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source]
    jobs.run(build, timeout_seconds=250).check()
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_is_called_deepspeed_toolkit(wheel: Path) -> None:
    assert wheel.name.startswith(f"deepspeed_toolkit-{ds_toolkit.__version__}-py3-none-any")


def test_a_template_renders_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    # Dependencies come from the environment that runs the tests; the package itself from the wheel alone.
    site_packages = next(environment.glob("lib/python3*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site_packages, wheel]
    jobs.run(install, timeout_seconds=250).check()
    here = next(path for path in map(Path, sys.path) if (path / "jinja2").is_dir())
    (site_packages / "dependencies.pth").write_text(f"{here}\n")
    code = """
import json, ds_toolkit
from ds_toolkit.rendering import render, template_directory
text = render("env/deepspeed_env.j2", variables={"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": 22})
print(json.dumps([ds_toolkit.__file__, str(template_directory()), text]))
"""
    finished = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    package_file, templates, rendered = json.loads(finished.stdout)
    assert Path(package_file).is_relative_to(site_packages)
    assert Path(templates) == site_packages / "ds_toolkit" / "templates"
    assert rendered == "NCCL_DEBUG=WARN\nNCCL_IB_TIMEOUT=22\n"
    assert not list(site_packages.glob("templates"))
