"""A module that no program imports: a file that has its name imported has chosen what runs."""

raise SystemExit("tests.fuzz.stranger was imported")
