"""What several test files share stands in tests/support."""

import re

OF_A_TEST = re.compile(r"^\s*(?:from|import)\s+(tests\.(?!support\b)\S+)", re.MULTILINE)


def test_no_test_file_imports_another(repo):
    found = {
        str(path.relative_to(repo)): names
        for path in (repo / "tests").rglob("*.py")
        if (names := OF_A_TEST.findall(path.read_text(encoding="utf-8")))
    }
    assert not found, f"move what they share into tests/support: {found}"
