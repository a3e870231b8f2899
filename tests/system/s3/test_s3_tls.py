"""The door with a certificate: TLS alone, and refused where its key is not private."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.errors import ConfigError
from tests.support.engines.s3_served import Served, served
from tests.support.waiting import wait_until


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its private key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "g35")])
    now = datetime.datetime.now(datetime.UTC)
    where = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(35)
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(where, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "door.pem", folder / "door.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.touch(0o600)
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private


def test_with_a_certificate_the_door_speaks_tls_alone(tmp_path: Path) -> None:
    certificate, private = make_certificate(tmp_path)
    with served(tmp_path, certificate=str(certificate), private_key=str(private)) as s3:
        client = s3.client(verify=str(certificate))
        data = bytes(range(256)) * 10_000
        client.put_object(Bucket="blocks", Key="a", Body=data)
        assert client.get_object(Bucket="blocks", Key="a")["Body"].read() == data
        with s3.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP" not in connection.recv(100)
        wait_until(lambda: s3.door.counters.connections_refused == 1)
        client.close()


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    certificate, private = make_certificate(tmp_path)
    private.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        Served(tmp_path, certificate=str(certificate), private_key=str(private))


@pytest.mark.parametrize("which", ["certificate", "private_key"])
def test_a_file_that_is_missing_is_called_by_its_name(tmp_path: Path, which: str) -> None:
    certificate, private = make_certificate(tmp_path)
    files = {"certificate": str(certificate), "private_key": str(private)} | {which: str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"cannot open .*/none: No such file"):
        Served(tmp_path, **files)
