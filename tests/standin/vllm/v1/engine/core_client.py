"""The API server's end of the pipe to the engine core."""

import asyncio
import itertools
import multiprocessing
import threading

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc


class EngineDeadError(Exception):
    pass


class AsyncMPClient:
    def __init__(self, vllm_config):
        self.loop = asyncio.get_running_loop()
        self.dead = asyncio.Event()
        self.streams, self._calls, self._ids = {}, {}, itertools.count()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        kwargs = {"vllm_config": vllm_config, "connection": theirs}
        self.process = context.Process(target=EngineCoreProc.run_engine_core, kwargs=kwargs, name="EngineCore")
        self.process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError("Engine core initialization failed.") from None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while True:
                self.loop.call_soon_threadsafe(self._take, *self._pipe.recv())
        except (EOFError, OSError):
            self.loop.call_soon_threadsafe(self._die)
        except RuntimeError:
            pass  # the loop is closed

    def _take(self, kind, content):
        if kind == "token" and content[0] in self.streams:
            self.streams[content[0]].put_nowait(content[1:])
        elif kind == "utility":
            call_id, good, result = content
            future = self._calls.pop(call_id)
            if not future.done():
                future.set_result(result) if good else future.set_exception(Exception(result))

    def _die(self):
        self.dead.set()
        for future in self._calls.values():
            future.cancelled() or future.done() or future.set_exception(EngineDeadError("EngineCore died"))
        for stream in self.streams.values():
            stream.put_nowait((None, 0, True))

    def _send(self, kind, content):
        if self.dead.is_set():
            raise EngineDeadError("EngineCore died")
        self._pipe.send((kind, content))

    async def call_utility_async(self, method, *args):
        call_id = next(self._ids)
        self._calls[call_id] = self.loop.create_future()
        self._send(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        return await self._calls[call_id]

    async def add_request_async(self, request):
        self._send(EngineCoreRequestType.ADD, (request, 0))

    async def abort_requests_async(self, request_ids):
        if not self.dead.is_set():
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def shutdown(self):
        self.process.terminate()
        self.process.join(10)
