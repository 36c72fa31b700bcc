from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config

# The machine under test may have GPUs; without nvidia-smi on the PATH it counts as one that has none.
ENVIRONMENT = {
    "PATH": "/nonexistent",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "COLUMNS": "120",
}
SMALL = ("--model", "1M", "--stage", "3", "--num-nodes", "1", "--gpus-per-node", "2")
SMALL += ("--sequence-length", "128", "--micro-batch-size", "8")


def gen_config(*arguments: str, cwd: Path, columns: int = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_toolkit", "gen-config", *arguments]
    environment = {**ENVIRONMENT, "COLUMNS": str(columns)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_a_config_is_written_with_its_ladder_and_its_reasons(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = gen_config(*SMALL, "-o", "runs/ds_config.json", "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0:3] for line in lines if "->" in line] == [["->", "ZeRO", "3,"]]
    assert len([line for line in lines if line.startswith("- ")]) > 6
    assert lines[-1] == "written: runs/ds_config.json"
    document = read_config(tmp_path / "runs" / "ds_config.json")
    assert json.loads((tmp_path / "runs" / "ds_config.json").read_text()) == document.data
    assert document.data["zero_optimization"]["stage"] == 3  # type: ignore[index]
    assert lint(document, world_size=2) == []


def test_json_output_holds_what_the_file_holds(tmp_path: Path) -> None:
    done = gen_config(*SMALL, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert report["config"] == json.loads((tmp_path / "ds_config.json").read_text())
    assert [rung["name"] for rung in report["rungs"] if rung["chosen"]] == ["ZeRO 3, micro batch 8 x 1"]
    assert report["file"] == "ds_config.json"


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path) -> None:
    done = gen_config(*SMALL, "--dry-run", cwd=tmp_path)
    config = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--model is missing"),
        (("--gpu-memory", "80GB"), "--model, --gpus-per-node are missing"),
        (("--model", "none.json"), "cannot be read"),
        (("--model", "1M", "--interconnect", "fast"), "`fast` is not a network"),
        (("--model", "1M", "--preset", "fast"), "no preset `fast`"),
        (("--model", "1M", "--mttf-per-gpu", "0h"), "mean time to failure is 0"),
        (("--model", "1M", "--env-file", "none"), "cannot be read"),
        (("--model", "big"), "`big` is not a count"),
        (("--model", "1M", "-o", "missing/c.json"), "the folder does not exist"),
        (("--model", "1M", "-o", "there.json"), "the file exists"),
        (("--model", "1M", "-o", "."), "is a folder"),
        (("--model", "1M", "--gpus-per-node", "0"), "--gpus-per-node is 0"),
        (("--model", "1M", "--host-memory", "much"), "`much` is not a size"),
        (("--model", "70B", "--host-memory", "1GB"), "does not fit"),
        (("--model", "1M", "--stage", "4"), "--stage"),
        (("--model", "1M", "--nvme", ""), "--nvme is empty"),
        (("--model", "1M", "--host-memory", "0"), "host memory is 0"),
        (("--model", "1M", "--gpu-memory", "80"), "did you mean 80GB?"),
        (("--model", "1M", "--host-memory", "512"), "did you mean 512GB?"),
    ],
)
def test_bad_input_ends_with_two_and_without_a_traceback(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "there.json").write_text("mine")
    done = gen_config(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "there.json").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_no_word_of_the_ladder_is_cut_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    machine = ("--num-nodes", "2", "--gpus-per-node", "8", "--gpu-memory", "80GB", "--host-memory", "1TB")
    arguments = ("--model", "7B", *machine, "--interconnect", "8x400Gb-IB", "--dry-run")
    done = gen_config(*arguments, cwd=tmp_path, columns=80)
    assert done.returncode == 0
    assert "…" not in done.stdout
    ladder = done.stdout.partition("\n- ")[0].splitlines()
    assert max(map(len, ladder)) <= 80


def test_the_ladder_is_printed_when_nothing_fits_too(tmp_path: Path) -> None:
    arguments = ("--model", "70B", "--gpu-memory", "24GB", "--gpus-per-node", "2", "--host-memory", "64GB")
    done = gen_config(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "memory ladder" in done.stdout
    assert done.stdout.count("ZeRO") == 8
    assert "--num-nodes" in done.stderr
    assert "does not fit" in done.stderr
    done = gen_config(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["error"]["what"] == "the model does not fit"
    rungs = report["error"]["rungs"]
    assert len(rungs) == 8
    assert not any(rung["fits"] or rung["chosen"] for rung in rungs)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("mine")
    assert gen_config("--model", "1M", "--force", cwd=tmp_path).returncode == 0
    assert "train_micro_batch_size_per_gpu" in (tmp_path / "ds_config.json").read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["--model", "1M", "--dry-run"]])
def test_neither_torch_nor_deepspeed_is_imported(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from ds_toolkit.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    print('heavy:', sorted({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, "gen-config", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_schema_that_the_config_names_lies_beside_it(tmp_path: Path) -> None:
    assert gen_config(*SMALL, cwd=tmp_path).returncode == 0
    config = json.loads((tmp_path / "ds_config.json").read_text())
    schema = json.loads((tmp_path / config["$schema"]).read_text())
    assert "zero_optimization" in schema["properties"]


@pytest.mark.parametrize("mine", ["mine", "[]", '{"title": "ds_config"}', b"\xff"])
def test_a_schema_that_is_not_the_toolkits_stays(mine: str | bytes, tmp_path: Path) -> None:
    content = mine.encode() if isinstance(mine, str) else mine
    (tmp_path / "ds_config.schema.json").write_bytes(content)
    assert gen_config(*SMALL, cwd=tmp_path).returncode == 0
    assert (tmp_path / "ds_config.schema.json").read_bytes() == content


def test_the_toolkits_own_schema_of_another_version_is_replaced(tmp_path: Path) -> None:
    assert gen_config(*SMALL, cwd=tmp_path).returncode == 0
    path = tmp_path / "ds_config.schema.json"
    newest = path.read_text()
    stale = json.loads(newest)
    del stale["properties"]["zero_optimization"]
    path.write_text(json.dumps(stale))
    assert gen_config(*SMALL, "--force", cwd=tmp_path).returncode == 0
    assert path.read_text() == newest
    # What is as it should be is left alone.
    before = path.stat().st_ino
    assert gen_config(*SMALL, "--force", cwd=tmp_path).returncode == 0
    assert path.stat().st_ino == before


def test_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100, "model_type": "llama"}))
    done = gen_config("--model", "config.json", "--dry-run", "--json", cwd=tmp_path)
    assert "config.json: llama, 2 blocks of width 64" in json.loads(done.stdout)["reasons"][0]


def test_the_environment_file_is_held_against_the_plan(tmp_path: Path) -> None:
    (tmp_path / "my_env").write_text("NCCL_IB_DISABLE=1\n")
    arguments = ("--model", "1B", "--gpu-memory", "80GB", "--gpus-per-node", "8", "--num-nodes", "2")
    arguments += ("--interconnect", "400Gb-IB", "--env-file", "my_env", "--dry-run", "--stage", "1")
    done = gen_config(*arguments, "--json", cwd=tmp_path)
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["DS555"]
    assert "warning DS555" in gen_config(*arguments, cwd=tmp_path).stdout


def test_each_rung_says_what_it_needs_and_sends(tmp_path: Path) -> None:
    arguments = ("--model", "7B", "--gpu-memory", "24GB", "--gpus-per-node", "8", "--nvme", "/local")
    done = gen_config(*arguments, "--interconnect", "NVLink4", "--dry-run", "--json", cwd=tmp_path)
    rungs = json.loads(done.stdout)["rungs"]
    assert len(rungs) == 9
    assert all(rung["device_bytes"] > 0 and rung["communication_seconds"] > 0 for rung in rungs)
    assert rungs[-1]["nvme_bytes"] > 0


def converse(answers: list[str], cwd: Path, *flags: str, exit_code: int = 0) -> str:
    """What is on the screen after these answers were typed."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "ds_toolkit", "gen-config", *flags]
    with subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdin=terminal, stdout=terminal, stderr=terminal
    ) as run:
        os.close(terminal)
        screen = ""
        for answer in [*answers, None]:
            while answer is None or "? " not in screen.rpartition("\n")[2].replace("]", "?"):
                try:
                    data = os.read(controller, 4096)
                except OSError:
                    data = b""  # the terminal closes with the process
                if not data:
                    break
                screen += data.decode().replace("\r\n", "\n")
                if answer is None and "? " in screen.rpartition("\n")[2]:
                    run.kill()  # it asks for more than was expected, and would wait for ever
            if answer is not None:
                os.write(controller, f"{answer}\n".encode())
                screen += "\n"
        os.close(controller)
        assert run.wait(timeout=30) == exit_code, screen
    return screen


def test_on_a_terminal_it_asks_one_question_at_a_time(tmp_path: Path) -> None:
    # A wrong answer is explained and asked again; empty ones take the default; a CPU has no network question.
    screen = converse(["large", "1M", "", "", "2", "16GB", "", "128", "4", "", ""], tmp_path)
    assert "`large` is not a count" in screen
    assert "Network between" not in screen
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert "bf16" not in config


def test_a_cluster_is_asked_for_its_network(tmp_path: Path) -> None:
    screen = converse(["1M", "2", "80GB", "8", "1TB", "100GbE", "", "", "", "32", "hf"], tmp_path)
    assert "Network between" in screen
    heading = screen.partition("memory ladder")[2].partition("ZeRO 0")[0]
    assert "sending" in heading
    assert "100GbE" in heading
    assert json.loads((tmp_path / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == "auto"


def test_a_global_batch_that_does_not_come_out_is_asked_for_again(tmp_path: Path) -> None:
    screen = converse(["1M", "", "", "2", "16GB", "", "128", "4", "12", "24", ""], tmp_path)
    assert "the global batch 12 cannot be divided" in screen
    assert "one pass is 8: micro batch 4 x 2 ranks" in screen
    assert screen.count("Samples of one optimizer step") == 2
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["gradient_accumulation_steps"] == 3


def test_what_does_not_go_with_a_flag_is_asked_for_again_at_once(tmp_path: Path) -> None:
    # 10 samples on 4 ranks never come out; on 5 they do, and then not with 4 samples a pass.
    answers = ["1M", "", "80", "", "4", "5", "16GB", "", "128", "4", "2", ""]
    screen = converse(answers, tmp_path, "--global-batch-size", "10")
    assert "did you mean 80GB?" in screen
    assert screen.count("cannot be divided") == 2
    assert screen.count("GPUs a host") == screen.count("Samples of one forward pass") == 2
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 2


def test_flags_that_cannot_go_together_end_before_the_first_question(tmp_path: Path) -> None:
    flags = ("--global-batch-size", "10", "--num-nodes", "4")
    assert "cannot be divided" in converse([], tmp_path, *flags, exit_code=2)
    assert list(tmp_path.iterdir()) == []
