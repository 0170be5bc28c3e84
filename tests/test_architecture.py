"""Rules that a linter cannot see: what importing costs, what a file may do, what a module says it is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import resource
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from freewheel.config import signature
from freewheel.config.flags import option_types
from tests.support.places import PACKAGE, ROOT
from tests.support.runs import python

PROJECTS = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")}
#: The core and the packages beside it.
PACKAGES = [PACKAGE, *(ROOT / "packages" / name / "src" / f"freewheel_{name}" for name in sorted(PROJECTS))]
PARSED = {
    path: ast.parse(path.read_text(encoding="utf-8")) for package in PACKAGES for path in sorted(package.rglob("*.py"))
}
PAGES = ("*.md", "docs/*.md", "packages/*/*.md", "packages/*/docs/*.md", "benchmarks/README.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))

#: What CPU workers, --help and the config import: none of it may import torch, except inside functions. What the entry points of
#: packages name is imported by --help as well.
WITHOUT_TORCH = """errors core seeding ledger registry loop metrics/* rollout/factory rollout/runner rollout/single_env_runner
    rollout/kernel rollout/probe pacing/* transport/**/* policies/spec policies/numpy_actor policies/heads/* envs/gym envs/loop
    envs/lane envs/spaces envs/vector envs/processes envs/legacy envs/fault_tolerant envs/family collect/*
    learn/spec learn/*/config config/* cli/main run/checkpoints/checkpoint run/trainer sinks/* testing/*"""
WITHOUT_TORCH_TOO = """freewheel_cage2/env freewheel_cage2/family freewheel_cage2/command freewheel_drone/family
    freewheel_lab/*/command freewheel_lab/seeds/campaign freewheel_ray/mode freewheel_ray/actors/* freewheel_ray/federate/options
    freewheel_watch/command freewheel_watch/runs freewheel_watch/timeline/command"""
#: What would run or unpickle what a file says: modules, and functions of others.
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib"}
FORBIDDEN = {"eval", "exec", "torch.load", "numpy.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
#: cloudpickle, over pipes to and from our own children only.
PIPES = {
    "freewheel.envs.processes",
    "freewheel.run.learners.follow",  # from the first learner of the same run
    "freewheel.transport.executors",
    "freewheel_ray.actors.code_shipping",  # from the trainer, by way of Ray, which pickles itself
    "freewheel.transport.shm.worker",
    "freewheel.transport.survey",
}


def module_name(path: Path) -> str:
    package = next(package for package in PACKAGES if path.is_relative_to(package))
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def forbidden(tree: ast.Module, module: str = "") -> Iterator[str]:
    """What would run or unpickle what a file says, under whatever name it was imported."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            yield from (alias.name for alias in node.names if alias.name in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from [node.module] if node.module in UNPICKLERS else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root, dot, rest = ast.unparse(node.func).partition(".")
            call = names.get(root, root) + dot + rest
            if call in FORBIDDEN or call.endswith((".extractall", ".unpack_archive")):
                yield call
            if call == "cloudpickle.loads" and module not in PIPES:
                yield call
            yield from ("allow_pickle" for keyword in node.keywords if keyword.arg == "allow_pickle")


def test_no_modules_import_each_other_in_a_circle_types_included() -> None:
    """Imports inside functions are left out: they are for what must not be loaded yet."""
    names = {module_name(path) for path in PARSED}
    graph: dict[str, set[str]] = {}
    for path, tree in PARSED.items():
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in ast.walk(node)}
        nodes = [node for node in ast.walk(tree) if id(node) not in inside]
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                called = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in names else str(node.module) for name in called}
        graph[module_name(path)] = (found & names) - {module_name(path)}
    assert graph["freewheel.run.trainer"] > {"freewheel.run.session", "freewheel.run.plan"}
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_what_cpu_workers_import_does_without_torch() -> None:
    found = {pattern: sorted(PACKAGE.glob(f"{pattern}.py")) for pattern in WITHOUT_TORCH.split()}
    found |= {pattern: sorted(ROOT.glob(f"packages/*/src/{pattern}.py")) for pattern in WITHOUT_TORCH_TOO.split()}
    assert [pattern for pattern, paths in found.items() if not paths] == []
    names = [module_name(path) for paths in found.values() for path in paths]
    assert sorted({place.partition(":")[0] for name in PROJECTS for _, place in entry_points(name)} - {*names}) == []
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    python("-c", script)


