"""Each line that the page's messages tell to type repairs the export that failed."""

import pytest
import torch
from torch.export import export

import __main__ as page
from yobx_flatten import explain_error, register_flattening_functions

# one tensor passed twice: the line is key.clone()
assert "key.clone()" in str(page.found)
key = page.rows
program = export(page.Attend(), (page.rows, key.clone())).module()
assert torch.equal(program(page.query, page.key), page.Attend()(page.query, page.key))


# a class that is not registered: the line is a block
class Total(torch.nn.Module):
    def forward(self, cache):
        return cache.layers[0].keys.sum() + cache.layers[23].values.sum()


inputs = (page.make_cache(),)
with pytest.raises(ValueError, match="DynamicCache") as raised:
    export(Total(), inputs)
line = "with register_flattening_functions(patch_transformers=True): ..."
assert line in str(explain_error(raised.value, Total(), inputs))
with register_flattening_functions(patch_transformers=True):
    assert export(Total(), inputs).module()(page.make_cache()) == 0

# a size that the code fixes: the line is batch = 4
batch = 4
export(page.Fixed(), (page.rows,), dynamic_shapes={"x": {0: batch}})
