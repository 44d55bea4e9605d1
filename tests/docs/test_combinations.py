"""The page of what goes together is what its program prints."""

from tools import combinations


def test_the_page_is_what_the_program_prints(repo):
    page = (repo / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert page == combinations.page()
