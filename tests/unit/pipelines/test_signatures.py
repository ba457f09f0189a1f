"""Signed certificates: every forgery fails with one line, whoever made it consistent."""

import base64
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as ec_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from components.certify.certificate import write_certificate
from components.certify.keys import PASSPHRASE_ENV
from components.certify.votes import write_votes
from components.core.digests import digest_file
from pipelines import api
from pipelines.runtime.manifests import SIGNATURE, manifest_text
from pipelines.runtime.storage import Storage
from tests.e2e.cli import call, mistake_of
from tests.refusals import refusal_of
from tests.small_certificates import (
    COLUMNS_CLAIM,
    GAUSSIAN_CLAIM,
    columns_votes,
    gaussian_votes,
    write_small_certificate,
)
from tests.stored_steps import finish, force, place_of

PKCS8, SSH = ser.PrivateFormat.PKCS8, ser.PrivateFormat.OpenSSH
INFO, LINE = ser.PublicFormat.SubjectPublicKeyInfo, ser.PublicFormat.OpenSSH
PEM, OPEN_SSH = ser.Encoding.PEM, ser.Encoding.OpenSSH
WORD = "correct horse"


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """Key files as openssl and ssh-keygen write them; `a` and `b` are two signers."""
    folder, plain = tmp_path_factory.mktemp("keys"), ser.NoEncryption()
    for name in ("a", "b"):
        key = Ed25519PrivateKey.from_private_bytes(name.encode() * 32)
        (folder / f"{name}.pem").write_bytes(key.private_bytes(PEM, PKCS8, plain))
        (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(PEM, INFO))
    key = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
    locked = ser.BestAvailableEncryption(WORD.encode())
    (folder / "locked.pem").write_bytes(key.private_bytes(PEM, PKCS8, locked))
    (folder / "ssh").write_bytes(key.private_bytes(PEM, SSH, plain))
    (folder / "ssh.pub").write_bytes(key.public_key().public_bytes(OPEN_SSH, LINE) + b" me@here\n")
    other = ec_key(SECP256R1())
    (folder / "ec.pem").write_bytes(other.private_bytes(PEM, PKCS8, plain))
    (folder / "ec.pub").write_bytes(other.public_key().public_bytes(PEM, INFO))
    (folder / "torn.pem").write_bytes((folder / "a.pem").read_bytes()[:60])
    (folder / "torn.pub").write_bytes((folder / "a.pub").read_bytes()[:60])
    (folder / "notes.txt").write_text("ask Ann for the key\n")
    return folder


def certificate_files(folder: Path, evidence=None, claim=GAUSSIAN_CLAIM) -> dict[str, bytes]:
    """The files of a small certificate, and one more file of its step."""
    write_small_certificate(folder, evidence or gaussian_votes(), claim)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"challenge.json": b"{}"}


@pytest.fixture
def step(tmp_path):
    """A finished step with a certificate, in a storage that is a folder."""
    place = place_of(Storage.at(tmp_path / "runs"), "demo", "certify.l2")
    finish(place, certificate_files(tmp_path / "made"))
    return place


@pytest.fixture
def signed(step, keys) -> Path:
    """The folder of a signed step."""
    api.sign(step.path, keys / "a.pem")
    return step.path


def flipped_votes():
    """Self-consistent votes with another outcome: the last vote of an item is another class."""
    header, rows = gaussian_votes()
    index = next(i for i, row in enumerate(rows) if row.stream == "estimate")
    votes = rows[index].predictions.copy()
    votes[0] = (votes[0] + 1) % 3
    return header, [*rows[:index], replace(rows[index], predictions=votes), *rows[index + 1 :]]


def problem_of(*arguments) -> str:
    """The one line with which a verification fails."""
    said = call("verify", *arguments)
    assert said.code == 1, said.out + said.err
    assert said.err == ""
    (line,) = said.out.splitlines()
    return line.removeprefix("problem: ")


# -- what is signed


