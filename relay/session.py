"""One client of the relay: which request it is, its login, then frames in and out. SHELL.

What a connection is, how much may wait and how slow readers end is connection.py's; which key is where and how fast a
client may be is router's and limits'. Made by server.py for every accepted connection; all share one Shared.

    before the login   CHALLENGE goes out with the WebSocket's handshake. The first message is a good LOGIN → WELCOME,
                       and the router knows the key; else REFUSED. None within login_timeout: the connection is dropped
    logged in          DATA and DISCO are passed on in this key's name; PING is answered; PUBLISH and WATCH go to the
                       directory; anything that is broken, and a newer login with the same key, ends it with REFUSED
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias

from websockets.frames import CloseCode, Opcode
from websockets.http11 import Request

from relay.client_address import IPAddress, address_text, forwarded_for, is_in, one_subscriber, parse_address
from relay.config import RelayConfig, is_our_name
from relay.connection import WRITE_LOW, Connection, Page, State, websocket_frame
from relay.limits import OutboundQueue, Priority, QueueTotal, Seldom, Slots, TokenBucket, reconnect_spread_ms
from relay.metrics import Counts, Drop
from relay.record_pump import RecordPump
from relay.router import Router
from transport.errors import IdentityError
from transport.identity import PeerId
from transport.proto.relay_frames import (
    MAX_MESSAGE,
    MAX_REASON_BYTES,
    NONCE_BYTES,
    PATH,
    PUBLISH_BURST,
    PUBLISH_RATE,
    VERSION,
    Challenge,
    Feature,
    FrameType,
    Gone,
    GoneReason,
    Limited,
    Login,
    Ping,
    Pong,
    Publish,
    RefusalCode,
    Refused,
    RelayFrameError,
    Restarting,
    UnknownRelayFrame,
    Watch,
    Welcome,
    decode_client,
    login_message,
    relayed,
)

logger = logging.getLogger(__name__)

MAX_PAUSE_BYTE_RATE = 0.1  # reading stops so long when a client is over its byte rate: disco waits no longer
MAX_PAUSE_FRAME_RATE = 2.0
BURST_SECONDS = 1.0
DISCO_BURST_SECONDS = 4.0  # several punches at once after a change of network
CONTROL_BURST = 100
LIMITED_INTERVAL = 1.0
GONE_INTERVAL = 0.5  # per destination
GONE_PER_SECOND, GONE_BURST = 20, 50
GONE_REMEMBERED = 256
REFUSED_RETRY_AFTER = 60.0
MAX_U32 = 2**32 - 1

KEY_FIGHT = "two nodes log in with this key again and again; give one of them another key"
REPLACED = "another session logged in with this key"
NOT_ON_LIST = "this key is not on the relay's access list; ask whoever runs it"

Refusal: TypeAlias = tuple[RefusalCode, float, str]  # code, retry after s, reason


@dataclass(slots=True)
class Shared:
    """What all sessions of one relay share. Owned by the server."""

    config: RelayConfig
    loop: asyncio.AbstractEventLoop
    page: Callable[[str], Page]  # path → page
    login_seconds: Callable[[float], None]
    counts: Counts
    instance_id: bytes
    queues: QueueTotal
    records: RecordPump
    bulk: TokenBucket
    disco: TokenBucket
    pending: Slots
    clients_by_ip: Slots
    access: frozenset[bytes] | None = None
    reflector_ports: tuple[int, int] = (0, 0)
    shutting_down: bool = False
    router: Router[Session] = field(default_factory=Router)
    sessions: set[Session] = field(default_factory=set)  # every connection, logged in or not
    most_sessions: int = 0  # of them at one time, since somebody last set it back
    all_gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when there is no connection

    def spread_ms(self) -> int:
        """The reconnect spread for as many clients as there are now."""
        return reconnect_spread_ms(len(self.router))


class Allowance:
    """What one logged-in client may do from now on."""

    __slots__ = ("bulk", "control", "disco", "frames", "gone", "gone_seldom", "limited_seldom", "over_rate", "publish")

    def __init__(self, config: RelayConfig, now: float) -> None:
        self.frames = TokenBucket(config.client_frames, config.client_frames * BURST_SECONDS, now)
        self.bulk = TokenBucket(config.client_rate, max(config.client_rate * BURST_SECONDS, MAX_MESSAGE), now)
        self.disco = TokenBucket(config.client_disco_rate, config.client_disco_rate * DISCO_BURST_SECONDS, now)
        self.control = TokenBucket(config.client_control_frames, CONTROL_BURST, now)
        self.publish = TokenBucket(PUBLISH_RATE, PUBLISH_BURST, now)
        self.gone = TokenBucket(GONE_PER_SECOND, GONE_BURST, now)
        self.gone_seldom = Seldom(GONE_INTERVAL, GONE_REMEMBERED)
        self.limited_seldom = Seldom(LIMITED_INTERVAL, 1)
        self.over_rate = 0.0  # seconds to read nothing, because something was dropped

    def pause(self, now: float) -> float:
        """For how long to read nothing."""
        pause, self.over_rate = self.over_rate, 0.0
        if not self.frames.ready(now):
            pause = max(pause, min(self.frames.wait(), MAX_PAUSE_FRAME_RATE))
        return pause


class Session(Connection):
    """One connection, from its first byte on."""

    __slots__ = (
        "_allowance",
        "_behind_proxy",
        "_has_client_slot",
        "_has_pending_slot",
        "_ip",
        "_nonce",
        "_observed",
        "_opened",
        "_slot",
        "_was_replaced",
        "key",
        "shared",
    )

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared.loop, OutboundQueue(shared.config.queue, shared.queues), shared.config.linger)
        self.shared = shared
        self.key = b""
        self._allowance: Allowance | None = None  # once logged in
        self._opened = shared.loop.time()
        self._nonce = b""
        self._ip: IPAddress | None = None
        self._observed = ""
        self._behind_proxy = False
        self._slot: object = self  # what counts as one address
        self._has_pending_slot = False
        self._has_client_slot = False
        self._was_replaced = False

    @property
    def name(self) -> str:
        """Who this is, for logs: a short PeerId, or the address of who has not logged in."""
        return PeerId(self.key).short if self.key else str(self._ip)

    # Requests

    def on_open(self) -> None:
        shared = self.shared
        shared.sessions.add(self)
        shared.most_sessions = max(shared.most_sessions, len(shared.sessions))
        shared.all_gone.clear()
        host, port = (self._transport.get_extra_info("peername") or ("", 0))[:2]  # None: it is gone already
        self._ip = parse_address(f"[{host}]")
        self._behind_proxy = self._ip is not None and is_in(self._ip, shared.config.trusted_proxies)
        if not self._behind_proxy:  # a front opens all its clients' connections from one address
            self._slot, self._observed = one_subscriber(self._ip), address_text(self._ip, port)
        if self._take_pending():
            self.start_timer(shared.config.login_timeout, "login_timeout")
        else:
            self.abort("too_many_pending")

    def on_request(self, request: Request) -> None:
        if self._behind_proxy and not self._believe_proxy(request):
            self.answer(Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"too many connections\n"))
            return
        path = request.path.partition("?")[0]
        if path == PATH:
            if self.upgrade(request):
                self._nonce = secrets.token_bytes(NONCE_BYTES)
                self.send(Challenge(VERSION, self._nonce).encode(), Priority.CONTROL)
        elif request.method in ("GET", "HEAD"):
            self.answer(self.shared.page(path), with_body=request.method == "GET")
        else:
            allow = (("Allow", "GET, HEAD"),)
            self.answer(Page(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET and HEAD\n", allow))

    def _believe_proxy(self, request: Request) -> bool:
        """Take a trusted front's word for who the client is; False when that address has too many connections."""
        address = forwarded_for(request.headers.get_all("X-Forwarded-For"), self.shared.config.trusted_proxies)
        if address is None:  # nobody knows: only the totals bound it
            return True
        self._give_pending()
        self._ip, self._slot, self._observed = address, one_subscriber(address), address_text(address, 0)
        return self._take_pending()

    # Login

    def _login(self, message: bytes, now: float) -> None:
        shared, config = self.shared, self.shared.config
        try:
            login = decode_client(message)
        except RelayFrameError as error:
            self.on_broken(str(error))
            return
        if not isinstance(login, Login):
            self.on_broken("the first message is no LOGIN")
            return
        refusal = self._why_not(login)
        if refusal is not None:
            self.refuse(*refusal)
            return
        outcome = shared.router.login(login.key, self, now)
        if outcome.fight_pause:
            if outcome.replaced is not None:
                outcome.replaced.refuse(RefusalCode.KEY_FIGHT, outcome.fight_pause, KEY_FIGHT)
            self.refuse(RefusalCode.KEY_FIGHT, outcome.fight_pause, KEY_FIGHT)
            return
        if outcome.replaced is not None:
            outcome.replaced.refuse(RefusalCode.REPLACED, config.replaced_retry_after, REPLACED)
        if not shared.clients_by_ip.take(self._slot):
            shared.router.logout(login.key, self)
            self.refuse(RefusalCode.OVERLOADED, config.overloaded_retry_after, "too many clients at your address")
            return
        self._has_client_slot = True
        self.key = login.key
        self._welcome(now)

    def _why_not(self, login: Login) -> Refusal | None:
        """Why this login cannot be, whoever holds the key now."""
        shared, config = self.shared, self.shared.config
        if login.version != VERSION:
            reason = f"this relay speaks version {VERSION}, not {login.version}"
            return RefusalCode.VERSION, config.replaced_retry_after, reason
        if config.names and not is_our_name(login.authority, config.names):
            return RefusalCode.WRONG_AUTHORITY, REFUSED_RETRY_AFTER, f"this relay is not {login.authority[:150]!a}"
        try:
            signed = PeerId(login.key).verify(login.signature, login_message(self._nonce, login.authority))
        except (IdentityError, RelayFrameError):
            signed = False
        if not signed:
            return RefusalCode.BAD_SIGNATURE, REFUSED_RETRY_AFTER, "the signature does not fit key and challenge"
        if shared.access is not None and login.key not in shared.access:
            return RefusalCode.NOT_ON_LIST, config.list_retry_after, NOT_ON_LIST
        if shared.shutting_down:
            wait = config.restart_min + random.uniform(0, shared.spread_ms() / 1000)
            return RefusalCode.SHUTTING_DOWN, wait, "this relay is shutting down"
        if len(shared.router) >= config.max_clients and login.key not in shared.router.sessions:
            return RefusalCode.OVERLOADED, config.overloaded_retry_after, "this relay is full"
        return None

    def _welcome(self, now: float) -> None:
        shared, config = self.shared, self.shared.config
        self._allowance = Allowance(config, now)
        self.is_trusted = True
        self._give_pending()
        self.cancel_timer()
        welcome = Welcome(
            ping_s=round(config.ping_interval),
            spread_ms=shared.spread_ms(),
            bytes_per_s=config.client_rate,
            reflectors=shared.reflector_ports,
            instance_id=shared.instance_id,
            observed=self._observed,
            features=Feature.DIRECTORY,
        )
        self.send(welcome.encode(), Priority.CONTROL)
        shared.counts.logins["ok"] += 1
        shared.login_seconds(now - self._opened)
        logger.info("login peer=%s ip=%s clients=%d", self.name, self._ip, len(shared.router))

    # Frames

    def on_frame(self, opcode: Opcode, now: float) -> None:
        allowance = self._allowance
        if allowance is None:
            return
        allowance.frames.spend(1)
        if (opcode is Opcode.PING or opcode is Opcode.PONG) and not allowance.control.take(1, now):
            self.on_broken("too many WebSocket pings")

    def on_message(self, message: bytes, now: float) -> None:
        allowance = self._allowance
        if self.state is not State.WEBSOCKET:
            return
        if allowance is None:
            self._login(message, now)
            return
        kind = message[0] if message else -1
        if kind == FrameType.DATA:
            self._relay_data(message, allowance, now)
        elif kind == FrameType.DISCO:
            self._relay_disco(message, allowance, now)
        elif allowance.control.take(1, now):
            self._control(message, allowance, now)
        else:
            self.on_broken("too many control frames")

    def _relay_data(self, message: bytes, allowance: Allowance, now: float) -> None:
        shared, size = self.shared, len(message)
        if not allowance.bulk.ready(now):
            self._over_rate(Drop.CLIENT_RATE, allowance, allowance.bulk.wait(), now)
        elif not shared.bulk.ready(now):
            self._over_rate(Drop.GLOBAL_RATE, allowance, shared.bulk.wait(), now)
        else:
            allowance.bulk.spend(size)
            shared.bulk.spend(size)
            if self._forward(message, Priority.BULK, allowance, now):
                shared.counts.frames_bulk += 1
                shared.counts.bytes_bulk += size

    def _relay_disco(self, message: bytes, allowance: Allowance, now: float) -> None:
        shared, size = self.shared, len(message)
        if not (allowance.disco.ready(now) and shared.disco.ready(now)):
            shared.counts.drops[Drop.DISCO_RATE] += 1
            return
        allowance.disco.spend(size)
        shared.disco.spend(size)
        if self._forward(message, Priority.DISCO, allowance, now):
            shared.counts.frames_disco += 1
            shared.counts.bytes_disco += size

    def _forward(self, message: bytes, priority: Priority, allowance: Allowance, now: float) -> bool:
        """Pass a frame on in our key's name; False when nobody is there to get it."""
        try:
            destination, out = relayed(message, self.key)
        except RelayFrameError as error:
            self.on_broken(str(error))
            return False
        target = self.shared.router.sessions.get(destination)
        if target is None:
            self._gone(destination, GoneReason.NOT_CONNECTED, 1, allowance, now)
            return False
        dropped = target.send(out, priority)
        if dropped:
            self._gone(destination, GoneReason.QUEUE_FULL, dropped, allowance, now)
        return True

    def _gone(self, destination: bytes, why: GoneReason, frames: int, allowance: Allowance, now: float) -> None:
        drop = Drop.NOT_CONNECTED if why is GoneReason.NOT_CONNECTED else Drop.QUEUE_FULL
        self.shared.counts.drops[drop] += frames
        if allowance.gone_seldom.allows(destination, now) and allowance.gone.take(1, now):
            self.send(Gone(destination, why).encode(), Priority.CONTROL)

    def _over_rate(self, why: Drop, allowance: Allowance, wait: float, now: float) -> None:
        self.shared.counts.drops[why] += 1
        allowance.over_rate = min(wait, MAX_PAUSE_BYTE_RATE)
        if allowance.limited_seldom.allows(None, now):
            self.send(Limited(min(round(wait * 1000) + 1, MAX_U32)).encode(), Priority.CONTROL)

    def _control(self, message: bytes, allowance: Allowance, now: float) -> None:
        try:
            frame = decode_client(message)
        except UnknownRelayFrame:
            return  # of a later version
        except RelayFrameError as error:
            self.on_broken(str(error))
            return
        if isinstance(frame, Ping):
            self.send(Pong(frame.echo, self.shared.spread_ms()).encode(), Priority.CONTROL)
        elif isinstance(frame, Publish):
            if allowance.publish.take(1, now):
                self.shared.records.publish(self.key, frame)
            else:
                self.shared.counts.drops[Drop.RECORD_RATE] += 1
        elif isinstance(frame, Watch):
            self.shared.records.watch(self, frame)
        elif isinstance(frame, Login):
            self.on_broken("a second LOGIN")

    def takes_records(self) -> bool:
        """Whether they leave soon, or stand where disco overtakes them and bulk does not: never in front of disco."""
        if self.state is not State.WEBSOCKET or self.queue.waits(Priority.RECORD):
            return False
        return not self._writable or self._transport.get_write_buffer_size() <= WRITE_LOW

    def send_records(self, messages: list[bytes]) -> None:
        """RECORD messages, in one piece."""
        self._send_raw(b"".join(map(websocket_frame, messages)), Priority.RECORD)

    def reading_pause(self, now: float) -> float:
        return 0.0 if self._allowance is None else self._allowance.pause(now)

    # The end

    def on_broken(self, reason: str) -> None:
        self.refuse(RefusalCode.PROTOCOL_ERROR, REFUSED_RETRY_AFTER, reason)

    def refuse(self, code: RefusalCode, retry_after: float, reason: str) -> None:
        """Say why, and end the session. `retry_after` in seconds."""
        if self.state in (State.ENDING, State.CLOSED):
            return
        name = code.name.lower()
        if self._allowance is None:
            self.shared.counts.logins[name] += 1
        logger.info("refused peer=%s code=%s reason=%r", self.name, name, reason)
        self._was_replaced = code is RefusalCode.REPLACED
        text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        last = Refused(code, min(round(retry_after * 1000), MAX_U32), text)
        self.end(CloseCode.POLICY_VIOLATION, name, last.encode())

    def refuse_not_on_list(self) -> None:
        """The access list has changed."""
        self.refuse(RefusalCode.NOT_ON_LIST, self.shared.config.list_retry_after, NOT_ON_LIST)

    def tell_restart(self, message: Restarting) -> None:
        """The relay goes away."""
        if self._allowance is not None and self.state is State.WEBSOCKET:
            self.send(message.encode(), Priority.CONTROL)

    def on_leave(self, why: str) -> None:
        shared = self.shared
        if self._has_client_slot:
            self._has_client_slot = False
            shared.clients_by_ip.give(self._slot)
        if self._allowance is not None:
            shared.router.logout(self.key, self)
            shared.records.leave(self, self.key)
            shared.counts.ends[why] += 1
            logger.info("session_ended peer=%s why=%s clients=%d", self.name, why, len(shared.router))
        elif why not in ("http", "lost"):
            shared.counts.strangers[why] += 1
            logger.info("connection_ended ip=%s why=%s", self._ip, why)

    def on_close_answered(self) -> None:
        if self._was_replaced:
            self._was_replaced = False
            self.shared.router.was_alive(self.key, self.shared.loop.time())

    def on_lost(self, by_client: bool) -> None:
        # A front closes its side whether or not somebody is left behind it: only a client's own answer counts there.
        if by_client and not self._behind_proxy:
            self.on_close_answered()
        self._give_pending()  # not earlier: who is refused again and again would hold any number of connections
        self._slot = None
        self.shared.sessions.discard(self)
        if not self.shared.sessions:
            self.shared.all_gone.set()

    def _take_pending(self) -> bool:
        self._has_pending_slot = self.shared.pending.take(self._slot)
        return self._has_pending_slot

    def _give_pending(self) -> None:
        if self._has_pending_slot:
            self._has_pending_slot = False
            self.shared.pending.give(self._slot)
