"""Derives the certificate of a run from its secret, for mutual TLS.

Both sides derive the same key and self-signed certificate, and trust nothing else. The key is
neither stored nor sent, so only a holder of the secret can be one of the sides.
"""

from __future__ import annotations

import datetime
import os
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

NAME = "run.otel-ddp.invalid"
"""All certificates have this name. Runs differ by their keys, not by names."""

# The certificate has no expiry: a node's clock may be wrong, and a secret serves only one run.
_FROM = datetime.datetime(1970, 1, 1)
_TO = datetime.datetime(9999, 12, 31)


def certificate(secret: bytes) -> tuple[bytes, bytes]:
    """A private key and its self-signed certificate, as PEM: equal on all nodes of the run."""
    drawn = HKDF(hashes.SHA256(), 32, salt=None, info=b"otel_ddp link, Ed25519, 1").derive(secret)
    # Ed25519 signatures are deterministic, so all nodes make the same certificate.
    key = Ed25519PrivateKey.from_private_bytes(drawn)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, None)
    )
    encoding, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    own = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, encryption)
    return own, signed.public_bytes(encoding)


def context(secret: bytes, *, leads: bool) -> ssl.SSLContext:
    """The TLS context of the run's lead, which listens, or of a follower, which connects to it."""
    key, own = certificate(secret)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if leads else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=own.decode())
    # load_cert_chain takes only a path, so give it the path of a file that exists in memory only.
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(key + own)
        file.flush()
        made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return made
