"""What is wrong with a trace."""


class TraceError(ValueError):
    """A file is no trace, is damaged, or can't be replayed; the message says what and where."""
