"""The bytes of a trace: a magic, a version, and frames that can be checked one by one.

All numbers are little-endian. The file begins with `MAGIC` and a `u16` version. A frame is

    u32 bytes of the payload as stored
    u32 bytes of the payload unpacked
    u32 CRC-32 of these two and the payload as stored

and then the payload: a msgpack array of events, packed by zlib. Whatever a file says, no more than
`MAX_FRAME_BYTES` are unpacked at a time.
"""

import struct
import zlib
from typing import BinaryIO, Final

from sparksched.trace.errors import TraceError

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
