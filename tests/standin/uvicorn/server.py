import asyncio


class Server:
    """Serves a coroutine ``handler(reader, writer)``."""

    def __init__(self, handler):
        self.handler, self.started, self.servers = handler, False, []
        self.should_exit = asyncio.Event()

    async def startup(self, sockets=None):
        self.servers = [await asyncio.start_server(self.handler, sock=one) for one in sockets]
        self.started = True

    async def serve(self, sockets=None):
        await self.startup(sockets=sockets)
        await self.should_exit.wait()
        for server in self.servers:
            server.close()
