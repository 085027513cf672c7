"""The pages name what is really there: messages, commands, options, links."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from lhotse_oomfit import errors
from lhotse_oomfit.cli import main
from lhotse_oomfit.config import field_kinds

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def messages_in_the_source() -> str:
    """All of the package's texts, literals joined, with … for what is filled in."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "lhotse_oomfit").glob("*.py")))
    text = re.sub(r"""["']\s*\n?\s*[fr]?["'](?=[^"'])""", "", text).replace('\\"', '"').replace("\\'", "'")
    return re.sub(r"\{[^{}\n]*\}|%\.?\d*[sdgf]", "…", text).replace("%%", "%")


def rows_of(page: str) -> list[str]:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line.split(" | ")[0].lstrip("| ") for line in lines if line.startswith("| ") and "---" not in line]


def fragments(cell: str) -> list[str]:
    found = [
        part for text in re.findall(r"`([^`]+)`", cell) for part in re.split(r"^calibrating: |unreadable: |…|\d+", text)
    ]
    return [part.strip(" ;:,()'=") for part in found if len(part.strip(" ;:,()'=")) > 11 and "->" not in part]


@pytest.mark.parametrize("cell", [cell for cell in rows_of("troubleshooting.md") if fragments(cell)])
def test_every_message_in_troubleshooting_is_one_of_ours(cell: str) -> None:
    source = messages_in_the_source()
    for fragment in fragments(cell):
        assert fragment in source or hasattr(errors, fragment), fragment


def test_every_warning_of_ours_is_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    missing = []
    for path in sorted((ROOT / "lhotse_oomfit").glob("*.py")):
        for text in re.findall(r'(?:logger\.warning|_warn_once)\(\s*f?"([^"]+)"', path.read_text()):
            parts = [part.strip(" ;:,()'=") for part in re.split(r"%\.?\d*[sdgf]|%%|\d+|\{[^}]*\}", text)]
            told = [part for part in parts if len(part) > 7]
            if told and not any(part[:24] in page for part in told):
                missing.append(f"{path.name}: {text}")
    assert not missing, "add a row to docs/troubleshooting.md"


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"^[^#]*?\boomfit ([a-z]+)\b", page.read_text(), re.MULTILINE)
    }
    assert isinstance(main, click.Group)
    assert named >= set(main.commands)
    for page in PAGES:
        for name in re.findall(r"(?:^|`)(?:\$ )?oomfit ([a-z]+)", page.read_text(), re.MULTILINE):
            assert name in main.commands, f"{page.name}: oomfit {name}"


def test_every_option_that_a_page_gives_a_command_exists() -> None:
    assert isinstance(main, click.Group)
    for page in PAGES:
        for name, rest in re.findall(r"`(?:\$ )?oomfit ([a-z]+)([^`]*)`", page.read_text()):
            known = {flag for param in main.commands[name].params for flag in (*param.opts, *param.secondary_opts)}
            for flag in re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", rest):
                assert flag in known, f"{page.name}: oomfit {name} {flag}"


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_s_options_exist() -> None:
    table = (ROOT / "README.md").read_text().partition("## Options that matter")[2].partition("## ")[0]
    for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE):
        assert name in field_kinds() or name == "make_batch"
