from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path

import pytest

from ds_toolkit import files
from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import crc32_of, exchange, whole_file, write_output, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_text("old")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_writer_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as partial:
            partial.write_text("ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_replace = Path.replace
    monkeypatch.setattr(files, "fsync_file", lambda path: order.append(f"fsync {path.suffix}"))
    monkeypatch.setattr(files, "fsync_directory", lambda path: order.append("fsync folder"))
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("rename"), real_replace(self, to))[1])
    write_whole(tmp_path / "file", b"data")
    assert order == ["fsync .partial", "rename", "fsync folder"]


def test_the_crc_is_zlibs_over_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CRC_CHUNK_BYTES", 7)
    content = bytes(range(256))
    (tmp_path / "file").write_bytes(content)
    assert crc32_of(tmp_path / "file") == zlib.crc32(content)


def test_two_folders_swap_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if exchange(tmp_path / "one", tmp_path / "two"):
        assert (tmp_path / "one" / "two").exists()
        assert (tmp_path / "two" / "one").exists()
    else:
        assert (tmp_path / "one" / "one").exists()


def test_a_swap_with_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "two")


def test_an_output_is_written_through_links_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "file"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "middle").symlink_to("there/file")
    (tmp_path / "link").symlink_to("middle")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").readlink() == Path("middle")
    assert (tmp_path / "middle").readlink() == Path("there/file")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list((tmp_path / "there").iterdir()) == [target]


def test_a_link_to_nothing_yet_gets_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    write_output(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "new"
    (tmp_path / "lost").symlink_to("nowhere/file")
    with pytest.raises(ToolkitError, match="cannot be written"):
        write_output(tmp_path / "lost", b"new")
    assert (tmp_path / "lost").is_symlink()


@pytest.mark.parametrize(("mode", "runs"), [(0o640, 0o750), (0o600, 0o700), (0o755, 0o755)])
def test_who_may_read_a_script_may_run_it(mode: int, runs: int, tmp_path: Path) -> None:
    (tmp_path / "script").touch()
    (tmp_path / "script").chmod(mode)
    write_output(tmp_path / "script", b"", executable=True)
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == runs


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(tmp_path / "pipe", b"new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(ToolkitError, match="cannot be written"):
        write_output(tmp_path, b"new")


def test_writing_back_is_begun_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    data = os.urandom(3 * 2**20)
    with path.open("wb", buffering=0) as file:
        file.write(data)
        files.start_writing_back(file.fileno(), 0, len(data))
        files.start_writing_back(file.fileno(), 2**40, 5)
    assert path.read_bytes() == data
    # It is a hint: a descriptor that is none is no reason to fail, nor a system without the call.
    files.start_writing_back(-1, 0, 1)
    monkeypatch.setattr(files, "_sync_file_range", lambda: None)
    files.start_writing_back(-1, 0, 1)
