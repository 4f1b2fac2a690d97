import asyncio
import os
import socket
import sys
import time
import uuid

import sglang.srt.arg_groups.overrides  # noqa: F401
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.entrypoints.engine import launch_subprocesses
from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_manager import ServerStatus
from standin import faults, frontend
from uvicorn.server import Server

HEALTH_SECONDS = 5.0


def launch_server(server_args):
    if (code := faults.start_code()) is not None:
        print(f"the stand-in fails at its start, with status {code}", file=sys.stderr)
        sys.exit(code)
    listener = socket.create_server(("127.0.0.1", server_args.port))
    manager = launch_subprocesses(server_args)
    faults.install("leader", "sglang")
    asyncio.run(_serve(manager, listener))


async def _serve(manager, listener):
    served = Frontend(manager)
    served.server = manager.server = server = Server(served.handle, waits=True)
    manager.start()
    faults.own_handlers()
    warm = asyncio.create_task(_warm_up(manager))
    await server.serve(sockets=[listener])
    warm.cancel()


async def _warm_up(manager):
    async for _ in manager.generate("warm", 1, f"{HEALTH_CHECK_RID_PREFIX}_warm"):
        pass
    manager.server_status = ServerStatus.Up


class Frontend(frontend.Frontend):
    def __init__(self, manager):
        self.generate, self.manager = manager.generate, manager

    async def call(self, path, query):
        if path == "/health":
            return await self._health(), {}
        if path == "/pause":
            return 200, await self.manager.ask(io_struct.PauseGenerationReqInput("in_place"))
        if path == "/resume":
            return 200, await self.manager.ask(io_struct.ContinueGenerationReqInput())
        if path == "/counts":
            return 200, (await self.manager.ask(io_struct.GetInternalStateReq()))["counts"]
        if path == "/environment":
            name = query["name"][0]
            found = await self.manager.ask(io_struct.GetInternalStateReq(name))
            return 200, {"leader": os.environ.get(name), "core": None, "ranks": found["ranks"]}
        if path == "/crash":
            self.manager._dispatch_to_scheduler(io_struct.RpcReqInput("crash"))
            return 200, {}
        return 404, {}

    async def _health(self):
        """It has the model make a token, unless it is told not to."""
        manager = self.manager
        if manager.gracefully_exit or manager.server_status is ServerStatus.Starting:
            return 503
        if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1").lower() in ("0", "false"):
            return 200
        began, rid = time.monotonic(), f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}"
        probe = asyncio.create_task(self._probe(rid))
        while time.monotonic() < began + HEALTH_SECONDS and manager.last_receive_tstamp <= began:
            await asyncio.sleep(0.01)
        probe.cancel()
        answered = manager.last_receive_tstamp > began
        manager.server_status = ServerStatus.Up if answered else ServerStatus.UnHealthy
        return 200 if answered else 503

    async def _probe(self, rid):
        async for _ in self.manager.generate("health", 1, rid):
            pass
