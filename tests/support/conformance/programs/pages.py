"""Reads the pages of docs/clients: what a user pastes is what the programs are driven with.

A page names a file by a line that ends in its path and a colon, as "`~/.codex/config.toml`:", and the code after it is
the file's content. Lines `export NAME=VALUE` of a code block are the environment.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.stack import ROOT

PAGES = ROOT / "docs" / "clients"
GATEWAY = "http://127.0.0.1:8000"  # of the pages
_FILE = re.compile(r"^`~/([^`]+)`.*:$")
_EXPORT = re.compile(r"^(?:\$ )?export ([A-Z_0-9]+)=(\S*)(?:\s+#.*)?$")


@dataclass(frozen=True, slots=True)
class Config:
    """What a page has its readers paste: files by their path below the home folder, and the environment."""

    files: dict[str, str]
    environment: dict[str, str]

    def at(self, url: str) -> "Config":
        """Return the config for a gateway at `url`."""
        return replace(
            self,
            files={path: content.replace(GATEWAY, url) for path, content in self.files.items()},
            environment={name: value.replace(GATEWAY, url) for name, value in self.environment.items()},
        )

    def write(self, home: Path) -> None:
        """Write the files below a home folder."""
        for path, content in self.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(content, "utf-8")


def read_config(page: str) -> Config:
    """Return what the text of a page has its readers paste."""
    files, environment = dict[str, str](), dict[str, str]()
    named: str | None = None
    block: list[str] | None = None
    for line in page.splitlines():
        if line.startswith("```"):
            if block is not None and named is not None:
                files[named] = "\n".join(block) + "\n"
            if block is not None:
                named = None
            block = [] if block is None else None
        elif block is not None:
            block.append(line)
            if named is None and (found := _EXPORT.match(line)):
                environment[found[1]] = found[2]
        elif found := _FILE.match(line):
            named = found[1]
    return Config(files, environment)
