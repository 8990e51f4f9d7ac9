"""The library's tokens are those of the model that the folder was made of, past the end of the prompt."""

import json

import __main__ as page

assert page.tokens[:4] == [5, 6, 7, 8]
assert page.tokens == page.wanted[0].tolist()
assert len(page.tokens) > 8
with open("llama/genai_config.json", encoding="utf-8") as file:
    assert json.load(file)["search"]["past_present_share_buffer"] is True
