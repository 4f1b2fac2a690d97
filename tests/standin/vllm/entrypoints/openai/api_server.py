import asyncio
import os
import signal
import socket
import sys

from standin import faults, frontend
from uvicorn.server import Server
from vllm.v1.engine.async_llm import AsyncLLM


async def run_server(config, port):
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", port))
    if (code := faults.start_code()) is not None:
        print(f"the stand-in fails at its start, with status {code}", file=sys.stderr)
        sys.exit(code)
    llm = AsyncLLM(config, None)
    faults.install("leader")
    served = Frontend(llm)
    served.server = server = Server(served.handle)
    loop.add_signal_handler(signal.SIGTERM, server.should_exit.set)
    loop.add_signal_handler(signal.SIGINT, server.should_exit.set)
    faults.own_handlers()
    dead = asyncio.create_task(_leave_when_dead(llm, server))
    await server.serve(sockets=[listener])
    dead.cancel()
    llm.shutdown(timeout=0)


async def _leave_when_dead(llm, server):
    """vLLM's server ends by itself, with status 0, when its engine core has died."""
    await llm.engine_core.dead.wait()
    server.should_exit.set()


class Frontend(frontend.Frontend):
    def __init__(self, llm):
        self.generate, self.core = llm.generate, llm.engine_core

    async def call(self, path, query):
        if path == "/health":
            return 503 if self.core.dead.is_set() else 200, {}
        if path in ("/pause", "/resume"):
            return 200, {"was": await self.core.call_utility_async("pause", path == "/pause")}
        if path == "/counts":
            return 200, await self.core.call_utility_async("get_counts")
        if path == "/environment":
            name = query["name"][0]
            return 200, {"leader": os.environ.get(name), **await self.core.call_utility_async("environment", name)}
        return 404, {}
