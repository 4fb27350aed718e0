"""Build the kernels of a model before the first run, on a machine with nvcc; a GPU is not needed.

    python -m nemo_v4_indexer.kernels.prebuild --heads 64 --dim 128 --topk 512 [--topk 1024 ...]

They land in TileLang's disk cache (`TILELANG_CACHE_DIR`), where every process of a node finds them; the folder can be
part of a container image.
"""

import argparse
import sys

from . import backward, forward, loss, rotation, runtime


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog=runtime.PREBUILD, description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64, help="index heads (default 64)")
    parser.add_argument("--dim", type=int, default=128, help="index head dim (default 128)")
    parser.add_argument("--rope-dim", type=int, default=64, help="rotary dims of the indexer (default 64)")
    parser.add_argument("--topk", type=int, action="append", help="top-k; may be given several times (default 512)")
    options = parser.parse_args(arguments)
    import torch

    built = 0
    topks = options.topk or [512]
    for topk in topks:
        if problem := runtime.shape_problem(torch.bfloat16, options.heads, options.dim, topk):
            parser.error(problem)
    try:
        built += rotation.prebuild(options.dim, options.rope_dim)
        for topk in topks:
            built += forward.prebuild(options.heads, options.dim, topk)
            built += backward.prebuild(options.heads, options.dim, topk)
            built += loss.prebuild(topk)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{built} kernels ready in {runtime.cache_dir()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
