"""Recording what a scheduler is asked and decides.

`attach` wraps a scheduler's methods, and `copy_calls` copies what each call saw. In a thread of its
own `write` has `make_events` turn the copies into events, and writes them to the file.
"""
