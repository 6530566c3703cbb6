"""A page's commands typed one after the other, on machines that are folders here, with real nodes and a real relay.

Each host of a page (`laptop$ …`) has a folder of its own, in which `model.gguf` is the shipped model, and a state
folder. What a page cannot know stands in it as a placeholder, and is put in from what was really printed:

    swarm1ae…                      the last ticket                 h7nekgea          a connected peer's id
    <PEERID>@127.0.0.1:40123       the first node wired by hand    3f2a              the last ticket's id
    --peer …                       all others of them              relay.example     the relay

Nodes run on loopback, with one thread and without mDNS, whatever else they are told; they are stopped by Ctrl-C, when
another is started with the same state, or at the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnode.demo import MODEL
from tests.docs.console import ROOT, Step

Word = Sequence[str]

# What is only parsed, and why. Whatever is not here is run.
ONLY_PARSED: tuple[tuple[str, str], ...] = (
    (r"make (demo|test)", "CI runs them: the one makes this environment, the other runs this test"),
    (r"make natlab", "needs root; tests/natlab runs it where there is root"),
    (r"swarmnode bench .*", "measures for minutes; tests/swarmnode/bench runs each"),
    (r"swarmnode demo.*", "tests/swarmnode/test_swarm.py runs it"),
    (r"swarmnode gate .*", "computes for minutes; tests/swarmnode/cli/test_gate.py runs it"),
    (r".* --open", "finds others by multicast on a real network; tests/swarmnode/discovery runs it"),
    (r".*https://(?!relay\.example).*", "is on the internet"),
)
LOOPBACK = ("--listen", "127.0.0.1:0", "--no-lan", "--threads", "1", "--no-port-mapping")
TIMEOUT = 60.0  # seconds, for anything: a loaded machine


def why_not_run(step: Step) -> str:
    """Why a command is only parsed; "" where it is run."""
    command = " ".join(step.words)
    return next((why for pattern, why in ONLY_PARSED if re.fullmatch(pattern, command)), "")


class Running:
    """A process that stays, and the lines that it has printed."""

    def __init__(self, command: Word, cwd: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.printed = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """What it has printed, sooner or later."""
        with self._news:
            self._news.wait_for(lambda: pattern.search(self.printed) or not self._reader.is_alive(), TIMEOUT)
            found = pattern.search(self.printed)
        assert found, f"{pattern.pattern!r} was not printed, but:\n{self.printed}"
        return found

    def stop(self) -> None:
        """Ctrl-C twice: do not wait for others."""
        end = time.monotonic() + TIMEOUT
        while self.process.poll() is None and time.monotonic() < end:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.printed += line
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


class Stage:
    """See the module. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[Path, Running] = {}  # by state folder; the relay by its host's
        self._section = self._ticket = self._relay = ""
        self._wired: list[str] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()

    def _end_all(self) -> None:
        for one in self._running.values():
            one.process.kill()  # nobody has to be handed anything
        for one in self._running.values():
            one.stop()
        self._running.clear()
        self._wired.clear()

    def play(self, step: Step) -> None:
        """Type one command. AssertionError where it does not do what the page says."""
        if step.section != self._section:
            self._section = step.section
            self._end_all()
        match step.words:
            case ["swarmnode", "up", *_]:
                self._up(step)
            case ["swarmnode-relay", *_]:
                self._start_relay(step)
            case ["swarmnode", *_]:
                self._command(step)
            case _:
                raise AssertionError(f"no scenario covers {step.command!r}: teach tests/docs/stage.py how to run it")

    def _up(self, step: Step) -> None:
        words = self._filled(step)
        state = self._state(step, words)
        if state in self._running:
            self._running.pop(state).stop()
        wired = "--experts" in words
        node = Running([*_program(words), *LOOPBACK], self._host(step), self._env(step))
        self._running[state] = node
        node.wait_for(re.compile("ready: "))
        for pattern in step.patterns():
            node.wait_for(pattern)
        if wired:
            self._wired.append(node.wait_for(re.compile(r"[a-z2-7]{56}@127\.0\.0\.1:[0-9]+"))[0])
        elif "--model" in words and "--peer" not in words:
            self._ticket = node.wait_for(re.compile(r"swarm1[a-z2-7]+"))[0]

    def _start_relay(self, step: Step) -> None:
        words = self._filled(step)
        relay = Running(
            [*_program(words), "--listen", "127.0.0.1:0", "--reflector", "0,0"], self._host(step), self._env(step)
        )
        self._running[self._host(step) / "relay"] = relay
        address = relay.wait_for(re.compile(r"relay ready on (\S+)"))[1]
        for pattern in step.patterns():
            relay.wait_for(pattern)
        self._relay = f"http://{address}"

    def _command(self, step: Step) -> None:
        words = self._filled(step)
        if words[1] == "ping" and "--count" not in words:
            words += ["--count", "3", "--interval", "0.1"]  # a person ends it with Ctrl-C
        done = self._run(step, words)
        expected = 1 if step.shown and step.shown[0].strip().startswith("No: ") else 0
        said = done.stdout + done.stderr
        assert done.returncode == expected, f"exit code {done.returncode}:\n{said}"
        for pattern in step.patterns():
            assert pattern.search(said), f"{pattern.pattern!r} was not printed, but:\n{said}"
        if words[1] == "ticket" and (found := re.search(r"swarm1[a-z2-7]+", said)):
            self._ticket = found[0]

    def _run(self, step: Step, words: Word) -> subprocess.CompletedProcess[str]:
        folder, env = self._host(step), self._env(step)
        return subprocess.run(
            _program(words), check=False, capture_output=True, text=True, timeout=TIMEOUT, cwd=folder, env=env
        )

    def _filled(self, step: Step) -> list[str]:
        """The words with what is true here in the place of placeholders."""
        put: dict[str, Callable[[], str]] = {
            r"swarm1ae…": lambda: self._ticket,
            r"<PEERID>@127\.0\.0\.1:40123": lambda: self._wired[0],
            r"https?://relay\.example(:8080)?/?": lambda: self._relay,
            r"h7nekgea": lambda: str(self._asked(step, "peers")[0]["peer"])[:8],
            r"3f2a": lambda: str(self._asked(step, "ticket", "list")[-1]["id"])[:8],
        }
        words: list[str] = []
        for word in step.words:
            if word == "…" and words[-1:] == ["--peer"]:
                words.pop()
                words += [part for address in self._wired[1:] for part in ("--peer", address)]
                continue
            made = next((make() for pattern, make in put.items() if re.fullmatch(pattern, word)), word)
            assert made, f"{step.place}: nothing was printed before that could stand for {word}"
            assert "…" not in made, f"{step.place}: nobody knows what {word} stands for"
            words.append(made)
        return words

    def _asked(self, step: Step, *command: str) -> list[dict[str, Any]]:
        state = ["--state", _after(step.words, "--state")] if "--state" in step.words else []
        done = self._run(step, ["swarmnode", *command, "--json", *state])
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        assert rows, f"{step.place}: {' '.join(command)} shows nothing"
        return rows

    def _host(self, step: Step) -> Path:
        folder = self._folder / (step.host or "here")
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "model.gguf").symlink_to(MODEL)
            (folder / "swarmnode").symlink_to(ROOT / "swarmnode")  # pages name the shipped model's file
        return folder

    def _state(self, step: Step, words: Word) -> Path:
        folder = self._host(step)
        return folder / (_after(words, "--state") if "--state" in words else "state")

    def _env(self, step: Step) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
        return kept | {
            "SWARMNODE_STATE": str(self._host(step) / "state"),
            "SWARMNODE_CACHE": str(self._folder / "cache"),  # of all: the model is cut once
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",
            "COLUMNS": "200",
        }


def _program(words: Word) -> list[str]:
    module = {"swarmnode": "swarmnode", "swarmnode-relay": "relay"}[words[0]]
    return [sys.executable, "-m", module, *words[1:]]


def _after(words: Word, option: str) -> str:
    return words[list(words).index(option) + 1]
