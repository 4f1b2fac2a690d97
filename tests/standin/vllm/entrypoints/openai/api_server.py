"""HTTP by hand: one request a connection."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from urllib.parse import parse_qs, urlsplit

from uvicorn.server import Server
from vllm import standin
from vllm.v1.engine.async_llm import AsyncLLM


async def run_server(config, port):
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", port))
    if (code := standin.start_code()) is not None:
        print(f"the stand-in fails at its start, with status {code}", file=sys.stderr)
        sys.exit(code)
    llm = AsyncLLM(config, None)
    standin.install("leader")
    frontend = Frontend(llm)
    frontend.server = server = Server(frontend.handle)
    loop.add_signal_handler(signal.SIGTERM, server.should_exit.set)
    loop.add_signal_handler(signal.SIGINT, server.should_exit.set)
    standin.own_handlers()
    dead = asyncio.create_task(_leave_when_dead(llm, server))
    await server.serve(sockets=[listener])
    dead.cancel()
    llm.shutdown(timeout=0)


async def _leave_when_dead(llm, server):
    """vLLM's server ends by itself, with status 0, when its engine core has died."""
    await llm.engine_core.dead.wait()
    server.should_exit.set()


class Frontend:
    def __init__(self, llm):
        self.llm, self.server = llm, None

    async def handle(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            answer = asyncio.create_task(self._route(*head[0].split()[:2], body, writer))
            gone = asyncio.create_task(reader.read(1))
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _route(self, method, target, body, writer):
        where = urlsplit(target)
        try:
            if where.path == "/v1/completions":
                return await self._complete(json.loads(body), writer)
            self._answer(writer, *await self._look_up(where.path, parse_qs(where.query)))
        except Exception as error:
            self._answer(writer, 500, {"error": f"{type(error).__name__}: {error}"})
        await writer.drain()

    async def _look_up(self, path, query):
        core = self.llm.engine_core
        if path == "/health":
            return 503 if core.dead.is_set() else 200, {}
        if path == "/close_listener":
            for server in self.server.servers:
                server.close()
            return 200, {}
        if path in ("/pause", "/resume"):
            return 200, {"was": await core.call_utility_async("pause", path == "/pause")}
        if path == "/counts":
            return 200, await core.call_utility_async("get_counts")
        if path == "/environment":
            name = query["name"][0]
            return 200, {"leader": os.environ.get(name), **await core.call_utility_async("environment", name)}
        return 404, {}

    async def _complete(self, wanted, writer):
        tokens, number = [], 0
        stream = bool(wanted.get("stream"))
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async with contextlib.aclosing(self.llm.generate(wanted["prompt"], wanted.get("max_tokens", 4))) as answers:
            async for token, number in answers:
                tokens.append(token)
                if stream:
                    writer.write(f"data: {json.dumps({'token': token})}\n\n".encode())
                    await writer.drain()
        result = {"tokens": tokens, "number": number}
        if stream:
            writer.write(f"data: {json.dumps(result)}\n\ndata: [DONE]\n\n".encode())
        else:
            self._answer(writer, 200, result)
        await writer.drain()

    @staticmethod
    def _answer(writer, status, content):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