def test_a_signed_step_verifies_and_stays_what_it_was(storage, keys, tmp_path):
    place = place_of(storage, "demo", "certify.l2")
    finish(place, certificate_files(tmp_path / "made"))
    where = str(place) if not storage.is_local else str(place.path)
    before = place.manifest()
    made = api.sign(where, keys / "a.pem")
    assert api.sign(where, keys / "a.pem") == made  # ed25519 is deterministic
    report = api.verify(where, key=keys / "a.pub")
    assert (report.problems, report.num_items, report.signed_by) == ([], 6, made.keyid)
    assert api.verify(where).ok
    assert place.manifest() == before
    assert place.is_finished(before.fingerprint)
    api.gc(storage.root, delete=True, older_than=0)
    assert api.verify(where, key=keys / "a.pub").ok
    said = call("verify", where, "--key", keys / "a.pub", "--json")
    assert (said.code, said.json["signed_by"]) == (0, made.keyid)
    assert "exists with other content" in refusal_of(api.sign, where, keys / "b.pem")

    force(place)  # a new generation has other files, and needs a signature of its own
    finish(place, certificate_files(tmp_path / "forged", flipped_votes()))
    assert SIGNATURE not in place.manifest().files
    (problem,) = api.verify(where, key=keys / "a.pub").problems
    assert "is missing or unreadable" in problem
    api.sign(where, keys / "b.pem")
    assert api.verify(where, key=keys / "b.pub").ok


def test_a_step_that_is_made_again_in_its_folder_leaves_the_signature_out(step, signed, tmp_path):
    for path in signed.glob("*manifest.json"):
        path.unlink()
    finish(step, certificate_files(tmp_path / "again"))
    assert SIGNATURE not in step.manifest().files


def test_a_rewritten_step_of_a_bucket_is_not_the_signed_one(s3_root, keys, tmp_path, monkeypatch):
    place = place_of(Storage.at(s3_root), "demo", "certify.l2")
    finish(place, certificate_files(tmp_path / "made"))
    api.sign(str(place), keys / "a.pem")
    key = next(ref.key for n, ref in place.open().files.items() if n == "votes.parquet")
    whole = place.store.get(key)
    place.store.delete([key])
    place.store.put_new(key, whole[:-1] + b"?")
    monkeypatch.setenv("CASEMATE_CACHE", str(tmp_path / "cache"))  # nothing was fetched before
    assert "votes.parquet" in problem_of(place, "--key", keys / "a.pub")
    place.store.delete([place.manifest_key(0)])
    finish(place, certificate_files(tmp_path / "forged", flipped_votes()))
    assert api.verify(str(place)).ok
    line = problem_of(place, "--key", keys / "a.pub")
    assert line.startswith("signature: certificate.json, ")
    assert "votes.parquet: changed since it was signed" in line


def test_the_statement_is_in_toto_and_the_signature_is_plain_ed25519(signed, keys, tmp_path):
    envelope = json.loads((signed / SIGNATURE).read_text())
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    payload, (signature,) = base64.b64decode(envelope["payload"]), envelope["signatures"]
    kind = envelope["payloadType"].encode()
    encoded = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    sig = base64.b64decode(signature["sig"])
    key = ser.load_pem_public_key((keys / "a.pub").read_bytes())
    key.verify(sig, encoded)
    with pytest.raises(InvalidSignature):
        key.verify(sig, encoded + b" ")
    if shutil.which("openssl"):
        (tmp_path / "pae").write_bytes(encoded)
        (tmp_path / "sig").write_bytes(sig)
        subprocess.run(
            ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys / "a.pub", "-rawin",
             "-in", tmp_path / "pae", "-sigfile", tmp_path / "sig"],
            check=True, capture_output=True,
        )  # fmt: skip

    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "urn:casemate:certificate:v1"
    names = ("certificate.json", "certificates.parquet", "challenge.json", "manifest.json")
    assert {s["name"]: s["digest"] for s in statement["subject"]} == {
        name: {"sha256": digest_file(signed / name)} for name in (*names, "votes.parquet")
    }
    said = statement["predicate"]
    assert (said["kind"], said["sound"], said["num_items"]) == ("gaussian", True, 6)
    assert (said["model_digest"], said["dataset_digest"]) == ("a" * 64, "b" * 64)
    assert said["threat"]["unit"].startswith("pixels in [0, 1]")
    document = json.loads((signed / "certificate.json").read_text())
    assert said["certified"] == document["summary"]["certified"]
    count = round(6 * said["certified"][0]["accuracy"]["value"])
    assert said["in_words"][0].startswith(f"l2 0.25: {count} of 6 items")
    assert "numpy" in said["software"]


