"""One scheduler a rank: its main loop, and the model in the same process."""

import contextlib
import os
import signal
import time
import traceback
from types import SimpleNamespace

import torch.distributed as dist
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.distributed import parallel_state
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from standin import faults, model

IDLE_SECONDS = 0.05  # between two turns with nothing to do; the real one turns without rest


class Batch:
    def __init__(self, reqs):
        self.reqs = reqs

    def is_empty(self):
        return not self.reqs


class Scheduler:
    def __init__(self, server_args, port_args, tp_rank):
        self.server_args, self.port_args, self.tp_rank = server_args, port_args, tp_rank
        parallel_state.initialize(tp_rank, server_args.tp_size, port_args.init_method)
        self.tp_group = parallel_state._TP
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=None, dtype="bfloat16"))
        first = tp_rank == 0
        self.request_receiver = SchedulerRequestReceiver(
            pipe=port_args.scheduler_input if first else None, tp_cpu_group=self.tp_group.cpu_group
        )
        self.to_detokenizer = port_args.to_detokenizer if first else None
        self.to_tokenizer = port_args.control_output if first else None
        self.waiting_queue, self.running_batch, self.last_batch = [], Batch([]), None
        self.cur_batch_for_debug = None
        self.counts = {"started": 0, "ran": 0, "finished": 0, "aborted": 0, "probes": 0}
        self._engine_paused = self.gracefully_exit = False
        self._handlers = {
            io_struct.TokenizedGenerateReqInput: self.handle_generate_request,
            io_struct.AbortReq: self.abort_request,
            io_struct.RpcReqInput: self.handle_rpc_request,
            io_struct.PauseGenerationReqInput: self.pause_generation,
            io_struct.ContinueGenerationReqInput: self.continue_generation,
            io_struct.GetInternalStateReq: self.get_internal_state,
            io_struct.ShutdownReq: self.handle_shutdown,
        }

    def event_loop_normal(self):
        while not self.gracefully_exit:
            self.process_input_requests(self.request_receiver.recv_requests())
            if self._engine_paused:
                self.on_idle()
                continue
            batch = self.cur_batch_for_debug = self.get_next_batch_to_run()
            if batch is None:
                self.on_idle()
            else:
                self.process_batch_result(batch, self.run_batch(batch))
            self.last_batch = batch

    def on_idle(self):
        """The first rank waits for a request, the others for the first."""
        if self.request_receiver.pipe is not None:
            self.request_receiver.pipe.poll(IDLE_SECONDS)

    def process_input_requests(self, recv_reqs):
        for request in recv_reqs:
            self._handlers[type(request)](request)

    # -- requests

    def handle_generate_request(self, recv_req):
        probe = recv_req.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        if probe and not self.is_fully_idle(for_health_check=True):
            return
        self.counts["probes" if probe else "started"] += 1
        recv_req.number = self.counts["started"]
        self.waiting_queue.append(recv_req)

    def abort_request(self, recv_req):
        for queue in (self.waiting_queue, self.running_batch.reqs):
            for one in [one for one in queue if recv_req.abort_all or one.rid.startswith(recv_req.rid)]:
                queue.remove(one)
                self.counts["aborted"] += 1
                self._tell(one.rid, None, 0, True)

    def handle_rpc_request(self, recv_req):
        if recv_req.method == "crash":
            raise RuntimeError("a scheduler that crashes")
        with contextlib.suppress(Exception):  # its words go to nobody who reads them
            getattr(self, recv_req.method)(**(recv_req.parameters or {}))
        dist.barrier(group=self.tp_group.cpu_group)

    def pause_generation(self, recv_req):
        self._engine_paused = True
        if recv_req.mode == "retract":
            self.waiting_queue = self.running_batch.reqs + self.waiting_queue
            self.running_batch = Batch([])
        self._answer({})

    def continue_generation(self, recv_req):
        self._engine_paused = False
        self._answer({})

    def flush_cache(self, empty_cache=True):
        return self.is_fully_idle()

    def get_internal_state(self, recv_req):
        seen = [None] * self.tp_group.world_size
        dist.all_gather_object(seen, os.environ.get(recv_req.name), group=self.tp_group.cpu_group)
        self._answer({"counts": dict(self.counts), "ranks": seen})

    def handle_shutdown(self, recv_req):
        self.gracefully_exit = True

    def _answer(self, content):
        if self.to_tokenizer is not None:
            self.to_tokenizer.send(content)

    def _tell(self, rid, token, number, finished):
        if self.to_detokenizer is not None:
            self.to_detokenizer.send((rid, token, number, finished))

    # -- batches

    def is_fully_idle(self, for_health_check=False):
        last = self.last_batch is None or self.last_batch.is_empty()
        return self.running_batch.is_empty() and last and not self.waiting_queue

    def get_next_batch_to_run(self):
        self.running_batch.reqs.extend(self.waiting_queue)
        self.waiting_queue.clear()
        return None if self.running_batch.is_empty() else self.running_batch

    def run_batch(self, batch):
        tokens = model.step(self.tp_rank, self.tp_group, [(one.prompt, one.done) for one in batch.reqs])
        time.sleep(self.server_args.token_seconds)
        return tokens

    def process_batch_result(self, batch, result):
        for one, token in zip(list(batch.reqs), result):
            self.counts["ran"] += one.done == 0
            one.done += 1
            finished = one.done >= one.max_new_tokens
            if finished:
                batch.reqs.remove(one)
                self.counts["finished"] += not one.rid.startswith(HEALTH_CHECK_RID_PREFIX)
            self._tell(one.rid, token, one.number, finished)


def run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer):
    """An exception ends it with 0, and its parent is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    try:
        scheduler = Scheduler(server_args, port_args, tp_rank)
        time.sleep(server_args.startup_seconds)
        faults.install(tp_rank, "sglang")
        faults.install_leak(tp_rank)
        pipe_writer.send("ready")
        scheduler.event_loop_normal()
    except Exception:
        traceback.print_exc()
        os.kill(parent, signal.SIGQUIT)
