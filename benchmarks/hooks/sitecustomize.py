"""Notes the CPU time in which this process collects garbage, for a server that is measured (`Serving.collected`).

Imported by any Python that has this folder on PYTHONPATH, so no server needs to know of it. The seconds so far are a
double in the file that BENCH_COLLECTED names.
"""

import gc
import mmap
import os
import struct
import time

SIZE = 8


def note(file: str) -> None:
    """Keep the seconds up to date in a file."""
    with open(file, "r+b") as opened:
        opened.truncate(SIZE)
        seconds = mmap.mmap(opened.fileno(), SIZE)
    spent = began = 0.0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal spent, began
        if phase == "start":
            began = time.thread_time()
        else:
            spent += time.thread_time() - began
            struct.pack_into("d", seconds, 0, spent)

    gc.callbacks.append(collecting)


if "BENCH_COLLECTED" in os.environ:
    note(os.environ["BENCH_COLLECTED"])