def test_a_certificate_of_its_own_folder_and_one_that_is_not_sound(keys, tmp_path):
    claim = COLUMNS_CLAIM | {"delta_rule": "paper_reference"}
    folder = write_small_certificate(tmp_path / "patch", columns_votes(), claim)
    said = call("sign", folder, "--key", keys / "a.pem", "--out", tmp_path / "s.json", "--json")
    assert said.code == 0
    assert "not sound" in said.err
    assert said.json["statement"]["predicate"]["sound"] is False
    assert len(said.json["statement"]["subject"]) == 3
    assert not (folder / SIGNATURE).exists()
    options = ("--key", keys / "a.pub", "--signature", tmp_path / "s.json")
    said = call("verify", folder, *options)
    assert said.code == 0
    assert "\nnot sound: " in said.out
    (folder / "manifest.json").write_text("{}")
    assert problem_of(folder, *options) == "signature: manifest.json: not signed"


@pytest.mark.parametrize(("private", "public"), [("ssh", "ssh.pub"), ("locked.pem", "a.pub")])
def test_other_forms_of_a_key_sign_the_same_bytes(signed, keys, private, public, monkeypatch):
    before = (signed / SIGNATURE).read_bytes()
    (signed / SIGNATURE).unlink()
    monkeypatch.setenv(PASSPHRASE_ENV, WORD)
    api.sign(signed, keys / private)
    assert (signed / SIGNATURE).read_bytes() == before
    assert api.verify(signed, key=keys / public).ok


# -- forgeries of the certificate


def reseal(folder: Path) -> None:
    """Rewrite both manifests so that they list the files as they are now."""
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("manifest_sha256")
    for name, entry in document["files"].items():
        entry |= {"sha256": digest_file(folder / name), "bytes": (folder / name).stat().st_size}
    for path in folder.glob("*manifest.json"):
        path.write_text(manifest_text(document))


def forge_votes(folder: Path, evidence) -> None:
    header, rows = evidence
    (folder / "votes.parquet").unlink()  # a link into the storage
    votes = write_votes(folder / "votes.parquet", rows, header)
    write_certificate(folder, votes, GAUSSIAN_CLAIM)
    reseal(folder)


def change_vote(folder: Path) -> None:
    forge_votes(folder, flipped_votes())


def change_label(folder: Path) -> None:
    header, rows = gaussian_votes()
    forge_votes(folder, (header, [replace(row, label=row.label % 2 + 1) for row in rows]))


def change_digest(folder: Path) -> None:
    header, rows = gaussian_votes()
    forge_votes(folder, (header | {"model_digest": "c" * 64}, rows))


def swap_file(folder: Path) -> None:
    (folder / "challenge.json").unlink()
    (folder / "challenge.json").write_text('{"broken_certified": 0}')
    reseal(folder)


def rewrite_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text().replace("mlflow-1", "mlflow-2")
    document = json.loads(text)
    document.pop("manifest_sha256")
    for path in folder.glob("*manifest.json"):
        path.write_text(manifest_text(document))


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (change_vote, "votes.parquet"),
        (change_label, "votes.parquet"),
        (change_digest, "votes.parquet"),
        (swap_file, "challenge.json"),
        (rewrite_manifest, "manifest.json"),
    ],
)
def test_a_forgery_that_is_consistent_passes_all_but_the_signature(signed, keys, forge, told):
    forge(signed)
    assert api.verify(signed).problems == []
    line = problem_of(signed, "--key", keys / "a.pub")
    assert line.startswith("signature: ")
    assert line.endswith("changed since it was signed")
    assert told in line
    assert "manifest.json" in line
    said = call("verify", signed, "--key", keys / "a.pub", "--json")
    assert (said.code, said.json["signed_by"], len(said.json["problems"])) == (1, None, 1)


