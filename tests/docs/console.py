"""The commands in the documentation: ```console blocks taken apart, and what each prints as a pattern."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
# Pages whose every command is run. The commands of the others are parsed.
RUN = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")

_PROMPT = re.compile(r"(?P<host>[a-z]*)\$ (?P<command>.+)")
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ELSEWHERE = ("203.0.113.", "198.51.100.")  # addresses for documentation (RFC 5737): nobody has them here
# What differs from run to run, and what stands for it. The first that fits a place is taken.
_PLACEHOLDERS = (
    (r"swarm1[a-z2-7]*…", r"swarm1[a-z2-7]+"),
    (r"<PEERID>", r"[a-z2-7]{56}"),
    (r"h7nekge[a-z2-7]*…?", r"[a-z2-7]+…?"),
    (r"https?://relay\.example[:0-9]*", r"http\S+"),
    (r"my-model", r"\S+"),
    (r"\((?:loopback|direct-lan|direct-public|punched|relay)\)", r"\([a-z-]+\)"),
    (r"…", r".*"),
    (r"[0-9][0-9,]*(?:\.[0-9]+)*", r"[0-9.,]+"),
    (r"\s+", r"\s+"),
)
_TOKEN = re.compile("|".join(f"({sign})" for sign, _ in _PLACEHOLDERS))


@dataclass(frozen=True)
class Step:
    """One command: where it stands, on which machine it is typed ("" where there is only one), what is shown of it."""

    page: Path
    line: int
    section: str
    host: str
    command: str
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The command as a shell reads it, without its comment."""
        return shlex.split(self.command, comments=True)

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def patterns(self) -> list[re.Pattern[str]]:
        """What the lines that are shown look like in any run."""
        return [pattern_of(line) for line in self.shown if not any(place in line for place in _ELSEWHERE)]


def steps(page: Path) -> Iterator[Step]:
    """The commands of a page, in order. A line that ends with a backslash goes on in the next."""
    text = page.read_text("utf-8")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        section = "".join(re.findall(r"^## (.+)$", text[: block.start()], re.MULTILINE)[-1:])
        lines = block[1].splitlines()
        at = 0
        while at < len(lines):
            prompt = _PROMPT.fullmatch(lines[at])
            assert prompt, f"{page.name}:{first + at}: a console block begins with what was printed, not with a command"
            begin, command = at, prompt["command"]
            while command.endswith("\\"):
                at += 1
                command = command[:-1] + lines[at].strip()
            shown = []
            while at + 1 < len(lines) and not _PROMPT.fullmatch(lines[at + 1]):
                at += 1
                shown.append(lines[at])
            at += 1
            yield Step(page, first + begin, section, prompt["host"], command, tuple(filter(str.strip, shown)))


def pattern_of(line: str) -> re.Pattern[str]:
    """A line of output as a pattern: numbers, ids and addresses may be others."""
    parts, at, text = [], 0, line.strip()
    for token in _TOKEN.finditer(text):
        kind = next(i for i, group in enumerate(token.groups()) if group is not None)
        parts += [re.escape(text[at : token.start()]), _PLACEHOLDERS[kind][1]]
        at = token.end()
    return re.compile("".join([*parts, re.escape(text[at:])]))
