"""The file of a trace: a magic, a version, and frames that can be checked one by one.

All numbers are little-endian. The file begins with `MAGIC` and a `u16` version. A frame is

    u32 bytes of the payload as stored
    u32 bytes of the payload unpacked
    u32 CRC-32 of these two and the payload as stored

and then the payload: a msgpack array of events, packed by zlib. Whatever a file says, no more than
`MAX_FRAME_BYTES` are unpacked at a time.
"""

import contextlib
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sparksched.trace.events import End, Event, TraceError

MAGIC: Final = b"SPARKTRC"
VERSION: Final = 2
"""Of what is written. In version 1 no step has knobs of its own; it is read as well."""

_READABLE: Final = (1, VERSION)

MAX_FRAME_BYTES: Final = 16 << 20
"""Of a frame's payload, unpacked."""

_VERSION: Final = struct.Struct("<H")
_LENGTHS: Final = struct.Struct("<II")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = len(MAGIC) + _VERSION.size
FRAME_HEADER_BYTES: Final = _LENGTHS.size + _CHECKSUM.size

_FASTEST: Final = 1

FULL: Final = "the file has reached its size"

_WRITTEN_FRAME_BYTES: Final = 256 << 10
_RESERVED_BYTES: Final = 4096
"""For the last event."""

# Never another file's contents, nor a place that somebody has prepared.
_NEW_FILE: Final = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class CutOffError(TraceError):
    """The file ends within a frame."""


def file_header() -> bytes:
    """Return what a file begins with."""
    return MAGIC + _VERSION.pack(VERSION)


def pack_frame(payload: bytes) -> bytes:
    """Return a payload as a frame.

    Raises:
        OverflowError: for a payload of more than `MAX_FRAME_BYTES`.

    """
    if len(payload) > MAX_FRAME_BYTES:
        raise OverflowError(f"a frame of {len(payload):,} bytes")
    packed = zlib.compress(payload, _FASTEST)
    lengths = _LENGTHS.pack(len(packed), len(payload))
    return lengths + _CHECKSUM.pack(_checksum(lengths, packed)) + packed


def read_file_header(file: BinaryIO) -> None:
    """Take in the first bytes of a file.

    Raises:
        TraceError: if they are not those of a trace of this version.

    """
    header = file.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise TraceError("is not a trace: it doesn't begin with sparksched's mark")
    if len(header) < HEADER_BYTES:
        raise TraceError("is cut off before its version, at byte 8")
    (version,) = _VERSION.unpack(header[len(MAGIC) :])
    if version not in _READABLE:
        raise TraceError(
            f"has version {version} of the format, and this sparksched reads versions"
            f" {_READABLE[0]} to {_READABLE[-1]}"
        )


def read_frame(file: BinaryIO, position: int) -> bytes | None:
    """Return the payload of the frame that begins at a position, None at the end of the file.

    Raises:
        CutOffError: if the file ends before the frame does.
        TraceError: if the frame is damaged.

    """
    header = file.read(FRAME_HEADER_BYTES)
    if not header:
        return None
    if len(header) < FRAME_HEADER_BYTES:
        raise CutOffError(f"is cut off in the frame at byte {position}")
    num_packed, num_unpacked = _LENGTHS.unpack_from(header)
    # zlib adds a few bytes to what it can't pack.
    if num_unpacked > MAX_FRAME_BYTES or num_packed > MAX_FRAME_BYTES + MAX_FRAME_BYTES // 64:
        raise TraceError(f"is damaged: the frame at byte {position} has an impossible length")
    packed = file.read(num_packed)
    if len(packed) < num_packed:
        raise CutOffError(f"is cut off in the frame at byte {position}")
    if _CHECKSUM.unpack_from(header, _LENGTHS.size)[0] != _checksum(
        header[: _LENGTHS.size], packed
    ):
        raise TraceError(f"is damaged: the frame at byte {position} has a wrong checksum")
    return _unpacked(packed, num_unpacked, position)


def _unpacked(packed: bytes, num_unpacked: int, position: int) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        # One more than there may be, so that a frame that goes on is noticed, not unpacked.
        payload = unpacker.decompress(packed, num_unpacked + 1)
    except zlib.error:
        raise TraceError(f"is damaged: the frame at byte {position} can't be unpacked") from None
    if len(payload) != num_unpacked or not unpacker.eof:
        raise TraceError(f"is damaged: the frame at byte {position} has another length inside")
    return payload


def _checksum(lengths: bytes, packed: bytes) -> int:
    return zlib.crc32(packed, zlib.crc32(lengths))


class FileFullError(Exception):
    """There is no more room; the message says of what kind."""


class TraceFile:
    """A file that takes events, as frames, up to a size.

    Without a name, the file is in the folder of its path, and gone when it is closed unless it was
    given its name.
    """

    def __init__(self, path: Path, max_bytes: int, *, is_named: bool = True) -> None:
        self._path = path
        self._descriptor = (
            os.open(path, os.O_WRONLY | _NEW_FILE, 0o600) if is_named else _open_nameless(path)
        )
        self._room = max_bytes - _RESERVED_BYTES
        # What doesn't fit is lost a frame at a time.
        self._frame_bytes = min(_WRITTEN_FRAME_BYTES, max_bytes // 16)
        self._size = 0
        self._events: list[msgspec.Raw] = []
        self._event_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._write(file_header())

    def append(self, event: Event) -> None:
        """Add an event to what the next flush writes."""
        encoded = self._encoder.encode(event)
        self._events.append(msgspec.Raw(encoded))
        self._event_bytes += len(encoded)

    @property
    def has_whole_frame(self) -> bool:
        """Whether enough has been added for a frame."""
        return self._event_bytes >= self._frame_bytes

    def flush(self) -> None:
        """Write what has been added, as one frame.

        Raises:
            FileFullError: if it doesn't fit; then none of it is written.
            OSError: if the system can't write.

        """
        if not self._events:
            return
        events, self._events, self._event_bytes = self._events, [], 0
        try:
            frame = pack_frame(self._encoder.encode(events))
        except OverflowError:
            raise FileFullError("an event is larger than a trace holds") from None
        if self._size + len(frame) > self._room:
            raise FileFullError(FULL)
        self._write(frame)

    def close(self, end: End | None, *, gets_name: bool = False) -> None:
        """Write the last event, if there is to be one; name the file if it has none; close it."""
        self._events.clear()
        try:
            if end is not None:
                self._write(pack_frame(self._encoder.encode([end])))
            if gets_name:
                self._give_name()
        finally:
            os.close(self._descriptor)

    def _write(self, content: bytes) -> None:
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            # What is there is whole frames, whatever happens now.
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += written

    def _give_name(self) -> None:
        try:
            # With a folder's descriptor, which an absolute path makes no use of, Python asks the
            # system to follow the link in /proc; without one it doesn't.
            link = f"/proc/self/fd/{self._descriptor}"
            os.link(link, self._path, src_dir_fd=self._descriptor)
        except OSError:
            # The filesystem has no nameless files, or there is no /proc.
            self._copy_to_name()

    def _copy_to_name(self) -> None:
        named = os.open(self._path, os.O_WRONLY | _NEW_FILE, 0o600)
        try:
            with os.fdopen(named, "wb") as copy, os.fdopen(os.dup(self._descriptor), "rb") as own:
                own.seek(0)
                shutil.copyfileobj(own, copy)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise


def _open_nameless(path: Path) -> int:
    try:
        return os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        # Not every filesystem can do that.
        descriptor = os.open(path, os.O_RDWR | _NEW_FILE, 0o600)
        path.unlink()
        return descriptor
