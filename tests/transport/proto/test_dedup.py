from __future__ import annotations

import pytest

from transport.proto.dedup import Existing, Verdict, decide

SMALL, LARGE = b"\x01" * 32, b"\x02" * 32
BOOT, OTHER_BOOT = b"a" * 16, b"b" * 16
OURS, THEIRS = Existing(BOOT, 7, dialled_by_us=True), Existing(BOOT, 7, dialled_by_us=False)


@pytest.mark.parametrize(
    ("ours", "boot_id", "previous", "existing", "dialling", "verdict"),
    [
        (SMALL, BOOT, 0, None, False, Verdict.ACCEPT),
        (LARGE, BOOT, 0, None, False, Verdict.ACCEPT),
        (SMALL, OTHER_BOOT, 0, OURS, False, Verdict.REPLACE),
        (LARGE, OTHER_BOOT, 7, THEIRS, False, Verdict.REPLACE),
        (SMALL, BOOT, 0, THEIRS, False, Verdict.REPLACE),
        (SMALL, BOOT, 7, OURS, False, Verdict.REPLACE),
        (SMALL, BOOT, 0, OURS, False, Verdict.REFUSE),
        (LARGE, BOOT, 6, OURS, False, Verdict.REFUSE),
        (LARGE, BOOT, 0, None, True, Verdict.ACCEPT),
        (SMALL, BOOT, 0, None, True, Verdict.PARK),
    ],
)
def test_the_table(
    ours: bytes, boot_id: bytes, previous: int, existing: Existing | None, dialling: bool, verdict: Verdict
) -> None:
    theirs = LARGE if ours == SMALL else SMALL
    assert (
        decide(ours=ours, theirs=theirs, boot_id=boot_id, previous=previous, existing=existing, dialling=dialling)
        is verdict
    )


def test_of_two_dials_that_cross_one_side_accepts_and_the_other_waits() -> None:
    verdicts = {
        decide(ours=ours, theirs=theirs, boot_id=BOOT, previous=0, existing=None, dialling=True)
        for ours, theirs in ((SMALL, LARGE), (LARGE, SMALL))
    }
    assert verdicts == {Verdict.ACCEPT, Verdict.PARK}
