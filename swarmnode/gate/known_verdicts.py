"""What this machine knows of a model by what it is, whatever its file is called and wherever its pack lies.

    CACHE/verdicts/KEY/verdict.json    KEY: of all that a verdict is bound to (model, backbone, recipes, engine, codec)

The gate keeps a copy of each verdict there. So a model that failed does not run under another name, from a copy, from
another part of a split file, or as the model of a swarm that this machine joins. Called by `allowed.py`, which judges,
and by whoever gates a model.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from swarmnode.config import default_cache_dir
from swarmnode.errors import ModelError
from swarmnode.gate.verdict import FINEST, Verdict
from swarmnode.gate.verdict_file import bound_of, load_verdict, save_verdict
from swarmnode.onboard import ModelPack

log = logging.getLogger(__name__)


def known_verdict(pack: ModelPack) -> Verdict | str:
    """The verdict on a pack's model, or why there is none that counts: a few words. Raises nothing.

    The pack's own; where it has none that counts, or this machine has found out a failure that it does not tell of, the
    one that this machine keeps.
    """
    return _known(pack)[0]


def known_file(pack: ModelPack) -> Path:
    """Where the verdict that `known_verdict` gives is kept."""
    return _known(pack)[1].verdict_file


def keep_verdict(pack: ModelPack, verdict: Verdict) -> str:
    """Put a verdict into a pack, unless the one that is there knows better: "", or why it was not kept.

    Two things are known better. The model failed, and the new verdict measured less (a part of the model, fewer
    positions, exact mode left out on a GPU): then it stays a failed one, and only other bits than llama.cpp's are news.
    And the model passed by the old one, and by the new one F16 does not (another text) or nobody knows: what fails
    otherwise is no matter of the text, and kept then.

    Raises ModelError where it cannot be written.
    """
    earlier = known_verdict(pack)  # of this model under another name too
    if isinstance(earlier, Verdict):
        less = verdict.less_than(earlier)
        worse = verdict.identical is False and earlier.identical is not False
        if earlier.failure and less and not worse:
            return f"not kept: {earlier.failure}, as was found before, and this time {less}"
        of_text = verdict.failure in ("", verdict.objection(FINEST))
        if of_text and not (earlier.failure or earlier.objection(FINEST)):
            if verdict.objection(FINEST):
                return (
                    "not kept: " + (f"{less}, and earlier " if less else "with an earlier text ") + "the model passed"
                )
            if verdict.unverified and not earlier.unverified:
                return f"not kept: {verdict.unverified}, and earlier the model passed"
    save_verdict(pack, verdict)
    _remember(pack, verdict)
    return ""


def _known(pack: ModelPack) -> tuple[Verdict | str, ModelPack]:
    own, here = load_verdict(pack), _here(pack)
    kept = load_verdict(here)
    if isinstance(kept, str):
        return own, pack
    if isinstance(own, str) or (kept.failure and not own.failure):
        return kept, here
    return own, pack


def _remember(pack: ModelPack, verdict: Verdict) -> None:
    """Keep a verdict on a pack's model for this machine, in place of an earlier one.

    A cache that cannot be written is logged, no more: the pack has the verdict.
    """
    try:
        save_verdict(_here(pack), verdict)
    except ModelError as error:
        log.warning("verdict_not_remembered why=%r", str(error))


def _here(pack: ModelPack) -> ModelPack:
    """A folder of the cache, as if it were this pack."""
    key = hashlib.sha256(msgspec.json.encode(bound_of(pack))).hexdigest()[:32]
    return ModelPack(default_cache_dir() / "verdicts" / key, pack.manifest, None)
