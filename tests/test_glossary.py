"""Neither public names nor the pages use the words that the glossary replaces."""

import re
from pathlib import Path

import pytest

import shmstore
import shmstore.inspect
import shmstore.multimodal
import shmstore.scheduler

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = (shmstore, shmstore.multimodal, shmstore.scheduler, shmstore.inspect)


def words_of(name: str) -> list[str]:
    """Return the words of a name, split at underscores and capitals: KVCacheSpec is kv, cache, spec."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def public_names() -> set[str]:
    names = {name for module in MODULES for name in module.__all__}
    for cls in (shmstore.ObjectStoreWriter, shmstore.ObjectStoreReader):
        names |= {name for name in dir(cls) if not name.startswith("_")}
    return names


def replaced() -> list[str]:
    table = GLOSSARY.read_text(encoding="utf-8").partition("| term | not |\n|---|---|\n")[2]
    return [word for row in re.findall(r"^\| .+? \| (.+?) \|$", table, re.M) for word in row.split(", ")]


def prose(text: str) -> str:
    """Return a page without code and without the tables that are made of docstrings."""
    text = re.sub(r"<!-- .*?: begin -->.*?<!-- .*?: end -->", "", text, flags=re.S)
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def used(word: str, text: str) -> bool:
    return re.search(rf"\b{word}\b", text, re.I) is not None


def test_a_name_of_another_word_is_seen() -> None:
    assert ["kv", "cache", "spec"] == words_of("KVCacheSpec")
    assert used("books", prose("a `books` and the books"))
    assert not used("books", prose("a `books` and notebooks"))


def test_no_public_name_has_a_word_that_the_glossary_replaces() -> None:
    assert len(replaced()) > 10
    assert set() == set(replaced()) & {word for name in public_names() for word in words_of(name)}


@pytest.mark.parametrize("page", [page for page in PAGES if page != GLOSSARY], ids=lambda page: page.name)
def test_no_page_has_a_word_that_the_glossary_replaces(page: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    assert [] == [word for word in replaced() if used(word, text)]
