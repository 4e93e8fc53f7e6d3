"""Thousands of malformed requests and broken connections against a server of `tiny`.

    PYTHONPATH=.:tests python bench/serve_faults.py --requests 10000

After every wave no sample may be in flight and no page lost; every error is an error object.
Last, a server that is killed under load and started again, with clients that retry.
"""

import argparse
import json
import random
import time

from support.http_faults import disconnect, send_malformed
from support.killing import kill_under_load
from support.serving import serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--wave", type=int, default=500)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    total: dict[int, int] = {}
    begun, left = time.monotonic(), args.requests
    with serving("tiny", max_running=16, max_waiting=16, max_n=8) as server:
        for wave in range(-(-args.requests // args.wave)):
            rng = random.Random(wave)
            broken = min(args.wave, left) // 10
            found = send_malformed(server, rng, min(args.wave, left) - broken)
            disconnect(server, rng, broken)
            server.wait_until_free()
            left -= args.wave
            for status, count in found.items():
                total[status] = total.get(status, 0) + count
            print(f"wave {wave}: {found}, {broken} left early", flush=True)
    print(json.dumps({"seconds": round(time.monotonic() - begun, 1), "answers": total}))
    if args.kills:
        print(json.dumps({"kills": args.kills, "ends": dict(kill_under_load(args.kills))}))


if __name__ == "__main__":
    main()
