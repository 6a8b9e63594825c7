"""Times what an API server does with each message of a step's outputs, with any transport."""

import time
from typing import Any

from bench.serving.garbage import GarbageWatch
from bench.serving.lateness import Call
from bench.serving.timers import Function, Replacements


class ClientProbe:
    """Times vLLM's decoder and output processor in this process until `stop`.

    Both run in the event loop, on the thread that makes and stops this. Garbage collections are
    noted, too: those of other threads hold that one up as well.
    """

    def __init__(self) -> None:
        """Begin."""
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.serial_utils import MsgpackDecoder

        self._messages: list[tuple[int, int, Call]] = []
        self._processing: list[Call] = []
        self._unprocessed: dict[float, int] = {}
        self._handed: list[tuple[int, int]] = []
        self._replacements = Replacements()
        self._replacements.replace(MsgpackDecoder, "decode", self._timing_decoder)
        self._replacements.replace(OutputProcessor, "process_outputs", self._timing_processor)
        self._garbage = GarbageWatch()

    def stop(self) -> dict[str, Any]:
        """Put everything back.

        Returns:
            messages: outputs in a message, ns from the end of the scheduler's `update` until it was
                there to be decoded, and the call of the decoder.
            processing: each call of the output processor.
            handed: outputs in a message, and ns from the end of the scheduler's `update` until the
                output processor got the first of them.
            collections: the garbage collections meanwhile, in order.

        """
        self._replacements.put_back()
        return {
            "messages": self._messages,
            "processing": self._processing,
            "handed": self._handed,
            "collections": self._garbage.stop(),
        }

    def _timing_decoder(self, decode: Function) -> Function:
        from vllm.v1.engine import EngineCoreOutputs

        def timed(decoder: Any, frames: Any) -> Any:
            message, call = _timed(decode, decoder, frames)
            if isinstance(message, EngineCoreOutputs) and message.outputs:
                arrival = call.start_ns - round(message.timestamp * 1e9)
                self._messages.append((len(message.outputs), arrival, call))
                self._unprocessed[message.timestamp] = len(message.outputs)
            return message

        return timed

    def _timing_processor(self, process: Function) -> Function:
        def timed(processor: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_handed(*args, **kwargs)
            result, call = _timed(process, processor, *args, **kwargs)
            self._processing.append(call)
            return result

        return timed

    def _note_handed(
        self, outputs: Any, engine_core_timestamp: float | None = None, *_: Any, **__: Any
    ) -> None:
        """Note when the output processor gets a message, whose further parts it gets later."""
        if engine_core_timestamp is None:
            return
        size = self._unprocessed.pop(engine_core_timestamp, None)
        if size is not None:
            taken_ns = time.monotonic_ns() - round(engine_core_timestamp * 1e9)
            self._handed.append((size, taken_ns))


def _timed(function: Function, *args: Any, **kwargs: Any) -> tuple[Any, Call]:
    """Return what a function returns, and how long it took. CPU time lies within wall time."""
    start_ns = time.monotonic_ns()
    begun_cpu_ns = time.thread_time_ns()
    result = function(*args, **kwargs)
    cpu_ns = time.thread_time_ns() - begun_cpu_ns
    return result, Call(start_ns, time.monotonic_ns() - start_ns, cpu_ns)
