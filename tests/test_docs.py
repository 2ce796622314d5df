"""What README.md and docs/ say is true of the code: settings, commands, options, paths, files, endpoints."""
from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from django.core.management import get_commands, load_command_class
from django.urls import Resolver404, resolve

from inference import config
from inference.__main__ import _parser as inference_parser
from mlxcel_site.environment import WEB
from tests import generated_docs
from tests.generated_docs import APPS, ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("inference", *APPS)
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)


def blocks(*languages: str) -> list[tuple[str, str]]:
    """(page:line, code) of every fenced block in one of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.S | re.M):
            if match[1] in languages:
                found.append((f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", match[2]))
    return found


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """(page:line of the block, words) of every command in the shell examples; a `console` block's commands follow a `$`."""
    for where, code in [*blocks("bash", "sh"), *((w, "\n".join(re.findall(r"^\$ (.*)$", c, re.M))) for w, c in blocks("console"))]:
        for line in code.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
            lexer.whitespace_split = True
            command: list[str] = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set("|;&<>"):
                    if command:
                        yield where, command
                    command = []
                elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                    command.append(word)


SHELL = list(shell_lines())


def examples(*program: str) -> list[tuple[str, list[str]]]:
    """(where, arguments) of the examples that run `program`, behind an interpreter of any path."""
    found = []
    for where, words in SHELL:
        words = words[1:] if re.fullmatch(r"(.*/)?python[\d.]*", words[0]) else words
        if words[:len(program)] == list(program):
            found.append((where, words[len(program):]))
    return found


@pytest.mark.parametrize("page", sorted({page for page, _ in generated_docs.PARTS.values()}))
def test_generated_parts_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert generated_docs.render(page, text) == text, "run: make docs"


def test_every_command_is_shown_at_work() -> None:
    """docs/commands.md lists all of them; here each needs an example that a reader can copy."""
    shown = [" ".join(words) for _, words in SHELL]
    assert [call for call in generated_docs.parsers() if not any(call in line for line in shown)] == []


def test_examples_of_management_commands_parse() -> None:
    found = examples("manage.py")
    assert found
    for where, (name, *arguments) in found:
        assert name in get_commands(), f"{where}: manage.py {name} does not exist"
        load_command_class(get_commands()[name], name).create_parser("manage.py", name).parse_args(arguments)


def test_examples_of_offline_commands_parse() -> None:
    found = examples("-m", "inference")
    assert found
    for _, arguments in found:
        inference_parser().parse_args(arguments)


def test_examples_and_the_help_of_make_name_its_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    phony = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split())  # type: ignore[index]
    assert targets == phony, "every target says what it does"
    assert {word for _, words in examples("make") for word in words if "=" not in word and not word.startswith("-")} <= targets


def test_addresses_in_examples_are_routes() -> None:
    found = {urlsplit(url).path for url in re.findall(r"http://(?:localhost|127\.0\.0\.1):\d+[\w./?=&-]*", TEXT)}
    endpoints = {path for line in re.findall(r"^\| (.*?) \|", (ROOT / "README.md").read_text("utf-8"), re.M)
                 for path in re.findall(r"`(?:GET |POST )?(/[^`]*)`", line)}
    assert found and endpoints
    # /v1 is the base address that OpenAI clients are given
    assert [path for path in sorted(found | endpoints) if path not in ("", "/", "/v1") and not is_route(path)] == []


def is_route(path: str) -> bool:
    try:
        resolve(re.sub(r"{\w+}", "x", path))
    except Resolver404:
        return False
    return True


def test_python_examples_compile() -> None:
    assert blocks("python")
    for where, code in blocks("python"):
        compile(code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_links_lead_somewhere() -> None:
    broken = [f"{page.name}: {target}" for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
              if "://" not in target and not (page.parent / target).exists()]
    assert broken == []


def test_every_page_is_linked_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []


def tree() -> list[str]:
    """The paths that the architecture tree names: two spaces of indentation a level, directories end in a slash."""
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"^```text tree\n(.*?)^```", text, re.S | re.M)
    paths: list[str] = []
    above: list[str] = []
    for line in block.splitlines():
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        above = above[:level]
        paths.append("".join(above) + name)
        if name.endswith("/"):
            above.append(name)
    return paths


def test_the_tree_names_files_that_exist() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_the_tree_names_every_file_of_the_packages() -> None:
    """But for families, which have a table."""
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
             if path.name != "__init__.py" and not {"migrations", "families"} & set(path.parts)}
    assert sorted(files - set(tree())) == []
    assert len(tree()) == len(set(tree()))


def test_settings_of_the_web_are_documented() -> None:
    source = (ROOT / "mlxcel_site" / "settings.py").read_text()
    read = set(re.findall(r'env\.\w+\(\s*["\'](\w+)', source))
    assert read and read <= {name for name, *_ in (*WEB, *config.describe())}, "environment.py lists them"
