"""A redis-server of the bench's own: loopback, plain and TLS, no persistence, as a user would start it."""

import datetime
import importlib.util
import ipaddress
import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.cli.up.children import run_child

ADDRESS = "127.0.0.1"


class NotHere(Exception):
    """What a number needs is not installed; the number is left out."""


class RedisSite:
    """One server with a plain port and a TLS port."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Start it in a new folder. Raises NotHere where the server or a client library is missing."""
        server = shutil.which("redis-server")
        if server is None:
            raise NotHere("redis-server is not installed (apt install redis-server)")
        for module in ("redis", "hiredis"):
            if importlib.util.find_spec(module) is None:
                raise NotHere(f"the Python package {module} is not installed")
        self._port, self._tls_port = free_ports(2)
        self._pid_file = folder / "server.pid"
        self._certificate, key = folder / "certificate.pem", folder / "key.pem"
        folder.mkdir()
        self_signed_certificate(self._certificate, key)
        command = [
            server, "--bind", ADDRESS, "--port", str(self._port), "--tls-port", str(self._tls_port),
            "--tls-cert-file", str(self._certificate), "--tls-key-file", str(key),
            "--tls-ca-cert-file", str(self._certificate), "--tls-auth-clients", "no",
            "--save", "", "--appendonly", "no", "--dir", str(folder),
        ]  # fmt: skip
        run_child(stack, "redis-server", command, folder / "server", self._answers)

    @property
    def pid(self) -> int:
        return int(self._pid_file.read_text())

    def client(self, *, tls: bool) -> Any:
        """A client of redis-py with its parser in C, its settings untouched."""
        import redis

        if not tls:
            return redis.Redis(ADDRESS, self._port)
        return redis.Redis(ADDRESS, self._tls_port, ssl=True, ssl_ca_certs=str(self._certificate))

    def _answers(self) -> bool:
        return listens(self._port) and listens(self._tls_port)


def listens(port: int) -> bool:
    """Whether a server listens on this port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) == 0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: redis-server cannot be told to take any that is."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((ADDRESS, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def self_signed_certificate(certificate: Path, key: Path) -> None:
    """A certificate for this machine's loopback address, for a day, and its key (mode 0600)."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "g35 bench")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(
            secret.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
