"""vLLM's functions and those that replace them, in one process: each in turn."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from engine.harness import restored_replacements
from sparksched.compat import patching, seams


@dataclass(frozen=True)
class Implementation:
    """Functions by the classes that they belong to."""

    name: str
    functions: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, function in self.functions:
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


def _both() -> tuple[Implementation, Implementation]:
    replaced: list[tuple[Any, str, Any, Any]] = []
    with restored_replacements():
        replace = patching.replace

        def replace_and_note(owner: Any, name: str, make: Any) -> None:
            original = getattr(owner, name)
            replace(owner, name, make)
            replaced.append((owner, name, original, getattr(owner, name)))

        with mock.patch.object(patching, "replace", replace_and_note):
            patching.apply(seams.OUTPUTS)
    assert replaced, "vLLM is not what sparksched knows"
    return (
        Implementation("vllm", tuple((owner, name, old) for owner, name, old, _ in replaced)),
        Implementation("sparksched", tuple((owner, name, new) for owner, name, _, new in replaced)),
    )


STOCK, OURS = _both()
