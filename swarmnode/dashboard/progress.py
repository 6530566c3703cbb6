"""How far onboarding, transfers and loading are: one line each, with a bar, the rate and the time left.

rich.progress does the arithmetic and is never started: it draws nothing, and nobody waits for a terminal. Safe from any
thread. Made by `serve.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress, Task, TaskID

from swarmnode.dashboard.cells import clean
from swarmnode.dashboard.look import Look, bar, size, span
from swarmnode.event_lines import COUNTED, stage_name

BAR = 20  # cells
FORGOTTEN_S = 20.0  # a stage that says nothing for so long was given up
_SHARES = frozenset({"load"})  # events whose `done` is a share of 1


@dataclass(slots=True)
class _Stage:
    task: TaskID
    heard: float
    is_bytes: bool


class Stages:
    """What is under way, by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress(disable=True, auto_refresh=False, get_time=clock, speed_estimate_period=10.0)
        self._stages: dict[str, _Stage] = {}

    def update(self, event: str, fields: Mapping[str, Any]) -> None:
        """A progress event of the node, see `event_lines.STAGES`."""
        name, now = clean(stage_name(event, fields)), self._clock()
        done, total = float(fields.get("done", 0)), float(fields.get("total", 1) or 1)
        stage = self._stages.get(name)
        if stage is not None and done < self._task(stage).completed:  # begun anew
            self._progress.remove_task(stage.task)
            stage = None
        if stage is None:
            is_bytes = event not in _SHARES and fields.get("stage") not in COUNTED
            stage = self._stages[name] = _Stage(self._progress.add_task(name, total=total), now, is_bytes)
        stage.heard = now
        self._progress.update(stage.task, completed=done, total=total)

    def lines(self, look: Look) -> list[str]:
        """One line for each that is not done."""
        now, out = self._clock(), []
        for name, stage in list(self._stages.items()):
            task = self._task(stage)
            if task.finished or now - stage.heard > FORGOTTEN_S:
                continue
            parts = [f"{name} {bar(task.percentage / 100, BAR, look)} {task.percentage:3.0f} %"]
            if stage.is_bytes:
                parts.append(f"{size(task.completed)} of {size(task.total or 0)}")
                if task.speed:
                    parts.append(f"{size(task.speed)}/s")
            if (left := task.time_remaining) is not None:
                parts.append(f"{span(left)} left")
            out.append("  ".join(parts))
        return out

    def _task(self, stage: _Stage) -> Task:
        return self._progress._tasks[stage.task]  # `tasks` makes a list of all of them


__all__ = ["BAR", "Stages"]
