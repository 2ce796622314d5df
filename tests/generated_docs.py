"""The parts of the documentation that are made from code. `make docs` writes them; test_docs.py keeps them equal."""
from __future__ import annotations

import argparse
import html
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APPS = ("mlxcel_site", "embeddings", "rerank")


def table(*rows: tuple[str, ...]) -> str:
    """Markdown: the first row is the head. Cells that begin with a backtick are code."""
    def cell(text: str) -> str:
        return (text if text.startswith("`") else html.escape(text, quote=False)).replace("|", "\\|")

    head, *body = ("| " + " | ".join(map(cell, row)) + " |" for row in rows)
    return "\n".join([head, "| --- " * len(rows[0]) + "|", *body])


def settings() -> str:
    from inference.config import describe
    from mlxcel_site.environment import WEB

    return table(("setting", "default", "meaning"), ("**models**", "", ""), *map(_setting, describe()),
                 ("**web**", "", ""), *map(_setting, WEB))


def _setting(row: tuple[str, str, str]) -> tuple[str, str, str]:
    name, default, meaning = row
    return f"`{name}`", f"`{default}`" if default and " " not in default else default, meaning


def families() -> str:
    """One row a family: its file's first sentence, and what it says it serves."""
    from inference.families import model_types

    modules = {module.__name__: module for module in model_types().values()}
    return table(("family", "model types", "architectures"), *(
        ((module.__doc__ or "").partition(". ")[0].strip(), ", ".join(f"`{t}`" for t in module.MODEL_TYPES),
         ", ".join(f"`{a}`" for a in module.ARCHITECTURES))
        for module in modules.values()))


def rerankers() -> str:
    """One row a way of scoring."""
    from inference.rerankers import ways

    return table(("reranker", "model types", "architectures", "instructions"), *(
        (f"`{way.SCORING}`: {(way.__doc__ or '').strip().splitlines()[0]}", ", ".join(f"`{t}`" for t in way.MODEL_TYPES),
         f"`{way.ARCHITECTURES}`", "yes" if way.INSTRUCTIONS else "no") for way in ways()))


def parsers() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """The project's own commands, by how they are called: what they do, and their parser."""
    from django.core.management import get_commands, load_command_class

    from inference.__main__ import _parser

    web = {f"manage.py {name}": load_command_class(app, name) for name, app in sorted(get_commands().items()) if app in APPS}
    found = {call: (command.help, command.create_parser(*call.split())) for call, command in web.items()}
    (offline,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    about = {action.dest: action.help or "" for action in offline._choices_actions}
    return found | {f"python -m inference {name}": (about[name].capitalize() + ".", parser) for name, parser in offline.choices.items()}


def commands() -> str:
    """Every command with its arguments and options, but for those that Django gives to each."""
    from django.core.management.base import BaseCommand

    inherited = BaseCommand().create_parser("manage.py", "")._option_string_actions.keys()
    parts = []
    for call, (about, parser) in parsers().items():
        expand = parser._get_formatter()._expand_help
        own = [action for action in parser._actions if not inherited & set(action.option_strings)]
        rows = [(f"`{_spelling(action)}`", expand(action) if action.help else "") for action in own]
        parts.append("\n\n".join([f"## {call}", about, *([table(("argument", "meaning"), *rows)] if rows else [])]))
    return "\n\n".join(parts)


def _spelling(action: argparse.Action) -> str:
    metavar = action.metavar or (("{" + ",".join(map(str, action.choices)) + "}") if action.choices else action.dest.upper())
    value = "" if action.nargs == 0 else str(metavar) + (" ..." if action.nargs in ("+", "*") else "")
    return " ".join(filter(None, (", ".join(action.option_strings), value)))


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("README.md", settings), "families": ("README.md", families),
    "rerankers": ("README.md", rerankers), "commands": ("docs/commands.md", commands)}


def render(page: str, text: str) -> str:
    """`text` of a page with everything between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, (owner, make) in PARTS.items():
        if owner == page:
            pair = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.S)
            if len(pair.findall(text)) != 1:
                raise ValueError(f"{page} holds {len(pair.findall(text))} pairs of <!-- {name} --> and <!-- /{name} -->; one is expected")
            before, after = pair.split(text)
            text = f"{before}{make()}\n{after}"
    return text


def main() -> None:
    import django

    django.setup()
    for page in {owner for owner, _ in PARTS.values()}:
        path = ROOT / page
        path.write_text(render(page, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
