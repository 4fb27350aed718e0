"""Who may import what, by parsing every module of the package."""

import ast
import sys
from pathlib import Path

import pytest

import nemo_v4_indexer

PACKAGE = "nemo_v4_indexer"
ROOT = Path(nemo_v4_indexer.__file__).parent
CONFIG_FILES = {"config", "config_parsing", "config_hf"}
# Units that stand apart inside a family.
NEMO = ("integrations.nemo", "integrations.nemo_config", "integrations.nemo_metrics")
INNER = {"kernels.tiling", "kernels.runtime", *NEMO}

BASE = {"config", "visibility", "checks", "reference", "rotary", "parallel"}
OPERATION = BASE | {"ops", "diagnostics"}
PARTS = OPERATION | {"modules"}
LAYER = PARTS | {"compressor", "sharding"}

ALLOWED = {
    "": set(),  # the package's __init__: names resolve on first use
    "config": set(),
    "configs": set(),
    "visibility": set(),
    "checks": set(),
    "rotary": set(),
    "parallel": set(),
    "reference": {"visibility"},
    "kernels.tiling": set(),
    "kernels.runtime": {"kernels.tiling"},
    "kernels": {"kernels.tiling", "kernels.runtime"},
    "ops": {"checks", "reference", "rotary", "visibility", "kernels", "kernels.runtime"},
    "diagnostics": {"reference", "visibility"},
    "modules": {"ops", "parallel"},
    "sharding": {"parallel", "visibility"},
    "compressor": {"config", "modules", "rotary", "sharding", "visibility"},
    "weights": {"config", "weights_files"},
    "weights_files": set(),
    "layer": LAYER,
    "teacher": OPERATION,
    "attention": LAYER | {"layer", "teacher"},
    "costs": {"visibility"},
    "plan": {"costs", "visibility", "training"},
    "integrations": LAYER | {"layer", "attention", "weights"},
    "training": LAYER | {"layer", "attention", "weights", "integrations", "configs"},
    "integrations.nemo": {*LAYER, "layer", "attention", "integrations", "training", *NEMO[1:]},
    "integrations.nemo_config": {"config", "training"},
    "integrations.nemo_metrics": {"training"},
    "pretrain": {"training"},
}
"""What a unit may import of the package, beside itself."""

OUTSIDE = {
    "hydra": {"training", "integrations"},
    "omegaconf": {"training", "integrations", "plan", "integrations.nemo", "integrations.nemo_metrics"},
    "torch.distributed": {"parallel", "training", "integrations", "integrations.nemo"},
    "megatron": {
        "parallel",
        "modules",
        "compressor",
        "layer",
        "attention",
        "integrations",
        "integrations.nemo",
        "training",
    },
    "nemo": {"integrations.nemo"},
    "lightning": {"integrations.nemo", "integrations.nemo_metrics"},
    "nemo_automodel": {"integrations", "training"},
    "tilelang": {"kernels", "kernels.runtime"},
    "tvm": {"kernels", "kernels.runtime"},
    "import_module": {"", "integrations"},
}
"""Units that may use an outside package; `import_module` stands for imports that parsing cannot follow."""

ENVIRONMENT = {"kernels.runtime", "training.world", "integrations.megatron_cli"}
"""Modules that may read environment variables: the kernels' settings, the launcher's local rank, and the file that
Megatron's command line cannot name."""


def unit_of(module):
    """The row of the table for a module, named without the package: "ops.loss" -> "ops"."""
    first = module.split(".")[0]
    return module if module in INNER else "config" if first in CONFIG_FILES else first


