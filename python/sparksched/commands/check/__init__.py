"""`sparksched check`: what would happen if vLLM were started here, and what to do about it."""
