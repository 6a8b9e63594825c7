"""vLLM's own tests: they are part of its source distribution, and of nothing that is installed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# vLLM's scheduler tests import helpers from all over the package `tests`.
TESTS_FOLDER = "tests"


@dataclass(frozen=True)
class SourceDistribution:
    """A file in a package index."""

    url: str
    sha256: str


def installed_version() -> str:
    """Return vLLM's version without its local part: `0.32.0` for `0.32.0+cpu`."""
    return metadata.version("vllm").partition("+")[0]


def ensure_tests(folder: Path) -> Path:
    """Return the folder with the tests of the installed vLLM; get them if they are not there."""
    version = installed_version()
    root = folder / f"vllm-{version}"
    if not root.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching the source distribution of vLLM {version}", flush=True)
        # Everything happens in a folder beside it, so that what is there is always complete.
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            archive = _download(_find_source_distribution(version), Path(staging))
            _unpack_tests(archive, Path(staging) / root.name)
            shutil.move(Path(staging) / root.name, root)
    return root


def _find_source_distribution(version: str) -> SourceDistribution:
    """Ask the configured package index, through uv, which names files without building them."""
    uv = os.environ.get("UV", "uv")
    if shutil.which(uv) is None:
        sys.exit("uv is not found: set UV to its path, or run `make conformance`")
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--python", sys.executable]
    # A lock file is what names the source distribution. This project's own source of vLLM has none.
    command += ["--format", "pylock.toml", "--no-sources", "-"]
    found = subprocess.run(
        command, input=f"vllm=={version}\n", capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        sys.exit(f"uv finds no vLLM {version} in the package index:\n{found.stderr}")
    (package,) = tomllib.loads(found.stdout)["packages"]
    if "sdist" not in package:
        sys.exit(f"the package index has no source distribution of vLLM {version}")
    sdist = package["sdist"]
    return SourceDistribution(sdist["url"], sdist["hashes"]["sha256"])


def _download(sdist: SourceDistribution, folder: Path) -> Path:
    path = folder / "sdist.tar.gz"
    with urllib.request.urlopen(sdist.url) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sdist.sha256:
        sys.exit(f"the file at {sdist.url} is damaged: its SHA-256 is {digest}")
    return path


def _unpack_tests(archive: Path, root: Path) -> None:
    """Unpack the tests' Python files so that `root/tests` is the package."""
    with tarfile.open(archive) as members:
        for member in members:
            path = Path(*Path(member.name).parts[1:])
            if path.parts[:1] == (TESTS_FOLDER,) and path.suffix == ".py":
                member.name = str(path)
                members.extract(member, root, filter="data")
