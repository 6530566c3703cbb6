"""What the user names is written to, and nothing that is there is replaced by something else."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swarmnode.cli import main
from swarmnode.errors import ModelError, UsageError
from swarmnode.output_file import output_path, write_output

posix = pytest.mark.skipif(os.name == "nt", reason="no pipes with names, links and permissions as here")


def write(path: Path, data: bytes = b"new") -> None:
    write_output(output_path(str(path), "--svg"), data)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a.svg", b"first")
    write(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["a.svg"]


@posix
def test_a_link_stays_one_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.svg").write_bytes(b"old")
    (tmp_path / "there" / "real.svg").chmod(0o600)
    (tmp_path / "link.svg").symlink_to("there/real.svg")
    (tmp_path / "new.svg").symlink_to("there/made.svg")
    write(tmp_path / "link.svg")
    write(tmp_path / "new.svg")
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "new.svg").is_symlink()
    assert (tmp_path / "there" / "real.svg").read_bytes() == b"new"
    assert (tmp_path / "there" / "made.svg").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "there" / "real.svg").stat().st_mode) == 0o600


@posix
def test_a_pipe_gets_the_bytes_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data, read = bytes(1 << 20), bytearray()
    reader = threading.Thread(target=lambda: read.extend(pipe.read_bytes()))
    reader.start()
    write(pipe, data)
    reader.join(20)
    assert read == data
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@posix
def test_standard_output_is_no_file_to_be_replaced(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from swarmnode.output_file import *\n"
    code += "write_output(output_path('/dev/stdout', '--svg'), b'new')"
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # where it may be replaced, this machine's own must not be
        probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
        if probe.returncode:
            pytest.skip("no mount namespaces here")
        command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs t /dev -o mode=755 && ln -s /proc/self/fd/1 /dev/stdout'
                   ' && mknod /dev/full c 1 7 && "$@" && test -L /dev/stdout', "sh", *command]  # fmt: skip
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"new"
    kept = tmp_path / "log"
    kept.write_bytes(b"before\n")
    with kept.open("ab") as file:  # as by >>
        subprocess.run(command, stdout=file, check=True)
    assert kept.read_bytes() == b"before\nnew"


@posix
def test_a_full_device_is_one_line_and_stays_a_device(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        full = "/dev/full"
        with pytest.raises(ModelError, match="No space left"):
            write(Path(full))
        assert stat.S_ISCHR(os.stat(full).st_mode)
        return
    full = str(tmp_path / "full")  # a copy: root could replace the machine's own
    made = subprocess.run(["mknod", full, "c", "1", "7"], capture_output=True, check=False)
    try:
        os.close(os.open(full, os.O_WRONLY))
    except OSError:
        pytest.skip(f"no devices may be made in {tmp_path}: {made.stderr!r}")
    with pytest.raises(ModelError, match=r"full: cannot be written \(No space left on device\)"):
        write(Path(full))
    assert stat.S_ISCHR(os.stat(full).st_mode)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--svg '': no file has such a name"),
        ("a\0b", "--svg 'a\\x00b': no file has such a name"),
        ("FOLDER", "--svg FOLDER: a folder; give the name of a file"),
        ("FOLDER/none/more/a.svg", "--svg FOLDER/none/more/a.svg: there is no folder FOLDER/none/more"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_is_done(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises((ModelError, UsageError), match=re.escape(said.replace("FOLDER", str(tmp_path)))):
        output_path(text.replace("FOLDER", str(tmp_path)), "--svg")
    assert not list(tmp_path.iterdir())


def test_the_dashboard_says_so_before_it_looks_for_a_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for option in ("--svg", "--html"):
        assert main(["dashboard", "--state", str(tmp_path), option, ""]) == 2
        assert capfd.readouterr().err == f"swarmnode: {option} '': no file has such a name\n"


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "a.svg", tmp_path / ("x" * 300)):
        with pytest.raises((ModelError, UsageError)) as caught:
            write(path)
        assert "\n" not in str(caught.value)
    if os.name == "posix":
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(ModelError, match="cannot be written"):
            write(tmp_path / "loop")
        assert (tmp_path / "loop").is_symlink()
