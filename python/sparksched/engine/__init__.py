"""What runs in the process of vLLM's EngineCore, around the native scheduler."""
