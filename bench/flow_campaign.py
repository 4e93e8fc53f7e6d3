"""A campaign of flows: drawn candidates, then those of a folder; winners by a rule fixed before.

    python bench/flow_campaign.py search OUT --candidates 32          # of the built-in proposer
    python bench/flow_campaign.py search OUT --candidates 64 --files bench/flow_candidates
    python bench/flow_campaign.py publish OUT        # the winners, on the held-out texts, once
    python bench/flow_campaign.py judge OUT --judge small-rl:TEXTS:2800:256,512 --judge ...
    python bench/flow_campaign.py times OUT                           # on a quiet GPU

Winners, by p05 on the validation texts: the best two within 1.15x the bytes of one 16-bit mean
key, and the best within 2.3x. All steps resume. Options of `sparrow flow loop` go behind `--`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import sparrow
from sparrow.schema.campaign import BASELINES, CAMPAIGN, Campaign, CampaignRow

FILES = "FLOW_CANDIDATES"  # environment: the folder that `propose` reads
NEAR, WIDE = 1.15, 2.3


def propose(state: dict[str, Any]) -> dict[str, Any]:
    """The first file, by name, that was not proposed; its first line says the idea."""
    proposed = {candidate["name"] for candidate in state["candidates"]}
    for file in sorted(Path(os.environ[FILES]).rglob("*.py")):
        if file.stem not in proposed:
            source = file.read_text(encoding="utf-8")
            made = source.partition("\n")[0].strip("# ")
            return {"source": source, "name": file.stem, "made": made}
    raise ValueError(f"all files of {os.environ[FILES]} were proposed")


def winners(campaign: Campaign) -> list[CampaignRow]:
    """Best first; a row may win in one way only."""
    able = [row for row in campaign.rows if row.number >= len(BASELINES) and row.validation]
    able.sort(key=lambda row: -row.validation.worth("p05") if row.validation else 0.0)
    near = [row for row in able if (row.of_mean or 0) <= NEAR][:2]
    wide = [row for row in able if row not in near and (row.of_mean or 0) <= WIDE][:1]
    return [*near, *wide]


def sources(out: Path) -> list[str]:
    rows = winners(Campaign.load(out / CAMPAIGN))
    return [str(out / "candidates" / f"{row.number:04d}.py") for row in rows]


def search(out: Path, candidates: int, files: Path | None, options: list[str]) -> None:
    command = ["flow", "loop", str(out), "--candidates", str(candidates), *options]
    if files is not None:
        os.environ[FILES] = str(files)
        command += ["--proposer", f"{__file__}:propose"]
    os.execv(sys.executable, [sys.executable, "-m", "sparrow", *command])


def judge(out: Path, judges: list[str], against: tuple[str, ...]) -> None:
    """MODEL:TEXTS:TOKENS:BUDGETS, each to judge-MODEL-TEXTS.json."""
    for text in judges:
        model, texts, tokens, budgets = text.split(":")
        found = sparrow.flow_score(
            flow=tuple(sources(out)),
            model=model,
            texts=texts,
            tokens=int(tokens),
            budget=tuple(map(int, budgets.split(","))),
            against=against,
            out=out / "judges",
        )
        name = f"judge-{model}-{Path(texts).name}.json"
        (out / name).write_text(found.model_dump_json(indent=1), encoding="utf-8")
        for row in found.rows:
            print(name, row.flow, row.budget, json.dumps(row.model_dump(mode="json"))[:400])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["search", "publish", "judge", "times"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--judge", action="append", default=[])
    given, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(given.split())
    if args.step == "search":
        search(args.out, args.candidates, args.files, options.split())
    elif args.step == "publish":
        for row in winners(Campaign.load(args.out / CAMPAIGN)):
            entry = sparrow.flow_publish(args.out, row.number, report=print)
            held_out = entry.held_out[-1].model_dump(mode="json")
            print(json.dumps({"number": row.number, "made": row.made, "held_out": held_out}))
    elif args.step == "judge":
        judge(args.out, args.judge, BASELINES)
    else:
        flows = [*sources(args.out), *BASELINES[1:]]
        found = sparrow.flow_bench(flow=tuple(flows), brief=True, report=print)
        (args.out / "times.json").write_text(found.model_dump_json(indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
