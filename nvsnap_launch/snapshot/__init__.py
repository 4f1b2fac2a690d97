"""The reference snapshot driver: prepare, CRIU, and back.

``create`` freezes a prepared engine tree into a folder and ends it; ``restore`` becomes the supervisor of the tree
that CRIU brings back; ``inspect`` says what a folder holds and whether it can be brought back here.
"""

# For its effect: nvsnap_hooks is importable, whatever a module of this package imports first.
from nvsnap_launch import hooktree as hooktree
