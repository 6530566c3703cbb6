"""Every constant of path finding, each with its reason. PURE.

Seconds, bytes and shares (0.05 is 5 %). Read by path.py, path_size.py, path_quality.py, path_policy.py, punch.py and
paths.py; built once, at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

UNPROBED_SIZE = 1200  # RFC 9000, 14: what every path must carry that QUIC may use
NARROW_SIZE = 600  # what is left for paths below that: 8900 bytes in 16 pieces; a link of 628 bytes carries it
RELAY_SIZE = 65_000  # a relay carries datagrams inside a stream: any size that UDP could
SIZE_RUNGS = (1280, 1372, 1452, 8900)  # tunnels in tunnels; tunnels; Ethernet less IPv6 and UDP; jumbo, loopback
DEFAULT_MAX_SIZE = 1452


@dataclass(frozen=True, slots=True)
class PathConfig:
    """How long a path is trusted, how often it is asked, and when another one is better."""

    # Detection. A peer acknowledges within 25 ms (RFC 9000, 18.2), so nothing for 3 RTT is no accident.
    silence_floor: float = 0.25  # schedulers and Wi-Fi sleep cost up to 200 ms on a healthy path
    silence_rtts: float = 3.0
    silence_margin: float = 0.05
    first_rtt: float = 0.15  # assumed until the first pong: silence limit 0.5 s
    suspect_gap: float = 0.175  # between pings of a doubted path: five of them take the second that it has
    deaf_after: int = 3  # pings in a row unanswered: the peer may not hear us, whatever we hear
    dead_after: int = 5  # pings in a row unanswered, and
    dead_time: float = 0.7  # this long in doubt: a peer that collects its garbage must not lose its path
    stale_after: float = 6.0  # a selected direct path is asked every 5 s; silence beyond that is doubt
    one_way_after: int = 3  # pongs in a row without data on a path that we send on: the peer uses another path,
    one_way_patience: float = 4.0  # so its silence says less: wait this many times longer
    ask_again: float = 0.5  # at most this often, doubling, is a path asked because data came by another one
    question_gap: float = 0.08  # between the pings of a question: three within the shortest limit of silence
    replay: float = 1.5  # what was sent longer ago QUIC has sent again
    stall: float = 0.1  # our own timer came this late: the silence was ours

    # Keeping alive. NATs forget UDP after 30 s (RFC 4787 asks for 120 s, many do not listen).
    selected_gap: float = 5.0
    other_gap: float = 15.0
    retry_gap: float = 1.0  # after one lost ping
    linger: float = 120.0  # nobody spoke to the peer for so long: its paths are left alone
    burst: int = 3  # RTT samples wanted soon after a path came alive
    burst_gap: float = 0.2
    rtt_window: int = 4  # the least of so many samples counts: one pong that waited in a socket changes nothing
    rtt_step: float = 2.0  # beyond this ratio it is another route, not jitter: believed without smoothing

    # Opening and coming back.
    tries: tuple[float, ...] = (0.0, 0.06, 0.15, 0.4)  # pings of a new path: they cross the peer's, jitter or not
    tries_end: float = 1.0  # after the last one: the path is given up
    back_off: float = 0.5  # first ping of a dead path, then doubling
    back_off_cap: float = 15.0
    return_pongs: int = 3  # in a row, before a dead path is trusted again; doubling
    return_cap: int = 48  # … to this with every death of a direct path within this many seconds of its return:
    relapse: float = 60.0  # at 35 % loss each way three pongs in a row are no accident, and twelve are
    return_gap: float = 0.1
    gone: float = 2.0  # a relay that said "not here" is asked again after this
    ping_life: float = 5.0  # a pong later than this answers nothing
    trusted_room: int = 16  # more of those that a handshake proved, or that our own relays are
    max_paths: int = 64  # per peer; a hostile peer cannot make us remember more
    strangers_per_s: float = 5.0  # unknown paths that may be added per second, after a burst of
    strangers_burst: float = 32.0

    # Policy.
    gain_floor: float = 0.0005  # nobody feels less
    gain_absolute: float = 0.005
    gain_share: float = 0.2
    gain_samples: int = 3  # of the better path, before it is taken
    gain_hold: float = 1.0
    gain_dwell: float = 60.0  # between two switches for the sake of RTT: jitter costs at most one a minute
    fresh: float = 1.0  # a path heard within this is surely better than a silent one

    # Quality: when a direct path loses its tier, and when it gets it back.
    loss_limit: float = 0.05
    loss_back: float = 0.02
    loss_packets: int = 50  # fewer say nothing
    loss_samples: int = 3  # seconds that are bad by themselves: a burst (slow start, a scan of Wi-Fi) is no bad path
    loss_window: float = 5.0  # seconds that count; longer only while they hold too few packets
    loss_memory: float = 30.0
    settle: float = 2.0  # after a switch, a doubt, a stall: QUIC finds what was lost then up to 1.5 s later
    taint: float = 1.0  # … and this long before a doubt it may have lost already
    excuse: float = 6.0  # a path that is in trouble for longer is not disturbed but bad
    goodput_share: float = 0.5
    goodput_samples: int = 3
    goodput_memory: float = 600.0
    busy_loss: float = 0.03  # at full speed a queue loses less than 1 %: more, second after second, is a policer of UDP
    busy_samples: int = 4
    busy_gain: float = 1.5  # … unless the relay was not so much faster when it was tried
    demote_hold: float = 30.0  # doubling with every demotion
    demote_cap: float = 900.0
    farewells: int = 5  # pings that tell the peer of it, until one is answered: four of five may be lost
    farewell_gap: float = 0.1
    train_pings: int = 50  # asked of a demoted path before it may come back
    train_gap: float = 0.1

    # Size.
    size_tries: int = 3
    size_check_gap: float = 0.5  # while big datagrams are sent
    size_search_gap: float = 30.0  # doubling
    size_search_cap: float = 600.0

    # Punch.
    wanted: float = 30.0  # after want() or traffic: how long a direct path is looked for
    call_timeout: float = 1.0  # a relay's queue, a reconnecting peer
    call_tries: int = 3
    go_timeout: float = 1.0  # the GO was lost: fire anyway
    aim_gap: float = 0.006  # between candidates, and
    aim_time: float = 0.1  # for all of them: dead ones cost nothing
    judge_after: float = 1.0  # no pong by then: this session failed
    second_session: float = 1.5
    session_burst: int = 3
    session_gap: float = 5.0
    forget_unproven: float = 30.0  # dead paths that never worked, and that nobody gave us
    forget_proven: float = 300.0
    retry_session: float = 300.0  # nothing changed that we know of, but NATs and firewalls do change
    retry_plain: float = 60.0  # doubling with every session that failed: both NATs are easy, it may be an outage
    retry_worked: float = 15.0  # the same where there has been a direct path already, up to retry_plain
    answers_burst: float = 4.0  # calls of the peer that are answered at once, then
    answers_per_s: float = 0.5
    predict_ports: int = 16
    birthday_sockets: int = 256
    birthday_probes: int = 1500  # 256 of 64,512 ports hit with 99.7 %
    birthday_gap: float = 0.01
    birthday_time: float = 15.0
    birthday_refresh: float = 4.0  # mappings that saw no answer live as little as 10 s
    birthday_fan_gap: float = 0.002

    def silence(self, rtt: float | None) -> float:
        """How long nothing may be heard after a send, or no pong after a ping, on a path with this RTT."""
        rtt = self.first_rtt if rtt is None else rtt
        return max(self.silence_floor, self.silence_rtts * rtt + self.silence_margin)
