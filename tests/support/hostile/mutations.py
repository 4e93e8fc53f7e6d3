"""Variants of hostile programs, drawn from a seed: other names, wrappings, constants, company."""

# ruff: noqa: E501

import ast
import base64
import builtins
import random
import textwrap
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from sparrow.sandbox.base import Ending, Limits, Mode
from support.hostile import KINDS
from support.hostile.kinds import LIMITS, Kind, complete, skipped

ANY: tuple[Ending, ...] = ("exited", "time", "wall", "output")
ODD = (0, 1, -1, 2, 3, 255, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63))
JUNK = (
    "x{n} = [i * {n} for i in range({n} % 50)]",
    "def f{n}(a, b={n}):\n    return a + b",
    "class C{n}:\n    y = {n}",
    "import math, json, collections",
    "print('ordinary output {n}')",
    "sorted({{'a': {n}}}.items())",
    "# \u00e9\u4e2d\U0001f600 {n}",
    "assert {n} + 1 > {n}",
    "try:\n    {n} / 0\nexcept ZeroDivisionError:\n    pass",
    "g{n} = (i for i in range({n}))\nnext(g{n}, 0)",
    "import gc; gc.disable()",
    "sys.setrecursionlimit(1000 + {n} % 9000)",
    "sys.setswitchinterval(0.0001)",
)


class Variant(NamedTuple):
    """A program of the campaign."""

    name: str
    kinds: tuple[Kind, ...]
    source: str
    mode: Mode
    limits: Limits
    endings: tuple[Ending, ...]


def variant(
    number: int, seed: int, aim: dict[str, Any], kinds: list[Kind] | None = None
) -> Variant:
    """The variant of that number: the same seed and number give the same."""
    dice = random.Random(f"{seed}/{number}")
    pool = kinds or [kind for kind in KINDS.values() if not kind.finding]
    chosen = dice.choices(pool, [0.15 if _is_slow(kind) else 1 for kind in pool])
    company = dice.choices((0, 1, 2), (7, 2, 1))[0]
    if chosen[0].mode == "script" and company:
        others = [
            kind
            for kind in pool
            if kind.mode == "script" and not _is_slow(kind) and _room(kind) == _room(chosen[0])
        ]
        chosen += dice.choices(others or chosen, k=company)
        dice.shuffle(chosen)
    bodies, plain = [], len(chosen) == 1
    for kind in chosen:
        body, same = mutate(kind.source.replace("{SKIP}", repr(skipped())), dice)
        plain &= same
        bodies.append(body if len(chosen) == 1 else _guarded(body))
    limits = _limits(chosen, dice)
    endings = chosen[0].endings if plain else ANY
    if limits.wall_seconds < 3:
        endings = (*endings, "wall")
    name = f"{number}: " + " + ".join(kind.name for kind in chosen)
    source = complete("\n".join(bodies), aim, every=True)
    return Variant(name, tuple(chosen), source, chosen[0].mode, limits, endings)


def _is_slow(kind: Kind) -> bool:
    return kind.slow or bool({"wall", "time"} & set(kind.endings))


def _room(kind: Kind) -> int:
    return int(kind.limits.get("scratch_bytes", 0))  # what fits is written, and no success


def _limits(kinds: list[Kind], dice: random.Random) -> Limits:
    """The widest of each limit; where a program may sleep, a short time."""
    found: dict[str, Any] = dict(LIMITS)
    for kind in kinds:
        for name, value in kind.limits.items():
            found[name] = max(found[name], value) if name in found else value
    waits = any("wall" in kind.endings for kind in kinds)
    if waits or dice.random() < 0.05:  # also while it starts
        found["wall_seconds"] = dice.choice((0.01, 0.03, 0.06, 0.1, 0.5, 1.0, 1.5))
    return Limits(**found)


def mutate(source: str, dice: random.Random) -> tuple[str, bool]:
    """A variant of a source, and whether it must end as the source itself does."""
    same = True
    if len(source) > 200_000 or "\0" in source or not _parses(source):
        return source, True
    if dice.random() < 0.5:
        source = _renamed(source, dice)
    if dice.random() < 0.3:
        source, changed = _other_constants(source, dice)
        same &= not changed
    for _ in range(dice.choice((0, 0, 1, 1, 2, 3))):
        wrap = dice.choice(WRAPPERS)
        source = wrap(source, dice)
        same &= wrap in SAME
    for _ in range(dice.choice((0, 1, 3))):
        junk = dice.choice(JUNK).format(n=dice.randrange(10**6))
        parts = [junk, source] if dice.random() < 0.7 else [source, junk]
        source = "\n".join(parts)
    return source, same


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# Names and constants.


