"""Scripts that know nothing of the toolkit, run with it: what they see, how they end, what is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from launched import DS_CONFIG, PLAIN_SCRIPT, deepspeed_launch, rank_process, seen_by

from ds_toolkit.checkpoint.incident import incidents
from ds_toolkit.checkpoint.newest import survey
from ds_toolkit.errors import ToolkitError
from ds_toolkit.integrations.launching import parse
from ds_toolkit.integrations.local_environment import ignored_variables

ON_ONE_NODE = {"CROSS_SIZE": "1"}


def launch(
    folder: Path, script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `train.py` of a folder, alone and from another folder; it must not need torch."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts" / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "ds_toolkit.launch", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.fspath(jobs.REPOSITORY),
            "HOME": os.fspath(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_script_sees_what_it_would_see_alone(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("name = __name__")
    script = """
import inspect, json, os, pickle, sys
import neighbour
class Mine: pass
def here(): return 1
pickle.loads(pickle.dumps(Mine()))
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"] is not None, __spec__,
    "torch" in sys.modules or "deepspeed" in sys.modules, type(__builtins__).__name__]))
assert inspect.getsource(here).startswith("def here")
assert neighbour.name == "neighbour"
import atexit
# What is saved when the script has ended may hold its classes.
atexit.register(lambda: print(len(pickle.dumps(Mine())) > 0))
"""
    finished = launch(
        tmp_path, script, "--local_rank=1", "--checkpoint-dir", "d", "scripts/train.py", "-x", "--"
    )
    alone = subprocess.run(
        [sys.executable, "scripts/train.py", "--local_rank=1", "-x", "--"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == alone.stdout, finished.stderr
    assert (finished.returncode, finished.stderr) == (0, "")
    assert alone.stdout.endswith("True\n")


@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.exit(0)",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('no more')",
        "import os; os._exit(5)",
        "def deeper():\n    raise ValueError('mine')\ndeeper()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('mine') from error",
        "def f(:\n    pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_script_ends_as_it_would_end_alone(tmp_path: Path, script: str) -> None:
    finished = launch(tmp_path, script, "scripts/train.py")
    alone = subprocess.run(
        [sys.executable, tmp_path / "scripts" / "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (finished.returncode, finished.stderr) == (alone.returncode, alone.stderr)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    finished = launch(tmp_path, "", "scripts/other.py")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: there is no such training script")
    assert "scripts/other.py" in finished.stderr


def test_initialize_is_found_however_it_is_imported(tmp_path: Path) -> None:
    """Once deepspeed has been imported; looking whether it is there, as transformers does, is no import."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "deepspeed.py").write_text(
        "class Engine: basic_optimizer = None\n"
        "def initialize(number):\n    'What it says.'\n    return (Engine(), number)\n"
    )
    script = """
import importlib.util
assert importlib.util.find_spec("deepspeed").loader.path.endswith("deepspeed.py")
from deepspeed import initialize
import deepspeed
assert initialize is deepspeed.initialize
# An engine without an optimizer has nothing to save.
assert initialize(number=7)[1] == 7
print(initialize.__doc__, initialize.__wrapped__.__name__)
"""
    finished = launch(tmp_path, script, "scripts/train.py")
    assert finished.stdout == "What it says. initialize\n", finished.stderr


def test_what_the_launcher_says_first_is_for_the_script() -> None:
    launch = parse(["--local_rank=0", "train.py", "--checkpoint-dir", "its own"])
    assert launch.arguments == ("--local_rank=0", "--checkpoint-dir", "its own")
    assert launch.directory == Path("checkpoints").absolute()
    assert parse(["--checkpoint-dir", "/ours", "train.py"]).arguments == ()


