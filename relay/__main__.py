"""`swarmnode-relay` and `python -m relay`: flags → RelayConfig, signals → the server. Composes nothing else.

One line on stderr when it is ready: `relay ready on HOST:PORT (reflector UDP PORT, PORT)`; with --log-format json the
event "ready", and every line there is one JSON object (transport/log_format.py). A standard error stream that stands
still or fails holds nothing up. SIGTERM and SIGINT end it in order, a second one at once; SIGHUP reads the access list
again. Exit code 0: ended in order; 1: cannot run, with one line that says why; 2: the flags cannot be meant.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from relay.config import (
    DEFAULT_PORT,
    DEFAULT_REFLECTOR_PORTS,
    RelayConfig,
    parse_listen,
    parse_names,
    parse_network,
    parse_reflector,
)
from relay.memory import run_with_system_malloc
from transport import log_format
from transport.errors import Address, ConfigError, TransportError
from transport.line_writer import LineWriter
from transport.standard_streams import fill_standard_streams

logger = logging.getLogger("relay")

Parsed = TypeVar("Parsed")


def main(arguments: list[str] | None = None) -> int:
    """Run a relay until it is told to end; the exit code."""
    if arguments is None:  # a process of our own
        fill_standard_streams()
    options = _parser().parse_args(arguments)
    if arguments is None:
        run_with_system_malloc()
    output = log_format.set_up(options.log_format, options.log_level)
    tell = partial(_tell_json if options.log_format == "json" else _tell_text, output.writer)
    try:
        return _run(options, tell)
    finally:
        output.flush()


def _run(options: argparse.Namespace, tell: Callable[..., None]) -> int:
    try:
        config = _config(options)
    except ConfigError as error:
        tell("error", "not_started", f"swarmnode-relay: {error}", error=str(error))
        return 2
    _allow_many_connections()
    try:
        asyncio.run(_serve(config, tell))
    except TransportError as error:
        tell("error", "not_started", f"swarmnode-relay: {error}", error=str(error))
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _tell_text(writer: LineWriter, level: str, event: str, text: str, **fields: object) -> None:
    writer.write(text + "\n")


def _tell_json(writer: LineWriter, level: str, event: str, text: str, **fields: object) -> None:
    """What whoever started the relay must hear, whatever the level of its log."""
    writer.write(log_format.json_line(level, "relay", event, fields) + "\n")


async def _serve(config: RelayConfig, tell: Callable[..., None]) -> None:
    from relay.server import RelayServer  # noqa: PLC0415  --help needs no server

    server = RelayServer(config)
    await server.start()
    loop = asyncio.get_running_loop()
    ended, hurried = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurried if ended.is_set() else ended).set()

    def reload_access() -> None:
        try:
            server.reload_access()
        except ConfigError as error:  # the old list stays
            logger.error("access_list_unusable error=%r", str(error))

    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C ends it at once
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop)
        loop.add_signal_handler(signal.SIGHUP, reload_access)
    first, second = server.reflector_ports
    reflector = f"reflector UDP {first}, {second}" if first else "no reflector"
    address = _text(server.address)
    ports = [first, second] if first else []
    tell("info", "ready", f"relay ready on {address} ({reflector})", address=address, reflector_ports=ports)
    try:
        await ended.wait()
        shutdown = asyncio.ensure_future(server.shutdown())
        hurry = asyncio.ensure_future(hurried.wait())
        await asyncio.wait({shutdown, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (shutdown, hurry):
            task.cancel()
        await asyncio.gather(shutdown, hurry, return_exceptions=True)
    finally:
        await server.close()


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="swarmnode-relay",
        description="Passes sealed datagrams between nodes that cannot reach each other directly. It cannot read them.",
    )
    ports = ",".join(map(str, DEFAULT_REFLECTOR_PORTS))
    defaults = RelayConfig()
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", type=_as(parse_listen), default=defaults.listen,
        help=f"where to listen for WebSocket and HTTP (default [::]:{DEFAULT_PORT}, every address)")  # fmt: skip
    add("--reflector", metavar="PORT,PORT", type=_as(parse_reflector), default=defaults.reflector_ports,
        help=f"two UDP ports that tell nodes their address, or off (default {ports})")  # fmt: skip
    add("--reflector-host", metavar="HOST", default=defaults.reflector_host,
        help="where these ports are, if not at --listen's address: behind a front, :: (every address)")  # fmt: skip
    add("--name", metavar="HOST", action="append", default=[], dest="names",
        help="a public name of this relay; logins meant for another relay are refused (may be repeated)")  # fmt: skip
    add("--access", metavar="FILE", type=Path,
        help="only peers in this file may log in, one PeerId per line; SIGHUP reads it again")  # fmt: skip
    add("--trusted-proxy", metavar="CIDR", type=_as(parse_network), action="append", default=[], dest="proxies",
        help="believe X-Forwarded-For from this address or network (may be repeated)")  # fmt: skip
    add("--client-rate", metavar="BYTES", type=int, default=defaults.client_rate,
        help="bytes per second that one client may send, 0: no limit (default %(default)s)")  # fmt: skip
    add("--global-rate", metavar="BYTES", type=int, default=defaults.global_rate,
        help="bytes per second for all together, 0: no limit (default %(default)s)")  # fmt: skip
    add("--max-clients", metavar="N", type=int, default=defaults.max_clients, help="(default %(default)s)")
    add("--max-clients-per-ip", metavar="N", type=int, default=defaults.max_clients_per_ip,
        help="from one address, an IPv6 /64 counting as one (default %(default)s)")  # fmt: skip
    add("--tls-cert", metavar="FILE", type=Path, help="certificate chain, PEM: serve TLS without a front")
    add("--tls-key", metavar="FILE", type=Path, help="its private key, PEM")
    set_by = os.environ.get
    add("--log-level", metavar="LEVEL", type=_one_of(log_format.LEVELS),
        default=set_by("SWARMNODE_LOG_LEVEL") or "warning",
        help=f"{', '.join(log_format.LEVELS)}; SWARMNODE_LOG_LEVEL sets it too (default %(default)s)")  # fmt: skip
    add("--log-format", metavar="FORMAT", type=_one_of(log_format.FORMATS),
        default=set_by("SWARMNODE_LOG_FORMAT") or "text",
        help="text, or json: one object per line; SWARMNODE_LOG_FORMAT sets it too (default %(default)s)")  # fmt: skip
    return parser


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Also for defaults from the environment, which argparse does not hold against `choices`."""

    def parsed(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"say {' or '.join(names)}, not {text[:40]!r}")
        return text

    return parsed


def _as(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """A parse function of config.py as argparse likes it."""

    def parsed(text: str) -> Parsed:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _config(options: argparse.Namespace) -> RelayConfig:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both")
    return RelayConfig(
        listen=options.listen,
        reflector_ports=options.reflector,
        reflector_host=options.reflector_host.strip("[]"),
        names=parse_names(options.names),
        access_file=options.access,
        trusted_proxies=tuple(options.proxies),
        tls=None if options.tls_cert is None else (options.tls_cert, options.tls_key),
        client_rate=options.client_rate,
        global_rate=options.global_rate,
        max_clients=options.max_clients,
        max_clients_per_ip=options.max_clients_per_ip,
    )


def _allow_many_connections() -> None:
    """Every client is an open file; the usual soft limit is 1024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415  not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
