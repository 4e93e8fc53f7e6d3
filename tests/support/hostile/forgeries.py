"""Wrong solutions that try to pass: what they attack, and how.

FORGERIES: (name, problem, solution). Problems are in the forms of verl, HumanEval and MBPP. None of
the solutions is right; a verdict of 1, no verdict, or a crash of the judge is a forgery that works.
"""

# ruff: noqa: E501

from typing import Any

STDIO = {"inputs": ["1 2\n", "5 6\n", "-1 1\n"], "outputs": ["3\n", "11\n", "0\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [5, 6], [-1, 1]], "outputs": [3, 11, 0]}
LISTS = {"fn_name": "order", "inputs": [[[3, 1, 2]], [[5, 4]]], "outputs": [[1, 2, 3], [4, 5]]}
LARGE = {"fn_name": "power", "inputs": [[3, 40], [7, 20]], "outputs": [3**40, 7**20]}
LARGE_TEXT = {"inputs": ["3 40\n", "7 20\n"], "outputs": [f"{3**40}\n", f"{7**20}\n"]}
CHECK = {
    "prompt": "def half(x):\n    return x / 2\n\ndef add(a, b):\n    '''Add.'''\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 6) == 11\n    assert half(candidate(4, 4)) == 4\n",
    "entry_point": "add",
}
ASSERTS = {
    "test_list": ["assert add(1, 2) == 3", "assert add(5, 6) == 11", "assert add(-1, 1) == 0"]
}
SORTED = {
    "test_list": ["x = [3, 1, 2]\nassert order(x) == [1, 2, 3]", "assert order([2, 1]) == [1, 2]"]
}
RAISES = {
    "test_list": [
        "try:\n    fail(1)\n    assert False\nexcept ValueError:\n    pass",
        "assert fail(0) == 7",
    ]
}
FOR_ALL = (("stdio", STDIO), ("calls", CALLS), ("check", CHECK), ("asserts", ASSERTS))

# A message by hand, to whichever descriptor is the judge's.
SAY = """
import json, os, sys
def say(message, times=1):
    data = (message if isinstance(message, str) else json.dumps(message)) + "\\n"
    for number in range(3, 9):
        try:
            for _ in range(times):
                os.write(number, data.encode())
        except OSError:
            pass
"""
# Source that the tests' own process is made to run: it takes the nonce from the frames.
INSIDE_TESTS = """
import json, os, sys
frame, found = sys._getframe(), {}
while frame:
    found = {**frame.f_locals, **found}
    frame = frame.f_back
for number in range(len(found["problem"]["tests"])):
    found["_say"](found["outbox"], {"test": number, "nonce": found["nonce"], "reason": ""})
os._exit(0)
"""
EQUAL = """
class Equal({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __lt__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __truediv__(self, other): return 4
    def __repr__(self): return "3"
def add(a, b): return Equal()
if __name__ == "__main__": print(Equal())
"""
SOLUTIONS = {
    "equal to everything": EQUAL.format(base=""),
    "a number that is equal to everything": EQUAL.format(base="int"),
    "a text that is equal to everything": EQUAL.format(base="str"),
    "a list that is equal to everything": EQUAL.format(base="list"),
    "exit with 0 at import": "import os\nos._exit(0)\n",
    "exit with 0 in a call": "import os\ndef add(a, b): os._exit(0)\nprint(3)\n",
    "SystemExit in a call": "def add(a, b): raise SystemExit(0)\nraise SystemExit(0) if __name__ == '__main__' else None\n",
    "a subclass of SystemExit that is an AssertionError": "class E(SystemExit, AssertionError): pass\ndef add(a, b): raise E(0)\n",
    "nonces that are guessed": SAY
    + "for n in range(9):\n    for nonce in ('', '0' * 32, None, True):\n        say({'test': n, 'nonce': nonce, 'reason': ''})\nsay({'ready': True})\ndef add(a, b): return {'test': 0, 'nonce': '', 'reason': ''}\n",
    "answers by hand: everything at once": SAY
    + "say({'ready': True, 'value': 3, 'args': [], 'test': 0, 'nonce': '', 'reason': '', 'passed': True, 'score': 1}, 50)\ndef add(a, b): return 3\n",
    "answers by hand: no value": SAY + "say({'ready': True}, 50)\n",
    "answers by hand: any of": SAY
    + "say({'ready': True})\nsay({'value': {'dict': [['any', [3, 11, 0]]]}, 'args': []}, 50)\n",
    "answers by hand: wildcards": SAY
    + "say({'ready': True})\nfor v in ({'float': 'nan'}, {'float': 'inf'}, True, None, {'iterator': []}, {'set': []}, '3'):\n    say({'value': v, 'args': []}, 3)\n",
    "the tests run a source": SAY
    + f"say({{'ready': True}})\nsay({{'raised': 'exec', 'message': {INSIDE_TESTS!r}}}, 9)\nimport time\ntime.sleep(1)\n",
    "the tests evaluate a text": SAY
    + f"say({{'ready': True}})\nsay({{'raised': 'eval', 'message': 'exec(' + repr({INSIDE_TESTS!r}) + ')'}}, 9)\nimport time\ntime.sleep(1)\n",
    "the tests wait for input or stop": SAY
    + "say({'ready': True})\nfor name in ('breakpoint', 'input', 'exit', 'quit', 'help', '__import__', 'KeyboardInterrupt', 'SystemExit', 'GeneratorExit', 'StopIteration'):\n    say({'raised': name, 'message': 'antigravity'})\n",
    "the ended message": SAY
    + "say({'ready': True})\nsay({'value': 3, 'ended': '', 'args': []}, 9)\n",
    "errors of other types": SAY
    + "say({'ready': True})\nfor v in (1, None, [], {}, 'x' * 1000, '__class__'):\n    say({'raised': v, 'message': {}})\n",
    "a value that is too deep": "def add(a, b):\n    x = 3\n    for _ in range(300): x = [x]\n    return x\n",
    "a value that is too deep, by hand": SAY
    + "say({'ready': True})\nfor depth in (450, 700, 900, 980, 995):\n    say('{\"value\": ' + '[' * depth + ']' * depth + ', \"args\": []}')\n",
    "arguments that are too deep, by hand": SAY
    + "say({'ready': True})\nfor depth in (980, 990, 995, 450, 700, 900):\n    say('{\"value\": 3, \"args\": [' + '[' * depth + ']' * depth + ']}')\n",
    "a value that no number holds": SAY
    + "say({'ready': True})\nsay({'value': {'complex': [10**400, 0]}, 'args': []}, 9)\n",
    "texts that cannot be written": "def add(a, b): raise ValueError('\\ud800' * 3)\nprint(b'\\xed\\xa0\\x80'.decode('utf8', 'surrogatepass') if 0 else 3)\n",
    "a value of half characters": "def add(a, b): return '\\ud800'\n",
    "an error whose name is long": "E = type('x' * 10000, (Exception,), {})\ndef add(a, b): raise E('y' * 100000)\n",
    "patched builtins and json": "import builtins, json, sys\nbuiltins.AssertionError = type('A', (Exception,), {})\njson.loads = lambda *a, **k: {'call': 'add', 'args': [], 'named': {}}\nbuiltins.isinstance = lambda *a: True\nbuiltins.sum = builtins.abs = lambda *a: 3\ndef add(*a, **k): return 3\nprint(3)\n",
    "the harness replaced": "import sys\nmain = sys.modules['__main__']\nmain.pack = lambda v: 3\nmain._answer = lambda *a: {'value': True, 'args': [3]}\nmain.run_tests = None\ndef add(a, b): return True\n",
    "a look for the expected values": "import gc, sys\ndef add(a, b):\n    for thing in gc.get_objects():\n        if isinstance(thing, dict) and ('outputs' in thing or 'tests' in thing):\n            return thing\n    frame = sys._getframe()\n    while frame:\n        for value in frame.f_locals.values():\n            if isinstance(value, dict) and 'expected' in value: return value['expected']\n        frame = frame.f_back\nprint(add(1, 2))\n",
    "sleep": "import time\ntime.sleep(1000)\n",
    "sleep in a call": "import time\ndef add(a, b): time.sleep(1000)\n",
    "source of half characters": "x = '\ud800'\ndef add(a, b): return 3\n",
    "source with a zero byte": "def add(a, b): return a + b\n\0\n",
}

FORGERIES: list[tuple[str, dict[str, Any], str]] = [
    (f"{name} ({form})", problem, solution)
    for name, solution in SOLUTIONS.items()
    for form, problem in FOR_ALL
]
FORGERIES += [
    (
        "large numbers by floats (calls)",
        LARGE,
        "def power(a, b): return float(a) ** b * (1 + 3e-7)\n",
    ),
    (
        "large numbers by floats (stdio)",
        LARGE_TEXT,
        "a, b = map(int, input().split())\nprint('%.1f' % (float(a) ** b * (1 + 3e-7)))\n",
    ),
    (
        "large numbers by exponents (stdio)",
        LARGE_TEXT,
        "a, b = map(int, input().split())\nprint('%.6e' % (a ** b))\n",
    ),
    (
        "the argument is changed, not sorted (asserts)",
        SORTED,
        "def order(x):\n    x[:] = [1, 2, 3]\n    return x\n",
    ),
    ("a tuple for a list (asserts)", SORTED, "def order(x): return tuple(sorted(x))\n"),
    ("the wrong error (asserts)", RAISES, "def fail(x):\n    raise AssertionError\n"),
    (
        "an error that is any error (asserts)",
        RAISES,
        "class E(KeyError, ValueError): pass\ndef fail(x):\n    raise E(7)\n",
    ),
    (
        "output, then an error (stdio)",
        STDIO,
        "print(sum(map(int, input().split())), flush=True)\nraise ValueError\n",
    ),
    (
        "output, then no end (stdio)",
        STDIO,
        "print(sum(map(int, input().split())), flush=True)\nwhile True: pass\n",
    ),
    ("many outputs (stdio)", STDIO, "for x in range(-20, 20): print(x)\n"),
    ("all the outputs in one line (stdio)", STDIO, "print(3, 11, 0)\n"),
    (
        "the output on stderr (stdio)",
        STDIO,
        "import sys\nprint(sum(map(int, input().split())), file=sys.stderr)\n",
    ),
    ("a wrapped value (calls)", LISTS, "def order(x): return [sorted(x)]\n"),
    ("a text of the value (calls)", LISTS, "def order(x): return str(sorted(x))\n"),
    ("a dict of the value (calls)", LISTS, "def order(x): return dict(enumerate(sorted(x)))\n"),
]
