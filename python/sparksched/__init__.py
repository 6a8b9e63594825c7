"""vLLM's scheduler, in Rust: identical decisions, a fraction of the CPU."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sparksched")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0.0.0"
