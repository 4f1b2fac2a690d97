import sys


def main():
    assert sys.argv[1] == "serve"
    from sglang.launch_server import run_server

    run_server(sys.argv[2:])
