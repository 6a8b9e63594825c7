"""A progress bar on a terminal, and a line for each step elsewhere."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Progress:
    """How far a benchmark is. Everything goes to stderr."""

    def __init__(self, total: int) -> None:
        """Begin with so many steps to do."""
        self._total = total
        self._num_begun = 0
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, dynamic_ncols=True, leave=False) if is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, what: str) -> None:
        """Say what is measured now; what was before that is done."""
        if self._bar is not None:
            self._bar.n = self._num_begun
            self._bar.set_description_str(what)
        self._num_begun += 1
        if self._bar is None:
            print(f"[{self._num_begun}/{self._total}] {what}", file=sys.stderr, flush=True)

    def skip(self, number: int) -> None:
        """Count steps as done that need not be taken."""
        self._num_begun += number

    def say(self, line: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)
