"""From a name to an environment."""

from typing import Any

from sparrow.functions import resolve
from sparrow.tasks.environments.base import Environment
from sparrow.tasks.environments.crafting import CraftingEnvironment
from sparrow.tasks.environments.reasoning_gym import GYM, GymEnvironment
from sparrow.tasks.environments.textarena import ARENA, TextArenaEnvironment

SETTING = "environment"
FORMS = f"crafting, {GYM}NAME, {ARENA}NAME or module:function"


def open_environment(name: str, **settings: Any) -> Environment:
    """Open an environment: one of ours, of a package, or what a user's function returns.

    settings: arguments of the function; the others have none.
    """
    if ":" in name:
        made = resolve(name, SETTING)(**settings)
        if not isinstance(made, Environment):
            raise ValueError(
                f"{SETTING} {name!r}: expected an object with tools, reset, step and close, "
                f"got {type(made).__name__}"
            )
        return made
    if settings:
        raise ValueError(f"{SETTING} {name}: expected no settings, got {', '.join(settings)}")
    if name == "crafting":
        return CraftingEnvironment()
    if name.startswith(GYM):
        return GymEnvironment(name.removeprefix(GYM))
    if name.startswith(ARENA):
        return TextArenaEnvironment(name.removeprefix(ARENA))
    raise ValueError(f"{SETTING}: expected {FORMS}, got {name!r}")
