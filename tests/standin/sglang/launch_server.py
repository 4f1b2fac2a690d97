import sys

from sglang.srt.server_args import prepare_server_args


def run_server(argv):
    server_args = prepare_server_args(argv)
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(server_args)


if __name__ == "__main__":
    run_server(sys.argv[1:])