def test_the_bare_package_imports_nothing_of_its_own() -> None:
    loaded = python("-c", "import sys, freewheel; print(*sys.modules)").stdout.split()
    assert "freewheel" in loaded
    assert not [name for name in loaded if name.startswith(("freewheel.", "numpy", "torch", "gymnasium"))]


def test_help_answers_at_once_and_without_torch() -> None:
    listing = python("-X", "importtime", "-m", "freewheel", "--help")
    imported = {line.rpartition("|")[2].strip() for line in listing.stderr.splitlines()}
    assert "freewheel.cli.main" in imported
    assert "torch" not in imported
    assert "train" in listing.stdout

    def seconds() -> float:
        """Of the processor: what others take does not count."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("-m", "freewheel", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.7


def test_modules_say_in_a_sentence_what_they_are() -> None:
    openings = {path: (ast.get_docstring(tree) or "").partition("\n\n")[0] for path, tree in PARSED.items()}
    wrong = [path for path, opening in openings.items() if not re.fullmatch(r"\S.*[.:]", " ".join(opening.split()))]
    assert list(map(module_name, wrong)) == []


def test_folders_import_nothing_by_themselves() -> None:
    """Below the top of the core, __init__.py is a docstring and nothing else."""
    packages = [path for path in PARSED if path.name == "__init__.py" and path.parent != PACKAGE]
    assert packages
    assert [module_name(path) for path in packages if [*map(type, PARSED[path].body)] != [ast.Expr]] == []


def test_files_are_data() -> None:
    found = {name: [*forbidden(tree, name)] for path, tree in PARSED.items() if (name := module_name(path))}
    assert {module: calls for module, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n    import marshal as m", ["marshal"]),
        ("from dill import loads", ["dill"]),
        ("from torch import load as read\nread(path)", ["torch.load"]),
        ("import numpy as np\nnp.load(path)", ["numpy.load"]),
        ("def f():\n    import yaml\n    return yaml.load(text)", ["yaml.load"]),
        ("x = eval(text)", ["eval"]),
        ("open_it(file, allow_pickle=True)", ["allow_pickle"]),
        ("archive.extractall()\ncloudpickle.loads(file)", ["archive.extractall", "cloudpickle.loads"]),
        ("net.eval()\nmodule.exec_module(x)\nself.load(x)\nsafetensors.numpy.load(data)  # not torch.load()", []),
    ],
)
def test_the_search_finds_what_it_is_for_and_nothing_else(source: str, calls: list[str]) -> None:
    assert list(forbidden(ast.parse(source))) == calls


def test_files_that_documents_name_exist() -> None:
    named = re.compile(r"`((?:freewheel|tests|benchmarks|docs|examples|scripts|packages)/[\w/.-]+(?<!-v0))`")
    modules = re.compile(r"`(freewheel_(\w+?)/[\w/.-]*)`")
    missing = list[str]()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        files = [path.parent / link for link in re.findall(r"\]\((?!http)([^)#\s]+)", text)]
        files += [ROOT / name for name in named.findall(text) if path.name != "CHANGELOG.md"]
        files += [ROOT / "packages" / package / "src" / name for name, package in modules.findall(text)]
        missing += [f"{path.name}: {file}" for file in files if not file.exists()]
        tests = re.findall(r"`((?:tests|packages)/[\w/]+\.py)::(\w+)`", text)
        missing += [f"{path.name}: {test}" for file, test in tests if f"def {test}(" not in (ROOT / file).read_text()]
    assert missing == []


def entry_points(package: str) -> list[tuple[str, str]]:
    """The entry points of a package by which objects are found: kind and place of each."""
    groups = PROJECTS[package]["project"]["entry-points"]
    kinds = {group.removeprefix("freewheel."): points for group, points in groups.items()}
    return [(kind, place) for kind, points in kinds.items() if kind != "moved_modules" for place in points.values()]


def added_by(package: str) -> dict[str, set[str]]:
    """All names that a package adds, by kind."""
    added: dict[str, set[str]] = defaultdict(set)
    for kind, place in entry_points(package):
        module, _, name = place.partition(":")
        entry: Any = getattr(importlib.import_module(module), name)
        added[kind].add(entry.name)
        if kind == "campaigns":
            added["options"] |= {one.name for one in dataclasses.fields(entry.options)}
        if kind == "modes":
            added["options of modes"] |= {*option_types(entry.config)}
        if kind == "worlds":
            folder = ROOT / "packages" / package / "src" / (entry.flags.presets or "none")
            added["envs"] |= {*entry.ids}
            added["presets"] |= {*tomllib.loads((folder / "presets.toml").read_text())}
            added["options"] |= {*entry.flags.aliases}
            added["served"] |= {one for one in ADDED[f"freewheel-{package}"].get("envs", ()) if entry.serves(one)}
    return added


ADDED: dict[str, dict[str, list[str]]] = tomllib.loads((PACKAGE / "packages.toml").read_text(encoding="utf-8"))


def test_the_core_names_no_package() -> None:
    """What they add stands in packages.toml, which answers alone read: everything else is found by entry points."""
    name = re.compile(rf"freewheel[-_.](?:{'|'.join(PROJECTS)})\b")
    texts = [path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".toml", ".c"}]
    found = {path.relative_to(PACKAGE).as_posix(): name.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert {path for path, names in found.items() if names} == {"packages.toml"}
    assert {*ADDED} == {project["project"]["name"] for project in PROJECTS.values()}


@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_packages_add_what_the_core_says_of_them(package: str) -> None:
    """An answer that tells to install a package is right: the name is there then. Commands, modes and presets are all listed."""
    listed, added = ADDED[f"freewheel-{package}"], added_by(package)
    for kind in ("commands", "modes", "presets"):
        assert {*listed.get(kind, ())} == added[kind], kind
    assert {*listed.get("envs", ())} == added["served"] >= added["envs"]
    assert {*listed.get("options", ())} <= added["options"] | added["options of modes"]
    assert {*listed.get("options", ())} >= added["options"]
    assert {*listed} <= {"commands", "modes", "presets", "envs", "options", "files"}


def test_the_typed_signature_of_train_has_every_option() -> None:
    fresh = signature.FILE.read_text(encoding="utf-8") == signature.source()
    command = "python -m freewheel.config.signature"
    assert fresh, f"options have changed: run `{command}` and commit freewheel/config/arguments.py"


#: Fields of a record at most; records that still have more. Options are no records: each field of theirs is a flag.
MOST_FIELDS = 15
LARGER = {"EnvCost": 22, "Measurement": 24, "ModeFigures": 19, "Results": 21, "RemoteWorker": 17}
OPTIONS = re.compile(r"(Options|Config)$")


def test_records_are_small() -> None:
    """What has more parts than one can keep in mind is made of records that have a meaning of their own."""
    found: dict[str, int] = {}
    for path in [*PARSED, *sorted((ROOT / "packages").glob("*/src/**/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not OPTIONS.search(node.name):
                kinds = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
                own = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                fields = [one for one in own if not ast.unparse(one.annotation).startswith("ClassVar")]
                if ("dataclass" in kinds or "NamedTuple" in kinds) and len(fields) > MOST_FIELDS:
                    found[node.name] = len(fields)
    assert found == LARGER


def test_every_class_has_a_name_of_its_own() -> None:
    """Also across packages: a name in a traceback or a page means one thing."""
    named: dict[str, list[str]] = {}
    for path, tree in PARSED.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(module_name(path))
    assert len(named) > 300
    assert {name: modules for name, modules in named.items() if len(modules) > 1} == {}
