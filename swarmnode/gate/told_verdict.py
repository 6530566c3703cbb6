"""What a swarm's founder says of the swarm's model, as a member that generates keeps it beside the model.

    STATE/models/MODEL/verdict-of-SWARM.json    the founder's last word; `ModelPack.told_verdict` names it

It counts for this swarm's model alone: it does not get into the pack's own verdict, nor into what this machine knows of
models (`known_verdicts.py`), where another swarm's nodes would take it for measured here. Called by
`coordination/founder_verdict.py`, which knows that the founder said it; `allowed.py` asks for what counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from swarmnode.errors import BadMessage, ModelError
from swarmnode.gate.known_verdicts import known_verdict
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_bytes import check_verdict, unpack_verdict
from swarmnode.gate.verdict_file import bound_of, read_verdict
from swarmnode.model.atomic_file import write_atomically
from swarmnode.onboard import ModelPack

Source = Literal["own", "founder"]


def told_file(folder: Path, swarm: str) -> Path:
    """Where the founder of this swarm (its key, as text) is kept, of the model whose pack is this folder."""
    return folder / f"verdict-of-{swarm[:16]}.json"


def told_verdict(pack: ModelPack) -> Verdict | None:
    """The founder's verdict, if there is one that counts here. Raises nothing."""
    if pack.told_verdict is None:
        return None
    found = read_verdict(pack.told_verdict, pack)
    return found if isinstance(found, Verdict) else None


def ruling_verdict(pack: ModelPack) -> tuple[Verdict | str, Source]:
    """The verdict that a node goes by and whose it is, or why there is none. Raises nothing.

    What was measured here goes before what the founder says, but for a failure: either's counts.
    """
    own, told = known_verdict(pack), told_verdict(pack)
    if told is not None and (isinstance(own, str) or (told.failure and not own.failure)):
        return told, "founder"
    return own, "own"


def keep_told(pack: ModelPack, packed: bytes) -> tuple[bool, str]:
    """Put the founder's word in place of the one before: whether it says something else, and why it is left out or "".

    `packed`: as `pack_verdict` makes it, b"" where the founder has no verdict. What is left out allows nothing, and
    neither does what was there before; but a failure stays until a verdict comes that counts.

    Raises ModelError where it cannot be written.
    """
    file = pack.told_verdict
    assert file is not None
    before, found, why = told_verdict(pack), None, ""
    if packed:
        found, why = _checked(pack, packed)
    if found is not None:
        if found != before:
            write_atomically(file, msgspec.json.encode(found))
        return found != before, ""
    if before is not None and before.failure:
        return False, why
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{file}: cannot be removed ({error.strerror}), and what it says counts no more") from None
    return before is not None, why


def _checked(pack: ModelPack, packed: bytes) -> tuple[Verdict | None, str]:
    try:
        found = check_verdict(unpack_verdict(packed), bound_of(pack), pack.manifest.sites)
    except BadMessage as error:
        return None, str(error)
    return (None, f"it is {found}") if isinstance(found, str) else (found, "")
