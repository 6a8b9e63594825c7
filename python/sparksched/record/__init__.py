"""Traces: what a scheduler was asked and decided, recorded in a file and replayed without a GPU.

`events` is the schema. Recording: `recorder` copies what each call of a scheduler was given and
decided; in a thread of its own, `write` has `tokens` complete the copies, and writes them.

Replaying: `load` reads and sums them up, `build` builds schedulers and requests from them; `replay`
compares `decisions`, `what_if` changes settings and takes `step_time` as given.
"""
