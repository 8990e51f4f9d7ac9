"""Machine profiles that were measured, typed in, or damaged."""

import json

import pytest

from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.estimate import Hardware, load_machine, save_machine

TYPED = {"names": ["cuda:0", "cuda:1"], "flops": 150e12, "link": 25e9, "memory": 24e9, "host_rate": 60e9}


def test_what_was_saved_is_loaded(tmp_path):
    measured = Hardware(("xpu:0",), "xpu", 1e13, 1e10, 10**10, 10**11, 5e10, {"flops": "measured"}, 9e9, 1e-4)
    save_machine(measured, tmp_path / "here.json")
    assert load_machine(tmp_path / "here.json") == measured


def test_a_profile_is_typed_in(tmp_path):
    """What is not stated is not known."""
    (tmp_path / "shop.json").write_text(json.dumps(TYPED))
    found = load_machine(tmp_path / "shop.json")
    assert (found.names, found.kind, found.memory) == (("cuda:0", "cuda:1"), "cuda", 24 * 10**9)
    assert (found.host, found.down, found.call, found.is_virtual) == (None, None, 0.0, False)
    assert found.origin == {"flops": "given", "link": "given", "memory": "given"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[]", "Expected `object`"),
        (json.dumps({"names": ["cuda:0"]}), r"flops is missing.*\n.*roundpipe doctor --machine"),
        (json.dumps({**TYPED, "ram": 1}), "ram is an unknown entry"),
        (json.dumps({**TYPED, "names": []}), "names must be a list"),
        (json.dumps({**TYPED, "link": "25 GB/s"}), "link must be a number above 0, found '25 GB/s'"),
        (json.dumps({**TYPED, "origin": 5}), r"machine\.json: origin must map keys to sources.*, found 5"),
        (json.dumps({**TYPED, "origin": {"flops": 5}}), "origin must map keys to sources"),
        (json.dumps({**TYPED, "kind": {"a": 1}}), "kind must be the type of the devices"),
        (json.dumps({**TYPED, "memory": 0}), "memory must be a number above 0"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, content, message):
    """Before anything is planned with it."""
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_machine(tmp_path / "machine.json")
