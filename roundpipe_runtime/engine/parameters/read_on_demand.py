"""Copy a parameter of a module to the device when it is read: an expert that is not called is not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


class ParametersOnDemand(dict[str, nn.Parameter | None]):
    """The parameters of a module, some of which are copied to the device when they are read.

    >>> found = ParametersOnDemand({"weight": None, "bias": None}, {"weight": lambda: print("copied")})
    >>> found["bias"], "weight" in found
    (None, True)
    >>> found["weight"]
    copied
    """

    # It stands in `module._parameters`, where everything that reads a parameter looks it up: `module.weight`,
    # `module.parameters()`, functions that call a module with other parameters.

    def __init__(self, parameters: Mapping[str, Any], fetch: Mapping[str, Callable[[], None]]) -> None:
        # fetch: functions that copy a parameter, by its name
        super().__init__(parameters)
        self._fetch = dict(fetch)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        fetch = self._fetch.get(name)
        if fetch is not None:
            fetch()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, if there is one of this name."""
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        """Return names and parameters."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Return the parameters."""
        return [self[name] for name in self]

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter, and return it."""
        if name in self:
            self[name]
        return super().pop(name, *default)

    def copy(self) -> dict[str, nn.Parameter | None]:
        """Return the parameters as a plain dictionary."""
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        # one of its own: a copy of a dictionary reads what `__getitem__` returns where it has another iterator
        return super().__iter__()

    def added_to(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that another dictionary does not have."""
        return {name: super(ParametersOnDemand, self).__getitem__(name) for name in self if name not in parameters}
