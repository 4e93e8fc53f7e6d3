"""Which Chromium the tests of tests/browser use. `make test-browser` asks the same: run as a script
it prints the path, or says how to get one and ends with exit code 1.

A name on the path is not enough: on Ubuntu chromium-browser is a stub that only asks for a snap.
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTING = "SPARROW_CHROMIUM"
HOW = (
    "install one (apt install chromium; google-chrome; or playwright install chromium), or set "
    f"{SETTING} to its path"
)
LONGEST = 60.0  # seconds until a browser has said its version


def works(program: str) -> bool:
    """Whether it says its version."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, timeout=LONGEST)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0


def find(own: str) -> str:
    """The one that is named in the environment, else the first on the path that works, else
    playwright's `own`. Raises ValueError where there is none."""
    named = os.environ.get(SETTING)
    if named:
        if not works(named):
            raise ValueError(f"{SETTING} is {named}, of which --version fails: {HOW}")
        return named
    candidates = [*filter(None, map(shutil.which, NAMES)), own]
    found = next(filter(works, candidates), None)
    if found is None:
        raise ValueError(f"no Chromium that works ({', '.join((*NAMES, own))}): {HOW}")
    return found


def main() -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        try:
            print(find(playwright.chromium.executable_path))
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
