"""Runs a function on several gloo ranks, each a process, and hands back what they return."""

import datetime
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def _rank(rank, size, context_parallel, data_parallel, folder, function, arguments):
    torch.set_num_threads(1)
    folder = Path(folder)
    try:
        from megatron.core import parallel_state

        from nemo_v4_indexer.training.cpu_host import megatron_on

        store = dist.FileStore(str(folder / "store"), size)
        wait = datetime.timedelta(seconds=60)  # a collective that one rank misses fails instead of hanging
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=size // context_parallel // data_parallel,
            context_parallel_size=context_parallel,
        )
        with megatron_on(torch.device("cpu")):
            torch.save(function(*arguments), folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        sys.exit(1)


class Ranks:
    """`function(*arguments)` under way on `size` ranks that divide one model; both must be picklable.

    folder: an empty one, for the ranks' rendezvous and results.
    context_parallel, data_parallel: ranks among them that divide the sequence, the batch; the rest are tensor parallel.
    """

    def __init__(self, size, folder, function, *arguments, context_parallel=1, data_parallel=1):
        self.size, self.folder = size, Path(folder)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        # Ranks are forked from a server that has imported what takes seconds to import, and has run nothing.
        context.set_forkserver_preload(["nemo_v4_indexer.integrations.megatron"])
        self.processes = [
            context.Process(
                target=_rank,
                args=(rank, size, context_parallel, data_parallel, str(folder), function, arguments),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def results(self, timeout=240):
        """What the ranks returned, in rank order.

        Raises:
            RuntimeError: a rank failed (its traceback), or the ranks were not done within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
            stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
        errors = [f"rank {path.stem}: {path.read_text()}" for path in sorted(self.folder.glob("*.error"))]
        if errors or stuck:
            raise RuntimeError("\n".join(errors) or f"ranks {stuck} were not done after {timeout} s")
        return [torch.load(self.folder / f"{rank}.pt", weights_only=False) for rank in range(self.size)]
