"""What the Rust encoder of outputs needs of vLLM's encoder: the parts that only Python knows.

vLLM's `MsgpackEncoder` (`vllm/v1/serial_utils.py`) also encodes outputs, and both must make the
same bytes.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder


class PartEncoder(MsgpackEncoder):  # type: ignore[misc]
    """Encodes parts of a message that share its out-of-band buffers. Not thread-safe."""

    def encode_part(self, part: Any, frames: list[Any]) -> bytes:
        """Return a part as msgpack; append its large arrays and tensors to the message's frames."""
        self.aux_buffers: list[Any] | None = frames
        try:
            encoded: bytes = self.encoder.encode(part)
            return encoded
        finally:
            self.aux_buffers = None


class _IdOfOutput(msgspec.Struct, array_like=True, gc=False):
    request_id: str


_IDS: Final[dict[str, Any]] = {
    "outputs": list[_IdOfOutput],
    "finished_requests": list[str] | None,
}

_IdsOfOutputs: Final = msgspec.defstruct(
    "_IdsOfOutputs",
    # What is raw is skipped.
    [(name, _IDS.get(name, msgspec.Raw), None) for name in EngineCoreOutputs.__struct_fields__],
    array_like=True,
    gc=False,
)


def request_ids_in(frames: Sequence[Any]) -> set[str]:
    """Return the requests that a message of outputs is about, without decoding the rest of it."""
    outputs: Any = msgspec.msgpack.decode(frames[0], type=_IdsOfOutputs)
    return {output.request_id for output in outputs.outputs}.union(outputs.finished_requests or ())
