"""What a rank of an engine does, whichever engine: the actions of the leader's, and the resources that engines have in common.

Who has which, and in what order they go: vllm/worker.py, sglang/rank.py.
"""
