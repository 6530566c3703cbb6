"""The gate of many architectures: several processes, each with one tiny model after the other; none of them can end it.

An architecture that llama.cpp cannot build or run, even one over which it ends the process with an assertion, is a row
with llama.cpp's own error (`built` False). A process that ends in another way, or takes too long, is a row that failed.
Called by `swarmnode gate --arch` and by tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from swarmnode.architectures.check import ArchResult
from swarmnode.architectures.child import BUILT, TAKEN
from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.architectures.variants import PATTERNS, TYPES, VARIANTS, variants_of
from swarmnode.errors import UsageError
from swarmnode.process_end import TAIL, process_end

Job = tuple[str, str, str]  # architecture, variant, ggml type
Progress = Callable[[str, int, int], None]  # (what is done, rows done, rows in all)

JOB_S = 300.0  # a job that takes longer has hung
_TICK_S = 0.2


def plan_jobs(names: Sequence[str], variants: Sequence[str] | None, types: Sequence[str] | None) -> list[Job]:
    """What is to be run. None: every variant that changes an architecture's graph, in F32, and for architectures of
    different expert patterns every type; a list of types is crossed with all variants.

    Raises UsageError for a name that there is not.
    """
    for wanted, known, what in (
        (names, ARCHITECTURES, "architecture"),
        (variants, VARIANTS, "variant"),
        (types, TYPES, "type"),
    ):
        for name in wanted or ():
            if name not in known:
                raise UsageError(f"there is no {what} {name[:60]}; there are {', '.join(known)}")
    jobs: list[Job] = []
    for arch in names:
        of = [name for name in variants_of(arch) if variants is None or name in variants]
        jobs += [(arch, variant, ggml_type) for variant in of for ggml_type in types or TYPES[:1]]
        if types is None and arch in PATTERNS and (variants is None or PATTERNS[arch] in variants):
            jobs += [(arch, PATTERNS[arch], ggml_type) for ggml_type in TYPES[1:]]
    return jobs


def gate_architectures(
    names: Sequence[str],
    variants: Sequence[str] | None,
    types: Sequence[str] | None,
    folder: Path,
    progress: Progress | None = None,
    *,
    processes: int | None = None,
) -> list[ArchResult]:
    """Pass tiny models through the gate, several at a time; rows in the order of `plan_jobs`.

    Writes below `folder`, which must be there. What `progress` raises ends the work. Raises UsageError.
    """
    return run_jobs(plan_jobs(names, variants, types), folder, progress, processes=processes)


def run_jobs(
    jobs: Sequence[Job], folder: Path, progress: Progress | None = None, *, processes: int | None = None
) -> list[ArchResult]:
    """The rows of these jobs, in their order; see `gate_architectures`."""
    crew = _Crew(jobs, folder)
    threads = [
        threading.Thread(target=crew.work, name=f"gate-{number}", daemon=True)
        for number in range(min(len(jobs), processes or os.cpu_count() or 1))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK_S)
                if progress is not None:
                    progress(crew.last, len(crew.results), len(jobs))
    finally:
        crew.stop()
        for thread in threads:
            thread.join()
    if crew.failed is not None:
        raise crew.failed
    return [crew.results[job] for job in jobs]


class _Crew:
    """The jobs that are left, and what came of the others."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self._folder = folder
        self._todo = deque(dict.fromkeys(jobs))
        self._stopped = False
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.results: dict[Job, ArchResult] = {}
        self.last = ""
        self.failed: BaseException | None = None

    def work(self) -> None:
        """One thread: a process, and another one where it ended."""
        try:
            while self._todo and not self._stopped:
                with self._process() as (process, log):
                    first = True
                    while (job := self._take()) is not None:
                        result = self._do(process, job, log)
                        if result is None and not first:
                            self._put_back(job)
                            break
                        # No process gets as far as a first job where something is wrong with this installation.
                        self.results[job] = result or _row(job, _why(process.returncode, log, 0)[0], built=True)
                        self.last = " ".join(job[:2])
                        first = False
                        if process.poll() is not None:
                            break
        except BaseException as error:
            self.failed = error
            self._stopped = True

    def stop(self) -> None:
        """No more jobs; what is being done is given up."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()

    def _take(self) -> Job | None:
        with self._lock:
            return self._todo.popleft() if self._todo and not self._stopped else None

    def _put_back(self, job: Job) -> None:
        with self._lock:
            self._todo.appendleft(job)

    @contextlib.contextmanager
    def _process(self) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        # Without the first, ggml lets a debugger write a page about its own end.
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(prefix="gate-", dir=self._folder) as place:  # what it leaves goes with it
            command = [sys.executable, "-m", "swarmnode.architectures.child", place]
            log = Path(place) / "stderr"
            with log.open("wb") as stderr, self._lock:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment
                )
                self._running.add(process)
            try:
                yield process, log
            finally:
                with self._lock:
                    self._running.discard(process)
                process.kill()
                process.communicate()

    def _do(self, process: subprocess.Popen[bytes], job: Job, log: Path) -> ArchResult | None:
        """The row of a job. None: the process ended before it took the job, which somebody else has to do then."""
        assert process.stdin is not None
        assert process.stdout is not None
        before = log.stat().st_size
        hung = threading.Event()

        def too_late() -> None:
            hung.set()
            process.kill()

        late = threading.Timer(JOB_S, too_late)
        late.start()
        said: list[bytes] = []
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            while (line := process.stdout.readline().removesuffix(b"\n")) in (TAKEN, BUILT):
                said.append(line)
        except OSError:
            line = b""
        finally:
            late.cancel()
            late.join()
        if hung.is_set() or not line:
            process.wait()
        if line:
            return msgspec.json.decode(line, type=ArchResult)
        if TAKEN not in said and not hung.is_set():
            return None
        if hung.is_set():
            return _row(job, f"took longer than {JOB_S:g} s", built=True)
        error, asserted = _why(process.returncode, log, before)
        return _row(job, error, built=BUILT in said or not asserted)


def _row(job: Job, error: str, *, built: bool) -> ArchResult:
    arch, variant, ggml_type = job
    return ArchResult(arch=arch, variant=variant, type=ggml_type, error=error, built=built)


def _why(status: int, log: Path, start: int) -> tuple[str, bool]:
    """Why a process ended, in one line, by what it wrote into its log from `start` on; whether llama.cpp ended it."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - TAIL))
        end = process_end(status, file.read())
    if end.aborted:
        return f"llama.cpp ended the process: {end.said}", True
    return f"the process ended ({end.how}): {end.said or 'it said nothing'}", False
