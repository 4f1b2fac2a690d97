import argparse
import os

COUNTS = ("nnodes", "dp_size", "pp_size", "attn_cp_size", "dcp_size", "tokenizer_worker_num")


def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="sglang")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", "--tp", type=int, default=1)
    for name in COUNTS:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=1)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--device", default=os.environ.get("STANDIN_DEVICE", "cpu"))
    parser.add_argument("--startup-seconds", type=float, default=0.0)
    parser.add_argument("--token-seconds", type=float, default=0.01)
    return parser.parse_args(argv)
