"""Signatures of certificates: made with a private key, checked with the public one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from components.core.errors import CasemateError
from pipelines.api.certificates import verify


class Signed(NamedTuple):
    """A written signature: its place, the key's id, and the signed in-toto statement."""

    place: str
    keyid: str
    statement: dict[str, Any]

    @property
    def sound(self) -> bool:
        """False for claims that only reproduce published tables."""
        return bool(self.statement["predicate"]["sound"])


def sign(
    path: str | Path,
    key: str | Path,
    *,
    out: str | Path | None = None,
    passphrase: str | Callable[[], str | None] | None = None,
) -> Signed:
    """Verify a certificate and sign its files with an ed25519 key; returns the signature.

    `path`: the certificate's folder, one of its files, or the URI of its step. `key`: a private
    key, PEM (PKCS#8) or OpenSSH; `passphrase` of an encrypted one is by default
    CASEMATE_KEY_PASSPHRASE. The signature is written to `out`, by default beside the certificate.
    A certificate that is not sound is signed as such.

    >>> from pipelines import api
    >>> api.sign("runs/demo/certify.l2-1f2e3d4c5b6a", "release.pem")  # doctest: +SKIP
    """
    from components.certify.certificate import CertificateDocument
    from components.certify.keys import read_private_key
    from components.certify.signatures import sign_statement, statement_of
    from components.certify.verify import read_document
    from pipelines.runtime.signed_files import SignatureFile, signed_files

    signer = read_private_key(Path(key).expanduser(), _asked(passphrase))
    report = verify(path)
    if not report.ok:
        remedy = f"is not signed, its claims do not hold: {report.problems[0]}"
        raise CasemateError("path", path, remedy)
    files = signed_files(path)
    digests = {name: digest for name, digest in files.digests().items() if digest is not None}
    document = CertificateDocument.from_dict(read_document(files.folder))
    statement = statement_of(digests, document)
    place = SignatureFile(Path(out).expanduser()) if out is not None else files.signature
    place.create(sign_statement(statement, signer))
    return Signed(str(place), signer.public_key.keyid, statement)


def _asked(passphrase: str | Callable[[], str | None] | None) -> Callable[[], str | None]:
    """How a pass phrase is found: as given, else in the environment."""
    from components.certify.keys import PASSPHRASE_ENV

    if callable(passphrase):
        ask = passphrase
        return lambda: os.environ.get(PASSPHRASE_ENV) or ask()
    return lambda: passphrase or os.environ.get(PASSPHRASE_ENV)
