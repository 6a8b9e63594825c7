"""Shared-memory rings in place of ZMQ sockets between vLLM's front end and a local engine.

vLLM's sockets stay: they carry the start-up handshake, messages of the data-parallel coordinator,
and everything for a client or an engine that has no rings. In its ready response, which is the
first message on those sockets, an engine says under which name it offers rings, or why it doesn't;
each client then connects, or says why it stays with ZMQ.

`offer` is what engine and client say to each other; `engine` and `client` are the two sides.
"""
