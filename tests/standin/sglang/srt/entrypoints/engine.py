"""How the processes are started."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils import kill_process_tree
from standin.spawning import OutOfReach


@dataclass
class PortArgs:
    """The ends that a process has of the pipes between all."""

    init_method: str = ""
    scheduler_input: Any = None  # the first rank's
    to_detokenizer: Any = None
    control_output: Any = None
    from_scheduler: Any = None  # the detokenizer's
    to_tokenizer: Any = None
    scheduler_output: Any = None  # the server's
    from_detokenizer: Any = None
    control_input: Any = None


def _set_envs_and_config(server_args):
    signal.signal(signal.SIGQUIT, lambda *_: kill_process_tree(os.getpid()))


def launch_subprocesses(server_args):
    """Returns the tokenizer manager, once every scheduler is ready."""
    _set_envs_and_config(server_args)
    context = multiprocessing.get_context("spawn")
    requests, tokens, texts, control = (context.Pipe() for _ in range(4))
    schedulers = []
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/rendezvous"
        first = PortArgs(init_method, requests[0], tokens[0], control[0])
        ready = []
        for rank in range(server_args.tp_size):
            ours, theirs = context.Pipe(duplex=False)
            args = (server_args, first if rank == 0 else PortArgs(init_method), rank, rank, 0, None, theirs)
            with OutOfReach(rank):
                schedulers.append(_start(context, run_scheduler_process, args, f"scheduler-{rank}"))
            theirs.close()
            ready.append(ours)
        ends = PortArgs(from_scheduler=tokens[1], to_tokenizer=texts[0])
        detokenizer = _start(context, run_detokenizer_process, (server_args, ends), "detokenizer")
        for pipe in ready:
            pipe.recv()
    for end in (requests[0], tokens[0], control[0], tokens[1], texts[0]):
        end.close()
    ours = PortArgs(scheduler_output=requests[1], from_detokenizer=texts[1], control_input=control[1])
    manager = TokenizerManager(server_args, ours)
    manager.schedulers = schedulers
    children = [*schedulers, detokenizer]
    threading.Thread(target=_watch, args=(children, manager), daemon=True).start()
    return manager


def _start(context, target, args, name):
    process = context.Process(target=target, args=args, name=name)
    process.start()
    return process


def _watch(children, manager):
    """SGLang's watchdog of its children: one that died ends all."""
    multiprocessing.connection.wait([child.sentinel for child in children])
    if not manager.stopping:
        os.kill(os.getpid(), signal.SIGQUIT)
