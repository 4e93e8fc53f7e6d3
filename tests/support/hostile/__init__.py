"""Hostile programs: kinds of attacks by category, forged verdicts, and a way to run them."""

from support.hostile import files, interpreter, network, privileges, processes, resources
from support.hostile.kinds import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for module in (network, files, processes, privileges, resources, interpreter)
    for kind in module.KINDS
}
