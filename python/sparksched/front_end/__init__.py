"""What runs in the process of vLLM's Python API server, on the way of outputs to their streams."""
