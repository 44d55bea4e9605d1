"""Test that no test file imports another; shared code is in tests/support."""

import re

TEST_IMPORT = re.compile(
    r"^\s*(?:from|import)\s+(tests\.(?!support\b)\S+)", re.MULTILINE
)


def test_no_test_file_imports_another(repo):
    imports = {
        str(path.relative_to(repo)): names
        for path in (repo / "tests").rglob("*.py")
        if (names := TEST_IMPORT.findall(path.read_text(encoding="utf-8")))
    }
    assert not imports, f"move what they share into tests/support: {imports}"
