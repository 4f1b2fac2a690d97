import argparse
import asyncio

from vllm.config import ParallelConfig, VllmConfig


def main():
    parser = argparse.ArgumentParser(prog="vllm")
    serve = parser.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    serve.add_argument("--data-parallel-size", type=int, default=1)
    serve.add_argument("--startup-seconds", type=float, default=0.0)
    serve.add_argument("--token-seconds", type=float, default=0.01)
    given = parser.parse_args()
    parallel = ParallelConfig(given.tensor_parallel_size, given.data_parallel_size)
    config = VllmConfig(parallel, given.startup_seconds, given.token_seconds)
    from vllm.entrypoints.openai.api_server import run_server

    asyncio.run(run_server(config, given.port))


if __name__ == "__main__":
    main()
