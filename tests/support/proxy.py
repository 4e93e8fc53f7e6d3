"""The proxy of bench/faults, for tests."""

import importlib.util
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[2] / "bench/faults/proxy.py"
_spec = importlib.util.spec_from_file_location("fault_proxy", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
Line: Any = _module.Line
Proxy: Any = _module.Proxy
bad_line: Any = _module.bad_line
