"""What tests and benchmarks share: servers, tiny models, engines without a GPU, other vLLMs."""
