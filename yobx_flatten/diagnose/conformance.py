"""Check the registration of a class: :func:`check_recipe`."""

from __future__ import annotations

from ..errors import InvalidArgumentError, NotRegisteredError, describe_class
from ..private_names.of_torch import pytree
from ..recipe.contract import Recipe, require_class
from ..recipe.roundtrip import CHECKS
from ..registry.claims import REGISTRY


def check_recipe(cls: type, sample: object) -> None:
    """Check the flatten functions that this package or another library registered with torch for a class.

    Args:
        cls: the class.
        sample: an instance with as many fields filled as possible, since empty fields are not checked.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class.
        NotRegisteredError: when torch does not know the class.
        InvalidArgumentError: when ``sample`` is not an instance of exactly this class.
        RoundTripError: when one of these does not hold, tried in this order: no tensors in the static part; the keyed
            flatten agrees with the plain one; the object comes back with the same children, not copies, and an equal
            static part; unflatten makes no tensors; unflatten accepts placeholders; the spec survives storage; the
            static part hashes; torch's C++ pytree, if it is in use, agrees with the Python one.

    >>> import collections
    >>> check_recipe(collections.OrderedDict, collections.OrderedDict(a=1, b=[2, 3]))
    """
    require_class(cls, "check_recipe")
    recipe = recipe_of(cls)
    if type(sample) is not cls:
        raise InvalidArgumentError(
            f"check_recipe: expected an instance of {describe_class(cls)}, found {describe_class(sample)}. A subclass "
            "has its own registration."
        )
    for check in CHECKS.values():
        check(recipe, sample)


def recipe_of(cls: type) -> Recipe:
    """Return the flatten functions of a class that this package or another library registered."""
    ours = REGISTRY.recipe_in_force(cls)
    if ours is not None:
        return ours
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        raise NotRegisteredError(
            f"check_recipe: torch does not know how to flatten {describe_class(cls)}. Register the class:\n"
            f"    {REGISTRY.remedy(cls) or f'register_class_flattening({cls.__qualname__}, ...)'}"
        )
    return Recipe.from_functions(cls, node.flatten_fn, node.unflatten_fn, node.flatten_with_keys_fn)
