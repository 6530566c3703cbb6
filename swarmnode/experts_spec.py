"""Which experts a node holds, as people write it on the command line. Pure.

all            every expert of every layer
2/3            the second of three equal shares
0-4,9          these experts in every layer
0:0-4;2:1,3    these in layer 0, those in layer 2, none elsewhere
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from swarmnode.compute.recipe import Site
from swarmnode.errors import UsageError

_RANGES = re.compile(r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$")


def parse_experts(text: str, sites: Sequence[Site]) -> dict[int, tuple[int, ...]]:
    """Site index → sorted expert ids, sites without any left out. UsageError names what is wrong."""
    spec = text.replace(" ", "")
    wanted: dict[int, tuple[int, ...]] = {}
    layers = {site.layer for site in sites}
    by_layer: dict[int, str] = {}
    if ":" in spec:
        for part in filter(None, spec.split(";")):
            layer, _, experts = part.partition(":")
            if not (layer.isascii() and layer.isdecimal()) or int(layer) not in layers:
                raise UsageError(
                    f"--experts {text}: layer {layer} has no experts; layers with experts: {format_ids(layers)}"
                )
            if int(layer) in by_layer:
                raise UsageError(f"--experts {text}: layer {layer} is given twice")
            by_layer[int(layer)] = experts
    for site in sites:
        one = by_layer.get(site.layer) if by_layer else spec
        ids = () if one is None else _ids(one, site, text)
        if ids:
            wanted[site.index] = ids
    return wanted


def _ids(spec: str, site: Site, text: str) -> tuple[int, ...]:
    if spec == "all":
        return tuple(range(site.n_expert))
    share = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", spec)
    if share:
        part, of = int(share[1]), int(share[2])
        if not 1 <= part <= of:
            raise UsageError(f"--experts {text}: the share {part}/{of} does not exist; give 1/{of} to {of}/{of}")
        return tuple(range(site.n_expert * (part - 1) // of, site.n_expert * part // of))
    if len(spec) > 65536 or not _RANGES.match(spec):
        raise UsageError(f"--experts {text}: not understood; examples: all · 2/3 · 0-4,9 · 0:0-4;2:1,3")
    ids: set[int] = set()
    for item in spec.split(","):
        low, _, high = item.partition("-")
        first, last = int(low), int(high or low)
        if first > last or last >= site.n_expert:
            raise UsageError(f"--experts {text}: layer {site.layer} has experts 0 to {site.n_expert - 1}, not {item}")
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def format_ids(ids: Iterable[int]) -> str:
    """Ids as ranges: 0-4,9."""
    parts: list[list[int]] = []
    for i in sorted(set(ids)):
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def format_holdings(holdings: Mapping[int, Sequence[int]], sites: Sequence[Site]) -> dict[str, str]:
    """Layer → ranges, for `status` and `peers`; layers held whole and alike stay one entry each."""
    return {str(site.layer): format_ids(holdings[site.index]) for site in sites if holdings.get(site.index)}
