"""What runs in the process of vLLM's EngineCore.

`scheduler` is the native scheduler. Its core calls the modules around it, and `hashing` serves the
engine's hasher and errors. `core_proc` changes vLLM's engine process: it offers rings. `clients`
handles what happens to the clients that take them. `input` receives and `output` sends. `sockets`
sends to clients that stay on ZMQ.

In vLLM a message waits until another thread gets the interpreter's lock. Here that is rare. The
thread that made outputs encodes and sends them. The engine's loop receives by itself while it is
idle. While the loop is busy the input thread receives: it prepares requests beside a step, and lets
two things through at once: aborts, and commands for a loop that has failed.
"""
