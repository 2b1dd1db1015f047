"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """An authority, whose files are in a directory."""

    def __init__(self, directory: pathlib.Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._serial = 0
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = str(directory / f"{name}.pem")
        signed = certificate.sign(self._key, hashes.SHA256())
        pathlib.Path(self.path).write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
        )

    def sign(self, common_name: str, file_name: str = "") -> tuple[str, str]:
        """Make a certificate for this host under a name. Returns the paths of it and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "A, CN=admin"),
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            ]
        )
        hosts = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        built = self._builder(subject, key).add_extension(hosts, critical=False)
        signed = built.sign(self._key, hashes.SHA256())
        base = self._directory / (file_name or common_name)
        paths = str(base.with_suffix(".pem")), str(base.with_suffix(".key"))
        pathlib.Path(paths[0]).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        pathlib.Path(paths[1]).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths
