"""Container images without a daemon or a registry: buildah, on a Debian that mmdebstrap makes."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("buildah", "mmdebstrap")
FREE = 25 * 10**9  # bytes: the packages as container, as archive and as layer
ANY_USER = 54321  # has no account in the image
CERTIFICATES = Path("/etc/ssl/certs")
BASE = "localhost/debian-python"
# In namespaces of its own: the image read-only, tmpfs where the page says, processes end with it.
READ_ONLY = """
set -eu
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
for place in tmp "${HOME#/}"; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
exec chroot --userspec="$user:$user" "$root" "$@"
"""


def why_not(folder: Path) -> str | None:
    """Why no image can be built here, in a line; None if one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {missing[0]} here: apt-get install {' '.join(PROGRAMS)}"
    if os.getuid() != 0:
        return "an image is built by root alone here"
    if (free := shutil.disk_usage(folder).free) < FREE:
        return f"an image needs {FREE / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free"
    return None


class Images:
    """A private image storage in a folder, with a Debian that has what the Dockerfile asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "TMPDIR": str(folder), "BUILDAH_ISOLATION": "chroot"}
        (folder / "pip.conf").write_text(
            f"[global]\ncert = {CERTIFICATES / 'ca-certificates.crt'}\n"
        )
        (folder / "uv.toml").write_text("system-certs = true\n")

    def call(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        places = ["--root", self.folder / "storage", "--runroot", self.folder / "run"]
        command = ["nice", "-n", "10", "buildah", *places, *words]
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=self.env, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    def make_base(self) -> None:
        """Debian 12 with Python 3.11, certificates and wget."""
        archive = self.folder / "base.tar"
        packages = "--include=python3.11-venv,ca-certificates,wget"
        command = ["nice", "-n", "10", "mmdebstrap", "--variant=minbase", packages, "bookworm"]
        subprocess.run([*command, archive], check=True, capture_output=True)
        container = self.call("from", "scratch").stdout.strip()
        self.call("add", "--quiet", container, archive, "/")
        self.call("commit", "--quiet", "--rm", container, BASE)
        archive.unlink()

    def build(self, tag: str, *words: object, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Build with the certificates and the cached packages of this machine."""
        cache = subprocess.check_output([ROOT / ".boot/bin/uv", "cache", "dir"], text=True).strip()
        arguments = {"BASE": BASE, "UV_CACHE_DIR": "/cache-of-host", **arguments}
        return self.call(
            "build", "--layers", "--file", "infra/image/Dockerfile", "--tag", tag,
            *(f"--secret=id={name},src={self.folder / name}" for name in ("pip.conf", "uv.toml")),
            f"--volume={CERTIFICATES}:{CERTIFICATES}:ro", f"--volume={cache}:/cache-of-host",
            *(f"--build-arg={name}={value}" for name, value in arguments.items()), *words, ".",
            check=False,
        )  # fmt: skip

    def settings(self, tag: str) -> dict[str, Any]:
        """User, environment, labels and so on."""
        found = json.loads(self.call("inspect", "--type", "image", tag).stdout)
        config: dict[str, Any] = found["OCIv1"]["config"]
        return config

    def container(self, tag: str) -> "Container":
        """A running place for commands."""
        name = self.call("from", tag).stdout.strip()
        root = Path(self.call("mount", name).stdout.strip())
        env = dict(pair.split("=", 1) for pair in self.settings(tag)["Env"])
        return Container(root, env)

    def close(self) -> None:
        self.call("rm", "--all", check=False)
        self.call("rmi", "--all", "--force", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Container:
    """An image with a read-only root, run by a uid without account, on the host's network."""

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self.root, self.env = root, env

    def __call__(
        self, script: str, *, shell: str = "-lc", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of bash; `-lc` is a login shell."""
        inside = [
            "bash",
            "-c",
            READ_ONLY,
            "sh",
            self.root,
            ANY_USER,
            "bash",
            shell,
            f"cd; {script}",
        ]
        apart = ["nice", "-n", "10", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*apart, *map(str, inside)],
            env={**self.env, **env},
            capture_output=True,
            text=True,
        )
