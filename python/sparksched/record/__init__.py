"""Traces: what a scheduler was asked and decided, recorded in a file and replayed without a GPU.

Recording: `recorder` copies what each call of a scheduler was given and decided; in a thread of its
own, `write` has `make_events` turn the copies into `events`, and writes these to a file.

Replaying: `read` gives the events back, `load` sums them up, `build` builds schedulers and requests
from them; `replay` compares decisions, `what_if` changes settings and takes `step_time` as given.
"""
