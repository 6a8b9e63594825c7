"""Recording: `attach` wraps a scheduler's methods, `copy_calls` copies what each call saw, and in a
thread of its own `write` lets `make_events` turn the copies into events, and writes them.
"""
