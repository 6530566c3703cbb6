from __future__ import annotations

import pytest

from swarmnode.bench.dashboard import SIZES, main, measure


def test_every_case_is_measured() -> None:
    found = measure(n_peers=20, frames=4)
    sizes = [f"{width}x{height}" for width, height in SIZES]
    cases = [(row["case"], row["size"]) for row in found["rows"]]
    assert cases == [
        *(("lines", size) for size in sizes),
        ("decode", ""),
        *(("rich", size) for size in sizes),
        *(("thread", size) for size in sizes),
    ]
    assert all(row["bytes_per_frame"] > 0 for row in found["rows"])


def test_the_command_refuses_what_it_does_not_know() -> None:
    with pytest.raises(SystemExit):
        main(["--nonsense"])
