"""`casemate sign`: a detached signature of a certificate."""

import json
import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated

import typer

from pipelines import api
from pipelines.cli.options import JsonOpt

commands = typer.Typer()


@commands.command(epilog="Example: casemate sign runs/demo/certify.l2-1f2e3d4c5b6a --key k.pem")
def sign(
    path: Annotated[str, typer.Argument(help="Certificate folder, or the URI of its step.")],
    key: Annotated[
        Path,
        typer.Option(
            help="Private ed25519 key, PEM or OpenSSH; CASEMATE_KEY_PASSPHRASE opens one that is "
            "encrypted."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File of the signature; default: beside the certificate.")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Verify a certificate and sign its files: an in-toto statement in a DSSE envelope."""
    made = api.sign(path, key, out=out, passphrase=_ask)
    if not made.sound:
        print("casemate: warning: signed as not sound: its rule is not a bound", file=sys.stderr)
    if as_json:
        found = {"signature": made.place, "keyid": made.keyid, "statement": made.statement}
        print(json.dumps(found, indent=2))
        return
    print(f"{path}: {len(made.statement['subject'])} files signed by key {made.keyid}")
    print(f"signature: {made.place}")


def _ask() -> str | None:
    """The pass phrase from a terminal; None without one."""
    return getpass("pass phrase of the key: ") if sys.stdin.isatty() else None
