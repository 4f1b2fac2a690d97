"""HTTP by hand: one request a connection."""

import asyncio
import contextlib
import json
from urllib.parse import parse_qs, urlsplit


class Frontend:
    server = None

    async def generate(self, prompt, max_tokens):
        """Yields (token, number of the request)."""
        raise NotImplementedError

    async def call(self, path, query):
        """What only this engine has: (status, content)."""
        raise NotImplementedError

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
        if path == "/close_listener":
            for server in self.server.servers:
                server.close()
            return 200, {}
        return await self.call(path, query)

    async def _complete(self, wanted, writer):
        tokens, number = [], 0
        stream = bool(wanted.get("stream"))
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async with contextlib.aclosing(self.generate(wanted["prompt"], wanted.get("max_tokens", 4))) as answers:
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
