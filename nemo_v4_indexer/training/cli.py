"""The command line: compose the YAML, check it, print it or run it. Mistakes end in one sentence and exit code 2."""

import argparse
import contextlib
import difflib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from nemo_v4_indexer.training.errors import RunError, UsageError

_EPILOG = """\
overrides are Hydra's key=value, for example:
  train.steps=200 train.lr=2e-3            change a value
  indexer.compress_ratio=8 indexer.topk=4  one number for all layers, or a list such as [0,4,4,4]
  indexer.layers.3.topk=16                 one layer (1-based)
  indexer.loss.coeff=0                     do not train the indexer
  data=text_file data.path=book.txt        train on your own text
  train.resume=true                        go on after an interruption
  output_dir=outputs/other                 write somewhere else
several processes: torchrun --nproc-per-node 2 -m nemo_v4_indexer.pretrain ... parallel.tensor=2
Megatron's own options (on GPUs): megatron.recompute_granularity=selective megatron.bf16=false
"""
_FREE_MAPS = ("indexer.layers.", "megatron.")  # maps whose keys the user adds: no Hydra `+` needed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_v4_indexer.pretrain",
        description="Pretrain a small DeepSeek-V4-style model with its lightning indexer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value of the configuration")
    parser.add_argument("--config-name", "-cn", default="pretrain_tiny", help="YAML to start from (%(default)s)")
    parser.add_argument("--config-dir", "-cd", type=Path, help="folder of your own YAML, searched before the package's")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the resolved configuration and stop")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Run the application; returns the exit code: 0, 1 for a failed run, 2 for a usage error, 128 + signal."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        with _quiet():
            return _run(arguments)
    except RunError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from nemo_v4_indexer.training.config import PretrainConfig

    composed = compose(arguments.config_name, arguments.overrides, arguments.config_dir)
    resolved = OmegaConf.to_container(composed, resolve=True)
    text = OmegaConf.to_yaml(OmegaConf.create(resolved))
    config = PretrainConfig.from_dict(resolved)
    if arguments.cfg:
        print(text, end="")
        return 0
    from nemo_v4_indexer.training import engines

    return engines.choose(config)(config, resolved, text)


def compose(name: str, overrides: Sequence[str], folder: Path | None = None) -> Any:
    """Hydra's composition of `name` with `overrides`. Raises UsageError for an unknown name, key or value form."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ours = resources.files("nemo_v4_indexer") / "configs"
    overrides = [f"++{item}" if item.startswith(_FREE_MAPS) else item for item in overrides]
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"--config-dir {folder} is not a folder")
        overrides = ["hydra.searchpath=[pkg://nemo_v4_indexer.configs]", *overrides]
    _parse_each(overrides)
    try:
        with initialize_config_dir(str((folder or Path(str(ours))).absolute()), version_base="1.3"):
            composed = hydra_compose(name.removesuffix(".yaml"), overrides=list(overrides))
        missing = OmegaConf.missing_keys(composed)
        if missing:
            raise UsageError(f"{', '.join(sorted(missing))} has no value; give it as key=value")
        return composed
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_sentence(error, name, overrides, folder)) from error


def _sentence(error: Exception, name: str, overrides: Sequence[str], folder: Path | None) -> str:
    """Hydra's several lines as one sentence that names the key."""
    text = " ".join(str(error).split())
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        key = unknown.group(1)
        known = _known_keys(name, folder)
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; --cfg job prints the known ones"
        return f"unknown key {key}{hint}"
    if "Cannot find primary config" in text:
        return f"there is no configuration named {name!r}; {_names(folder)}"
    return re.split(r" Config search path:| See https://hydra", text)[0]


def _parse_each(overrides: Sequence[str]) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for item in overrides:
        try:
            parser.parse_override(item)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"cannot read the override {item!r} (expected key=value): {reason}") from error


def _known_keys(name: str, folder: Path | None) -> list[str]:
    from omegaconf import DictConfig

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key in node:
            yield f"{prefix}{key}"
            if isinstance(node._get_node(key), DictConfig):
                yield from walk(node[key], f"{prefix}{key}.")

    with contextlib.suppress(UsageError):
        return list(walk(compose(name, [], folder), ""))
    return []


def _names(folder: Path | None) -> str:
    names = {item.name for item in (resources.files("nemo_v4_indexer") / "configs").iterdir()}
    if folder is not None:
        names |= {item.name for item in folder.iterdir()}
    return "known: " + ", ".join(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Megatron and PyTorch say about packages that this application does without, and about GPTModel."""
    loggers = [logging.getLogger(name) for name in ("torch.utils.cpp_extension", "megatron.core.models.gpt.gpt_model")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in (".*Transformer Engine.*", ".*[Aa]pex.*", ".*absl.logging.*", ".*full scope is deprecated.*"):
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
