"""A procedural crafting world in which recursion pays: rows, verifier, oracle, environment."""

from sparrow.tasks.environments.crafting.environment import CraftingEnvironment
from sparrow.tasks.environments.crafting.task import Crafting
from sparrow.tasks.environments.crafting.world import CraftingAction
