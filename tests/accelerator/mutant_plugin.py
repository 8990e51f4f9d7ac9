"""A plugin of pytest that imports the mutant named by ``ROUNDPIPE_MUTANT``; it has to come before all others."""

import os

from tests.accelerator.mutants import install

install(os.environ["ROUNDPIPE_MUTANT"])
