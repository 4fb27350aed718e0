"""`pkg://nemo_v4_indexer.configs` resolves from this checkout and from a wheel installed elsewhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nemo_v4_indexer

ROOT = Path(nemo_v4_indexer.__file__).resolve().parent.parent
CONFIGS = ROOT / "nemo_v4_indexer" / "configs"

# Another application's primary config finds the presets through the search path, as a host framework would.
COMPOSE = """
import sys
from hydra import compose, initialize_config_dir
import nemo_v4_indexer
from nemo_v4_indexer.config import IndexerConfig
with initialize_config_dir(sys.argv[1], version_base=None):
    config = compose("host", overrides=["hydra.searchpath=[pkg://nemo_v4_indexer.configs]", "+model=v4_flash",
                                        "+indexer=v4_flash", "+indexer.layers.3.topk=64"])
print(nemo_v4_indexer.__file__)
print(IndexerConfig.from_dict(config.indexer).layer(3).topk)
"""


def compose_elsewhere(folder, import_path=None):
    """Compose in a fresh interpreter started in `folder`; returns the package file it imported, after checking."""
    (folder / "host.yaml").write_text("name: host\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if import_path is not None:
        environment["PYTHONPATH"] = str(import_path)
    command = [sys.executable, "-c", COMPOSE, str(folder)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    file, topk = result.stdout.split()
    assert topk == "64"
    return Path(file).resolve()


def test_from_the_checkout(tmp_path):
    assert compose_elsewhere(tmp_path, ROOT) == ROOT / "nemo_v4_indexer" / "__init__.py"


def test_from_the_installed_package(tmp_path):
    compose_elsewhere(tmp_path)


def test_the_top_level_folder_is_the_package_folder():
    assert (ROOT / "configs").resolve() == CONFIGS.resolve()


def test_from_a_built_wheel(tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel without network needs the build backend installed")
    built, target, elsewhere = tmp_path / "built", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = [sys.executable, "-m"]
    build = [*run, "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert expected and expected <= names
    assert not {name for name in names if name.startswith(("configs/", "tests/"))}
    install = [*run, "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    assert compose_elsewhere(elsewhere, target) == (target / "nemo_v4_indexer" / "__init__.py").resolve()
