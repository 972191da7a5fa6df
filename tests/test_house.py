"""Who may import whom: an import goes down a floor or more, or stays in its room. Those inside functions count too."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from minizero import torch_private
from minizero.torch_private import IN_PLACE, REASONS, WHOLE_PROCESS

ROOT = Path(__file__).parent.parent
PACKAGES = ("minizero", "flash", "precision")
# From the ground up. A room is a folder of `minizero`, a file beside them, or one of the other two packages.
FLOORS = [
    {"torch_private"},
    {"pictures", "recompute", "flash", "precision"},
    {"memory", "models"},
    {"ranks", "schedules"},
    {"engines", "cli"},
    {"checkpoint", "accumulate", "chunked_loss", "simulate", "mixed_precision", "grid"}
    | {"ring_attention", "ring_attention_on_a_page", "lab"},
    {"train", "xray"},
]


@functools.cache
def trees() -> dict[Path, list[ast.AST]]:
    """Of each file of ours all that it is made of."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


@functools.cache
def imports() -> dict[str, set[str]]:
    """For each file, by its dotted name, the files of ours that it imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in trees()}
    modules = {name.removesuffix(".__init__") for name in files}
    found: dict[str, set[str]] = {}
    for file, path in files.items():
        seen = found[file.removesuffix(".__init__")] = set()
        for node in trees()[path]:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: name the module in full"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:  # a module of ours, or a name in one
                seen.add(name if name in modules else name.rpartition(".")[0])
        seen &= modules
    return found


def room(file: str) -> str:
    package, _, rest = file.partition(".")
    if package != "minizero":
        return package
    return rest.split(".")[0]


def test_imports_go_down():
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    up = {
        (file, target)
        for file, targets in imports().items()
        if file != "minizero"  # the face of the house
        for target in targets
        if room(file) != room(target) and not floor[room(file)] > floor[room(target)]
    }
    assert not up, "an import goes up, or from room to room of one floor: see CONTRIBUTING.md"


def test_no_two_files_need_each_other():
    graphlib.TopologicalSorter(imports()).prepare()  # else CycleError, with the way around


OTHERS = {"_replace", "_asdict", "_fields", "_exit", "_inst"}  # of named tuples, os and random


def test_every_private_name_of_torch_is_listed_with_its_reason():
    ours, used = set(), set()
    for path, nodes in trees().items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(getattr(node, "attr", "") or getattr(node, "id", ""))
            if path.stem != "torch_private":
                used |= {node.attr} if isinstance(node, ast.Attribute) else set()
                if isinstance(node, ast.ImportFrom):
                    used |= {*node.module.split("."), *(alias.name for alias in node.names)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - OTHERS - (ours - IN_PLACE.keys()) == IN_PLACE.keys()


def test_each_name_in_torch_private_has_a_reason_a_version_and_a_way_out():
    others = {"contextlib", "Callable", "Iterator", "Any", "torch", "nn", "IN_PLACE", "REASONS", "WHOLE_PROCESS"}
    assert {name for name in vars(torch_private) if not name.startswith("_")} - others == REASONS.keys()
    assert all(re.fullmatch(r".+; (since|at least) \d\.\d+; .+", reason) for reason in REASONS.values())


def changes_the_process(node: ast.AST, imported: set[str]) -> bool:
    """Is it a hook on every module or optimizer, a call at the end, a patch, or a write to what was imported?"""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return not ast.unparse(node.args[0]).startswith("self")
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node).replace("[", ".").split(".")[0] in imported
    if isinstance(node, ast.Attribute | ast.alias):
        words = ast.unparse(node)
        every = re.fullmatch(r"(\w+\.)*register_(module|optimizer_step)_\w*hook", words)
        calls = "atexit.register", "mock.patch.object", "os.environ.setdefault", "os.environ.update"
        return bool(every) or words in calls
    return False


def test_every_change_of_the_whole_process_is_listed_with_its_way_out():
    found = set()
    for path, nodes in trees().items():
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
        if any(changes_the_process(node, imported) for node in nodes):
            found.add(path.relative_to(ROOT).as_posix())
    assert found == WHOLE_PROCESS.keys()
