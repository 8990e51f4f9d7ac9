"""`verbose=` logs one call, in one thread, and nothing else."""

import logging
import threading

from tests import fresh_process
from tests.flatten.pair import FUNCTIONS, Pair
from yobx_flatten import register_class_flattening, unregister_class_flattening


def test_verbose_logs_the_call_and_nothing_after_it(caplog, capsys):
    register_class_flattening(Pair, *FUNCTIONS, verbose=1)
    unregister_class_flattening(Pair)
    register_class_flattening(Pair, *FUNCTIONS)
    unregister_class_flattening(Pair, verbose=1)
    expected = ["registered tests.flatten.pair.Pair", "unregistered tests.flatten.pair.Pair"]
    assert [record.getMessage() for record in caplog.records] == expected
    assert (capsys.readouterr().out, logging.getLogger("yobx_flatten").level) == ("", logging.NOTSET)


def test_verbose_is_for_one_thread(caplog):
    logger = logging.getLogger("yobx_flatten")
    other = type("Other", (Pair,), {})
    levels = []

    def meanwhile():
        levels.append(logger.level)
        register_class_flattening(other, *FUNCTIONS)
        unregister_class_flattening(other)
        levels.append(logger.isEnabledFor(logging.INFO))

    def check():
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    register_class_flattening(Pair, *FUNCTIONS, f_check=check, verbose=2)
    unregister_class_flattening(Pair)
    assert levels == [logging.NOTSET, False]
    assert [record.getMessage() for record in caplog.records] == ["registered tests.flatten.pair.Pair"]
    assert [(record.module, record.funcName) for record in caplog.records] == [("scopes", "register_class_flattening")]


def test_verbose_is_seen_where_no_logging_is_configured():
    code = (
        "from yobx_flatten import register_flattening_functions\n"
        "with register_flattening_functions(verbose=1): pass\n"
        "with register_flattening_functions(): pass\n"
    )
    found = fresh_process.run("-c", code)
    assert (found.stdout, found.stderr.splitlines()) == ("", ["registered: nothing new", "released: nothing"])
