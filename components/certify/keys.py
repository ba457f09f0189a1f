"""ed25519 keys in PEM or OpenSSH form: reading and parsing is done by `cryptography`."""

from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey

from components.core.errors import CasemateError

PASSPHRASE_ENV = "CASEMATE_KEY_PASSPHRASE"  # of an encrypted private key
MAX_BYTES = 2**16  # of a key's file
OPENSSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"
PRIVATE, PUBLIC = b"PRIVATE KEY-----", b"-----BEGIN PUBLIC KEY-----"
SSH_LINE = (b"ssh-", b"ecdsa-", b"sk-")
NEW_KEY = "make one with: openssl genpkey -algorithm ed25519 -out FILE"
PUBLIC_HALF = "openssl pkey -in FILE -pubout, or the .pub file of ssh-keygen, gives it"

AskPassphrase = Callable[[], str | None]


def read_private_key(path: Path, passphrase: AskPassphrase) -> CryptoSigner:
    """The signer of a private key; `passphrase` is called for an encrypted one."""
    content = _content(path)
    if _is_public(content):
        raise CasemateError("key", path, "is a public key; sign needs the private one")
    if PRIVATE not in content:
        raise CasemateError("key", path, f"is not a private key in PEM or OpenSSH form; {NEW_KEY}")
    key = _load_private(path, content, passphrase)
    if not isinstance(key, Ed25519PrivateKey):
        raise _other_kind(path, key)
    return CryptoSigner(key)


def read_public_key(path: Path) -> SSlibKey:
    """A public key; a private one is refused, since it should not be where verification runs."""
    content = _content(path)
    if PRIVATE in content:
        remedy = f"is a private key; verify needs the public one: {PUBLIC_HALF}"
        raise CasemateError("key", path, remedy)
    if not _is_public(content):
        remedy = f"is not a public key in PEM or OpenSSH form; {PUBLIC_HALF}"
        raise CasemateError("key", path, remedy)
    load = load_pem_public_key if PUBLIC in content else load_ssh_public_key
    try:
        key = load(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _other_kind(path, key)
    return SSlibKey.from_crypto(key)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CasemateError("key", path, f"cannot be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise CasemateError("key", path, f"is too large for a key; {NEW_KEY}")
    return content


def _is_public(content: bytes) -> bool:
    return PUBLIC in content or content.lstrip().startswith(SSH_LINE)


def _load_private(path: Path, content: bytes, passphrase: AskPassphrase) -> object:
    load = load_ssh_private_key if OPENSSH in content else load_pem_private_key
    try:
        return load(content, None)
    except TypeError:  # it is encrypted
        pass
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _damaged(path) from error
    word = passphrase()
    if not word:
        raise CasemateError("key", path, f"is encrypted; set {PASSPHRASE_ENV} to its pass phrase")
    try:
        return load(content, word.encode())
    except UnsupportedAlgorithm as error:
        remedy = f"is encrypted as OpenSSH does it, which is not read; {NEW_KEY} -aes256"
        raise CasemateError("key", path, remedy) from error
    except (ValueError, TypeError) as error:
        remedy = f"cannot be decrypted by this pass phrase; check {PASSPHRASE_ENV}"
        raise CasemateError("key", path, remedy) from error


def _damaged(path: Path) -> CasemateError:
    return CasemateError("key", path, f"is a damaged key or one that cannot be read; {NEW_KEY}")


def _other_kind(path: Path, key: object) -> CasemateError:
    kind = type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey").lstrip("_")
    remedy = f"is a key of another kind ({kind}); signatures are ed25519: {NEW_KEY}"
    return CasemateError("key", path, remedy)