def test_the_file_of_the_folder_beats_that_of_the_home_and_both_what_is_exported(tmp_path: Path) -> None:
    for folder, text in (("home", "A=1\nB=2\nSAME=3\n"), ("here", "B = three = 3 \nRANK=7\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".deepspeed_env").write_text(text)
    folders = tmp_path / "home", tmp_path / "here"
    exported = {"A": "0", "SAME": "3", "RANK": "1"}
    ignored = ignored_variables({**ON_ONE_NODE, **exported}, *folders)
    assert ignored is not None
    assert ignored.variables == {"A": "1", "B": "three = 3"}
    assert ignored.left_out == ("RANK",)
    assert "A, B" in str(ignored)
    assert "three" not in str(ignored)
    # torchrun knows of no such file; DeepSpeed's launcher has read it for several nodes.
    assert ignored_variables({"TORCHELASTIC_RUN_ID": "x", **exported}, *folders) == ignored
    assert ignored_variables({"CROSS_SIZE": "2", **exported}, *folders) is None
    assert ignored_variables({**ON_ONE_NODE, **exported, **ignored.variables}, *folders) is None
    (tmp_path / "here" / "other").write_text("C=4\n")
    other = ignored_variables({**ON_ONE_NODE, "DS_ENV_FILE": "other"}, *folders)
    assert other is not None
    assert other.variables == {"C": "4"}


@pytest.mark.parametrize(("line", "word"), [("", "a blank line"), ("# A=1", "`# A` cannot be set")])
def test_a_file_that_would_end_the_launcher_is_refused(tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"{line}\n")
    with pytest.raises(ToolkitError, match=word):
        ignored_variables(ON_ONE_NODE, tmp_path / "none", tmp_path)


def test_variables_that_count_only_at_the_start_count(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "of_the_path.py").write_text("")
    path = f"{jobs.REPOSITORY}{os.pathsep}{tmp_path / 'modules'}"
    (tmp_path / ".deepspeed_env").write_text(f"PYTHONPATH={path}\nSECRET=hidden\n")
    script = "import os, of_the_path; print(os.environ['SECRET'], 'DS_TOOLKIT_BEGUN_AGAIN' in os.environ)"
    finished = launch(tmp_path, script, "scripts/train.py", **ON_ONE_NODE)
    assert finished.stdout == "hidden False\n", finished.stderr
    assert finished.stderr.count("\n") == 1
    assert "PYTHONPATH, SECRET" in finished.stderr
    assert "hidden" not in finished.stderr


def written_config(folder: Path) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(DS_CONFIG))
    return path


def test_killed_and_resumed_under_deepspeeds_launcher(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("OF_THE_FILE=yes\n")
    directory = tmp_path / "checkpoints"
    arguments = ["--deepspeed_config", written_config(tmp_path), "--steps", "40", "--step-seconds", "0.05"]
    environment = {"PYTHONPATH": os.fspath(jobs.REPOSITORY), "HOME": os.fspath(tmp_path / "none")}
    with jobs.Job(deepspeed_launch(PLAIN_SCRIPT, *arguments), environment=environment, cwd=tmp_path) as job:
        jobs.wait_until((directory / "global_step4").exists, 60, "a checkpoint")
        os.kill(rank_process(job.process.pid, rank=0), signal.SIGKILL)
        assert job.wait(60).exit_code == 256 - signal.SIGKILL
    finished = jobs.run(
        deepspeed_launch(PLAIN_SCRIPT, *arguments), environment=environment, cwd=tmp_path
    ).check()
    (seen,) = seen_by(finished)
    assert 4 <= seen["first"] < 40
    assert seen["last"] == 40
    assert seen["argv"] == [str(PLAIN_SCRIPT), "--local_rank=0", *map(str, arguments)]
    assert seen["main"]
    assert seen["from_file"] == "yes"
    assert finished.output.count("OF_THE_FILE") == 1
    assert f"the engine is at step {seen['first']}" in finished.output
    # The final checkpoint is that of `close`: nobody had to speak last words.
    assert survey(directory)[0][0].step == 40
    assert len(incidents(directory)) == 1


def test_a_failure_that_only_the_exit_code_tells_and_a_second_engine(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    arguments = ["--deepspeed_config", written_config(tmp_path), "--steps", "3", "--engines", "2"]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    finished = jobs.run(
        [
            *(sys.executable, "-m", "ds_toolkit.launch", "--checkpoint-dir", directory),
            *(PLAIN_SCRIPT, *arguments, "--end", "exit3"),
        ],
        environment={
            **alone,
            "MASTER_PORT": str(jobs.free_port()),
            "PYTHONPATH": os.fspath(jobs.REPOSITORY),
        },
        cwd=tmp_path,
    )
    assert finished.exit_code == 3, finished.output
    for folder in (directory, directory / "engine_2"):
        (incident,) = incidents(folder)
        assert [(end.how, end.detail) for end in incident.ended] == [("exception", "SystemExit: 3")]
        assert survey(folder)[0][0].step == 3
