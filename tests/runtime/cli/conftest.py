"""What a command shows that refuses what is asked."""

import pytest

from roundpipe_runtime.__main__ import main


@pytest.fixture
def refused(capsys):
    """Run `roundpipe`, which is to end with status 2 and one line; return what it has shown."""

    def shown(*arguments):
        assert main([*arguments]) == 2
        found = capsys.readouterr()
        assert found.err.startswith("roundpipe: ")
        assert found.err.count("\n") == 1
        return found

    return shown
