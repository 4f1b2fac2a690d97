import argparse
import functools
import signal
from dataclasses import fields

from vllm.config import ParallelConfig, VllmConfig

COUNTS = ["api_server_count", *(field.name for field in fields(ParallelConfig) if field.type is int)]
COUNTS.remove("tensor_parallel_size")


def main():
    parser = argparse.ArgumentParser(prog="vllm")
    serve = parser.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    for name in COUNTS:
        serve.add_argument("--" + name.replace("_", "-"), type=int, default=1)
    serve.add_argument("--enable-expert-parallel", action="store_true")
    serve.add_argument("--headless", action="store_true")
    serve.add_argument("--startup-seconds", type=float, default=0.0)
    serve.add_argument("--token-seconds", type=float, default=0.01)
    given = parser.parse_args()
    shape = {field.name: getattr(given, field.name) for field in fields(ParallelConfig)}
    config = VllmConfig(ParallelConfig(**shape), given.startup_seconds, given.token_seconds)
    if given.headless:
        return signal.pause()
    import asyncio

    from vllm.entrypoints.openai import api_server

    api_server.AsyncLLM = functools.partial(api_server.AsyncLLM, client_count=given.api_server_count)
    asyncio.run(api_server.run_server(config, given.port))


if __name__ == "__main__":
    main()
