"""What runs in the process of vLLM's EngineCore.

`scheduler` is the native scheduler. Around it stand what its core calls back, and what the engine's
hasher and errors need (`hooks`). `core_proc` changes vLLM's engine process: it offers rings, and
`clients` handles what happens to those who take them. `input` and `output` are the two directions,
`sockets` sends to clients that stay on ZMQ.

Unlike in vLLM, no message waits for another thread to get the interpreter's lock if that can be
helped. The thread that made outputs encodes and sends them. An engine's loop that has nothing to do
receives by itself. While the loop is busy the input thread receives: it prepares requests beside a
step, and lets aborts, and commands for a loop that has failed, get through.
"""
