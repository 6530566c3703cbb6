"""Which layers of a model the gate can hold at a time: the backbone, and as many layers' experts as fit beside it.

Pure. The experts are mapped, so that more of them than fit would be read from disk again for every piece of text.
Called by `wires.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.errors import ModelError
from swarmnode.sizing.needs import PROCESS_BYTES, HeaderLike, memory_of, needs_of
from swarmnode.tables import human_bytes

# Copies in double precision: of all logits of a piece of text, and of what the experts of a layer made of it.
_LOGITS, _ROWS = 6, 4


def backbone_memory(header: HeaderLike, tokens: int) -> int:
    """Bytes that the gate takes without any expert: the backbone for `tokens` at once, what is compared of each such
    piece of text, and the worker's process."""
    needs = needs_of(header)
    compared = tokens * 8 * (_LOGITS * needs.vocabulary + _ROWS * needs.n_used * needs.d_out)
    return memory_of(needs, tokens, batch=tokens).total + compared + PROCESS_BYTES


def group_sites(sizes: Sequence[int], room: int) -> list[range]:
    """Runs of consecutive sites whose experts, `sizes` bytes per site, fit into `room` together.

    They end before the first site that does not fit by itself: what lies behind it has no exact inputs.
    """
    groups: list[range] = []
    start, held = 0, 0
    for index, size in enumerate(sizes):
        if size > room:
            sizes = sizes[:index]
            break
        if held + size > room:
            groups.append(range(start, index))
            start, held = index, 0
        held += size
    if start < len(sizes):
        groups.append(range(start, len(sizes)))
    return groups


def groups_within(name: str, backbone: int, sizes: Sequence[int], memory: int) -> list[range]:
    """As `group_sites`, in the memory that the backbone leaves. Raises ModelError where not one layer fits."""
    groups = group_sites(sizes, memory - backbone)
    if not groups:
        raise ModelError(
            f"{name}: the gate needs {human_bytes(backbone)} for the backbone and {human_bytes(sizes[0])} for the "
            f"experts of the first layer, and has {human_bytes(memory)}: free some memory, or state what there is with "
            "--memory"
        )
    return groups
