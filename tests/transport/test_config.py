from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from transport.config import TransportConfig
from transport.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "quiche"}, "use qh3 or aioquic"),
        ({"keep_alive": 0}, "keep_alive"),
        ({"keep_alive": 6.0, "idle_timeout": 10.0}, "at most half"),
        ({"handshake_timeout": 1e9}, "handshake_timeout"),
        ({"stream_window": 1000}, "stream_window"),
        ({"stream_window": 1 << 25, "connection_window": 1 << 20}, "must not exceed"),
        ({"datagram_size": 1100}, "datagram_size"),
        ({"loopback_datagram_size": 65000}, "loopback_datagram_size"),
        ({"max_streams": 100}, "max_streams"),
        ({"max_pending": 0}, "max_pending"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransportConfig(**settings)  # type: ignore[arg-type]


def test_a_config_cannot_change() -> None:
    config = TransportConfig()
    with pytest.raises(FrozenInstanceError):
        config.engine = "aioquic"  # type: ignore[misc]
