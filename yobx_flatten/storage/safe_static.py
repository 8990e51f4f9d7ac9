"""Read static data from an untrusted file, and refuse anything else as damage."""

from __future__ import annotations

from ..errors import DamagedFileError, NotRegisteredError
from ..errors.failures import raised_as
from ..recipe.aliases import Static
from ..recipe.static_codec import load_static


def load_trusted(data: Static) -> Static:
    """Bring static data back, as :func:`.load_static` does."""
    with raised_as(_damaged, NotRegisteredError):
        return load_static(data)


def _damaged(error: Exception) -> DamagedFileError:
    return DamagedFileError(f"Static data cannot be read ({type(error).__name__}: {error}).")
