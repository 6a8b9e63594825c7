"""The command `sparksched top`: a live view of a server, from its `/metrics` page."""