@pytest.mark.parametrize("name", ["votes.parquet", "certificate.json", "manifest.json"])
def test_damage_is_found_before_anything_is_read(signed, keys, name):
    whole = (signed / name).read_bytes()
    (signed / name).unlink()
    assert problem_of(signed, "--key", keys / "a.pub") == f"signature: {name}: signed and missing"
    (signed / name).write_bytes(whole[:-9])
    line = problem_of(signed, "--key", keys / "a.pub")
    assert line == f"signature: {name}: changed since it was signed"


@pytest.mark.parametrize("files", [[{}], 3, {"x" * 5000: {}, "../../a\0\nb": {}}])
def test_a_hostile_manifest_is_not_the_signed_one(signed, keys, files):
    (signed / "manifest.json").write_text(manifest_text({"files": files}))
    line = problem_of(signed, "--key", keys / "a.pub")
    assert line.startswith("signature: manifest.json: changed since it was signed")
    assert len(line) < 200
    assert line.isprintable()


def test_a_swapped_certificate_and_a_signature_of_another_one(signed, keys, tmp_path):
    other = write_small_certificate(tmp_path / "other", flipped_votes(), GAUSSIAN_CLAIM)
    api.sign(other, keys / "a.pem")
    mine, theirs = signed / SIGNATURE, other / SIGNATURE
    line = problem_of(other, "--key", keys / "a.pub", "--signature", mine)
    assert "votes.parquet: changed since it was signed" in line
    assert "challenge.json, manifest.json: signed and missing" in line
    line = problem_of(signed, "--key", keys / "a.pub", "--signature", theirs)
    assert "challenge.json, manifest.json: not signed" in line


# -- forgeries of the signature


def altered(envelope: dict, how: str) -> object:
    payload = base64.b64decode(envelope["payload"])
    (one,) = envelope["signatures"]
    return {
        "payload": envelope | {"payload": base64.b64encode(payload + b" ").decode()},
        "type": envelope | {"payloadType": "application/json"},
        "no type": envelope | {"payloadType": None},
        "duplicate": envelope | {"signatures": [one, one]},
        "two": envelope | {"signatures": [one, one | {"keyid": "0" * 64}]},
        "empty": envelope | {"signatures": []},
        "zero": envelope | {"signatures": [one | {"sig": base64.b64encode(bytes(64)).decode()}]},
        "short": envelope | {"signatures": [one | {"sig": "AAAA"}]},
        "renamed": envelope | {"signatures": [one | {"keyid": "f" * 64}]},
        "list": [envelope],
        "text": "signed, Ann",
        "odd": {"payload": 1, "payloadType": [], "signatures": {"a": 1}},
    }[how]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("payload", "does not match its content"),
        ("type", "does not match its content"),
        ("no type", "is not a DSSE envelope"),
        ("duplicate", "holds two signatures of one key"),
        ("two", "holds 2 signatures, not one"),
        ("empty", "holds 0 signatures, not one"),
        ("zero", "does not match its content"),
        ("short", "does not match its content"),
        ("renamed", "is not of this key"),
        ("list", "is not a DSSE envelope"),
        ("text", "is not a DSSE envelope"),
        ("odd", "is not a DSSE envelope"),
    ],
)
def test_an_altered_signature(signed, keys, how, told):
    envelope = json.loads((signed / SIGNATURE).read_text())
    (signed / SIGNATURE).write_text(json.dumps(altered(envelope, how)))
    assert told in problem_of(signed, "--key", keys / "a.pub")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_a_damaged_signature(signed, keys, content):
    (signed / SIGNATURE).write_bytes(content)
    assert "is not a DSSE envelope" in problem_of(signed, "--key", keys / "a.pub")


