"""Whether the experts in a model's file are still those that were onboarded: bytes rot, and keep size and time.

Called by `wires.py` before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.errors import ModelError
from swarmnode.model.digests import digest_experts
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest


def verify_experts(gguf: GgufFile, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
    """Hash every expert of the sites whose digests are known; `progress` hears of bytes.

    Raises ModelError with the first layer and expert that is another, BrokenModel where a weight is NaN or infinity.
    """
    sites = [site for site in manifest.sites if any(manifest.digests[site.index])]
    for site, found in zip(sites, digest_experts(gguf, sites, progress), strict=True):
        for expert, (now, known) in enumerate(zip(found, manifest.digests[site.index], strict=True)):
            if known and now != known:
                raise ModelError(
                    f"{gguf.paths[0]}: expert {expert} of layer {site.layer} is not what was onboarded, with the "
                    "file's size and time as they were: its bytes changed on disk; fetch the file again"
                )
