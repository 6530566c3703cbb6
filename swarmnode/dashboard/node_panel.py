"""This node, and what generating costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment
from rich.style import Style

from swarmnode.dashboard import look as looks
from swarmnode.dashboard.cells import Line, clean, pad, width_of, wrap
from swarmnode.dashboard.look import Look, millis, size, span, spark
from swarmnode.dashboard.model import SHORT_ID, Model
from swarmnode.status import NodeStatus

Pair = tuple[str, str, Style]  # a label, what it is, and its style


def title_line(model: Model, width: int) -> Line:
    """Who this is, and for how long."""
    status = model.status
    if status is None:
        return pad([Segment(" swarmnode", looks.TITLE), Segment("  waiting for the node", looks.DIM)], width)
    here = sum(row.is_here for row in model.peers)
    right = f"{here} peer{'' if here == 1 else 's'} · up {span(status.uptime_s)} "
    left = [
        Segment(" swarmnode ", looks.TITLE),
        Segment(clean(status.name), looks.BOLD),
        Segment(f" · {clean(status.role)} of {clean(status.model) or 'no model yet'}", looks.PLAIN),
    ]
    room = width - width_of(right) - 1
    return pad([*pad(left, max(0, room)), Segment(" ", looks.PLAIN), Segment(right, looks.PLAIN)], width)


def node_lines(model: Model, width: int, height: int) -> list[Line]:
    """NAT, relays, addresses, memory and whatever is wrong, in as many lines as there are; at most `height`."""
    status = model.status
    return [] if status is None else flow(_node_pairs(model, status), width, height)


def _node_pairs(model: Model, status: NodeStatus) -> Iterable[Pair]:
    if model.trouble:
        yield "!", clean(model.trouble), looks.BAD
    yield "id", clean(status.peer[:SHORT_ID]), looks.PLAIN
    yield "NAT", clean(status.nat), looks.PLAIN
    wanted = len(status.relays) + len(status.relay_problems)
    if wanted:
        fine = not status.relay_problems
        first = f" {clean(status.relays[0])}" if status.relays else ""
        yield "relays", f"{len(status.relays)} of {wanted}{first}", looks.PLAIN if fine else looks.WARN
    yield "memory", size(status.memory), looks.PLAIN
    if status.swarm is not None:
        swarm = status.swarm
        yield "swarm", f"{clean(swarm.swarm[:SHORT_ID])}{', founded here' if swarm.founder else ''}", looks.PLAIN
        if swarm.budget:
            yield "for experts", f"{size(swarm.held_bytes)} of {size(swarm.budget)}", looks.PLAIN
        if swarm.trouble:
            yield "trouble", clean(swarm.trouble), looks.BAD
    if status.served_calls:
        yield "served", f"{status.served_calls} calls, {status.served_rows} rows", looks.PLAIN
    for url, why in status.relay_problems.items():
        yield "no relay", f"{clean(url)}: {clean(why)}", looks.WARN
    for peer, why in status.quarantined.items():
        yield "not asked", f"{clean(model.name_of(peer))}: {clean(why)}", looks.BAD
    if status.addresses:
        yield "addresses", " ".join(clean(one) for one in status.addresses), looks.PLAIN


def flow(pairs: Iterable[Pair], width: int, height: int) -> list[Line]:
    """Pairs beside each other as they fit; one that is wider than a line alone is cut in the last line."""
    lines: list[list[Segment]] = [[]]
    used = 0
    for label, value, style in pairs:
        wide = width_of(label) + 1 + width_of(value)
        if used and used + 3 + wide > width:
            if len(lines) == height:
                break
            lines.append([])
            used = 0
        lines[-1] += [
            Segment("   " if used else " ", looks.PLAIN),
            Segment(f"{label} ", looks.DIM),
            Segment(value, style),
        ]
        used += wide + (3 if used else 1)
    return [pad(line, width) for line in lines[:height] if line]


def generates(model: Model) -> bool:
    """Does this node generate, so that there is something to say of it?"""
    return model.status is not None and bool(model.status.sites)


def generation_lines(model: Model, width: int, height: int, look: Look) -> list[Line]:
    """Tokens per second, what one costs, and which layer takes longest."""
    status = model.status
    if status is None:
        return []
    figures, generation = model.figures, status.generation
    rate = figures.tokens_per_s if generation.active else generation.tokens_per_s
    known = figures.trips_per_token > 0 or figures.tokens_per_step > 0
    unknown = "–"
    wires = sorted(set(generation.wires.values()))
    pairs: list[Pair] = [
        (
            "tokens/s" if generation.active or not rate else "last tokens/s",
            f"{rate:.1f} {spark(model.speed.values, min(24, max(8, width // 8)), look)}",
            looks.BOLD,
        ),
        ("per step", f"{figures.tokens_per_step:.2f}" if known else unknown, looks.PLAIN),
        ("round trips/token", f"{figures.trips_per_token:.2f}" if known else unknown, looks.PLAIN),
        ("bytes/token/layer", size(figures.bytes_per_token_layer) if known else unknown, looks.PLAIN),
        ("slowest", _slowest(model), looks.PLAIN),
        (
            "generating",
            f"{generation.running} of {generation.parallel}"
            + (f", {generation.waiting} waiting" if generation.waiting else ""),
            looks.PLAIN,
        ),
        ("tokens", str(generation.tokens), looks.PLAIN),
        (
            "mode",
            (f"{generation.mode}, {wires[0] if len(wires) == 1 else 'mixed wires'}" if wires else generation.mode)
            + (", founder's gate" if generation.verdict == "founder" else ""),
            looks.PLAIN,
        ),
        *([("failed", generation.verdict, looks.BAD)] if ":" in generation.verdict else []),
        ("drafts", generation.speculate, looks.PLAIN),
    ]
    return flow([(label, clean(value), style) for label, value, style in pairs], width, height)


def _slowest(model: Model) -> str:
    figures = model.figures
    if figures.slowest < 0:
        return "–"
    waits = f", waits for {model.name_of(figures.waits_for)}" if figures.waits_for else ""
    return f"layer {figures.slowest}, {millis(figures.wait_ms)} ms{waits}"


def text_lines(texts: Iterable[str], width: int, style: Style = looks.PLAIN) -> list[Line]:
    """Paragraphs of clean text."""
    return [pad([Segment(f" {piece}", style)], width) for text in texts for piece in wrap(text, width - 2) or [""]]