class _Rename(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node


def _renamed(source: str, dice: random.Random) -> str:
    """Other names for the variables of a program; not for those that other nodes name, too."""
    tree = ast.parse(source)
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    others = {"AIM", "NUMBERS", *dir(builtins)}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                others.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                others |= set(names)
            case ast.alias(name=name, asname=given):
                others |= {name.partition(".")[0], given or name}
            case ast.ExceptHandler(name=str(name)):
                others.add(name)
    names = {name: f"v{dice.randrange(10**9)}" for name in sorted(stored - others)}
    return ast.unparse(_Rename(names).visit(tree)) + "\n"


class _Constants(ast.NodeTransformer):
    def __init__(self, dice: random.Random) -> None:
        self._dice, self.changed = dice, False

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "reach":
            for place, word in enumerate(node.args[1:], 1):
                number = isinstance(word, ast.Constant) and type(word.value) is int
                if number and self._dice.random() < 0.3:
                    node.args[place] = ast.Constant(self._dice.choice(ODD))
                    self.changed = True
        return node


def _other_constants(source: str, dice: random.Random) -> tuple[str, bool]:
    """Other numbers in raw calls none of which may succeed."""
    change = _Constants(dice)
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
    return (ast.unparse(tree) + "\n", True) if change.changed else (source, False)


# Wrappings.

Wrap = Callable[[str, random.Random], str]


def _guarded(source: str) -> str:
    return f"try:\n    exec(compile({source!r}, 'part', 'exec'), dict(globals()))\nexcept BaseException as error:\n    os.write(2, repr(error)[:200].encode('ascii', 'replace') + b'\\n')\n"


def _exec(source: str, dice: random.Random) -> str:
    return f"exec({source!r}, globals())\n"


def _eval(source: str, dice: random.Random) -> str:
    return f"eval(compile({source!r}, 'name', 'exec'), globals())\n"


def _base64(source: str, dice: random.Random) -> str:
    data = base64.b64encode(source.encode()).decode()
    return f"import base64\nexec(base64.b64decode({data!r}), globals())\n"


def _zlib(source: str, dice: random.Random) -> str:
    return f"import zlib\nexec(zlib.decompress({zlib.compress(source.encode())!r}), globals())\n"


def _codes(source: str, dice: random.Random) -> str:
    key = dice.randrange(1, 200)
    return f"exec(''.join(chr(c ^ {key}) for c in {[ord(c) ^ key for c in source]}), globals())\n"


def _thread(source: str, dice: random.Random) -> str:
    return f"import threading\nt = threading.Thread(target=lambda: exec({source!r}, globals()))\nt.start()\nt.join()\n"


def _function(source: str, dice: random.Random) -> str:
    return f"def outer():\n    def inner():\n        exec({source!r}, globals())\n    return inner\nouter()()\n"


def _class(source: str, dice: random.Random) -> str:
    return f"class Thing:\n    def __init__(self):\n        exec({source!r}, globals())\nThing()\n"


def _generator(source: str, dice: random.Random) -> str:
    return (
        f"def steps():\n    yield 1\n    exec({source!r}, globals())\n    yield 2\nlist(steps())\n"
    )


def _decorator(source: str, dice: random.Random) -> str:
    return f"def now(function):\n    function()\n    return function\n@now\ndef run():\n    exec({source!r}, globals())\n"


def _tried(source: str, dice: random.Random) -> str:
    return f"try:\n{textwrap.indent(f'exec({source!r}, globals())', '    ')}\nfinally:\n    pass\n"


def _swallowed(source: str, dice: random.Random) -> str:
    return f"try:\n    exec({source!r}, globals())\nexcept BaseException:\n    pass\n"


def _at_exit(source: str, dice: random.Random) -> str:
    return f"import atexit\natexit.register(exec, {source!r}, globals())\n"


def _at_deletion(source: str, dice: random.Random) -> str:
    return f"class Late:\n    def __del__(self, run=exec, source={source!r}, names=globals()):\n        run(source, names)\nlate = Late()\ndel late\n"


def _in_a_signal(source: str, dice: random.Random) -> str:
    return f"import signal\nsignal.signal(signal.SIGUSR1, lambda *_: exec({source!r}, globals()))\nsignal.raise_signal(signal.SIGUSR1)\n"


def _traced(source: str, dice: random.Random) -> str:
    return f"sys.settrace(lambda *a: None)\nexec({source!r}, globals())\n"


def _awaited(source: str, dice: random.Random) -> str:
    return f"async def run():\n    exec({source!r}, globals())\ntry:\n    run().send(None)\nexcept StopIteration:\n    pass\n"


def _new_interpreter(source: str, dice: random.Random) -> str:
    """By exec, which is allowed: the limits must hold there as well."""
    return f"""
import tempfile
code = "AIM = " + repr(AIM) + "; NUMBERS = " + repr(NUMBERS) + chr(10) + {_prelude()!r} + {source!r}
if len(code) < 100000:
    os.execv(os.path.realpath(sys.executable), ["python3", "-S", "-c", code])
"""


def _prelude() -> str:
    from support.hostile.kinds import PRELUDE

    return PRELUDE


SAME: tuple[Wrap, ...] = (_exec, _eval, _base64, _zlib, _codes, _function, _class, _generator)
SAME = (*SAME, _decorator, _tried, _awaited)
WRAPPERS: tuple[Wrap, ...] = (*SAME, _thread, _swallowed, _at_exit, _at_deletion, _in_a_signal)
WRAPPERS = (*WRAPPERS, _traced, _new_interpreter)
