"""The engine's side: rings beside the sockets of `EngineCoreProc`.

Unlike in vLLM, no message waits for another thread to get the interpreter's lock if that can be
helped: outputs are encoded and sent by the thread that made them, and an engine's loop that has
nothing to do receives by itself. While the loop is busy the input thread receives: requests are
prepared beside a step, and aborts, and commands for a loop that has failed, get through.

`install` changes vLLM's engine process and offers rings. `input` and `output` are the two
directions, `clients` is what the engine's loop does when clients come, go or don't read, and
`notices` is how it learns of that.
"""
