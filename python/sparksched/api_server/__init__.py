"""What runs in vLLM's Python API server, and wherever else an engine has clients.

`client` changes vLLM's clients, and `connection` connects them to their engines. `channel` is what
each client needs of its rings to one engine. `async_channel` adds what a client with an event loop
needs, `sync_channel` what one without needs. The other modules handle tokens, requests, overload
and shutdown, and show engines on `/metrics`.
"""
