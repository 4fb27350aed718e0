"""`python -m nemo_v4_indexer.pretrain`: see `--help`."""

import sys

from nemo_v4_indexer.training.cli import run

if __name__ == "__main__":
    sys.exit(run())
