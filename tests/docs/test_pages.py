"""What the pages name exists: commands with their options, links, files, rooms; and the generated page is of today."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.dispatch import frames as dispatch_frames
from tests.docs import dry
from tests.docs.console import PAGES, ROOT, Step, pattern_of, steps
from transport.proto import control_frames, disco_frames, relay_frames

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def _name(value: object) -> str:
    return value.place if isinstance(value, Step) else str(Path(str(value)).relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_is_one_that_exists(page: Path) -> None:
    wrong = []
    for step in steps(page):
        try:
            dry.parse(step.words)
        except (AssertionError, ValueError) as error:
            wrong.append(f"{step.place}: {step.command}\n    {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    wrong = []
    for target in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or not there.is_relative_to(ROOT):
            wrong.append(target)
        elif anchor and anchor not in _anchors(there):
            wrong.append(f"{target} (no such heading)")
    assert not wrong, f"{page.relative_to(ROOT)}: {', '.join(wrong)}"


def test_the_rooms_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?`(?:, `.+?`)*) \|.*\|(.*)\|$", text.partition("## Rooms")[2], re.MULTILINE)
    assert len(rows) > 10
    missing = []
    for rooms, pure in rows:
        named = re.findall(r"`([^`]+)`", rooms)
        # Of several, the folder of the first holds for all: `swarmnode/authority.py`, `member_state.py`.
        folder = ROOT / named[0].rpartition("/")[0] if not named[0].endswith("/") else ROOT / named[0]
        for room in named:
            if not ((ROOT / room).exists() or (folder / room).exists()):
                missing.append(room)
        for file in re.findall(r"`([^`]+)`", pure):
            if not ((folder / file).exists() or (ROOT / file).exists()):
                missing.append(f"{named[0]}: {file}")
    assert not missing, f"docs/architecture.md: {', '.join(missing)}"


def test_the_command_reference_is_what_the_code_says() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "cli_reference.py"), "--check"]
    done = subprocess.run(tool, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_option_that_does_not_exist_is_found() -> None:
    for command in (
        "swarmnode up --modle x.gguf", "swarmnode pear", "swarmnode ping", "swarmnode up --threads many",
        "swarmnode bench wan --far", "swarmnode-relay --listen nowhere", "make coffee", "rm -r home",
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            dry.parse(command.split())
    dry.parse(["swarmnode", "ticket", "revoke", "3f2a", "--expel", "--state", "home"])


def test_blocks_are_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# x\n```console\n$ a "b c" \\\n    d   # why\nprinted 12 ms\nlaptop$ e\n```\n')
    first, second = steps(page)
    assert first.words == ["a", "b c", "d"]
    assert (first.line, first.host, first.shown) == (3, "", ("printed 12 ms",))
    assert (second.host, second.words) == ("laptop", ["e"])


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("  holding 912 experts", "holding 64 experts", True),
        ("connected to h7nekgea… (relay)", "connected to abcdefgh… (loopback)", True),
        ("swarmnode up swarm1ae…", "  swarmnode up swarm1aeaaaq", True),
        ("  ready: backbone of my-model", "ready: worker of x", False),
    ],
)
def test_what_is_shown_is_compared_without_what_differs_from_run_to_run(shown: str, printed: str, fits: bool) -> None:
    assert bool(pattern_of(shown).search(printed)) is fits


def test_the_bounds_of_the_protocol_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text("utf-8").partition("## Bounds")[2]
    rows = re.findall(r"^\| .+ \| (\d+) \| `([\w.]+)\.(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 30
    found = {f"{module}.{name}": getattr(importlib.import_module(module), name) for _, module, name in rows}
    assert found == {f"{module}.{name}": int(value) for value, module, name in rows}


def test_the_frame_numbers_of_the_protocol_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    for heading, numbers in (
        ("Control stream", control_frames.FrameType), ("Disco", disco_frames.FrameType),
        ("Relay", relay_frames.FrameType), ("Dispatch", dispatch_frames.FrameType),
    ):  # fmt: skip
        section = re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
        told = {name: int(number, 0) for number, name in re.findall(r"^(0x\w\w|\d) ([A-Z_]+) ", section, re.MULTILINE)}
        assert told == {one.name: int(one) for one in numbers}, heading


def test_what_troubleshooting_quotes_is_what_the_program_says() -> None:
    """The beginning of each line of a table is a message: its words between what differs stand in the code."""
    code = "\n".join(
        file.read_text("utf-8") for room in ("swarmnode", "transport", "relay") for file in (ROOT / room).rglob("*.py")
    )
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts that go on in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    missing = []
    for cell in re.findall(r"^\| (.*?) \| ", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cell):
            parts = [part.strip(" :;,()") for part in message.split("…")]
            missing += [message for part in parts if len(part) > 3 and part not in code]
    # Not ours: what make and the compiler say.
    missing = [one for one in missing if one not in ("make", "error: cannot find a C++ compiler")]
    assert not missing, "\n".join(missing)