def test_another_key_and_a_missing_signature(signed, keys):
    assert "is not of this key" in problem_of(signed, "--key", keys / "b.pub")
    (signed / SIGNATURE).unlink()
    line = problem_of(signed, "--key", keys / "a.pub")
    assert line.endswith(f"{SIGNATURE} is missing or unreadable; casemate sign writes it")


def test_what_a_key_signed_must_be_a_statement_about_certificates(signed, keys):
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    signer = CryptoSigner(ser.load_pem_private_key((keys / "a.pem").read_bytes(), None))
    payload = base64.b64decode(json.loads((signed / SIGNATURE).read_text())["payload"])
    statement = json.loads(payload)

    def problem(payload: bytes, kind: str = "application/vnd.in-toto+json") -> str:
        envelope = Envelope(payload, kind, {})
        envelope.sign(signer)
        (signed / SIGNATURE).write_text(json.dumps(envelope.to_dict()))
        return problem_of(signed, "--key", keys / "a.pub")

    assert "signs 'text/plain'" in problem(payload, "text/plain")
    assert "does not sign an in-toto statement" in problem(b"{}")
    other = statement | {"predicateType": "https://slsa.dev/provenance/v1"}
    assert "statement of another type" in problem(json.dumps(other).encode())
    twice = statement | {"subject": statement["subject"] * 2}
    assert "does not sign an in-toto statement" in problem(json.dumps(twice).encode())
    statement["predicate"]["num_items"] = 600
    line = problem(json.dumps(statement).encode())
    assert line == "signature: num_items: the signed statement differs from certificate.json"


# -- bad input


UNUSABLE = {
    "cannot be read (No such file or directory)": ("sign none.pem", "verify none.pub"),
    "cannot be read (Is a directory)": ("sign .",),
    "is a public key; sign needs the private one": ("sign a.pub", "sign ssh.pub"),
    "is a private key; verify needs the public one": ("verify a.pem", "verify locked.pem"),
    "is a key of another kind (EC)": ("sign ec.pem", "verify ec.pub"),
    "is a damaged key": ("sign torn.pem", "verify torn.pub"),
    "is not a private key in PEM or OpenSSH form": ("sign notes.txt",),
    "is not a public key in PEM or OpenSSH form": ("verify notes.txt",),
    f"is encrypted; set {PASSPHRASE_ENV}": ("sign locked.pem",),
}


@pytest.mark.parametrize(
    ("command", "key", "told"),
    [(*tried.split(), told) for told, uses in UNUSABLE.items() for tried in uses],
)
def test_a_key_that_cannot_be_used_is_one_line(signed, keys, command, key, told, monkeypatch):
    monkeypatch.delenv(PASSPHRASE_ENV, raising=False)
    line = mistake_of(command, signed, "--key", keys / key)
    assert line.startswith(f"key: {keys / key} ")
    assert told in line


def test_a_wrong_pass_phrase_is_one_line_and_not_shown(signed, keys, monkeypatch):
    monkeypatch.setenv(PASSPHRASE_ENV, "battery staple")
    line = mistake_of("sign", signed, "--key", keys / "locked.pem")
    assert "cannot be decrypted by this pass phrase" in line
    assert "battery" not in line


def test_only_a_certificate_that_holds_is_signed(step, keys, tmp_path):
    path = step.path / "certificate.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace('"sound": true', '"sound": false'))
    line = mistake_of("sign", step.path, "--key", keys / "a.pem")
    assert "is not signed, its claims do not hold" in line
    assert not (step.path / SIGNATURE).exists()
    assert "needs the public key" in mistake_of("verify", step.path, "--signature", tmp_path / "s")
    assert "neither a folder with a certificate" in mistake_of(
        "sign", tmp_path / "nowhere", "--key", keys / "a.pem"
    )


def test_a_signature_overwrites_nothing(signed, keys, tmp_path):
    before = (signed / "certificate.json").read_bytes()
    command = ("sign", signed, "--key", keys / "a.pem", "--out")
    line = mistake_of(*command, signed / "certificate.json")
    assert "exists with other content" in line
    assert (signed / "certificate.json").read_bytes() == before
    assert "cannot be written" in mistake_of(*command, tmp_path / "no" / "folder.json")
