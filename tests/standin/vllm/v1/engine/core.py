"""The engine core: one process, one loop; messages come and go through a pipe to the API server."""

import os
import queue
import signal
import threading
import time
import traceback

from standin import faults
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import RequestStatus


class EngineCoreProc:
    def __init__(self, vllm_config, connection):
        self.vllm_config = vllm_config
        self.input_queue, self.output_queue = queue.SimpleQueue(), queue.SimpleQueue()
        self.scheduler = Scheduler()
        self.counts = {"started": 0, "ran": 0, "finished": 0, "aborted": 0}
        self._running = True
        signal.signal(signal.SIGTERM, self._stop)
        failed = (EngineCoreRequestType.EXECUTOR_FAILED, b"")
        self.model_executor = MultiprocExecutor(vllm_config, lambda: self.input_queue.put(failed))
        faults.install("core")
        time.sleep(vllm_config.startup_seconds)
        self._connection = connection
        threading.Thread(target=self._read, daemon=True).start()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self.output_queue.put(("ready", None))

    @staticmethod
    def run_engine_core(*args, dp_rank=0, local_dp_rank=0, **kwargs):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        core = None
        try:
            core = EngineCoreProc(*args, **kwargs)
            core.run_busy_loop()
        except SystemExit:
            raise
        except Exception:
            traceback.print_exc()
            raise
        finally:
            if core is not None:
                core.shutdown()

    def _stop(self, *_):
        self._running = False
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def _read(self):
        """The other end's death is not noticed, as in vLLM before it had a parent watch."""
        try:
            while True:
                self.input_queue.put(self._connection.recv())
        except (EOFError, OSError):
            pass

    def _write(self):
        while (message := self.output_queue.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return

    def is_running(self):
        return self._running

    def has_work(self):
        return bool(self.scheduler.running())

    def run_busy_loop(self):
        while self.is_running():
            self._process_input_queue()
            self._process_engine_step()
        self._send_abort_outputs(self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
        raise SystemExit

    def _process_input_queue(self):
        while not self.has_work() and self.is_running():
            self._handle_client_request(*self.input_queue.get())
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get())

    def _handle_client_request(self, request_type, request):
        if request_type is EngineCoreRequestType.ADD:
            self.counts["started"] += 1
            request[0].number = self.counts["started"]
            self.scheduler.requests[request[0].request_id] = request[0]
        elif request_type is EngineCoreRequestType.ABORT:
            self._send_abort_outputs(self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED))
        elif request_type is EngineCoreRequestType.UTILITY:
            self._utility(*request)
        elif request_type is EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")

    def _utility(self, client, call_id, method, args):
        try:
            self.output_queue.put(("utility", (call_id, True, getattr(self, method)(*args))))
        except Exception as error:
            self.output_queue.put(("utility", (call_id, False, f"{type(error).__name__}: {error}")))

    def _process_engine_step(self):
        running = self.scheduler.running()
        if not running:
            return
        batch = [(request.prompt, request.done) for request in running]
        rows = self.model_executor.collective_rpc("execute_model", args=(batch,))
        assert all(row == rows[0] for row in rows), rows
        time.sleep(self.vllm_config.token_seconds)
        for request, token in zip(running, rows[0]):
            self.counts["ran"] += request.done == 0
            request.done += 1
            finished = request.done >= request.max_tokens
            self.output_queue.put(("token", (request.request_id, token, request.number, finished)))
            if finished:
                del self.scheduler.requests[request.request_id]
                self.counts["finished"] += 1

    def _send_abort_outputs(self, aborted_reqs):
        self.counts["aborted"] += len(aborted_reqs)
        for request_id in aborted_reqs:
            self.output_queue.put(("token", (request_id, None, 0, True)))

    def pause(self, paused):
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)

    def get_counts(self):
        return dict(self.counts)

    def environment(self, name):
        return {"core": os.environ.get(name), "ranks": self.model_executor.collective_rpc("environment", args=(name,))}

    def shutdown(self):
        self.model_executor.shutdown()
        self.output_queue.put(None)
        self._writer.join(2)
