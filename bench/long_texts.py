"""Long texts for forced calibrations: the ten of `sparrow flow texts`, and Python's own library.

    PYTHONPATH=. python bench/long_texts.py FOLDER

Modules of the standard library with enough characters for 8192 tokens of SmolLM2, in the order of
their names; with the ten there are more than 48. Which ones they are depends on Python's version.
"""

import sys
import sysconfig
from pathlib import Path

from sparrow.calibrate.flows import texts

LEAST = 45_000  # characters; code has 3.3 to 4.6 a token of SmolLM2
MOST = 46  # modules


def main(folder: str) -> None:
    place = texts.write(folder, print)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*library.glob("*.py"), *library.glob("*/*.py")])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
    found = [
        file for file in files if not skipped & set(file.parts) and file.stat().st_size > LEAST
    ]
    for file in found[:MOST]:
        name = "-".join(file.relative_to(library).with_suffix("").parts)
        if name != "_pydecimal":
            text = file.read_bytes().decode("utf-8", errors="replace")[: texts.CUT]
            (place / f"py-{name}.txt").write_bytes(text.encode())
    print(place, len(list(place.glob("*.txt"))), "texts")


if __name__ == "__main__":
    main(sys.argv[1])
