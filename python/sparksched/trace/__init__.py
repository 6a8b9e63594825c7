"""Traces: what a scheduler was asked and decided, recorded in a file and replayed without a GPU.

`record` fills a file, `read` reads it, `replay` gives its calls to a scheduler, `compare` compares
each decision with the recorded one, `what_if` serves the same load with other settings.
"""
