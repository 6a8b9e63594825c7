"""`SPARKSCHED_VERIFY`: vLLM's own scheduler runs beside ours, and each step of both is compared.

`scheduler` is what the engine gets then, `shadow` is vLLM's side of it, and `report` says what was
found.
"""