def files():
    """Module names, without the package, and their files."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = files()


def dotted(node):
    """ "a.b.c" of an attribute chain, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def imported(tree, module, is_package):
    """Absolute names that a module imports, and the attribute chains and calls that count as such."""
    names = set()
    package = [PACKAGE, *filter(None, module.split("."))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package if is_package else package[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            names.add(dotted(node))
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            names.add("import_module")
    return names


def problems(module, source, is_package=False):
    """Sentences on what a module may not do."""
    names = imported(ast.parse(source), module, is_package)
    unit = unit_of(module)
    if unit not in ALLOWED:
        return [f"{module} is in no unit: add it to the table of this test"]
    found = []
    for name in sorted(names):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            inner = name[len(PACKAGE) + 1 :]
            while inner and inner not in FILES:  # an attribute of a module
                inner = inner.rpartition(".")[0]
            target = unit_of(inner)
            if target not in ALLOWED[unit] | {unit, ""}:
                found.append(f"{module} imports {inner}, which is not below {unit}")
        for outside, users in OUTSIDE.items():
            if (name == outside or name.startswith(f"{outside}.")) and unit not in users:
                found.append(f"{module} uses {name}")
        if name in ("os.environ", "os.getenv", "os.putenv", "os.environb") and module not in ENVIRONMENT:
            found.append(f"{module} uses {name}")
        top = name.split(".")[0]
        if unit == "config" and top not in sys.stdlib_module_names | {PACKAGE} and name in plain_imports(source):
            found.append(f"{module} imports {name}, config is stdlib only")
    return found


def plain_imports(source):
    """Names of absolute imports alone, without attribute chains."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", FILES, ids=lambda m: m or PACKAGE)
def test_imports_point_one_way(module):
    path = FILES[module]
    assert not problems(module, path.read_text(), path.name == "__init__.py")


def test_the_table_points_one_way():
    """No unit reaches itself through the units it may import."""
    reach = {unit: set(below) for unit, below in ALLOWED.items()}
    for _ in ALLOWED:
        reach = {unit: below | {far for near in below for far in reach[near]} for unit, below in reach.items()}
    assert not [unit for unit, below in reach.items() if unit in below]
    assert not reach["reference"] & {"ops", "kernels", "kernels.runtime", "kernels.tiling"}
    assert not reach["config"]


def test_every_public_name_is_defined_where_the_package_looks_for_it():
    """Parsed, not imported: half of them need Megatron."""
    assert nemo_v4_indexer.__all__ == ["__version__", *sorted(nemo_v4_indexer._PUBLIC)]
    assert set(nemo_v4_indexer.__all__) <= set(dir(nemo_v4_indexer))
    for name, module in nemo_v4_indexer._PUBLIC.items():
        body = ast.parse(FILES[module].read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, name
    with pytest.raises(AttributeError, match="has no attribute 'v4_lightning'"):
        _ = nemo_v4_indexer.v4_lightning


def test_the_table_names_only_units_that_exist():
    units = {unit_of(module) for module in FILES}
    assert not set().union(*OUTSIDE.values()) - set(ALLOWED)
    assert {"reference", "ops", "kernels", "layer", "integrations", "training"} <= units


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("reference", "from nemo_v4_indexer.ops import indexer", "reference imports ops.indexer"),
        ("reference", "def f():\n    from nemo_v4_indexer.kernels import runtime", "reference imports kernels.runtime"),
        ("visibility", "from nemo_v4_indexer import reference", "visibility imports reference"),
        ("visibility", "from . import checks", "visibility imports checks"),
        ("kernels.tiling", "from . import runtime", "kernels.tiling imports kernels.runtime"),
        ("kernels.forward", "from ..ops.indexer import Options", "kernels.forward imports ops.indexer"),
        ("ops.loss", "import nemo_v4_indexer.layer", "ops.loss imports layer"),
        ("layer", "from nemo_v4_indexer.attention import Sink", "layer imports attention"),
        ("layer", "from nemo_v4_indexer.training import files", "layer imports training.files"),
        ("config", "import torch", "config imports torch"),
        ("config_hf", "from megatron.core import x", "config_hf uses megatron.core.x"),
        ("ops.indexer", "import torch\ntorch.distributed.barrier()", "ops.indexer uses torch.distributed"),
        ("layer", "from torch import distributed", "layer uses torch.distributed"),
        ("layer", "import torch.distributed as dist", "layer uses torch.distributed"),
        ("ops.indexer", "import tilelang.language as T", "ops.indexer uses tilelang.language"),
        ("ops.indexer", "import importlib\nimportlib.import_module('x')", "ops.indexer uses import_module"),
        ("reference", "from megatron.core.utils import x", "reference uses megatron.core.utils.x"),
        ("layer", "from omegaconf import OmegaConf", "layer uses omegaconf.OmegaConf"),
        ("layer", "import os\nx = os.environ.get('A')", "layer uses os.environ"),
        ("training.files", "from os import environ", "training.files uses os.environ"),
        ("kernels.forward", "import os\nos.getenv('A')", "kernels.forward uses os.getenv"),
        ("helpers", "import math", "helpers is in no unit"),
    ],
)
def test_what_points_the_other_way_is_caught(module, source, complaint):
    assert any(found.startswith(complaint) for found in problems(module, source))
