"""S16: secrets are compared in constant time, and an unknown id takes the way of a wrong secret.

A statistical test of times would flake; these look at the code instead.
"""

import ast
from pathlib import Path

import modelyard

SOURCE = Path(modelyard.__file__).parent
SECRETS = ("secret", "token", "signature", "digest", "password", "hmac", "proven")


def names_in(node: ast.AST) -> list[str]:
    return [
        name
        for part in ast.walk(node)
        for name in (
            [part.id] if isinstance(part, ast.Name) else [part.attr] if isinstance(part, ast.Attribute) else []
        )
    ]


def is_secret(name: str) -> bool:
    return name.lower().lstrip("_") in {*SECRETS, *(f"internal_{kind}" for kind in SECRETS), "api_key", "admin_key"}


def is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def comparisons_of_secrets(tree: ast.AST) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or not any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            continue
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) or is_length(side) for side in sides):
            continue  # whether there is one at all, and how long it is, is no secret
        if any(is_secret(name) for side in sides for name in names_in(side)):
            found.append(node.lineno)
    return found


def test_no_secret_is_compared_with_equals() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        for line in comparisons_of_secrets(ast.parse(path.read_text("utf-8")))
    }
    # Digests of artifacts and files are public names of their content.
    of_content = (
        "control/artifacts", "control/files.py", "control/uploads.py", "domain/catalog.py", "engines/", "fleet/weights",
        "stores/sql/uploads.py",
    )  # fmt: skip
    of_leases = ("stores/sql/batches.py",)  # fencing tokens are numbers that count up
    assert {place for place in found if not place.startswith(of_content + of_leases)} == set()


def test_the_rule_bites() -> None:
    assert comparisons_of_secrets(ast.parse("if given == self.internal_token: pass")) == [1]
    assert comparisons_of_secrets(ast.parse("ok = key.secret != secret")) == [1]


def test_an_unknown_id_goes_through_the_same_comparison_as_a_wrong_secret() -> None:
    tree = ast.parse((SOURCE / "gateway" / "accounts.py").read_text("utf-8"))
    (key,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "key"]
    compared = [
        node for node in ast.walk(key) if isinstance(node, ast.Call) and "compare_digest" in names_in(node.func)
    ]
    early = [
        node.lineno
        for node in ast.walk(key)
        if isinstance(node, ast.Return) and node.lineno < max(call.lineno for call in compared)
    ]
    # The one early way out is for a token that is proven already.
    assert len(early) == 1, f"accounts.py returns at {early} before the comparison"
