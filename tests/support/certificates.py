"""A certificate authority for tests, as strict as Python 3.13 wants one."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate, its key, and the authority that signed it, as files."""

    certificate: Path
    key: Path
    authority: Path


def server_certificate(folder: Path, names: Sequence[str], *, lax: bool = False) -> Pair:
    """Write a new authority and a server's certificate for these names and addresses.

    ``lax`` leaves out what a strict reader wants an authority to say (key usage, key identifiers), as
    the authorities of some clusters do.
    """
    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = _name("tests"), _name("kubernetes")
    authority = _begun(issuer, issuer, ours).add_extension(x509.BasicConstraints(True, None), critical=True)
    server = (
        _begun(subject, issuer, theirs)
        .add_extension(x509.SubjectAlternativeName([_general(each) for each in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
    )
    if not lax:
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ours.public_key())
        known = x509.SubjectKeyIdentifier.from_public_key(ours.public_key())
        authority = authority.add_extension(_signing(), critical=True).add_extension(known, critical=False)
        server = server.add_extension(identifier, critical=False)
    pair = Pair(folder / "server.crt", folder / "server.key", folder / "ca.crt")
    pair.authority.write_bytes(authority.sign(ours, hashes.SHA256()).public_bytes(_PEM))
    pair.certificate.write_bytes(server.sign(ours, hashes.SHA256()).public_bytes(_PEM))
    write_key(pair.key, theirs)
    return pair


def write_key(path: Path, key: ec.EllipticCurvePrivateKey | None = None) -> None:
    """Write a private key, a new one if none is given."""
    made = key or ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    plain = serialization.NoEncryption()
    path.write_bytes(made.private_bytes(_PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain))


_PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _signing() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
