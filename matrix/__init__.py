"""What each version of an engine reaches. Importing it makes ``nvsnap_hooks`` importable."""

from nvsnap_launch import hooktree as hooktree
