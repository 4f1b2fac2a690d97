"""In the server: requests go to the first rank, tokens come from the detokenizer."""

import asyncio
import contextlib
import enum
import itertools
import os
import signal
import threading
import time

from sglang.srt.managers import io_struct
from sglang.srt.utils import kill_process_tree


class ServerStatus(enum.Enum):
    Up = "Up"
    Starting = "Starting"
    UnHealthy = "UnHealthy"


class TokenizerManager:
    def __init__(self, server_args, port_args):
        self.server_args, self.port_args = server_args, port_args
        self.server_status, self.gracefully_exit = ServerStatus.Starting, False
        self.rid_to_state, self.last_receive_tstamp = {}, 0.0
        self.schedulers, self.stopping = [], False
        self._answers, self._ids, self._loop = [], itertools.count(), None

    def start(self):
        """In the event loop, as the real one does with its first request."""
        self._loop = asyncio.get_running_loop()
        self._watchdog = asyncio.create_task(self.sigterm_watchdog())
        for pipe, take in ((self.port_args.from_detokenizer, self._take), (self.port_args.control_input, self._answer)):
            threading.Thread(target=self._read, args=(pipe, take), daemon=True).start()
        handler = SignalHandler(self)
        self._loop.add_signal_handler(signal.SIGTERM, handler.sigterm_handler)
        self._loop.add_signal_handler(signal.SIGQUIT, handler.running_phase_sigquit_handler)

    def _read(self, pipe, take):
        try:
            while True:
                self._loop.call_soon_threadsafe(take, pipe.recv())
        except (EOFError, OSError, RuntimeError):
            pass

    def _take(self, message):
        self.last_receive_tstamp = time.monotonic()
        if message[0] in self.rid_to_state:
            self.rid_to_state[message[0]].put_nowait(message[1:])

    def _answer(self, content):
        self._answers.pop(0).set_result(content)

    def _dispatch_to_scheduler(self, obj):
        with contextlib.suppress(OSError):  # ZeroMQ does not mind whether there is anybody
            self.port_args.scheduler_output.send(obj)

    async def ask(self, request):
        answer = self._loop.create_future()
        self._answers.append(answer)
        self._dispatch_to_scheduler(request)
        return await asyncio.shield(answer)

    async def generate(self, prompt, max_new_tokens, rid=None):
        """Yields (token, number of the request). A caller that goes away aborts it."""
        rid = rid or f"request-{next(self._ids)}-"
        tokens = self.rid_to_state[rid] = asyncio.Queue()
        finished = False
        try:
            self._dispatch_to_scheduler(io_struct.TokenizedGenerateReqInput(rid, prompt, max_new_tokens))
            while not finished:
                token, number, finished = await tokens.get()
                if token is None:
                    raise RuntimeError("aborted")
                yield token, number
        finally:
            del self.rid_to_state[rid]
            if not finished:
                self._dispatch_to_scheduler(io_struct.AbortReq(rid))

    async def sigterm_watchdog(self):
        """STANDIN_SIGTERM=kill: as in 0.5.12, where it ends itself by SIGKILL, and asks no scheduler."""
        while not self.gracefully_exit:
            await asyncio.sleep(0.2)
        forced = os.environ.get("SGL_FORCE_SHUTDOWN", "0") != "0"
        while self.rid_to_state and not forced and self.server_status is not ServerStatus.UnHealthy:
            await asyncio.sleep(0.05)
        self.stopping = True
        if os.environ.get("STANDIN_SIGTERM") == "kill":
            kill_process_tree(os.getpid())
        self._dispatch_to_scheduler(io_struct.ShutdownReq())
        deadline = time.monotonic() + 5
        while any(one.is_alive() for one in self.schedulers) and time.monotonic() < deadline:
            time.sleep(0.02)
        kill_process_tree(os.getpid(), include_parent=False)
        self.server.should_exit.set()


class SignalHandler:
    def __init__(self, tokenizer_manager):
        self.tokenizer_manager = tokenizer_manager

    def sigterm_handler(self, signum=None, frame=None):
        self.tokenizer_manager.gracefully_exit = True

    def running_phase_sigquit_handler(self, signum=None, frame=None):
        kill_process_tree(os.getpid())
