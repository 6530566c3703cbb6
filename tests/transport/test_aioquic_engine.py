"""What aioquic_engine.py relies on inside aioquic, and what it proves about the other side as the second library.

A failure here means: read the library's changes before raising the pin.
"""

from __future__ import annotations

import datetime
from importlib.metadata import version
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.transport.engines import SERVER, Pair
from transport.aioquic_engine import AioquicEngine, AioquicFactory
from transport.config import TransportConfig
from transport.identity import Identity
from transport.quic_engine import create_factory


def quic_of(engine: object) -> Any:
    assert isinstance(engine, AioquicEngine)
    return engine._quic


def test_the_version_is_the_one_this_was_written_for() -> None:
    assert version("aioquic") == "1.7.2"


def test_the_private_parts_are_there() -> None:
    quic = quic_of(Pair("aioquic", "aioquic").client)
    for name in ("_close_event", "_loss", "_network_paths", "_streams"):
        assert hasattr(quic, name)
    assert hasattr(quic, "_pacing_at")
    for name in (
        "_in_persistent_congestion",
        "_on_packets_lost",
        "_pto_count",
        "_rtt_initialized",
        "_rtt_latest",
        "_rtt_min",
        "_rtt_smoothed",
        "_time_of_last_sent_ack_eliciting_packet",
        "get_loss_detection_time",
        "get_probe_timeout",
        "reschedule_data",
    ):
        assert hasattr(quic._loss, name)
    for name in ("_congestion_recovery_start_time", "bytes_in_flight", "congestion_window", "ssthresh"):
        assert hasattr(quic._loss._cc, name)
    assert quic.tls._peer_certificate is not None
    assert len(quic.tls._signature_algorithms) == 1
    assert quic.tls.key_schedule.algorithm.name in ("sha256", "sha384")


def impostor(monkeypatch: pytest.MonkeyPatch, certificate: x509.Certificate, key: object) -> None:
    """Have every aioquic server show this certificate and sign with this key."""

    def create(identity: Identity, config: TransportConfig) -> Any:
        factory = create_factory(identity, config)
        if identity is SERVER:
            assert isinstance(factory, AioquicFactory)
            factory._certificate, factory._key = certificate, key  # type: ignore[assignment]
        return factory

    monkeypatch.setattr("tests.transport.engines.create_factory", create)


@pytest.mark.parametrize("client", ["qh3", "aioquic"])
def test_a_certificate_without_its_key_is_worth_nothing(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies a node's certificate must fail the handshake, although its chain is not checked."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    certificate = x509.load_pem_x509_certificate(SERVER.certificate_pem)
    impostor(monkeypatch, certificate, Ed25519PrivateKey.generate())
    pair = Pair(client, "aioquic")
    assert not pair.at_client.done
    assert not pair.at_server.done
    assert pair.at_client.end is not None
    assert pair.at_client.end.kind == "transport"


@pytest.mark.parametrize("client", ["qh3", "aioquic"])
def test_other_kinds_of_keys_are_refused(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36_500))
        .sign(key, hashes.SHA256())
    )
    impostor(monkeypatch, certificate, key)
    pair = Pair(client, "aioquic")
    assert not pair.at_client.done or pair.client.peer_id() is None
