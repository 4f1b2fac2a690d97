"""What ties this process to other GPUs, as the CUDA driver itself sees it, whoever holds it and whatever we believe.

Measured on two H200s, driver 580.159: memory of a peer's shows while NCCL, torch's symmetric memory or an IPC handle has it mapped
and no longer after each one's own teardown. A walk takes 12 to 60 ms then (with NCCL alive, and its large reservations, 0.4 s).
An empty context on another GPU that is not its primary one is not seen.
"""

from __future__ import annotations

from collections import defaultdict

from .driver import PAGE, Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


def residue(device: int) -> list[str]:
    """Contexts and memory on GPUs other than ``device``, each in words. Raises RuntimeError when the driver won't say."""
    driver = Driver.loaded()
    if driver is None:
        return []
    others = (other for other in range(driver.devices()) if other != device)
    left = [f"a CUDA context on GPU {other}" for other in others if driver.has_context(other)]
    return left + _mapped(driver, device)


def _mapped(driver: Driver, device: int) -> list[str]:
    found = [memory for start, end in reserved() for memory in driver.memory(start, end)]
    # Where CUDA IPC does not work, nothing can be exported: that does not mean that all of it was opened.
    works = any(memory.exportable for memory in found)
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for memory in found:
        if memory.device != device:
            sizes[f"memory of GPU {memory.device} is mapped"].append(memory.size)
        elif works and memory.opened:
            sizes["memory of another process is open through CUDA IPC"].append(memory.size)
    return [f"{what}: {len(each)} allocations, {sum(each) / MIB:.1f} MiB" for what, each in sorted(sizes.items())]


def reserved() -> Iterator[tuple[int, int]]:
    """Ranges of addresses that could hold a GPU's memory: the driver reserves them without any access for the processor."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        lines = maps.readlines()
    for line in lines:
        addresses, access, *rest = line.split()
        start, end = (int(text, 16) for text in addresses.split("-"))
        if access == "---p" and len(rest) == 3 and end - start >= PAGE:  # offset, device, inode, and no path
            yield start, end
