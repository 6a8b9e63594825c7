"""What sparksched adds to the metrics that vLLM shows Prometheus: see docs/metrics.md.

`engine` is the engine's part: a page of shared memory in which it counts. `front_end` is the API
server's: it finds each engine's page, and times how outputs reach their streams. `collector` makes
series of all that whenever somebody asks for `/metrics`.
"""
