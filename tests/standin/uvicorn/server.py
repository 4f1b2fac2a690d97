import asyncio


class Server:
    """Serves a coroutine ``handler(reader, writer)``. ``waits``: at its end for its clients, unless it is told not to."""

    def __init__(self, handler, waits=False):
        self.handler, self.started, self.servers = handler, False, []
        self.should_exit, self.force_exit = asyncio.Event(), not waits
        self.clients = 0

    async def startup(self, sockets=None):
        self.servers = [await asyncio.start_server(self.handle, sock=one) for one in sockets]
        self.started = True

    async def handle(self, reader, writer):
        self.clients += 1
        try:
            await self.handler(reader, writer)
        finally:
            self.clients -= 1

    async def serve(self, sockets=None):
        await self.startup(sockets=sockets)
        await self.should_exit.wait()
        for server in self.servers:
            server.close()
        while self.clients and not self.force_exit:
            await asyncio.sleep(0.02)
