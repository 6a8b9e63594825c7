"""Another release of vLLM in the place of the installed one, without its compiled code.

Of a release that has no CPU build there is still the source distribution. Its Python sources are
enough for all that is around a model: schedulers, engine, clients, front end. An overlay is a
folder with the package `vllm` of that release, metadata that names its version, and the
distributions that it requires and the environment lacks. First on the path of a process, it hides
the installed vLLM; all else, such as torch, comes from the environment as usual.

As a command, `python -m testkit.vllm_overlay 0.33.0 COMMAND...` runs a command that way:

    python -m testkit.vllm_overlay 0.33.0 .venv/bin/pytest tests/differential
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from testkit.vllm_source import FOLDER, ensure_source_distribution, installed_version, uv

_PACKAGE: Final = "vllm"
_REQUIREMENTS: Final = "requirements/common.txt"
# By `cpu` in the version vLLM recognises its CPU platform, on which it imports without a GPU.
_LOCAL_VERSION: Final = "cpu"


def variables(version: str) -> dict[str, str]:
    """Return what a process's environment lacks to have this vLLM; nothing if it has it already.

    The processes that it starts inherit it, as engines must be of the same vLLM as their clients.
    """
    if version == installed_version():
        return {}
    overlay = ensure_overlay(version)
    path = (str(overlay), os.environ.get("PYTHONPATH", ""))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # What vLLM keeps there about model classes depends on its sources: two releases that share
        # it overwrite each other's, and inspect each class anew, for half a minute.
        "VLLM_CACHE_ROOT": str(overlay / "cache"),
    }


def ensure_overlay(version: str) -> Path:
    """Return the overlay of a release; make it if it is not there."""
    overlay = FOLDER / f"{_PACKAGE}-{version}"
    if not overlay.exists():
        archive = ensure_source_distribution(version)
        # Everything happens in a folder beside it, so that what is there is always complete.
        with tempfile.TemporaryDirectory(dir=FOLDER) as staging:
            made = Path(staging) / overlay.name
            _unpack(archive, made)
            _write_metadata(made, version)
            _install_missing(made)
            compileall.compile_dir(made, quiet=2, workers=0)  # or each process would, see Makefile
            shutil.move(made, overlay)
    return overlay


def _unpack(archive: Path, overlay: Path) -> None:
    """Unpack the package and the list of what it requires, without the folder around them."""
    with tarfile.open(archive) as members:
        for member in members:
            path = Path(*Path(member.name).parts[1:])
            if path.parts[:1] == (_PACKAGE,) or path == Path(_REQUIREMENTS):
                member.name = str(path)
                members.extract(member, overlay, filter="data")


def _write_metadata(overlay: Path, version: str) -> None:
    """Name the version where vLLM looks itself up: in the metadata of a distribution `vllm`."""
    full_version = f"{version}+{_LOCAL_VERSION}"
    folder = overlay / f"{_PACKAGE}-{full_version}.dist-info"
    folder.mkdir()
    fields = {"Metadata-Version": "2.4", "Name": _PACKAGE, "Version": full_version}
    lines = (f"{name}: {value}\n" for name, value in fields.items())
    (folder / "METADATA").write_text("".join(lines))


def _install_missing(overlay: Path) -> None:
    """Add distributions that this release requires and the environment doesn't have at all.

    Those that are there in another version stay: an overlay imports, it serves nobody.
    """
    lines = (overlay / _REQUIREMENTS).read_text().splitlines()
    declared = (line.partition("#")[0].strip() for line in lines)
    missing = [text for text in declared if text and _is_missing(Requirement(text))]
    if missing:
        command = [uv(), "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        subprocess.run([*command, "--target", str(overlay), *missing], check=True)


def _is_missing(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return False
    try:
        metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return True
    return False


def main(arguments: list[str]) -> None:
    """Become the command that follows the version."""
    if len(arguments) < 2:
        sys.exit("usage: python -m testkit.vllm_overlay VERSION COMMAND...")
    version, *command = arguments
    os.execvpe(command[0], command, os.environ | variables(version))


if __name__ == "__main__":
    main(sys.argv[1:])
