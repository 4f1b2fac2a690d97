import asyncio
import itertools

import vllm.envs  # noqa: F401
from vllm.v1.engine.core_client import AsyncMPClient, EngineDeadError
from vllm.v1.request import Request


class AsyncLLM:
    def __init__(self, vllm_config, executor_class, client_count=1, client_index=0):
        self.vllm_config = vllm_config
        self.engine_core = AsyncMPClient(vllm_config)
        self._ids = itertools.count()

    async def generate(self, prompt, max_tokens):
        """Yields (token, number of the request). A caller that goes away aborts it."""
        request_id = f"request-{next(self._ids)}"
        tokens = self.engine_core.streams[request_id] = asyncio.Queue()
        finished = False
        try:
            await self.engine_core.add_request_async(Request(request_id, prompt, max_tokens))
            while not finished:
                token, number, finished = await tokens.get()
                if token is None:
                    raise EngineDeadError("aborted")
                yield token, number
        finally:
            del self.engine_core.streams[request_id]
            if not finished:
                await self.engine_core.abort_requests_async([request_id])

    def shutdown(self, timeout=None):
        self.engine_core.shutdown()
