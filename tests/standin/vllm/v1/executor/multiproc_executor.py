"""The workers as processes, and the call to all of them at one step."""

import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import threading
import time

import vllm.distributed.device_communicators.shm_broadcast  # noqa: F401
import vllm.envs  # noqa: F401
from standin import faults
from standin.spawning import OutOfReach
from vllm.v1.worker.worker_base import WorkerWrapperBase


class MultiprocExecutor:
    def __init__(self, vllm_config, failure_callback):
        self._stopping = False
        self.workers, self._pipes = [], []
        size = vllm_config.parallel_config.tensor_parallel_size
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                with OutOfReach(rank):
                    self._start(rank, size, f"file://{folder}/rendezvous")
            for pipe in self._pipes:
                pipe.recv()
        threading.Thread(target=self._watch, args=(failure_callback,), daemon=True).start()

    def _start(self, rank, size, init_method):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        kwargs = {"rank": rank, "size": size, "distributed_init_method": init_method, "pipe": theirs}
        worker = context.Process(target=WorkerProc.worker_main, kwargs=kwargs, name=f"VllmWorker-{rank}")
        worker.start()
        theirs.close()
        self.workers.append(worker)
        self._pipes.append(ours)

    def _watch(self, failure_callback):
        multiprocessing.connection.wait([worker.sentinel for worker in self.workers])
        if not self._stopping:
            failure_callback()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        """Stops reading at the first failure, as vLLM's does. Raises TimeoutError, or what a worker said."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pipe in self._pipes:
            pipe.send((method, args, kwargs or {}))
        results = []
        for pipe in self._pipes:
            if not pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"RPC call to {method} timed out.")
            try:
                good, result = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError("a worker died") from None
            if not good:
                raise RuntimeError(result)
            results.append(result)
        return results

    def shutdown(self):
        self._stopping = True
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
                worker.join()


class WorkerProc:
    @staticmethod
    def worker_main(*args, **kwargs):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave)
        pipe = kwargs["pipe"]
        wrapper = WorkerWrapperBase(rpc_rank=kwargs["rank"])
        wrapper.init_worker([kwargs])
        faults.install(kwargs["rank"])
        faults.install_leak(kwargs["rank"])
        pipe.send("ready")
        while True:
            try:
                method, call_args, call_kwargs = pipe.recv()
            except (EOFError, ConnectionResetError):
                while True:  # a worker that outlives its parent (public case 12)
                    signal.pause()
            try:
                answer = True, getattr(wrapper, method)(*call_args, **call_kwargs)
            except Exception as error:
                answer = False, f"{type(error).__name__}: {error}"
            pipe.send(answer)


def _leave(*_):
    raise SystemExit
