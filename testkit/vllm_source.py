"""Which vLLM is installed, and the files of any release of it."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

# testkit/vllm_source.py
ROOT: Final = Path(__file__).resolve().parents[1]
# Source distributions, and beside them the overlays that are made of them.
FOLDER: Final = ROOT / ".overlays"
_FETCHED_UV: Final = ROOT / ".uv/bin/uv"


@dataclass(frozen=True)
class Distribution:
    """A file in a package index."""

    url: str
    sha256: str


def installed_version() -> str:
    """Return vLLM's version without its local part: `0.32.0` for `0.32.0+cpu`."""
    return metadata.version("vllm").partition("+")[0]


def ensure_source_distribution(version: str) -> Path:
    """Return the archive of a release's sources; fetch it if it is not there."""
    archive = FOLDER / f"vllm-{version}.tar.gz"
    if not archive.exists():
        print(f"fetching the source distribution of vLLM {version}", flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        # What is there is always complete.
        with tempfile.TemporaryDirectory(dir=FOLDER) as staging:
            fetched = _download(_find_source_distribution(version), Path(staging) / archive.name)
            shutil.move(fetched, archive)
    return archive


def fetch_wheel(version: str, folder: Path) -> Path:
    """Put the wheel of a release for this machine into a folder, and return it."""
    print(f"fetching the wheel of vLLM {version}, of some 300 MB", flush=True)
    return _download(_find_wheel(version), folder / "vllm.whl")


def uv() -> str:
    """Return uv's path: what the environment says, or what `make` has fetched."""
    for path in (os.environ.get("UV", "uv"), str(_FETCHED_UV)):
        if shutil.which(path) is not None:
            return path
    sys.exit("uv is not found: set UV to its path, or run `make env`")


def _find_source_distribution(version: str) -> Distribution:
    package = _find_package(version)
    if "sdist" not in package:
        sys.exit(f"the package index has no source distribution of vLLM {version}")
    sdist = package["sdist"]
    return Distribution(sdist["url"], sdist["hashes"]["sha256"])


def _find_wheel(version: str) -> Distribution:
    suffix = f"_{platform.machine()}.whl"
    for wheel in _find_package(version).get("wheels", []):
        # Paths may be missing from the entry; the address ends with the name.
        if wheel["url"].endswith(suffix):
            return Distribution(wheel["url"], wheel["hashes"]["sha256"])
    sys.exit(f"the package index has no wheel of vLLM {version} for {platform.machine()}")


def _find_package(version: str) -> dict[str, Any]:
    """Ask the configured package index, through uv, which names files without building them."""
    command = [uv(), "pip", "compile", "--quiet", "--no-deps", "--python", sys.executable]
    # A lock file is what names the source distribution. This project's own source of vLLM has none.
    command += ["--format", "pylock.toml", "--no-sources", "-"]
    found = subprocess.run(
        command, input=f"vllm=={version}\n", capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        sys.exit(f"uv finds no vLLM {version} in the package index:\n{found.stderr}")
    package: dict[str, Any]
    (package,) = tomllib.loads(found.stdout)["packages"]
    return package


def _download(distribution: Distribution, path: Path) -> Path:
    with urllib.request.urlopen(distribution.url) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != distribution.sha256:
        sys.exit(f"the file at {distribution.url} is damaged: its SHA-256 is {digest}")
    return path
