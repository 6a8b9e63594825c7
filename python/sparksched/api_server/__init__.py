"""What runs in vLLM's Python API server, and wherever else an engine has clients.

`client` changes vLLM's clients, and `connection` connects them to their engines. `channel` is what
every client needs of its rings to one engine, `async_channel` what one in an event loop needs,
`sync_channel` what one without needs. The rest is what a token, a request and an overload cost the
front end, and what its `/metrics` shows of engines.
"""
