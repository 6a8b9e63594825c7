"""vLLM's own tests: they are part of its source distribution, and of nothing that is installed."""

import shutil
import tarfile
import tempfile
from pathlib import Path

from testkit.vllm_source import ensure_source_distribution, installed_version

# vLLM's scheduler tests import helpers from all over the package `tests`.
TESTS_FOLDER = "tests"


def ensure_tests(folder: Path) -> Path:
    """Return the folder with the tests of the installed vLLM; get them if they are not there."""
    version = installed_version()
    root = folder / f"vllm-{version}"
    if not root.exists():
        archive = ensure_source_distribution(version)
        folder.mkdir(parents=True, exist_ok=True)
        # Everything happens in a folder beside it, so that what is there is always complete.
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            _unpack_tests(archive, Path(staging) / root.name)
            shutil.move(Path(staging) / root.name, root)
    return root


def _unpack_tests(archive: Path, root: Path) -> None:
    """Unpack the tests' Python files so that `root/tests` is the package."""
    with tarfile.open(archive) as members:
        for member in members:
            path = Path(*Path(member.name).parts[1:])
            if path.parts[:1] == (TESTS_FOLDER,) and path.suffix == ".py":
                member.name = str(path)
                members.extract(member, root, filter="data")
