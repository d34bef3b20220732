"""Environments by name: the built-in ones, and those of the operator's own modules."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from app.errors import InvalidRequest
from workers.tools.calculator_env import CalculatorEnvironment
from workers.tools.dataset_env import DatasetEnvironment
from workers.tools.environment import JSON, Environment
from workers.tools.reasoning_gym_env import ReasoningGymEnvironment


class Registry:
    """Names and their environment classes; a class is called with (params, job seed) and raises InvalidRequest."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Environment]] = {}

    def register(self, name: str, environment: type[Environment]) -> None:
        if name in self._classes:
            raise ValueError(f"environment {name!r} is registered twice")
        self._classes[name] = environment

    def get(self, name: str) -> type[Environment]:
        """The class of that name. Raises InvalidRequest listing the known names."""
        try:
            return self._classes[name]
        except KeyError:
            known = ", ".join(sorted(self._classes))
            raise InvalidRequest(f"unknown environment {name!r}; known: {known}", param="environment.type") from None

    def create(self, name: str, params: JSON, seed: int) -> Environment:
        return self.get(name)(params, seed)


def build_registry(modules: Iterable[str] = ()) -> Registry:
    """The built-in environments and those that each module adds in its `register(registry)`."""
    registry = Registry()
    registry.register("reasoning_gym", ReasoningGymEnvironment)
    registry.register("calculator", CalculatorEnvironment)
    registry.register("dataset", DatasetEnvironment)
    for module in modules:
        import_module(module).register(registry)
    return registry


def module_names(setting: str) -> tuple[str, ...]:
    """Module names from a comma-separated setting."""
    return tuple(name.strip() for name in setting.split(",") if name.strip())
