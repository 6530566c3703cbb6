"""Every command of the README and of the quick starts is run, on this machine, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import ROOT, RUN, steps
from tests.docs.stage import Stage, why_not_run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        for step in steps(page):
            if why_not_run(step):
                continue  # it is parsed, as all are, by test_pages.py
            try:
                stage.play(step)
            except AssertionError as error:
                raise AssertionError(f"{step.place}: {step.command}\n{error}") from None
