"""Passes on what the first rank has computed."""

import signal


def run_detokenizer_process(server_args, port_args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            port_args.to_tokenizer.send(port_args.from_scheduler.recv())
    except (EOFError, OSError):
        pass  # the scheduler or the server is gone: somebody else's business
