"""Who computes what: everything once, few workers, near ones first, the same ones again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan, plan


def worker(number: int, experts: set[int] | range, **rest: int | bool) -> Candidate:
    return Candidate(number, f"w{number:02d}", mask_of(experts), **rest)  # type: ignore[arg-type]  # ints and bools


def shares(chosen: Plan) -> dict[int, set[int]]:
    return {candidate.worker: set(experts_of(mask)) for candidate, mask in chosen.shares}


masks = st.integers(0, (1 << 16) - 1)
candidates = st.builds(
    Candidate,
    worker=st.integers(0, 9),
    name=st.just("w"),
    held=masks,
    load=st.integers(0, 3),
    latency_class=st.integers(0, 3),
    suspended=st.booleans(),
    thin=st.booleans(),
    pair_s=st.sampled_from([0.0, 1e-4, 1e-3]),
)
swarms = st.lists(candidates, max_size=8, unique_by=lambda c: c.worker)


@given(masks, swarms, st.one_of(st.none(), masks), st.booleans(), masks, st.booleans())
def test_every_expert_goes_to_one_holder_or_is_reported(
    need: int, swarm: list[Candidate], local_mask: int | None, local_first: bool, kept: int, spread: bool
) -> None:
    local = None if local_mask is None else Candidate(LOCAL, "here", local_mask)
    counts = list(range(1, 17)) if spread else None
    chosen = plan(need, swarm, local=local, local_first=local_first, kept=kept, pairs_per_expert=counts)
    here = (local_mask or 0) & need & (0xFFFF if local_first else kept)
    assert all(mask & here == 0 for candidate, mask in chosen.shares if candidate is not local)
    taken = 0
    for candidate, mask in chosen.shares:
        assert mask
        assert mask & candidate.held == mask
        assert not mask & taken
        taken |= mask
    reach = local_mask or 0
    for candidate in swarm:
        reach |= candidate.held
    assert taken == need & reach
    assert chosen.uncovered == need & ~reach
    again = plan(need, swarm[::-1], local=local, local_first=local_first, kept=kept, pairs_per_expert=counts)
    assert again == chosen or any(a.name == b.name for a in swarm for b in swarm if a is not b)


def test_one_worker_that_holds_all_is_enough() -> None:
    swarm = [worker(0, {0, 1}), worker(1, {2, 3}), worker(2, range(4))]
    assert shares(plan(0b1111, swarm)) == {2: {0, 1, 2, 3}}


def test_equals_are_told_apart_by_name_and_stay_the_same() -> None:
    swarm = [worker(n, range(8)) for n in (3, 1, 2)]
    for need in (0b1, 0b1010, 0b1111):
        assert list(shares(plan(need, swarm))) == [1]


def test_the_less_loaded_of_two_equals_is_taken() -> None:
    swarm = [worker(0, range(8), load=5), worker(1, range(8))]
    assert list(shares(plan(0b11, swarm))) == [1]


def test_two_near_workers_beat_a_far_one_that_holds_all() -> None:
    swarm = [worker(0, range(4), latency_class=5), worker(1, {0, 1}), worker(2, {2, 3})]
    assert set(shares(plan(0b1111, swarm))) == {1, 2}
    assert shares(plan(0b11111, [*swarm, worker(3, {4}, latency_class=5)]))[0] == {0, 1, 2, 3}


def test_the_order_is_healthy_then_this_node_then_suspended() -> None:
    swarm = [worker(0, {0}), worker(1, {0, 1, 2}, suspended=True)]
    local = Candidate(LOCAL, "here", 0b011)
    assert shares(plan(0b111, swarm, local=local)) == {0: {0}, LOCAL: {1}, 1: {2}}
    assert shares(plan(0b111, swarm, local=local, local_first=True)) == {LOCAL: {0, 1}, 1: {2}}


def test_what_is_kept_here_is_computed_here_and_the_rest_goes_out() -> None:
    local = Candidate(LOCAL, "here", 0b1111)
    assert shares(plan(0b1111, [worker(0, range(4))], local=local, kept=0b0110)) == {LOCAL: {1, 2}, 0: {0, 3}}
    assert shares(plan(0b0110, [worker(0, range(4))], local=local, kept=0b0110)) == {LOCAL: {1, 2}}
    assert shares(plan(0b11, [worker(0, range(4))], local=Candidate(LOCAL, "here", 0b10), kept=0b11)) == {
        LOCAL: {1},
        0: {0},
    }
    # What nobody else holds joins what is kept, as one piece of work.
    assert shares(plan(0b111, [worker(0, {0})], local=local, kept=0b010)) == {0: {0}, LOCAL: {1, 2}}


def test_a_thin_worker_gets_only_what_nobody_else_holds() -> None:
    near, far = worker(0, {0, 1, 2}), worker(1, range(4), latency_class=4)
    thin = worker(2, range(4), latency_class=4, thin=True)
    assert shares(plan(0b1111, [near, far])) == {1: {0, 1, 2, 3}}
    assert shares(plan(0b1111, [near, thin])) == {0: {0, 1, 2}, 2: {3}}
    assert shares(plan(0b1111, [thin])) == {2: {0, 1, 2, 3}}
    slower = worker(3, range(4), latency_class=6, thin=True)
    assert shares(plan(0b1111, [worker(2, {0, 1, 2}, latency_class=4, thin=True), slower])) == {2: {0, 1, 2}, 3: {3}}


def test_a_large_call_is_spread_by_what_a_pair_costs() -> None:
    swarm = [worker(n, range(12)) for n in range(3)]
    swarm[0] = Candidate(0, "w00", swarm[0].held, pair_s=1e-4)
    swarm[2] = Candidate(2, "w02", swarm[2].held, pair_s=1e-3)
    mine = shares(plan((1 << 12) - 1, swarm[::2], pairs_per_expert=[10] * 12))
    assert len(mine[0]) == 11  # the tenfold slower one is done with its one when the other is with its eleven
    assert set(shares(plan((1 << 12) - 1, swarm, pairs_per_expert=[10] * 12))) == {0, 1, 2}  # unknown: taken as usual


def test_to_a_large_call_a_long_way_counts_for_its_seconds() -> None:
    near = Candidate(0, "near", 0b1111, pair_s=1e-3, start_s=0.001)
    far = Candidate(1, "far", 0b1111, latency_class=5, pair_s=1e-4)
    shares = {c.name: mask for c, mask in plan(0b1111, [near, far], pairs_per_expert=[100] * 4).shares}
    assert shares == {"near": 0b1111}  # how far that is nobody knows
    for start_s, count in ((0.05, 4), (0.15, 3), (0.35, 1), (1.0, 0)):
        far = Candidate(1, "far", 0b1111, latency_class=5, pair_s=1e-4, start_s=start_s)
        shares = {c.name: mask for c, mask in plan(0b1111, [near, far], pairs_per_expert=[100] * 4).shares}
        assert shares.get("far", 0).bit_count() == count
    new = Candidate(1, "new", 0b1111, latency_class=5, start_s=0.08)  # as fast as the others, as far as anybody knows
    shares = {c.name: mask for c, mask in plan(0b1111, [near, new], pairs_per_expert=[100] * 4).shares}
    assert shares == {"near": 0b0101, "new": 0b1010}


def test_a_large_call_is_spread_by_pairs() -> None:
    swarm = [worker(0, range(4)), worker(1, range(4))]
    assert shares(plan(0b1111, swarm, pairs_per_expert=[100, 40, 30, 30])) == {0: {0}, 1: {1, 2, 3}}
