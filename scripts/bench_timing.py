"""Clocks, peak memory, the machine's ceilings, and how many repeats fit into a budget."""

import platform
import re
import subprocess
import time

import torch

FLUSH_BYTES = 2**30  # far beyond any L2; writing it also hides the launch of a short run behind work
RESULTS = ("scores", "values", "indices", "dq", "dk", "dw")


class CudaClock:
    """Times with CUDA events; the L2 cache holds nothing of the run before."""

    def __init__(self, device):
        self.device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def start(self, run):
        """Launch one timed run; `read` gives its time once the device has finished."""
        self._flush.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        return first, last

    def wait(self):
        """Raises what the launched work raised."""
        torch.cuda.synchronize(self.device)

    def read(self, mark):
        """ms of a finished run."""
        return mark[0].elapsed_time(mark[1])

    def peak(self, run):
        """(result, bytes beyond inputs and results) of one run."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = run()
        self.wait()
        held = sum(result[name].numel() * result[name].element_size() for name in RESULTS if name in result)
        return result, max(0, torch.cuda.max_memory_allocated(self.device) - before - held)

    def tidy(self):
        """Give cached memory back."""
        torch.cuda.empty_cache()

    def ceilings(self):
        """Best bf16 matrix product, TFLOP/s, and best copy, TB/s of bytes read plus written, on random data."""
        rates = []
        for m, n, k in ((8192, 8192, 8192), (16384, 8192, 4096)):
            a, b = (torch.randn(*size, device=self.device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
            rates += [2 * m * n * k / ms / 1e9 for ms in self._times(lambda a=a, b=b: a @ b)]
        source = torch.randn(2**30, device=self.device)
        target = torch.empty_like(source)
        copies = [2 * source.nbytes / ms / 1e9 for ms in self._times(lambda: target.copy_(source))]
        return {"matmul_tflops": max(rates), "copy_tbps": max(copies)}

    def _times(self, run, repeats=12):
        marks = [self.start(run) for _ in range(repeats)]
        self.wait()
        return [self.read(mark) for mark in marks[2:]]


class WallClock:
    """The same for the CPU, to try the script out: wall time, no memory, ceilings of a small product and copy."""

    device = "cpu"

    def start(self, run):
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3

    def wait(self):
        """Nothing runs on its own."""

    def read(self, mark):
        return mark

    def peak(self, run):
        return run(), None

    def tidy(self):
        """Nothing is cached."""

    def ceilings(self):
        a = torch.randn(512, 512)
        product, copy = (min(self.start(run) for _ in range(5)) for run in (lambda: a @ a, lambda: a.clone()))
        return {"matmul_tflops": 2 * 512**3 / product / 1e9, "copy_tbps": 2 * a.nbytes / copy / 1e9}


def repeats_within(seconds, costs, most, least=5):
    """Repeats per arm: equal shares of the seconds, at most `most`, at least `least`. costs: {arm: ms a run}."""
    share = 1e3 * seconds / max(1, len(costs))
    return {name: max(least, min(most, int(share / cost))) for name, cost in costs.items()}


def interleaved(repeats):
    """Names in the order of one series: arm after arm, every arm's runs spread over the whole series."""
    rounds = max(repeats.values(), default=0)
    for i in range(rounds):
        yield from (name for name, n in repeats.items() if (i + 1) * n // rounds > i * n // rounds)


def machine(device):
    """What the numbers depend on, in words."""
    found = {"python": platform.python_version(), "system": platform.system(), "cuda": torch.version.cuda}
    if torch.device(device).type != "cuda":
        return found | {"device": f"CPU {platform.machine()}", "driver": None}
    properties = torch.cuda.get_device_properties(device)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    found |= {"device": properties.name, "driver": driver, "memory_gib": round(properties.total_memory / 2**30)}
    return found | {"multiprocessors": properties.multi_processor_count}


def revision(folder):
    """Git revision of the sources, or None."""
    try:
        git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def slug(text):
    """The text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
