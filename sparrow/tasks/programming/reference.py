"""What the operations compute: the definition that outputs of hidden tests come from.

Written apart from the code of solutions in operations.toml, and otherwise where possible.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, groupby, pairwise
from typing import Any

VOWELS = frozenset("aeiou")
Cell = tuple[int, int]


def power_sequence(x: int, n: int, m: int, a: int, c: int) -> list[int]:
    return list(accumulate(range(n - 1), lambda v, _: (a * v + c) % m, initial=x % m))


def linear_recurrence(x: int, a: int, b: int, c: int, m: int) -> int:
    terms = [a, b]
    while len(terms) < 50:
        terms.append((c * terms[-1] + terms[-2]) % m)
    return terms[abs(x) % 50]


def ways_to_pay(x: int, coins: Sequence[int]) -> int:
    def ways(amount: int, usable: Sequence[int]) -> int:
        if not usable:
            return int(amount == 0)
        return sum(ways(rest, usable[1:]) for rest in range(amount, -1, -usable[0]))

    return ways(abs(x) % 40, coins)


def collatz_length(x: int, k: int) -> int:
    path = [abs(x) % k + 1]
    while path[-1] != 1:
        path.append(collatz_step(path[-1]))
    return len(path) - 1


def collatz_step(v: int) -> int:
    return 3 * v + 1 if v & 1 else v >> 1


def to_base(x: int, k: int) -> str:
    return ("" if abs(x) < k else to_base(abs(x) // k, k)) + str(abs(x) % k)


def rotate(x: list[int], k: int) -> list[int]:
    ring = deque(x)
    ring.rotate(-k)
    return list(ring)


def cancel(x: Sequence[Any]) -> list[Any]:
    items = list(x)
    while equal := [i for i, (left, right) in enumerate(pairwise(items)) if left == right]:
        del items[equal[0] : equal[0] + 2]
    return items


def ring_automaton(x: list[int], t: int, m: int) -> list[int]:
    if not t or not x:
        return x
    return ring_automaton([sum(pair) % m for pair in zip(x, x[1:] + x[:1], strict=True)], t - 1, m)


def circle_order(x: list[int], k: int) -> list[int]:
    ring, removed = deque(x), []
    while ring:
        ring.rotate(1 - k)
        removed.append(ring.popleft())
    return removed


def most_frequent(x: list[int]) -> int:
    counts = Counter(x)
    return min((v for v in counts if counts[v] == max(counts.values())), default=0)


def blocks(x: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield all blocks of neighbours, the empty one too."""
    yield x[:0]
    for start, end in combinations(range(len(x) + 1), 2):
        yield x[start:end]


def best_apart(x: list[int]) -> int:
    best = [0, 0]
    for v in x:
        best.append(max(best[-1], best[-2] + v))
    return best[-1]


def longest_increasing(x: list[int]) -> int:
    ends: list[int] = []  # smallest end of an increasing subsequence of each length
    for v in x:
        place = sum(end < v for end in ends)
        ends[place : place + 1] = [v]
    return len(ends)


def subset_sum(x: list[int], k: int) -> int:
    reached = 1  # bit s: the sum s is reached
    for v in x:
        reached |= reached << max(v, 0)
    return max(s for s in range(k + 1) if reached >> s & 1)


