"""The front end's side: rings beside the sockets of `MPClient` and its subclasses.

`install` changes vLLM's clients, `connection` connects them to their engines. `channel` is what
rings to one engine are for every client, `event_loop` for one in asyncio, `threads` for one
without.
"""
