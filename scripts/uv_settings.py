"""Print pip's settings of this machine as the environment variables of uv, one NAME=value a line.

uv reads none of pip's files and variables; whoever has pip look at another index or folder wants uv to look there too.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

#: pip's setting -> the variable, and what stands between several values.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
SECTIONS = ("global", "install", ":env:")  # the later one counts


def settings(listing: str) -> dict[str, str]:
    """Return the variables for what `pip config list` printed."""
    found: dict[str, str] = {}
    for section in SECTIONS:
        for line in listing.splitlines():
            where, _, setting = line.partition(".")
            key, _, value = setting.partition("=")
            if where == section and key in NAMES:
                name, separator = NAMES[key]
                found[name] = separator.join(ast.literal_eval(value).split())
    # As pip does: the best version of all indexes, not that of the first one that has the package.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | found


def main() -> None:
    """Ask the pip of this interpreter, and print what nobody has set for uv already."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for name, value in settings(listing).items():
        if name not in os.environ:
            print(f"{name}={value}")


if __name__ == "__main__":
    main()