def caesar(x: str, k: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return x.translate(str.maketrans(letters, letters[k:] + letters[:k]))


def expand_digits(x: str) -> str:
    written: list[str] = []
    for c in x:
        written += [c] if c.isalpha() else written[-1:] * int(c)
    return "".join(written)


def rewrite(x: str, n: int, old: str, new: str) -> str:
    before, found, after = x.partition(old)
    return rewrite(before + new + after, n - 1, old, new) if n and found else x


def common_subsequence(x: str, word: str) -> int:
    for count in range(len(word), 0, -1):
        for part in combinations(word, count):
            rest = iter(x)
            if all(c in rest for c in part):
                return count
    return 0


def robot(x: str) -> list[int]:
    place, heading = 0j, 1j
    for c in x:
        heading *= 1j if c.isdigit() else -1j if c in VOWELS else 1
        place += 0 if c.isdigit() or c in VOWELS else heading
    return [int(place.real), int(place.imag)]


def letter_blocks(x: str) -> list[str]:
    return ["".join(block) for letters, block in groupby(x, str.isalpha) if letters]


def parse_log(x: str) -> list[tuple[str, int]]:
    items = [item.partition(":") for item in x.split(";")] if x else []
    return [(name, int(value)) for name, _, value in items]


def totals(x: list[tuple[str, int]]) -> list[tuple[str, int]]:
    values = defaultdict(list)
    for name, value in x:
        values[name].append(value)
    return [(name, sum(found)) for name, found in values.items()]


def last_entries(x: list[tuple[str, int]]) -> list[tuple[str, int]]:
    last = {name: i for i, (name, _) in enumerate(x)}
    return [x[i] for i in sorted(last.values())]


def merge_intervals(x: list[list[int]]) -> list[list[int]]:
    merged = sorted(x)
    for (a, b), (c, d) in combinations(merged, 2):
        if max(a, c) <= min(b, d):
            others = [pair for pair in merged if pair not in ([a, b], [c, d])]
            return merge_intervals([*others, [min(a, c), max(b, d)]])
    return merged


def members(x: list[list[int]]) -> Counter[int]:
    """Count for each integer the intervals that contain it."""
    return Counter(v for start, end in x for v in range(start, end + 1))


def disjoint(x: list[list[int]]) -> int:
    first = min((end for _, end in x), default=0)
    return 1 + disjoint([pair for pair in x if pair[0] > first]) if x else 0


def cells(x: list[list[int]]) -> dict[Cell, int]:
    return {(i, j): v for i, row in enumerate(x) for j, v in enumerate(row)}


def around(cell: Cell) -> list[Cell]:
    i, j = cell
    return [(i - 1, j), (i, j - 1), (i, j + 1), (i + 1, j)]


def blur(x: list[list[int]], t: int, m: int) -> list[list[int]]:
    for _ in range(t):
        old = cells(x)
        new = {c: (old[c] + sum(old.get(n, 0) for n in around(c))) % m for c in old}
        x = [[new[i, j] for j in range(len(x[0]))] for i in range(len(x))]
    return x


def spiral(x: list[list[int]]) -> list[int]:
    left, order = cells(x), []
    cell, step = (0, 0), (0, 1)
    while left:
        order.append(left.pop(cell))
        if (cell[0] + step[0], cell[1] + step[1]) not in left:
            step = step[1], -step[0]
        cell = cell[0] + step[0], cell[1] + step[1]
    return order


def regions(x: list[list[int]], k: int) -> int:
    group = {cell: cell for cell, v in cells(x).items() if v > k}
    for cell in group:
        for near in around(cell):
            if near in group and group[near] != group[cell]:
                old, new = group[near], group[cell]
                group.update({c: new for c in group if group[c] == old})
    return len(set(group.values()))


def cheapest_path(x: list[list[int]]) -> int:
    costs: dict[Cell, int] = {}
    for (i, j), v in cells(x).items():
        before = [costs[c] for c in ((i - 1, j), (i, j - 1)) if c in costs]
        costs[i, j] = v + min(before, default=0)
    return costs[len(x) - 1, len(x[0]) - 1]


def stack_machine(x: list[str], m: int) -> list[int]:
    stack: list[int] = []
    for instruction in x:
        match instruction.split(), stack[::-1]:
            case ["push", v], _:
                stack = [*stack, int(v)]
            case ["add"], [v, w, *_]:
                stack = [*stack[:-2], (v + w) % m]
            case ["mul"], [v, w, *_]:
                stack = [*stack[:-2], v * w % m]
            case ["swap"], [v, w, *_]:
                stack = [*stack[:-2], v, w]
            case ["dup"], [v, *_]:
                stack = [*stack, v]
            case ["drop"], [_, *_]:
                stack = stack[:-1]
    return stack


def _sizes_of_groups(keys: Sequence[Any]) -> list[int]:
    return sorted(Counter(keys).values(), reverse=True)


REFERENCE: dict[str, Callable[..., Any]] = {
    # two integers
    "sum_of_two": sum,
    "difference": lambda x: x[0] + -x[1],
    "product": math.prod,
    "larger": lambda x: sorted(x)[1],
    "distance_of_two": lambda x: max(x) - min(x),
    "weighted_sum": lambda x, k: sum([x[0]] * k) + x[1],
    "even_or_other": lambda x: x[x[0] & 1],
    # one number
    "add": lambda v, k: k + v,
    "subtract": lambda v, k: -k + v,
    "multiply": lambda v, k: k * v,
    "square": lambda v: v**2,
    "absolute": lambda v: max(v, -v),
    "negate": lambda v: 0 - v,
    "remainder": lambda v, k: v - k * (v // k),
    "divide": lambda v, k: (v - v % k) // k,
    "digit_sum": lambda v: sum(abs(v) // 10**i % 10 for i in range(20)),
    "collatz_step": collatz_step,
    "clamp": lambda v, k: sorted((-k, v, k))[1],
    "reverse_digits": lambda v: int("-" * (v < 0) + "".join(reversed(str(v).strip("-")))),
    "distance_from": lambda v, k: max(v - k, k - v),
    # an integer to something else
    "digits": lambda x: list(map(int, str(x).strip("-"))),
    "divisors": lambda x, k: [d for d in range(1, k + 1) if (abs(x) % k + 1) % d == 0],
    "power_sequence": power_sequence,
    "linear_recurrence": linear_recurrence,
    "ways_to_pay": ways_to_pay,
    "collatz_length": collatz_length,
    "to_base": to_base,
    # lists of integers
    "keep_greater": lambda x, k: list(filter(lambda v: v - k > 0, x)),
    "keep_even": lambda x: [v for v in x if not v & 1],
    "drop_multiples": lambda x, k: [v for v in x if v % k],
    "keep_remainder": lambda x, k, r: [v for v in x if (v - r) % k == 0],
    "reverse": lambda x: list(reversed(x)),
    "sort": sorted,
    "sort_by_size": lambda x: sorted(sorted(x), key=abs),
    "unique": lambda x: [v for i, v in enumerate(x) if v not in x[:i]],
    "running_sums": lambda x: list(accumulate(x)),
    "neighbour_differences": lambda x: [after - before for before, after in pairwise(x)],
    "drop_first": lambda x, k: [v for i, v in enumerate(x) if i >= k],
    "every_nth": lambda x, k: [v for i, v in enumerate(x) if i % k == 0],
    "rotate": rotate,
    "chunk_sums": lambda x, k: [sum(x[k * i :][:k]) for i in range(-(-len(x) // k))],
    "ranks": lambda x: [len({w for w in x if w < v}) for v in x],
    "next_greater": lambda x, none: [
        next((w for w in x[i:] if w > v), none) for i, v in enumerate(x)
    ],
    "cancel_pairs": cancel,
    "ring_automaton": ring_automaton,
    "circle_order": circle_order,
    "to_letters": lambda x: "".join("abcdefghijklmnopqrstuvwxyz"[v % 26] for v in x),
    # lists of integers to one integer
    "total": sum,
    "maximum": lambda x: sorted(x)[-1] if x else 0,
    "distinct": lambda x: len(Counter(x)),
    "spread": lambda x: max((v - w for v in x for w in x), default=0),
    "alternating_sum": lambda x: sum(-v if i & 1 else v for i, v in enumerate(x)),
    "most_frequent": most_frequent,
    "second_largest": lambda x, none: max({v for v in x if v < max(x)}, default=none),
    "polynomial": lambda x, a, m: sum(v * a**i for i, v in enumerate(reversed(x))) % m,
    "longest_rise": lambda x: max(len(b) for b in blocks(x) if all(v < w for v, w in pairwise(b))),
    "best_block": lambda x: max(map(sum, blocks(x))),
    "best_apart": best_apart,
    "longest_increasing": longest_increasing,
    "subset_sum": subset_sum,
    # strings
    "reverse_text": lambda x: "".join(reversed(x)),
    "drop_vowels": lambda x: "".join(c for c in x if c not in VOWELS),
    "sort_text": lambda x: "".join(sorted(x, key=ord)),
    "unique_text": lambda x: "".join(c for i, c in enumerate(x) if c not in x[:i]),
    "caesar": caesar,
    "run_lengths": lambda x: "".join(f"{c}{len(list(run))}" for c, run in groupby(x)),
    "expand_digits": expand_digits,
    "rewrite": rewrite,
    "count_vowels": lambda x: sum(map(x.count, VOWELS)),
    "digit_total": lambda x: sum(d * x.count(str(d)) for d in range(10)),
    "longest_palindrome": lambda x: max(len(b) for b in blocks(x) if b == b[::-1]),
    "longest_without_repeat": lambda x: max(len(b) for b in blocks(x) if len(b) == len(set(b))),
    "common_subsequence": common_subsequence,
    "robot": robot,
    "alphabet_positions": lambda x: [int(c, 36) - 9 * c.isalpha() for c in x],
    "cut": lambda x, k: [x[k * i :][:k] for i in range(-(-len(x) // k))],
    "letter_blocks": letter_blocks,
    # words
    "sort_words": lambda x: sorted(sorted(x), key=len),
    "unique_words": lambda x: [w for i, w in enumerate(x) if w not in x[:i]],
    "long_words": lambda x, k: [w for w in x if w[k:]],
    "word_lengths": lambda x: list(map(len, x)),
    "initials": lambda x: "".join(w[:1] for w in x),
    "longest_word": lambda x: sorted(x, key=len, reverse=True)[0] if x else "",
    "join_words": "".join,
    "anagram_groups": lambda x: _sizes_of_groups([frozenset(Counter(w).items()) for w in x]),
    # logs and entries
    "parse_log": parse_log,
    "totals": totals,
    "entries_above": lambda x, k: [entry for entry in x if not entry[1] < k],
    "last_entries": last_entries,
    "ranking": lambda x: [n for n, _ in sorted(sorted(x), key=lambda e: e[1], reverse=True)],
    "entry_values": lambda x: [e[1] for e in x],
    # intervals
    "merge_intervals": merge_intervals,
    "long_intervals": lambda x, k: [pair for pair in x if pair[0] + k <= pair[1]],
    "sort_by_end": lambda x: sorted(sorted(x), key=lambda pair: pair[1]),
    "interval_lengths": lambda x: [pair[1] - pair[0] for pair in x],
    "covered": lambda x: len(members(x)),
    "deepest": lambda x: max(members(x).values(), default=0),
    "disjoint": disjoint,
    # grids
    "turn_right": lambda x: [[row[j] for row in reversed(x)] for j in range(len(x[0]))],
    "row_sums": lambda x: list(map(sum, x)),
    "diagonal": lambda x: [v for (i, j), v in cells(x).items() if i == j],
    "blur": blur,
    "spiral": spiral,
    "regions": regions,
    "cheapest_path": cheapest_path,
    # programs
    "stack_machine": stack_machine,
    "pushed": lambda x: [int(line.removeprefix("push ")) for line in x if " " in line],
}
