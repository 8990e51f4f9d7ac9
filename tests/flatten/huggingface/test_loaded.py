"""The classes of imported models are found while other threads import."""

import gc
import sys
import types

from yobx_flatten.huggingface.outputs import ModelClasses

MODELS = "transformers.models.of_this_test"


def module_with_a_class(number):
    name = f"{MODELS}_{number}"
    module = types.ModuleType(name)
    module.Model = type("Model", (), {"__module__": name})
    return module


def test_models_may_be_imported_while_the_imported_ones_are_listed(monkeypatch):
    """Whenever memory is collected, another thread may run; here each collection imports a model."""
    made = []

    def import_one(phase, info):
        made.append(module_with_a_class(len(made)))
        sys.modules[made[-1].__name__] = made[-1]

    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    threshold = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(import_one)
    gc.set_threshold(20)
    try:
        listed = [ModelClasses(lambda cls: cls.__module__.startswith(MODELS))() for _ in range(5)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(import_one)
    assert len(made) > 5
    assert all(found == [module.Model for module in made[: len(found)]] for found in listed)


def test_a_model_that_was_imported_while_the_others_were_listed_is_found_next(monkeypatch):
    """It counts as new, although it was there when the list was finished."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    first, second = module_with_a_class(1), module_with_a_class(2)
    sys.modules[first.__name__] = first

    def fits(cls):
        sys.modules[second.__name__] = second
        return cls.__module__.startswith(MODELS)

    classes = ModelClasses(fits)
    assert classes() == [first.Model]
    assert classes() == [first.Model, second.Model]
