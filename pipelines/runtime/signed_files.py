"""The files that the signature of a certificate covers, and the place of the signature.

Beside a certificate in a folder it is `certificate.dsse.json`; in a bucket a key of the step with
the number of its generation, created once. It is never a file of the step: no manifest names it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from securesystemslib.signer import SSlibKey

from components.certify.certificate import CertificateDocument
from components.certify.signatures import (
    EVIDENCE,
    MAX_BYTES,
    SignatureError,
    changed_predicate,
    changed_subjects,
    digests_of,
    signed_statement,
)
from components.certify.verify import certificate_folder, read_document
from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.files import write_atomic
from components.core.object_stores import is_uri
from pipelines.runtime.manifests import MANIFEST, SIGNATURE, parse_manifest
from pipelines.runtime.storage import StepPlace, Storage, step_at
from pipelines.runtime.store import Store
from pipelines.runtime.store_errors import DamagedError, MissingError

EXISTS = "exists with other content; delete it, or name another file with --out"


@dataclass(frozen=True)
class StoredSignature:
    """The place of a signature in a bucket."""

    store: Store
    key: str

    def __str__(self) -> str:
        return self.store.where(self.key)

    def read(self) -> bytes | None:
        return self.store.find(self.key)

    def create(self, content: bytes) -> None:
        if not self.store.put_new(self.key, content):
            raise CasemateError("out", self, EXISTS)


@dataclass(frozen=True)
class SignatureFile:
    """A signature in a file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> bytes | None:
        """Its content; None if the file is missing or too large for a signature."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError:
            return None
        return content if len(content) <= MAX_BYTES else None

    def create(self, content: bytes) -> None:
        """Write it, unless another content is there: `out` may be any file by mistake."""
        if self.path.exists() and self.read() != content:
            raise CasemateError("out", self.path, EXISTS)
        try:
            write_atomic(self.path, content)
        except OSError as error:
            remedy = f"cannot be written ({error.strerror}); name a file with --out"
            raise CasemateError("out", self.path, remedy) from error


Signature = StoredSignature | SignatureFile


@dataclass(frozen=True)
class SignedFiles:
    """A certificate on this machine, with the manifest of its step."""

    folder: Path
    manifest: bytes | None  # None: it is not of a step
    signature: Signature  # where it is by default

    def digests(self, also: Iterable[str] = ()) -> dict[str, str | None]:
        """SHA-256 of every file that makes the certificate, and of `also`; None: not there."""
        found = {name: self._digest(name) for name in {*EVIDENCE, *self._listed(), *also}}
        if self.manifest is not None:
            found[MANIFEST] = sha256(self.manifest).hexdigest()
        return dict(sorted(found.items()))

    def _listed(self) -> Iterable[str]:
        """Names in the manifest; none in one that is damaged, whose digest differs anyway."""
        if self.manifest is None:
            return ()
        try:
            files = parse_manifest(self.manifest, source=self.folder / MANIFEST).files
        except CasemateError:
            return ()
        return files if isinstance(files, dict) else ()

    def _digest(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return digest_file(path) if path.is_file() else None
        except OSError:  # a name that no file can have
            return None


def signed_files(path: str | Path) -> SignedFiles:
    """The certificate at a path, or at the URI of its step."""
    if is_uri(str(path)):
        return _stored_files(str(path))
    folder = certificate_folder(Path(path))
    manifest = folder / MANIFEST
    content = manifest.read_bytes() if manifest.is_file() else None
    return SignedFiles(folder, content, SignatureFile(folder / SIGNATURE))


def _stored_files(uri: str) -> SignedFiles:
    folder = step_at(uri)
    place, number = StepPlace(Storage.at(folder.root), folder.key), folder.manifest.generation or 0
    signature = StoredSignature(place.store, f"{place.key}/{number:06d}.{SIGNATURE}")
    return SignedFiles(folder.fetched(), place.store.get(place.manifest_key(number)), signature)


def signature_problems(path: str | Path, key: SSlibKey, signature: Path | None = None) -> list[str]:
    """Why the signature of a certificate does not hold; empty: this key signed these files.

    Nothing of the certificate is parsed before its bytes are known to be the signed ones.
    """
    try:
        files = signed_files(path)
    except (DamagedError, MissingError) as error:  # a store checks what it fetches
        return [f"signature: {error.value} {error.remedy}"]
    place = files.signature if signature is None else SignatureFile(signature)
    content = place.read()
    if content is None:
        return [f"signature: {place} is missing or unreadable; casemate sign writes it"]
    try:
        statement = signed_statement(content, key)
    except SignatureError as error:
        return [f"signature: {place} {error}"]
    if changed := changed_subjects(statement, files.digests(digests_of(statement))):
        return [f"signature: {changed}"]
    document = CertificateDocument.from_dict(read_document(files.folder))
    return [f"signature: {problem}" for problem in changed_predicate(statement, document)]
