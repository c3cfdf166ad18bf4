"""Makes the certificates of a run from its secret: without it no TLS handshake with us succeeds.

Both sides derive the same key, and each signs a certificate with it that the other one checks.
Nothing is stored or sent: who has the secret can be either side, and no one else can be one.
"""

from __future__ import annotations

import datetime
import os
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

NAME = "run.otel-ddp.invalid"
"""In all certificates: the key tells runs apart, and addresses say nothing."""

# Shorter ones could be guessed: the lead shows its certificate to everyone who connects.
_LEAST_SECRET_BYTES = 16
# The order of the curve.
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# Always: the clock of a node may be wrong. A secret ends with its run.
_FROM = datetime.datetime(1970, 1, 1)
_TO = datetime.datetime(9999, 12, 31)


class Certificate:
    """A key, and what it has signed, as PEM."""

    def __init__(self, secret: bytes) -> None:
        key = _key(secret)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "otel_ddp run")])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
        # Two certificates: signatures are random, so one that signs itself would not be equal on
        # both sides, and only an equal one would be trusted.
        self.root = _pem(_signed(key, issuer, issuer, is_root=True))
        self.chain = _pem(_signed(key, subject, issuer, is_root=False))
        self.key = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def context(secret: bytes, *, leads: bool) -> ssl.SSLContext:
    """What the lead of a run listens with, or a follower connects with, which expects NAME."""
    own = Certificate(secret)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if leads else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=own.root.decode())
    if leads:
        # Links last: there is nothing to resume.
        made.num_tickets = 0
    # Only by a path, so it gets one that leads to no disk.
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(own.key + own.chain)
        file.flush()
        made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return made


def _key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ValueError(f"A run's secret has {_LEAST_SECRET_BYTES} bytes or more.")
    # 16 bytes more than the order has: the remainder is then as good as uniform.
    drawn = HKDF(hashes.SHA256(), 48, salt=None, info=b"otel_ddp link, P-256, 1").derive(secret)
    number = int.from_bytes(drawn, "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def _signed(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name, *, is_root: bool
) -> x509.Certificate:
    unsigned = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(1 if is_root else 2)
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
    )
    if not is_root:
        names = x509.SubjectAlternativeName([x509.DNSName(NAME)])
        unsigned = unsigned.add_extension(names, critical=False)
    return unsigned.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
