"""What belongs to torch itself, whichever engine uses it. One module a resource: release, reacquire, residue."""
