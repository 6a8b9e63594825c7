"""Files that an operator's variable names, and that the engine fills up to a size.

A file never takes the place of another one, is at no end of a link, and is its owner's alone.
"""

import os
from pathlib import Path
from typing import Any, Final

PROCESS_ID: Final = "%p"
"""In the name of a file: stands for the id of the engine's process."""

FULL: Final = "the file has reached its size"


class FileFullError(Exception):
    """There is no more room."""


def path_of_engine(name: str, vllm_config: Any) -> Path:
    """Return the path of an engine's own file: all but the first of several add their index."""
    index = vllm_config.parallel_config.data_parallel_index
    return Path(name.replace(PROCESS_ID, str(os.getpid())) + (f".{index}" if index else ""))


class NewFile:
    """A file that takes whole pieces, up to a size in bytes.

    Raises:
        FileExistsError: from the constructor, if there is something of that name.
        OSError: if it can't be created or written.

    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self._room = max_bytes
        self._size = 0

    def write(self, piece: bytes, *, reserve: int = 0) -> None:
        """Write a piece: the whole of it, or nothing.

        Raises:
            FileFullError: if there would be less than the reserve left behind it.
            OSError: if the system can't write.

        """
        if self._size + len(piece) + reserve > self._room:
            raise FileFullError(FULL)
        written = 0
        try:
            while written < len(piece):
                written += os.write(self._descriptor, piece[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += written

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)
