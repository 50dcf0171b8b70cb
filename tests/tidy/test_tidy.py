"""House rules that no linter knows. Each failure says what to do instead.

Other rules are kept by ruff, mypy and import-linter; see ``pyproject.toml``.
"""

import ast
import importlib.util
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "modelyard"
FILES = sorted(SOURCE.rglob("*.py"))
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500
FORBIDDEN_WORDS = ("Manager", "Helper", "Util", "Service", "Processor")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))


def lines_of_code(file: Path) -> set[int]:
    """Return the numbers of the lines that carry code: no comments, no blank lines, no docstrings."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type not in quiet and token.type != tokenize.ENCODING:
                found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            words = node.body[0]
            found.difference_update(range(words.lineno, (words.end_lineno or words.lineno) + 1))
    return found


def functions_of(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_short(file: Path) -> None:
    code = lines_of_code(file)
    for function in functions_of(file):
        count = sum(1 for line in range(function.lineno, (function.end_lineno or 0) + 1) if line in code)
        assert count <= FUNCTION_LINES_MAX, (
            f"{name_of(file)}:{function.lineno}: {function.name} has {count} lines of code, the limit is "
            f"{FUNCTION_LINES_MAX}. Ifs up, loops down: let the parent decide and move what it computes into leaves."
        )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short_and_say_what_they_are(file: Path) -> None:
    count = len(file.read_text("utf-8").splitlines())
    assert count <= FILE_LINES_MAX, (
        f"{name_of(file)} has {count} lines, the limit is {FILE_LINES_MAX}: one idea a file."
    )
    assert ast.get_docstring(tree_of(file)), (
        f"{name_of(file)}: open with what it is, what it promises, and why it is so."
    )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_classes_are_named_by_what_they_are(file: Path) -> None:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef):
            bad = [word for word in FORBIDDEN_WORDS if node.name.endswith(word)]
            assert not bad, f"{name_of(file)}:{node.lineno}: {node.name}: say what it is (a noun of DESIGN section 2)."


@pytest.mark.parametrize("file", sorted((SOURCE / "policy").glob("*.py")), ids=name_of)
def test_policies_are_pure(file: Path) -> None:
    for node in ast.walk(tree_of(file)):
        where = f"{name_of(file)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), (
            f"{where}: a policy never waits; take what it needs."
        )
        assert not isinstance(node, ast.Global), f"{where}: a policy keeps its memory in a value that its caller owns."


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_what_runs_code_or_shells_from_data_is_not_used(file: Path) -> None:
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call):
            continue
        where = f"{name_of(file)}:{node.lineno}"
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "os.system", "yaml.load", "marshal.loads", "shelve.open"), (
            f"{where}: {called}"
        )
        shell = [word for word in node.keywords if word.arg == "shell" and getattr(word.value, "value", True)]
        assert not shell, f"{where}: pass a list of arguments, never shell=True."


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_broad_excepts_stand_at_marked_boundaries_only(file: Path) -> None:
    lines = file.read_text("utf-8").splitlines()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            near = "\n".join(lines[max(0, node.lineno - 2) : node.lineno + 1])
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert caught not in ("", "Exception", "BaseException") or passes_on or "boundary:" in near, (
                f"{name_of(file)}:{node.lineno}: catch the narrowest type, or mark '# boundary: <why>'."
            )


def reference_tool():
    location = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text("utf-8")


def test_the_generated_reference_pages_are_current() -> None:
    tool = reference_tool()
    stale = [name for name, parts in tool.pages().items() if page(name) != tool.render(name, *parts)]
    assert not stale, f"{stale} lag behind the source: run 'python tools/reference.py'."


def test_every_error_code_is_in_the_reference() -> None:
    codes = reference_tool().error_codes()
    assert len(codes) > 25
    missing = [code.code for code in codes if f"`{code.code}`" not in page("errors.md")]
    assert not missing, f"describe {missing} in docs/reference/errors.md"


def test_every_setting_is_in_the_reference_and_has_a_reason() -> None:
    settings = reference_tool().settings()
    assert len(settings) > 30
    missing = [setting.name for setting in settings if f"`{setting.name}`" not in page("configuration.md")]
    assert not missing, f"describe {missing} in docs/reference/configuration.md"
    silent = [setting.name for setting in settings if not setting.why]
    assert not silent, f"say in a docstring after the field why {silent} exist"


def test_every_setting_the_program_knows_is_found_by_the_tool() -> None:
    import msgspec

    from modelyard.config import Config, PriceConfig

    def names(kind: type, prefix: str) -> Iterator[str]:
        for field in msgspec.structs.fields(kind):
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                yield from names(field.type, f"{prefix}{field.name}.")
            elif field.type == dict[str, PriceConfig]:
                yield from names(PriceConfig, f"{prefix}{field.name}.<model>.")
            else:
                yield prefix + field.name

    assert {setting.name for setting in reference_tool().settings()} == set(names(Config, ""))


def test_every_metric_is_in_the_reference() -> None:
    metrics = reference_tool().metrics()
    assert metrics, "no metric name found in observe/metrics.py"
    missing = [metric.name for metric in metrics if f"`{metric.name}`" not in page("metrics.md")]
    assert not missing, f"describe {missing} in docs/reference/metrics.md"
    silent = [metric.name for metric in metrics if not metric.why]
    assert not silent, f"give {silent} a help text"
