"""What a newcomer meets first: the Makefile, the installation, the README, the examples and the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import nemo_v4_indexer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if line.strip()]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="not a checkout of the project")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(*arguments, cwd=ROOT):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# Installation


@pytest.fixture
def checkout(tmp_path):
    """Files that the set-up reads, and a PATH with plain tools but without any Python."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder, tools = tmp_path / "a checkout", tmp_path / "tools"
    (folder / "scripts").mkdir(parents=True)
    tools.mkdir()
    for name in ("Makefile", ".python-version", "pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    for name in (
        "make",
        "sh",
        "cut",
        "cksum",
        "pwd",
        "ls",
        "tail",
        "mkdir",
        "rm",
        "cat",
        "chmod",
        "cp",
        "touch",
        "echo",
    ):
        (tools / name).symlink_to(shutil.which(name))
    return folder


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def make(checkout, *arguments):
    tools = checkout.parent / "tools"
    environment = {"PATH": str(tools), "HOME": str(checkout.parent)}
    command = [str(tools / "make"), *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def sentences(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def fake_python(checkout, install=":"):
    """A Python that is new enough, whose `-m venv` makes a copy of it and whose pip only notes that it was called."""
    log = checkout.parent / "pip.log"
    text = f"""\
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip install"*) echo "$@" >> '{log}'; {install} ;;
    "-m nemo_v4_indexer.pretrain"*|"-m pytest"*) echo "ran: $*" ;;
esac
"""
    return program(checkout.parent / "tools" / "python3.12", text), log


OLD = 'test "$1" = --version && echo "Python 3.11.2" && exit 0\nexit 1\n'


@pytest.mark.parametrize("target", ["test", "pretrain"])
def test_too_old_python_is_one_sentence(checkout, target):
    for name in ("python3", "python"):
        program(checkout.parent / "tools" / name, OLD)
    result = make(checkout, target)
    (sentence,) = sentences(result)
    assert result.returncode != 0
    assert "Python 3.12 or newer" in sentence and "python3 is Python 3.11.2" in sentence and "PYTHON=" in sentence
    assert "Traceback" not in result.stderr and not (checkout / ".venv").exists()


def test_missing_python_is_one_sentence(checkout):
    (sentence,) = sentences(make(checkout, "test"))
    assert "python3 is not installed" in sentence


def test_named_python_is_used_or_refused(checkout):
    old = program(checkout.parent / "old", OLD)
    fake_python(checkout)
    (sentence,) = sentences(make(checkout, "test", f"PYTHON={old}"))
    assert f"PYTHON={old} is Python 3.11.2" in sentence


def test_second_call_installs_nothing_and_changes_install_again(checkout):
    _, log = fake_python(checkout)
    result = make(checkout, "test", "ARGS=-k config")
    assert result.returncode == 0, result.stderr
    assert "ran: -m pytest -k config" in result.stdout
    assert "--editable .[test] --constraint constraints.txt" in log.read_text()
    assert make(checkout, "pretrain", "ARGS=train.steps=3").stdout == "ran: -m nemo_v4_indexer.pretrain train.steps=3\n"
    assert len(log.read_text().splitlines()) == 1
    for count, name in enumerate(("pyproject.toml", "constraints.txt"), start=2):
        later = (checkout / ".venv" / "bin").stat().st_mtime + 10 * count
        for mark in (checkout / ".venv").glob("installed-*"):
            os.utime(mark, (later - 5, later - 5))
        os.utime(checkout / name, (later, later))
        assert make(checkout, "test").returncode == 0
        assert len(log.read_text().splitlines()) == count, name
        os.utime(checkout / name, (later - 1000, later - 1000))


def test_interrupted_installation_is_redone_from_nothing(checkout):
    fake_python(checkout, install="kill -9 $PPID; exit 1")
    assert make(checkout, "test").returncode != 0
    (checkout / ".venv" / "half-copied").touch()
    fake_python(checkout)
    assert make(checkout, "test").returncode == 0
    assert not (checkout / ".venv" / "half-copied").exists()


def test_failed_installation_fails_and_is_redone(checkout):
    _, log = fake_python(checkout, install="exit 1")
    result = make(checkout, "test")
    assert result.returncode != 0 and "ran:" not in result.stdout
    assert sentences(result) == ["error: the installation did not finish; see pip's message above"]
    fake_python(checkout)
    assert make(checkout, "test").returncode == 0 and len(log.read_text().splitlines()) == 2


def test_moved_checkout_is_installed_again(checkout):
    _, log = fake_python(checkout)
    assert make(checkout, "test").returncode == 0
    moved = checkout.rename(checkout.with_name("moved"))
    assert make(moved, "test").returncode == 0
    assert len(log.read_text().splitlines()) == 2


def test_help_is_the_default_and_names_every_target(checkout):
    result = make(checkout)
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split())
    assert result.returncode == 0
    assert set(re.findall(r"^make (\w+)", result.stdout, flags=re.MULTILINE)) == targets - {"help"}


def test_constraints_meet_the_requirements():
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines)
    settings = project()
    for text in sum(settings["optional-dependencies"].values(), settings["dependencies"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text


def test_constraints_are_what_is_installed():
    """The suite vouches for the constraints only if it runs under them."""
    if (Path(sys.prefix).parent, Path(sys.prefix).name) != (ROOT, ".venv"):
        pytest.skip("these tests do not run in the environment that make sets up")
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        try:
            assert not version or metadata.version(name).partition("+")[0] == version, name
        except metadata.PackageNotFoundError:
            assert name in ("nemo-toolkit", "nemo-automodel") or sys.platform != "linux", name


# What is shipped


def test_wheel_holds_the_package_its_configs_and_the_licence_only(tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel without network needs the build backend installed")
    run_python("-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-{nemo_v4_indexer.__version__}-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    information = f"nemo_v4_indexer-{nemo_v4_indexer.__version__}.dist-info/"
    assert {name for name in names if not name.startswith((information, "nemo_v4_indexer/"))} == set()
    assert f"{information}licenses/LICENSE" in names
    sources = subprocess.run(["git", "ls-files", "nemo_v4_indexer"], cwd=ROOT, capture_output=True, text=True)
    if sources.returncode == 0:
        assert set(sources.stdout.split()) <= names


def test_version_is_the_same_everywhere():
    assert metadata.version("nemo-v4-indexer") == nemo_v4_indexer.__version__


def test_python_version_is_the_same_everywhere():
    wanted = (ROOT / ".python-version").read_text().strip()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["requires-python"] == f">={wanted}"
    assert settings["tool"]["ruff"]["target-version"] == "py" + wanted.replace(".", "")
    assert f"Python {wanted} or newer" in (ROOT / "scripts" / "setup.sh").read_text()


# README and examples


def test_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) < 200
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_readme_has_python():
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_readme_python_runs(number, tmp_path):
    """Each block on its own, in a fresh interpreter, away from the checkout."""
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPETS[number])
    run_python(file, cwd=tmp_path)


def test_readme_commands_exist():
    """Targets in the Makefile; modules and keys by composing the configuration."""
    makefile = (ROOT / "Makefile").read_text()
    assert COMMANDS[:2] == ["make pretrain", "make test"]
    runs = 0
    for line in COMMANDS:
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, flags=re.MULTILINE), line
        overrides = re.search(r'(?:ARGS="|-m nemo_v4_indexer\.pretrain )([^"]*)', line)
        if overrides and not line.startswith("make test"):
            from nemo_v4_indexer.training.cli import run

            arguments = [word for word in overrides[1].split() if not word.startswith("data.path")]
            assert run([*arguments, "data.path=README.md", "--cfg", "job"]) == 0, line
            runs += 1
    assert runs >= 4


def test_there_are_three_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", ["score_and_select", "own_megatron_model", "read_diagnostics"])
def test_example_runs(name, tmp_path):
    output = run_python(ROOT / "examples" / f"{name}.py", cwd=tmp_path)
    expected = {
        "score_and_select": "replay gives the same scores: True",
        "own_megatron_model": "12 indexer parameters have a gradient",
        "read_diagnostics": "evaluation: recall 0.",
    }
    assert expected[name] in output
