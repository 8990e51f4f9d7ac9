"""Static data of a file: read as it is written, and damaged where it is anything else."""

from __future__ import annotations

from ..errors import DamagedFileError, NotRegisteredError
from ..errors.failures import raised_as
from ..recipe.aliases import Static
from ..recipe.static_codec import load_static

__all__ = ["load_trusted"]


def load_trusted(data: Static) -> Static:
    """Bring static data back, as :func:`.load_static` does.

    Args:
        data: what :func:`yobx_flatten.recipe.static_codec.dump_static` returned, from a file.

    Raises:
        NotRegisteredError: when it names something in a module that is not imported.
        DamagedFileError: when it is not what ``dump_static`` writes, or names something that a file may not name.
    """
    with raised_as(_damaged, NotRegisteredError):
        return load_static(data)


def _damaged(error: Exception) -> DamagedFileError:
    return DamagedFileError(f"Static data cannot be read ({type(error).__name__}: {error}).")
