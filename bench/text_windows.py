"""Windows of tokens of installed packages, for `sparrow distill --ids`: training, then held out.

A package is in one part only, and gives few windows; what comes out depends on what is installed.
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sparrow import models
from sparrow.dataflow.language import load_language

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt")


def packages() -> Iterator[tuple[str, list[Path]]]:
    """Packages and modules of the standard library and of this environment, with their files."""
    for kind in ("stdlib", "purelib"):
        root = Path(sysconfig.get_paths()[kind])
        for place in sorted(root.iterdir()):
            if place.name in ("site-packages", "test", "idlelib") or place.suffix == ".dist-info":
                continue
            files = sorted(place.rglob("*")) if place.is_dir() else [place]
            yield f"{kind}/{place.name}", [file for file in files if file.suffix in ENDINGS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--training", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--most", type=int, default=3, help="windows of a package")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = load_language(models.load(args.model, device="cpu")).tokenizer
    parts: dict[bool, list[list[int]]] = {False: [], True: []}
    for name, files in packages():
        held = hashlib.sha256(name.encode()).digest()[0] % 4 == 0
        text = "\n\n".join(
            file.read_text(encoding="utf-8", errors="ignore")[: 8 * args.tokens]
            for file in files[: 4 * args.most]
        )[: 8 * args.tokens * args.most]
        ids = tokenizer.encode(text)
        windows = [ids[n : n + args.tokens] for n in range(0, len(ids), args.tokens)]
        whole = [window for window in windows if len(window) == args.tokens]
        parts[held] += whole[: args.most]
    training, held_out = parts[False][: args.training], parts[True][: args.held_out]
    rows = [{"ids": window, "start": 1} for window in (*training, *held_out)]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(training)} windows for training, {len(held_out)} held out: {args.out}")


if __name__ == "__main__":
    main()
