"""What is removed from the files of the devices, one at a time."""

import ast

from tests.accelerator.mutants import mutants, removals

_SOURCE = """
def upload(self, ready, tensor):
    self.stream.wait_event(ready)
    with self._compute, quiet():
        host = empty(pin_memory=True)
    tensor.data = tensor.pin_memory()
    self.ends.popleft().synchronize()
    return tensor.result()
"""


def test_waits_streams_and_pins_are_removed():
    found = []
    for place in range(5):
        tree = ast.parse(_SOURCE)
        list(removals(tree))[place].remove()
        (changed,) = set(ast.unparse(tree).splitlines()) - set(ast.unparse(ast.parse(_SOURCE)).splitlines())
        found.append(changed.strip())
    assert sorted(found) == [
        "host = empty(pin_memory=False)",
        "self.ends.popleft()",
        "self.stream",
        "tensor.data = tensor.clone()",
        "with __import__('contextlib').nullcontext(), quiet():",
    ]
    assert len(list(removals(ast.parse(_SOURCE)))) == 5


def test_every_removal_has_a_name_of_its_own():
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names)
    assert "accelerator.py:computing: return self._compute" in names
