"""Files as an attacker would write them: changed at random, with what is derived from the change made right again.

    make fuzz                      more of every kind; goes on with the seeds after those of the last run
    python -m tests.fuzz nested 7  one case, with its stack trace

A case is a kind of file, here called a door, and a seed. It ends in a load or in an error of these packages. Anything
else is a finding: another error, code that ran, a file outside of the folder that was opened, ten seconds, a gigabyte.
A finding is noted in `found.json`, and tried by the tests from then on.
"""
